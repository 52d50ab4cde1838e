# SPDX-License-Identifier: Apache-2.0
"""One seed per sampled row, from where the row stands in the run and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

IntOrInts = int | Sequence[int] | Tensor


def sample_seeds(
    run_seed: int, step: int, prompt_index: IntOrInts, generation_index: IntOrInts, turn: int = 0
) -> Tensor:
    """Hash a row's coordinates to its sampling seed.

    The seed depends on no worker, shard, order of completion or earlier call: one worker and three workers sample the
    same tokens, and so does a resumed run.

    Args:
        run_seed: ``grpo.seed``.
        step: Training step; validation uses numbers of its own (see :data:`VALIDATION_STEP_OFFSET`).
        prompt_index: Index of the prompt in the step's batch, one value or B values.
        generation_index: Index of the sample of that prompt, one value or B values.
        turn: Turn of the conversation.

    Returns:
        int64 [B], not negative; [1] if both indices are single values.
    """
    prompts, samples = np.broadcast_arrays(_as_array(prompt_index), _as_array(generation_index))
    state = np.zeros(prompts.shape, dtype=np.uint64)
    for value in (run_seed, step, prompts, samples, turn):
        state = _mix(state ^ np.asarray(value, dtype=np.int64).astype(np.uint64))
    return torch.from_numpy((state >> np.uint64(1)).astype(np.int64))


VALIDATION_STEP_OFFSET = 1 << 40
"""Added to the step for validation, so that it shares no seed with training."""


def batch_seeds(run_seed: int, step: int, num_prompts: int, num_generations: int) -> Tensor:
    """Seeds of ``num_prompts`` x ``num_generations`` rows, the samples of a prompt next to each other: int64 [B]."""
    prompts = torch.arange(num_prompts).repeat_interleave(num_generations)
    samples = torch.arange(num_generations).repeat(num_prompts)
    return sample_seeds(run_seed, step, prompts, samples)


def turn_seeds(seeds: Tensor, turn: int) -> Tensor:
    """Seeds [B] of a later turn, from those of the first; turn 0 is the identity."""
    if turn == 0:
        return seeds
    mixed = _mix(_mix(seeds.numpy().astype(np.uint64)) ^ np.uint64(turn))
    return torch.from_numpy((mixed >> np.uint64(1)).astype(np.int64))


def _as_array(value: IntOrInts) -> np.ndarray:
    return np.atleast_1d(value.numpy() if isinstance(value, Tensor) else np.asarray(value, dtype=np.int64))


def _mix(state: np.ndarray) -> np.ndarray:
    """One step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection that spreads every bit."""
    with np.errstate(over="ignore"):
        z = state + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
