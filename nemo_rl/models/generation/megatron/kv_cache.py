# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the rows in generation, one row a slot, and attention over them. torch only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bridge.layers.attention import AttentionMeta, attend

_COLUMN_STEP = 16  # attended lengths are rounded up to it: fewer distinct shapes, aligned masks


class SlotKVCache:
    """Keys and values of every layer, [slots, capacity, kv_heads / tp, d], and attention over them.

    The core attention of a layer calls :meth:`attend` after it has applied RoPE. Before a forward pass the
    engine says which it is: :meth:`begin_prefill` (right-padded prompts [s, b] enter slots) or
    :meth:`begin_decode` (one token of every slot, arranged as a sequence of slots: s = slots, b = 1). Layers
    are allocated at their first use, with the shape, type and device of the keys that they bring.

    Args:
        num_slots: rows held at a time.
        capacity: positions a row; :meth:`reserve` raises it.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._prefill_slots: Tensor | None = None
        self._positions: Tensor | None = None
        self._slots: Tensor | None = None
        self._length = 0
        self._mask: Tensor | None = None

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions a row; keeps what is stored."""
        if capacity <= self.capacity:
            return
        for number, pair in self._layers.items():
            grown = tuple(_zeros(old, self.num_slots, capacity) for old in pair)
            for old, new in zip(pair, grown, strict=True):
                new[:, : self.capacity] = old
            self._layers[number] = (grown[0], grown[1])
        self.capacity = capacity

    def begin_prefill(self, slots: Tensor) -> None:
        """The next pass brings whole prompts from position 0 on, row i for slot `slots[i]`, int64 [b]."""
        self._prefill_slots = slots
        self._mask = None

    def begin_decode(self, positions: Tensor, length: int) -> None:
        """The next forward pass brings one token a slot.

        Args:
            positions: int64 [slots], where each token goes; it attends to positions 0 to its own.
            length: the largest position of a live slot, plus 1 (a host integer).
        """
        assert length <= self.capacity, f"position {length - 1} is outside the cache's {self.capacity}"
        self._prefill_slots = None
        self._positions = positions
        if self._slots is None:
            self._slots = torch.arange(self.num_slots, device=positions.device)
        self._length = min(-(-length // _COLUMN_STEP) * _COLUMN_STEP, self.capacity)
        self._mask = None

    def attend(
        self,
        layer_number: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        meta: AttentionMeta,
        softmax_scale: float,
    ) -> Tensor:
        """Store keys and values, attend causally.

        Args:
            layer_number: the layer's global number.
            query: [s, b, heads, d], RoPE applied.
            key: [s, b, kv_heads, d], RoPE applied.
            value: [s, b, kv_heads, d_v].
            meta: the pass's description.
            softmax_scale: factor of the scores.

        Returns:
            [s, b, heads * d_v].
        """
        layer = self._layers.get(layer_number)
        if layer is None:
            layer = (_zeros(key, self.num_slots, self.capacity), _zeros(value, self.num_slots, self.capacity))
            self._layers[layer_number] = layer
        if self._prefill_slots is None:
            return self._decode(layer, query, key, value, softmax_scale)
        layer[0][self._prefill_slots, : key.shape[0]] = key.transpose(0, 1)
        layer[1][self._prefill_slots, : key.shape[0]] = value.transpose(0, 1)
        return attend(query, key, value, meta, softmax_scale=softmax_scale)

    def _decode(
        self, layer: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        keys, values = layer
        slots, _, heads, width = query.shape
        keys[self._slots, self._positions] = key[:, 0]
        values[self._slots, self._positions] = value[:, 0]
        kv_heads = keys.shape[2]
        # The query heads that share a KV head stand in the place of query positions: no copy of the cache for
        # GQA.
        out = F.scaled_dot_product_attention(
            query.reshape(slots, kv_heads, heads // kv_heads, width),
            keys[:, : self._length].transpose(1, 2),
            values[:, : self._length].transpose(1, 2),
            attn_mask=self._column_mask(query.dtype),
            scale=scale,
        )
        return out.reshape(slots, 1, -1)

    def _column_mask(self, dtype: torch.dtype) -> Tensor:
        """Additive mask [slots, 1, 1, length] of this pass, made once and used by every layer."""
        if self._mask is None:
            assert self._positions is not None, "begin_decode comes before the forward pass"
            columns = torch.arange(self._length, device=self._positions.device)
            hidden = columns > self._positions[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -torch.inf
            )
            self._mask = mask[:, None, None, :]
        return self._mask

    def copy_prefix(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `source` to `target` (int64 [n] each), in all layers."""
        for pair in self._layers.values():
            for stored in pair:
                stored[target, :length] = stored[source, :length]

    @property
    def num_bytes(self) -> int:
        """Memory allocated so far."""
        return sum(stored.nbytes for pair in self._layers.values() for stored in pair)


def _zeros(like: Tensor, num_slots: int, capacity: int) -> Tensor:
    # Zeros, because a masked column still takes part: 0 * NaN of fresh memory would be NaN.
    return torch.zeros(num_slots, capacity, *like.shape[2:], dtype=like.dtype, device=like.device)
