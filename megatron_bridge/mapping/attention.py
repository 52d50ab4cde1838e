# SPDX-License-Identifier: Apache-2.0
"""Fused query-key-value projection: weight and bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bridge.mapping.base import Geometry, ParamMapping, Readable, Shard
from megatron_bridge.mapping.dense import join


@dataclass(frozen=True)
class QKV(ParamMapping):
    """``hf`` is (q, k, v). Megatron's rows are, per key/value group: its query heads, its key, its value.

    Ranks hold contiguous rows. With fewer groups than ranks a cut does not follow heads, and megatron-core gathers the
    pieces at run time.
    """

    def hf_to_local(self, tensors: Mapping[str, Readable], shard: Shard) -> Tensor:
        """This rank's rows of the fused projection."""
        q, k, v = (tensors[name] for name in self.hf)
        g = shard.geometry
        if g.num_groups % shard.size == 0:
            parts = (x[shard.range_of(x.shape[0])] for x in (q, k, v))
            return fuse(*parts, groups=g.num_groups // shard.size, head_dim=g.head_dim)
        rows = shard.range_of((g.num_heads + 2 * g.num_groups) * g.head_dim)
        return torch.cat([source[part] for source, part in _pieces(q, k, v, rows, g)])

    def local_to_hf(self, shards: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """Query, key and value projections."""
        parts = split(join(shards, 0), groups=geometry.num_groups, head_dim=geometry.head_dim)
        return dict(zip(self.hf, parts, strict=True))


def fuse(q: Tensor, k: Tensor, v: Tensor, *, groups: int, head_dim: int) -> Tensor:
    """Rows of q, k, v ([rows, ...], whole groups) -> group-interleaved rows."""
    rest = q.shape[1:]
    views = [x.reshape(groups, -1, head_dim, *rest) for x in (q, k, v)]
    return torch.cat(views, dim=1).reshape(-1, *rest)


def split(fused: Tensor, *, groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`fuse`."""
    rest = fused.shape[1:]
    blocks = fused.reshape(groups, -1, head_dim, *rest)
    heads = blocks.shape[1] - 2
    parts = blocks[:, :heads], blocks[:, heads], blocks[:, heads + 1]
    q, k, v = (part.reshape(-1, *rest) for part in parts)
    return q, k, v


def _pieces(
    q: Readable, k: Readable, v: Readable, rows: slice, geometry: Geometry
) -> list[tuple[Readable, slice]]:
    """Which rows of q, k and v make up a range of fused rows."""
    per_group = geometry.num_heads // geometry.num_groups
    d = geometry.head_dim
    pieces, position = [], 0
    for group in range(geometry.num_groups):
        for source, start, length in (
            (q, group * per_group * d, per_group * d),
            (k, group * d, d),
            (v, group * d, d),
        ):
            first, last = max(rows.start, position), min(rows.stop, position + length)
            if first < last:
                pieces.append((source, slice(start + first - position, start + last - position)))
            position += length
    return pieces
