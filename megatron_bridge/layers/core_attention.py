# SPDX-License-Identifier: Apache-2.0
"""Our attention as a megatron-core ``core_attention`` module."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_bridge.layers.attention import AttentionMeta, apply_rotary, attend


class CoreAttention(MegatronModule):
    """Rotates query and key by ``position_ids``, then attends causally, packed, or against a KV cache.

    Takes megatron's builder signature; the rotary table comes with the config (``BridgeTransformerConfig.rotary``).
    A forward without an :class:`AttentionMeta` in ``packed_seq_params`` is an error, because without positions
    there is no RoPE.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        del attn_mask_type, attention_type, cp_comm_type, pg_collection
        self.layer_number = layer_number
        self.rotary = config.rotary
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: AttentionMeta | None = None,
    ) -> Tensor:
        """Query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]."""
        del attn_mask_type
        meta = packed_seq_params
        if meta is None:
            raise ValueError("pass an AttentionMeta as packed_seq_params: RoPE needs position_ids")
        assert attention_mask is None, "this attention is causal by construction; pass attention_mask=None"
        assert attention_bias is None
        if self.rotary is not None:
            cos, sin = meta.rope(self.rotary, query.dtype)
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        if meta.cache is not None:
            return meta.cache.attend(self.layer_number, query, key, value, meta, self.softmax_scale)
        if not self.training or self.dropout == 0.0:
            return attend(query, key, value, meta, softmax_scale=self.softmax_scale)
        # Heads differ between tensor-parallel ranks, so their dropout must too. Sequence parallelism forks outside.
        tracker = get_cuda_rng_tracker()
        assert tracker is not None
        with nullcontext() if self.config.sequence_parallel else tracker.fork():
            return attend(query, key, value, meta, softmax_scale=self.softmax_scale, dropout_p=self.dropout)
