# SPDX-License-Identifier: Apache-2.0
"""Causal self-attention with RoPE inside: one path for training, packing and decode. Torch only.

Tensors are [s, b, heads, d] (sequence first, as in megatron-core). RoPE rows are computed from ``position_ids``, so a
packed row, a shifted chunk and a decode slot need nothing special.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_TOKENS = 64  # up to here kernel calls cost more than passes over memory


class KVCache(Protocol):
    """What decoding has to offer: it stores the new keys and values and attends to what each slot has so far."""

    def attend(
        self,
        layer_number: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        meta: AttentionMeta,
        softmax_scale: float,
    ) -> Tensor:
        """Query, key, value [s, b, heads, d] with RoPE applied -> [s, b, query heads * d]."""
        ...


@dataclass
class AttentionMeta:
    """What one forward needs to know about its tokens, handed through megatron-core as ``packed_seq_params``.

    Attributes:
        position_ids: int64 [b, s], the full sequence (before any sequence-parallel slicing), on the model's device.
        cu_seqlens: int [n + 1], starts of the rows packed into one (b == 1), ending at the number of real tokens; rows
            do not see each other. None: every batch row is one right-padded sequence.
        cache: KV cache for decoding; None in training and log-prob passes.
        lengths: lengths of the packed rows on the host; derived from ``cu_seqlens`` (one device sync) if not given.
    """

    position_ids: Tensor
    cu_seqlens: Tensor | None = None
    cache: KVCache | None = None
    lengths: list[int] | None = None
    # What megatron-core reads from its own PackedSeqParams: "sbhd" leaves query, key and value alone.
    qkv_format: str = "sbhd"
    cp_group: Any = None
    tokens_per_sample: int | None = None
    _rope: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def rope(self, table: RotaryTable, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine [s, b, 1, rotary_dim] of this forward; computed once for all layers."""
        key = (id(table), dtype)
        if key not in self._rope:
            self._rope[key] = table.cos_sin(self.position_ids, dtype)
        return self._rope[key]

    def row_lengths(self, total: int) -> list[int]:
        """Lengths of the packed rows; what lies behind the last one (padding) counts as a row of its own."""
        if self.lengths is None:
            assert self.cu_seqlens is not None
            self.lengths = torch.diff(self.cu_seqlens).tolist()
        lengths = [length for length in self.lengths if length > 0]
        rest = total - sum(lengths)
        if rest < 0:
            raise ValueError(f"cu_seqlens ends at {sum(lengths)}, but the packed row has {total} tokens")
        return [*lengths, rest] if rest else lengths


class RotaryTable:
    """Rotary position embedding in the half-split layout (all families here; no interleaving).

    Args:
        inv_freq: fp32 [rotary_dim / 2], transformers' own numbers.
        attention_scaling: factor on cosine and sine (YaRN; 1.0 elsewhere).
    """

    def __init__(self, inv_freq: Tensor, attention_scaling: float = 1.0) -> None:
        self.inv_freq = inv_freq.float()
        self.attention_scaling = attention_scaling
        self._by_device: dict[torch.device, Tensor] = {inv_freq.device: self.inv_freq}

    def __deepcopy__(self, memo: dict[int, Any]) -> RotaryTable:
        """Constant, so copies of a config (megatron-core makes some) share it."""
        return self

    def cos_sin(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, each [s, b, 1, rotary_dim], of positions [b, s]; computed in fp32.

        The sine's first half is negated, so that x * cos + swap_halves(x) * sin is the rotation.
        """
        inv_freq = self._by_device.get(position_ids.device)
        if inv_freq is None:
            inv_freq = self._by_device[position_ids.device] = self.inv_freq.to(position_ids.device)
        angles = position_ids.t()[:, :, None, None].float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        cos, sin = cos.to(dtype), sin.to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class _ApplyRotary(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin as one autograd node that keeps nothing but cosine and sine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotates forth (direction 1) or back (-1). The result lies in memory as attention reads it, [b, h, s, d]."""
    s, b, heads, d = x.shape
    width = cos.shape[-1]
    half = width // 2
    out = x.new_empty(b, heads, s, d).permute(2, 0, 1, 3)
    rotated = out
    if width < d:
        out[..., width:] = x[..., width:]
        x, rotated = x[..., :width], out[..., :width]
    torch.mul(x, cos, out=rotated)
    swapped = torch.empty_like(rotated)
    torch.mul(x[..., half:], sin[..., :half], out=swapped[..., :half])
    torch.mul(x[..., :half], sin[..., half:], out=swapped[..., half:])
    rotated.add_(swapped, alpha=direction)  # no addcmul: it rounds once, transformers twice
    return out


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first ``cos.shape[-1]`` channels of x [s, b, heads, d]; the rest passes unchanged.

    Args:
        x: query or key.
        cos: [s, b, 1, rotary_dim].
        sin: [s, b, 1, rotary_dim], its first half negated (see :meth:`RotaryTable.cos_sin`).
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _ApplyRotary.apply(x, cos, sin)
    if x.shape[0] * x.shape[1] <= _FEW_TOKENS and cos.shape[-1] == x.shape[-1]:
        half = cos.shape[-1] // 2
        return (x * cos).add_(torch.cat((x[..., half:], x[..., :half]), dim=-1).mul_(sin))
    return _rotate(x, cos, sin, 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    meta: AttentionMeta,
    *,
    softmax_scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention over rotated query and key.

    Args:
        query: [s, b, heads, d].
        key: [s, b, groups, d] with heads a multiple of groups.
        value: [s, b, groups, d].
        meta: tells packed rows from right-padded ones.
        softmax_scale: factor on the scores.
        dropout_p: dropout on the attention probabilities.

    Returns:
        [s, b, heads * d]. Rows behind a sequence's end hold finite values without meaning.
    """
    s, b = query.shape[:2]
    if meta.cu_seqlens is not None and b != 1:
        raise ValueError(f"packed rows need a batch of one, got {b}")
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if (
        query.device.type == "cpu"
    ):  # its kernel is up to twice as slow on strided rows; apply_rotary's are dense
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    options = {
        "is_causal": True,
        "scale": softmax_scale,
        "dropout_p": dropout_p,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if meta.cu_seqlens is None:
        out = F.scaled_dot_product_attention(q, k, v, **options)
    else:
        lengths = meta.row_lengths(s)
        rows = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*row, **options) for row in rows], dim=2)
    return out.permute(2, 0, 1, 3).reshape(s, b, -1)
