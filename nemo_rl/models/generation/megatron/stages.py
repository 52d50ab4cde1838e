# SPDX-License-Identifier: Apache-2.0
"""Forward passes of the policy's mcore chunks for generation: through the pipeline, to logits of the chosen
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_bridge.layers.attention import AttentionMeta
from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.models.generation.megatron.kv_cache import SlotKVCache


class StageRunner:
    """Runs model-parallel forward passes and moves their results.

    One rank, the *sampler* (TP rank 0 of the last stage), receives the logits; what it draws goes to all
    ranks by :meth:`share`. So ranks cannot disagree about a token, whatever their kernels do.

    Args:
        chunks: this rank's unwrapped model chunks (several with a virtual pipeline).
        dims: the layout.
        vocab_size: real vocabulary columns; the padded ones behind them are cut off.
    """

    def __init__(self, chunks: Sequence[GPTModel], dims: ParallelDims, vocab_size: int) -> None:
        self._chunks = list(chunks)
        self._dims = dims
        self._vocab_size = vocab_size
        config = self._chunks[0].config
        self._hidden_size = config.hidden_size
        self._hidden_dtype = config.pipeline_dtype or config.params_dtype
        self._sequence_split = dims.tp if config.sequence_parallel else 1
        self.is_sampler = dims.is_last_stage and dims.tp_rank == 0

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotKVCache) -> Tensor | None:
        """One token of every slot; float [slots, V] on the sampler, None elsewhere.

        Args:
            tokens: int64 [slots].
            positions: int64 [slots].
            cache: prepared by `begin_decode`.
        """
        return self._forward(tokens[None], positions[None], cache, None)

    def prefill(self, input_ids: Tensor, lengths: Tensor, cache: SlotKVCache) -> Tensor | None:
        """Right-padded prompts; float [b, V] of each prompt's last token on the sampler, None elsewhere.

        Args:
            input_ids: int64 [b, s]; with sequence parallelism s is a multiple of TP.
            lengths: int64 [b].
            cache: prepared by `begin_prefill`.
        """
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self._forward(input_ids, position_ids, cache, lengths - 1)

    def _forward(
        self, input_ids: Tensor, position_ids: Tensor, cache: SlotKVCache, selected: Tensor | None
    ) -> Tensor | None:
        meta = AttentionMeta(position_ids=position_ids, cache=cache)
        hidden_shape = (input_ids.shape[1] // self._sequence_split, input_ids.shape[0], self._hidden_size)
        out: Any = None
        # The stages form a ring: with a virtual pipeline the last one feeds the first one's next chunk.
        for chunk in self._chunks:
            if not chunk.pre_process:
                chunk.set_input_tensor(self._receive(hidden_shape))
            out = chunk(
                input_ids,
                position_ids,
                None,
                packed_seq_params=meta,
                output_processor=_LastTokenLogits(selected, self._dims),
            )
            if not chunk.post_process:
                self._send(out)
        return self._gather(out) if self._dims.is_last_stage else None

    def _send(self, hidden: Tensor) -> None:
        dist.send(
            hidden.contiguous(), group=self._dims.pp_group, group_dst=(self._dims.pp_rank + 1) % self._dims.pp
        )

    def _receive(self, shape: tuple[int, int, int]) -> Tensor:
        hidden = torch.empty(shape, dtype=self._hidden_dtype, device=self._dims.device)
        dist.recv(hidden, group=self._dims.pp_group, group_src=(self._dims.pp_rank - 1) % self._dims.pp)
        return hidden

    def _gather(self, logits: Tensor) -> Tensor | None:
        """Vocabulary shards [n, v] to [n, V] on the sampler."""
        if self._dims.tp > 1:
            shards = [torch.empty_like(logits) for _ in range(self._dims.tp)] if self.is_sampler else None
            dist.gather(logits.contiguous(), shards, group=self._dims.tp_group, group_dst=0)
            if shards is None:
                return None
            logits = torch.cat(shards, dim=-1)
        return logits[:, : self._vocab_size].float()

    def share(self, values: Tensor) -> Tensor:
        """The sampler's `values` on every rank of the model copy, in place."""
        if self._dims.mp_group is not None and self._dims.tp * self._dims.pp > 1:
            sampler = (self._dims.pp - 1) * self._dims.tp  # ranks of the group are ordered PP-major
            dist.broadcast(values, group=self._dims.mp_group, group_src=sampler)
        return values


class _LastTokenLogits:
    """mcore's output hook: this rank's vocabulary shard of the chosen tokens' logits, [n, v].

    Args:
        selected: int64 [b], one sequence position a row; None takes all positions of the one row (decode).
        dims: the layout.
    """

    def __init__(self, selected: Tensor | None, dims: ParallelDims) -> None:
        self._selected = selected
        self._dims = dims

    def __call__(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, config: Any, **_: Any
    ) -> Tensor:
        # Not through the output layer's forward: with sequence parallelism that gathers into a buffer which it
        # shares with training, and what is made in inference mode cannot be written to in training.
        if config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self._dims.tp_group)
        if self._selected is None:
            hidden_states = hidden_states[:, 0]
        else:
            rows = torch.arange(len(self._selected), device=self._selected.device)
            hidden_states = hidden_states[self._selected, rows]
        for hook in output_layer._forward_pre_hooks.values():  # they finish an overlapped parameter gather
            hook(output_layer, ())
        weight = output_layer.weight if output_weight is None else output_weight
        logits = torch.matmul(hidden_states, weight.t())
        return logits if output_layer.bias is None else logits + output_layer.bias
