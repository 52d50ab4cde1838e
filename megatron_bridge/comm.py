# SPDX-License-Identifier: Apache-2.0
"""The bridge's only communication: shards over tensor-parallel ranks, owners over pipeline ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ModelGroups:
    """Process groups of one model replica; None stands for a group of one (no process group needed).

    Attributes:
        tp: tensor-parallel group.
        pp: pipeline-parallel group.
    """

    tp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None

    @property
    def tp_size(self) -> int:
        """Ranks that share a layer."""
        return 1 if self.tp is None else self.tp.size()

    @property
    def tp_rank(self) -> int:
        """This rank among them."""
        return 0 if self.tp is None else self.tp.rank()

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return 1 if self.pp is None else self.pp.size()

    @property
    def pp_rank(self) -> int:
        """This rank's stage."""
        return 0 if self.pp is None else self.pp.rank()


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """One small picklable object per rank of the group, in rank order."""
    if group is None or group.size() == 1:
        return [value]
    results: list[Any] = [None] * group.size()
    dist.all_gather_object(results, value, group=group)
    return results


def gather_flat(flat: Tensor, owner_stage: int, groups: ModelGroups) -> list[Tensor]:
    """Gives every rank of the replica what one pipeline stage holds.

    Args:
        flat: [n]; the owner stage's data (its own tensor-parallel shard), elsewhere a buffer to receive into.
        owner_stage: pipeline rank that holds the data.
        groups: the replica's groups.

    Returns:
        One [n] tensor per tensor-parallel rank, in rank order.
    """
    if groups.pp is not None and groups.pp_size > 1:
        dist.broadcast(flat, group=groups.pp, group_src=owner_stage)
    if groups.tp is None or groups.tp_size == 1:
        return [flat]
    gathered = flat.new_empty(groups.tp_size * flat.numel())
    dist.all_gather_into_tensor(gathered, flat, group=groups.tp)
    return list(gathered.chunk(groups.tp_size))


def pack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Tensors one after the other in one dimension; a single one of that dtype is not copied."""
    flats = [tensor.detach().reshape(-1).to(dtype) for tensor in tensors]
    return flats[0].contiguous() if len(flats) == 1 else torch.cat(flats)


def unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The inverse of :func:`pack`, as views."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [piece.view(*shape) for piece, shape in zip(flat.split(sizes), shapes, strict=True)]
