# SPDX-License-Identifier: Apache-2.0
"""Which rows go to which data-parallel shard: pure functions of counts and lengths."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl.distributed._batch_columns import BatchError


@dataclass(frozen=True)
class ShardRows:
    """Rows of one shard, and its micro-batches per global batch (relative to that global batch's rows)."""

    rows: list[int]
    micro_batch_indices: list[list[list[int]]]
    micro_batch_lengths: list[list[int]]


def even_rows(size: int, shards: int, batch_size: int) -> list[list[int]]:
    """Per shard its rows: part r of every ``batch_size`` consecutive rows (which ``shards`` must divide)."""
    part = batch_size // shards
    return [
        [
            row
            for start in range(0, size, batch_size)
            for row in range(start + r * part, start + (r + 1) * part)
        ]
        for r in range(shards)
    ]


def uneven_rows(size: int, shards: int) -> list[list[int]]:
    """Per shard ceil(size / shards) consecutive rows; the last shards get fewer, possibly none."""
    part = -(-size // shards)
    return [list(range(min(r * part, size), min((r + 1) * part, size))) for r in range(shards)]


def length_balanced_rows(
    *,
    lengths: list[int],
    shards: int,
    batch_size: int,
    max_tokens: int,
    length_round: int,
    padded_length: int,
) -> list[ShardRows]:
    """Deal each global batch by ascending length, in micro-batches of at most ``max_tokens`` padded tokens.

    A micro-batch's length is the longest row at its positions in any shard, rounded up to ``length_round``
    and capped at ``padded_length``; so all shards have equally many micro-batches of equal shapes.

    Raises:
        BatchError: a single row does not fit into ``max_tokens``.
    """
    if length_round < 1:
        raise BatchError(f"sequence_length_round must be at least 1, got {length_round}")
    plans = [ShardRows([], [], []) for _ in range(shards)]
    for start in range(0, len(lengths), batch_size):
        order = sorted(range(start, start + batch_size), key=lambda row: lengths[row])
        dealt = [order[r::shards] for r in range(shards)]
        costs = []
        for position in range(batch_size // shards):
            longest = max((dealt[r][position] for r in range(shards)), key=lambda row: lengths[row])
            cost = min(-(-max(lengths[longest], 1) // length_round) * length_round, padded_length)
            if cost > max_tokens:
                raise BatchError(
                    f"row {longest} has {lengths[longest]} tokens, padded to {cost}: more than "
                    f"max_tokens_per_microbatch ({max_tokens}); raise that limit to at least {cost}"
                )
            costs.append(cost)
        indices, mb_lengths = _greedy_microbatches(costs, max_tokens)
        for plan, rows in zip(plans, dealt, strict=True):
            plan.rows.extend(rows)
            plan.micro_batch_indices.append([list(bounds) for bounds in indices])
            plan.micro_batch_lengths.append(list(mb_lengths))
    return plans


def _greedy_microbatches(costs: list[int], max_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Consecutive [start, end) runs whose rows x longest stays within ``max_tokens``, and their longest."""
    indices: list[list[int]] = []
    longest: list[int] = []
    for position, cost in enumerate(costs):
        if indices:
            start, end = indices[-1]
            widest = max(longest[-1], cost)
            if (end - start + 1) * widest <= max_tokens:
                indices[-1] = [start, position + 1]
                longest[-1] = widest
                continue
        indices.append([position, position + 1])
        longest.append(cost)
    return indices, longest
