# SPDX-License-Identifier: Apache-2.0
"""Metrics that environments share; rows without a valid reward count in none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict

SOLVED = 1.0
"""A reward from here on counts as solved."""


def calculate_pass_rate_per_prompt(
    prompts: Tensor | Sequence[int], rewards: Tensor, valid: Tensor | None = None
) -> float:
    """Share of prompts that at least one sample solves.

    Args:
        prompts: Group id per row [B] (or prompt tokens [B, P]); equal ones are one prompt.
        rewards: float [B].
        valid: [B], 0 for rows that do not count.

    Returns:
        A share in [0, 1]; NaN if no row counts.
    """
    ids = prompts if isinstance(prompts, Tensor) else torch.tensor(list(prompts))
    kept = torch.ones(len(rewards), dtype=torch.bool) if valid is None else valid > 0
    if not bool(kept.any()):
        return float("nan")
    groups = torch.unique(ids[kept], dim=0, return_inverse=True)[1].flatten()
    best = torch.full((int(groups.max()) + 1,), -torch.inf)
    best.scatter_reduce_(0, groups, rewards[kept].float(), reduce="amax")
    return (best >= SOLVED).float().mean().item()


def answer_metrics(batch: BatchedDataDict[Any]) -> dict[str, float]:
    """Accuracy, pass rate and lengths of a finished batch.

    Args:
        batch: With ``total_reward`` [B], ``reward_valid`` [B], ``truncated`` [B], ``prompt_lengths`` [B],
            ``response_lengths`` [B] and ``idx``, a list of prompt ids.

    Returns:
        ``accuracy`` (mean reward of the rows that count), ``pass@samples_per_prompt``,
        ``fraction_of_samples_properly_ended``, ``num_problems_in_batch``, ``prompt_lengths``,
        ``generation_lengths``, ``correct_solution_generation_lengths`` and
        ``incorrect_solution_generation_lengths`` (means in tokens; NaN where there is nothing to take the
        mean of).
    """
    valid = batch["reward_valid"] > 0
    rewards = batch["total_reward"].float()
    lengths = batch["response_lengths"].float()
    solved = valid & (rewards >= SOLVED)
    return {
        "accuracy": _mean(rewards, valid),
        "pass@samples_per_prompt": calculate_pass_rate_per_prompt(batch["idx"], rewards, valid),
        "fraction_of_samples_properly_ended": _mean((~batch["truncated"].bool()).float(), valid),
        "num_problems_in_batch": float(len(rewards)),
        "prompt_lengths": _mean(batch["prompt_lengths"].float(), valid),
        "generation_lengths": _mean(lengths, valid),
        "correct_solution_generation_lengths": _mean(lengths, solved),
        "incorrect_solution_generation_lengths": _mean(lengths, valid & ~solved),
    }


def _mean(values: Tensor, kept: Tensor) -> float:
    return values[kept].mean().item() if bool(kept.any()) else float("nan")
