# SPDX-License-Identifier: Apache-2.0
"""A model as a stream of HuggingFace tensors: the refit stream, and what is saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bridge.comm import ModelGroups, gather_flat, pack, unpack
from megatron_bridge.mapping.base import Geometry
from megatron_bridge.plan import ParamTask

BUCKET_BYTES = 64 << 20


class HFWeight(NamedTuple):
    """One full tensor under its HuggingFace name."""

    name: str
    tensor: Tensor


def hf_specs(
    task: ParamTask, geometry: Geometry, tp_size: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Full shapes and dtypes of a task's HuggingFace tensors, without touching data."""
    shards = [torch.empty(task.shape, dtype=task.dtype, device="meta")] * tp_size
    tensors = task.mapping.local_to_hf(shards, geometry)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@torch.no_grad()
def export_weights(
    tasks: Sequence[ParamTask],
    geometry: Geometry,
    groups: ModelGroups,
    device: torch.device,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[HFWeight]:
    """Yields every HuggingFace tensor once, in the same order on all ranks. Collective over the replica.

    Parameters that follow each other on the same stage travel in one bucket. Without communication nothing is copied
    that the layout does not force to be: a yielded tensor may be a view of a parameter, so use it before the next
    optimizer step.

    Args:
        tasks: the plan of the whole model.
        geometry: sizes.
        groups: the replica's groups.
        device: of the parameters.
        dtype: of the yielded tensors; None keeps each parameter's.
        bucket_bytes: bytes of one rank's shards in a bucket.
    """
    distributed = groups.tp_size > 1 or groups.pp_size > 1
    for bucket in _buckets(
        [task for task in tasks if task.exported], dtype, bucket_bytes if distributed else 0
    ):
        target = dtype or bucket[0].dtype
        if distributed:
            shards = _gather_bucket(bucket, groups, device, target)
        else:
            shards = [[task.local.detach().to(target)] for task in bucket if task.local is not None]
        for task, parts in zip(bucket, shards, strict=True):
            for name, tensor in task.mapping.local_to_hf(parts, geometry).items():
                yield HFWeight(name, tensor)


def _gather_bucket(
    bucket: Sequence[ParamTask], groups: ModelGroups, device: torch.device, dtype: torch.dtype
) -> list[list[Tensor]]:
    """Per task, the shards of all tensor-parallel ranks."""
    owner, shapes = bucket[0].stages[0], [task.shape for task in bucket]
    if groups.pp_rank == owner:
        flat = pack([task.local for task in bucket if task.local is not None], dtype)
    else:
        flat = torch.empty(sum(torch.Size(shape).numel() for shape in shapes), dtype=dtype, device=device)
    per_rank = [unpack(piece, shapes) for piece in gather_flat(flat, owner, groups)]
    return [list(parts) for parts in zip(*per_rank, strict=True)]


def _buckets(tasks: Sequence[ParamTask], dtype: torch.dtype | None, limit: int) -> Iterator[list[ParamTask]]:
    """Runs of tasks with one owner and one dtype, up to ``limit`` bytes (at least one task each)."""
    bucket: list[ParamTask] = []
    size = 0
    for task in tasks:
        bytes_ = torch.Size(task.shape).numel() * (dtype or task.dtype).itemsize
        if bucket and (
            size + bytes_ > limit or task.stages[0] != bucket[0].stages[0] or task.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(task)
        size += bytes_
    if bucket:
        yield bucket
