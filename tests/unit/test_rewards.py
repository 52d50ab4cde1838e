# SPDX-License-Identifier: Apache-2.0
"""Reward scaling and shaping, overlong filtering, and the metrics of environments."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.algorithms.config import RewardScalingConfig, RewardShapingConfig
from nemo_rl.algorithms.reward import filter_overlong, scale_rewards, shape_rewards
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.metrics import answer_metrics, calculate_pass_rate_per_prompt


def test_scaling_clamps_then_maps():
    config = RewardScalingConfig(
        enabled=True, source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0
    )
    assert scale_rewards(torch.tensor([-5.0, 0.0, 0.5, 2.0, 9.0]), config).tolist() == [
        -1.0,
        -1.0,
        -0.5,
        1.0,
        1.0,
    ]
    off = RewardScalingConfig(enabled=False)
    assert scale_rewards(torch.tensor([7.0]), off).tolist() == [7.0]


def test_soft_overlong_penalty():
    config = RewardShapingConfig(
        enabled=True, overlong_buffer_length=10, overlong_buffer_penalty=0.5, max_response_length=100
    )
    lengths = torch.tensor([1, 90, 95, 100, 110])
    shaped = shape_rewards(torch.ones(5), lengths, torch.zeros(5, dtype=torch.bool), config)
    torch.testing.assert_close(shaped, torch.tensor([1.0, 1.0, 0.75, 0.5, 0.0]))


def test_stop_properly_penalty():
    config = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25)
    shaped = shape_rewards(
        torch.tensor([1.0, 1.0]), torch.tensor([5, 5]), torch.tensor([False, True]), config
    )
    assert shaped.tolist() == [1.0, 0.25]


def test_shaping_that_lacks_keys():
    config = RewardShapingConfig(enabled=True, max_response_length=10)
    with pytest.raises(ValueError, match="overlong_buffer_length"):
        shape_rewards(torch.ones(1), torch.ones(1), torch.zeros(1), config)


def test_overlong_filtering():
    mask, truncated = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([False, True, False])
    assert filter_overlong(mask, truncated, True).tolist() == [1.0, 0.0, 0.0]
    assert filter_overlong(mask, truncated, False).tolist() == [1.0, 1.0, 0.0]


def test_pass_rate_counts_prompts():
    prompts, rewards = [4, 4, 9, 9, 9], torch.tensor([0.0, 1.0, 0.0, 0.0, 0.5])
    assert calculate_pass_rate_per_prompt(prompts, rewards) == 0.5
    assert calculate_pass_rate_per_prompt(prompts, rewards, torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])) == 0.0
    assert math.isnan(calculate_pass_rate_per_prompt(prompts, rewards, torch.zeros(5)))


def test_metrics_leave_errored_rows_out():
    batch = BatchedDataDict(
        total_reward=torch.tensor([1.0, 0.0, 0.0]),
        reward_valid=torch.tensor([1.0, 1.0, 0.0]),
        truncated=torch.tensor([False, True, True]),
        prompt_lengths=torch.tensor([3, 5, 99]),
        response_lengths=torch.tensor([2, 8, 99]),
        idx=[0, 1, 2],
    )
    metrics = answer_metrics(batch)
    assert metrics["accuracy"] == 0.5
    assert metrics["pass@samples_per_prompt"] == 0.5
    assert metrics["fraction_of_samples_properly_ended"] == 0.5
    assert (metrics["prompt_lengths"], metrics["generation_lengths"]) == (4.0, 5.0)
    assert metrics["correct_solution_generation_lengths"] == 2.0
    assert metrics["incorrect_solution_generation_lengths"] == 8.0
