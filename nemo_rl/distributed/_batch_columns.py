# SPDX-License-Identifier: Apache-2.0
"""Operations on one column of a batch: a tensor [B, ...] or a list of B items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class BatchError(ValueError, AssertionError):
    """A batch cannot be cut or joined as asked.

    Also an ``AssertionError``, because that is what the documented interface raises.
    """


@dataclass(frozen=True)
class EncodedTensor:
    """A CPU tensor as raw bytes, which pickle protocol 5 ships out of band, without a copy."""

    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]


def length(key: Any, value: Any) -> int:
    """Rows of one column; BatchError for a value that has none."""
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            raise BatchError(f"column {key!r} is a scalar tensor: a column needs one entry per row")
        return value.shape[0]
    if isinstance(value, (list, tuple, np.ndarray)):
        return len(value)
    raise BatchError(
        f"column {key!r} is a {type(value).__name__}: columns are tensors or lists with one entry per row"
    )


def common_length(columns: Mapping[Any, Any]) -> int:
    """Rows that all columns share, 0 without columns; BatchError names the columns that differ."""
    lengths = {key: length(key, value) for key, value in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key}: {rows}" for key, rows in lengths.items())
        raise BatchError(f"columns must have equally many rows, got {listed}")
    return next(iter(lengths.values()), 0)


def take(value: Any, index: torch.Tensor) -> Any:
    """Rows of a column at ``index`` (int64 on the CPU)."""
    if isinstance(value, torch.Tensor):
        return value.index_select(0, index.to(value.device))
    if isinstance(value, np.ndarray):
        return value[index.numpy()]
    return [value[row] for row in index.tolist()]


def concatenate(key: Any, parts: list[Any], pad: float) -> Any:
    """Join the parts of one column by row; dimension 1 of tensors is right-padded with ``pad``."""
    if all(isinstance(part, torch.Tensor) for part in parts):
        return _concatenate_tensors(key, parts, pad)
    if all(isinstance(part, (list, tuple)) for part in parts):
        return [item for part in parts for item in part]
    kinds = sorted({type(part).__name__ for part in parts})
    raise NotImplementedError(
        f"column {key!r}: cannot join parts of type {', '.join(kinds)}, only tensors or lists"
    )


def _concatenate_tensors(key: Any, parts: list[torch.Tensor], pad: float) -> torch.Tensor:
    if any(part.ndim != parts[0].ndim or part.ndim == 0 for part in parts):
        raise BatchError(f"column {key!r}: cannot join tensors of shapes {[tuple(p.shape) for p in parts]}")
    if parts[0].ndim > 1:
        width = max(part.shape[1] for part in parts)
        parts = [_pad_width(part, width, pad) for part in parts]
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise BatchError(f"column {key!r}: cannot join tensors of shapes {[tuple(p.shape) for p in parts]}")
    return torch.cat(parts)


def _pad_width(part: torch.Tensor, width: int, pad: float) -> torch.Tensor:
    if part.shape[1] == width:
        return part
    padded = part.new_full((part.shape[0], width, *part.shape[2:]), pad)
    padded[:, : part.shape[1]] = part
    return padded


def all_gather(key: Any, value: Any, group: dist.ProcessGroup) -> Any:
    """Join the rows of one column over the ranks of ``group`` (collective)."""
    world = dist.get_world_size(group)
    if not isinstance(value, torch.Tensor):
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, list(value), group=group)
        return [item for part in parts for item in part]
    shapes = [torch.zeros(value.ndim, dtype=torch.int64, device=value.device) for _ in range(world)]
    dist.all_gather(shapes, torch.tensor(value.shape, dtype=torch.int64, device=value.device), group=group)
    sizes = [tuple(shape.tolist()) for shape in shapes]
    if any(size[1:] != tuple(value.shape[1:]) for size in sizes):
        raise BatchError(f"column {key!r}: ranks hold different shapes {sizes}, only the rows may differ")
    rows = max(size[0] for size in sizes)
    padded = value.new_zeros((rows, *value.shape[1:]))
    padded[: value.shape[0]] = value
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[: size[0]] for part, size in zip(gathered, sizes, strict=True)])


def encode(value: Any) -> Any:
    """A column for pickling: CPU tensors as raw bytes of their own rows only, everything else unchanged."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return value
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return EncodedTensor(flat.numpy(), value.dtype, tuple(value.shape))


def decode(value: Any) -> Any:
    """Inverse of :func:`encode`; read-only bytes (Ray's shared memory) are copied: tensors are writable."""
    if not isinstance(value, EncodedTensor):
        return value
    data = value.data if value.data.flags.writeable else value.data.copy()
    return torch.from_numpy(data).view(value.dtype).reshape(value.shape)
