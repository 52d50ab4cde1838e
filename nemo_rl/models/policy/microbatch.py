# SPDX-License-Identifier: Apache-2.0
"""Cutting a shard of a global batch into micro-batches, and putting per-token results back into rows.

Everything is computed on the CPU from the lengths and masks before anything moves to the device, so that no step of a
forward pass has to ask the device for a size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Selection = Literal["next_tokens", "masked", "positions"]
"""Which positions a head looks at: those that predict a token of the row, those that predict a token with a non-zero
loss mask, or all of the row's positions."""


@dataclass(frozen=True)
class Scored:
    """The t positions of a micro-batch whose hidden states a head needs.

    Attributes:
        rows: int64 [t], row in the micro-batch.
        positions: int64 [t], position of the hidden state; the token it predicts is at ``positions + 1``.
        targets: int64 [t], the predicted token (0 where the row ends).
    """

    rows: Tensor
    positions: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Microbatch:
    """One forward pass.

    Attributes:
        input_ids: int64 [b, s]; s is the longest row, rounded up; b includes dummy rows.
        position_ids: int64 [b, s].
        cu_seqlens: row borders if rows are packed into one, else None.
        scored: the positions that the head needs.
        rows: the data columns of the real rows, [b', S] and [b'], on the device.
        num_rows: b', real rows.
        width: S, the row length of the whole batch, which results are returned in.
        weight: 0 for a dummy micro-batch, which only keeps collectives in step; else 1.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor | None
    scored: Scored
    rows: Mapping[str, Any]
    num_rows: int
    width: int
    weight: float = 1.0

    def unpack(self, values: Tensor, *, shift: int) -> Tensor:
        """Put per-position values [t, ...] back into rows [b', S, ...], 0 elsewhere.

        Args:
            values: one value for each scored position.
            shift: 1 if a value belongs to the predicted token, 0 if to the position itself.
        """
        out = values.new_zeros((self.num_rows, self.width, *values.shape[1:]))
        return out.index_put((self.scored.rows, self.scored.positions + shift), values)


@dataclass(frozen=True)
class MicrobatchSpec:
    """How to cut.

    Attributes:
        size: rows per micro-batch.
        selection: which positions the head needs.
        length_multiple: s is rounded up to a multiple of this.
        uniform: all micro-batches have one shape (pipeline stages exchange activations of fixed shape); dummy rows
            fill the last one.
    """

    size: int
    selection: Selection
    length_multiple: int = 1
    uniform: bool = False


def num_rows(data: Mapping[str, Any]) -> int:
    """Rows of a batch."""
    return int(data["input_ids"].shape[0])


def row_lengths(data: Mapping[str, Any]) -> Tensor:
    """int64 [B] true lengths; rows without ``input_lengths`` count as full."""
    input_ids = data["input_ids"]
    if "input_lengths" in data:
        return torch.as_tensor(data["input_lengths"]).to(device="cpu", dtype=torch.int64)
    return torch.full((input_ids.shape[0],), input_ids.shape[1], dtype=torch.int64)


def take_rows(data: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Rows ``start`` to ``stop`` of every column (tensors as views, lists as slices)."""
    return {
        key: value[start:stop] if isinstance(value, Tensor | list) else value for key, value in data.items()
    }


def build(data: Mapping[str, Any], spec: MicrobatchSpec, device: torch.device) -> list[Microbatch]:
    """Cut ``data`` into micro-batches of ``spec.size`` rows, in order.

    Args:
        data: ``input_ids`` int64[B, S] (right padding), ``input_lengths`` int[B] and whatever the head reads; on the
            CPU.
        spec: how to cut.
        device: where the micro-batches go.

    Returns:
        ceil(B / size) micro-batches.

    Raises:
        ValueError: there are no rows.
    """
    lengths = row_lengths(data)
    total = num_rows(data)
    if total == 0:
        raise ValueError("the batch has no rows; give every data-parallel rank at least one")
    longest = int(lengths.max())
    batches = []
    for start in range(0, total, spec.size):
        stop = min(start + spec.size, total)
        own = lengths[start:stop]
        length = _round_up(longest if spec.uniform else int(own.max()), spec.length_multiple)
        batches.append(_one(take_rows(data, start, stop), own, length, spec, device))
    return batches


def _round_up(value: int, multiple: int) -> int:
    return max(1, -(-value // multiple)) * multiple


def _one(
    rows: dict[str, Any], lengths: Tensor, length: int, spec: MicrobatchSpec, device: torch.device
) -> Microbatch:
    input_ids = rows["input_ids"]
    count, width = input_ids.shape
    scored = _select(rows, lengths, spec.selection)
    ids = input_ids[:, :length]
    missing_rows = spec.size - count if spec.uniform else 0
    if length > ids.shape[1] or missing_rows:
        ids = torch.nn.functional.pad(ids, (0, length - ids.shape[1], 0, missing_rows))
    positions = torch.arange(length).expand(ids.shape[0], length)
    return Microbatch(
        input_ids=_move(ids, device),
        position_ids=_move(positions, device),
        cu_seqlens=None,
        scored=Scored(*(_move(t, device) for t in (scored.rows, scored.positions, scored.targets))),
        rows={
            key: _move(value, device) if isinstance(value, Tensor) else value for key, value in rows.items()
        },
        num_rows=count,
        width=width,
    )


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def _select(rows: Mapping[str, Any], lengths: Tensor, selection: Selection) -> Scored:
    input_ids = rows["input_ids"]
    width = input_ids.shape[1]
    columns = torch.arange(width)
    last = lengths.unsqueeze(1) - (0 if selection == "positions" else 1)
    wanted = columns < last
    if selection == "masked":
        mask = (rows["token_mask"] != 0) & (rows["sample_mask"] != 0).unsqueeze(1)
        wanted[:, :-1] &= mask[:, 1:]
        wanted[:, -1] = False
    row, position = wanted.nonzero(as_tuple=True)
    following = torch.nn.functional.pad(input_ids, (0, 1))
    return Scored(row, position, following[row, position + 1])
