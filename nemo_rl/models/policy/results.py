# SPDX-License-Identifier: Apache-2.0
"""Global counts of a batch, and metrics from micro-batches to one value per global batch.

Two collectives per ``train()`` call: one all-reduce of counts before, one all-reduce of all metrics after. Values stay
tensors until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.algorithms.interfaces import Metric
from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.models.policy.microbatch import row_lengths


@dataclass(frozen=True)
class GlobalCounts:
    """Counts over all data-parallel ranks of one global batch.

    Attributes:
        valid_seqs: float32 scalar, sum of ``sample_mask``.
        valid_toks: float32 scalar, sum of ``token_mask[:, 1:] * sample_mask``.
        real_toks: tokens that are not padding, masked or not (normaliser of auxiliary losses).
        is_empty: nothing carries weight: no gradient comes out of this batch.
    """

    valid_seqs: Tensor
    valid_toks: Tensor
    real_toks: float
    is_empty: bool


def local_counts(batch: Mapping[str, Any]) -> Tensor:
    """float64 [3]: this shard's share of the three counts; a missing ``token_mask`` means every token counts."""
    lengths = row_lengths(batch)
    if "sample_mask" in batch:
        sample_mask = batch["sample_mask"].double().cpu()
    else:
        sample_mask = torch.ones(lengths.shape[0], dtype=torch.float64)
    if "token_mask" in batch:
        tokens = (batch["token_mask"][:, 1:].double().cpu() * sample_mask.unsqueeze(-1)).sum()
    else:
        tokens = ((lengths - 1).clamp(min=0) * sample_mask).sum()
    return torch.stack([sample_mask.sum(), tokens, lengths.sum().double()])


def global_counts(batches: Sequence[Mapping[str, Any]], dims: ParallelDims) -> list[GlobalCounts]:
    """Counts of each global batch, with one all-reduce over the data-parallel ranks for all of them."""
    counts = torch.stack([local_counts(batch) for batch in batches])
    if dims.dp_group is not None:
        counts = counts.to(dims.device)
        dist.all_reduce(counts, group=dims.dp_group)
    single = counts.float()
    host = counts.tolist()
    return [
        GlobalCounts(single[i, 0], single[i, 1], real, is_empty=seqs == 0 or toks == 0)
        for i, (seqs, toks, real) in enumerate(host)
    ]


class MetricAccumulator:
    """Collects the metrics of micro-batches, per global batch, and reduces them all at once."""

    def __init__(self, num_batches: int) -> None:
        """Start empty, for ``num_batches`` global batches."""
        self._values: list[list[Mapping[str, Metric]]] = [[] for _ in range(num_batches)]

    def add(self, batch: int, metrics: Mapping[str, Metric]) -> None:
        """Add one micro-batch's metrics to global batch number ``batch``."""
        self._values[batch].append(metrics)

    def reduce(self, dims: ParallelDims) -> list[dict[str, float]]:
        """One value for each metric and global batch, the same on every rank.

        Collective: one all-reduce over the data-parallel ranks of the last stage, and with pipeline parallelism one
        broadcast from there. Every data-parallel rank must have the same metric names.
        """
        reduced = self._reduce_over_dp(dims) if dims.is_last_stage else []
        if dims.pp_group is not None:
            payload = [reduced]
            dist.broadcast_object_list(payload, src=dims.last_stage_rank, group=dims.pp_group)
            reduced = payload[0]
        return reduced

    def _reduce_over_dp(self, dims: ParallelDims) -> list[dict[str, float]]:
        kinds = [
            {name: metric.reduction for mb in batch for name, metric in mb.items()} for batch in self._values
        ]
        parts = [
            _local(kind, [mb[name].value for mb in batch if name in mb], dims)
            for batch, names in zip(self._values, kinds, strict=True)
            for name, kind in sorted(names.items())
        ]
        if not parts:
            return [{} for _ in self._values]
        flat = torch.cat(parts)
        if dims.dp_group is not None:
            dist.all_reduce(flat, group=dims.dp_group)
        values = flat.tolist()
        out: list[dict[str, float]] = []
        offset = 0
        for names in kinds:
            row = {}
            for name, kind in sorted(names.items()):
                width = _width(kind, dims)
                row[name] = _finish(kind, values[offset : offset + width])
                offset += width
            out.append(row)
        return out


def _width(kind: str, dims: ParallelDims) -> int:
    return {"sum": 1, "mean": 2}.get(kind, dims.dp)


def _local(kind: str, values: list[Tensor], dims: ParallelDims) -> Tensor:
    """This rank's contribution to a sum over ranks; kinds that are not sums get one slot per rank."""
    stacked = torch.stack([value.detach().to(torch.float64).reshape(()) for value in values])
    if kind == "sum":
        return stacked.sum().reshape(1)
    if kind == "mean":
        return torch.stack([stacked.sum(), torch.full_like(stacked[0], len(values))])
    slots = torch.zeros(dims.dp, dtype=torch.float64, device=stacked.device)
    if kind == "max":
        slots[dims.dp_rank] = stacked.max()
    elif kind == "min":
        slots[dims.dp_rank] = stacked.min()
    elif kind == "last":
        slots[dims.dp_rank] = stacked[-1]
    else:
        raise ValueError(f"unknown metric reduction {kind!r}; use sum, mean, max, min or last")
    return slots


def _finish(kind: str, values: list[float]) -> float:
    if kind == "sum":
        return values[0]
    if kind == "mean":
        return values[0] / values[1]
    return {"max": max, "min": min}.get(kind, lambda slots: slots[-1])(values)
