# SPDX-License-Identifier: Apache-2.0
"""From rollouts to a training batch, and what is kept of them (cases 42, 47)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.stages import permute_rewards, rollout_rows, summarize_training, to_training_batch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def message(role: str, ids: list[int], sampled: bool = False) -> dict[str, Any]:
    out: dict[str, Any] = {"role": role, "content": f"<{role}>", "token_ids": torch.tensor(ids)}
    if sampled:
        out["generation_logprobs"] = -torch.arange(1, len(ids) + 1).float()
    return out


@pytest.fixture
def rollouts() -> BatchedDataDict[Any]:
    return BatchedDataDict(
        message_log=[
            [message("user", [5, 6, 7]), message("assistant", [8, 9], sampled=True)],
            [
                message("user", [5]),
                message("assistant", [6], sampled=True),
                message("user", [7, 7]),
                message("assistant", [8], sampled=True),
            ],
            [message("user", [5, 6]), message("assistant", [7, 8, 9, 10], sampled=True)],
        ],
        loss_multiplier=torch.tensor([1.0, 1.0, 1.0]),
        reward_valid=torch.tensor([1.0, 1.0, 0.0]),
        total_reward=torch.tensor([1.0, 0.0, 0.0]),
        truncated=torch.tensor([False, False, True]),
        errors=[None, None, "TimeoutError"],
        idx=[4, 4, 9],
        extra_env_info=[{"ground_truth": 7}, {"ground_truth": 7}, None],
    )


def test_only_sampled_tokens_of_valid_rows_are_trained_on(rollouts: BatchedDataDict[Any]) -> None:
    batch = to_training_batch(rollouts, pad_token_id=0, divisible_by=4)
    assert batch["input_ids"].tolist() == [
        [5, 6, 7, 8, 9, 0, 0, 0],
        [5, 6, 7, 7, 8, 0, 0, 0],
        [5, 6, 7, 8, 9, 10, 0, 0],
    ]
    assert batch["input_lengths"].tolist() == [5, 5, 6]
    assert batch["token_mask"].tolist() == [
        [0, 0, 0, 1, 1, 0, 0, 0],
        [0, 1, 0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
    ]
    assert batch["generation_logprobs"][0].tolist() == [0, 0, 0, -1, -2, 0, 0, 0]
    assert batch["sample_mask"].tolist() == [1, 1, 0]


def test_shuffled_rewards_are_a_permutation_that_the_step_decides() -> None:
    rewards = torch.arange(64).float()
    first = permute_rewards(rewards, seed=1, step=0)
    assert first.tolist() != rewards.tolist()
    assert sorted(first.tolist()) == rewards.tolist()
    assert permute_rewards(rewards, seed=1, step=0).equal(first)
    assert not permute_rewards(rewards, seed=1, step=1).equal(first)
    assert not permute_rewards(rewards, seed=2, step=0).equal(first)


def test_rows_of_a_step_can_be_read_afterwards(rollouts: BatchedDataDict[Any]) -> None:
    batch = to_training_batch(rollouts, pad_token_id=0, divisible_by=1)
    batch["prev_logprobs"] = batch["generation_logprobs"] + 0.5 * batch["token_mask"]
    advantages = 2.0 * batch["token_mask"]
    rows = rollout_rows(rollouts, weight_version=7, advantages=advantages, training=batch)
    row = json.loads(json.dumps(rows[1]))
    assert row["idx"] == 4
    assert row["ground_truth"] == "7"
    assert (row["prompt"], row["response"]) == ("<user>", "<assistant><assistant>")
    assert row["token_ids"] == [6, 8]
    assert row["generation_logprobs"] == [-1.0, -1.0]
    assert row["ratio"] == pytest.approx([1.6487213] * 2)
    assert (row["reward"], row["advantage"], row["weight_version"]) == (0.0, 2.0, 7)
    assert [r["valid"] for r in rows] == [True, True, False]
    assert [r["error"] for r in rows] == [None, None, "TimeoutError"]
    assert [r["truncated"] for r in rows] == [False, False, True]
    del batch["prev_logprobs"]  # not computed with loss_fn.force_on_policy_ratio
    assert "ratio" not in rollout_rows(rollouts, weight_version=7, advantages=advantages, training=batch)[1]


def test_updates_without_a_token_do_not_make_extremes_infinite() -> None:
    def extremes(low: list[float], high: list[float]) -> tuple[float, float]:
        metrics = {"probs_ratio_min": low, "probs_ratio_max": high}
        results = {"loss": torch.zeros(1), "grad_norm": torch.zeros(1), "all_mb_metrics": metrics}
        results |= {"lr": [0.1], "wd": [0.0], "global_valid_seqs": [0.0], "global_valid_toks": [0.0]}
        summary = summarize_training({**results, "num_skipped_steps": 0})
        return summary["probs_ratio_min"], summary["probs_ratio_max"]

    inf = math.inf
    assert extremes([inf], [-inf]) == (-1.0, -1.0)
    assert extremes([inf, 0.5, 0.7], [-inf, 1.5, 1.2]) == (0.5, 1.5)
    assert extremes([0.5], [inf]) == (0.5, inf), "a ratio that overflows stays visible"


def test_metrics_of_several_updates_become_one_number_each() -> None:
    results = {
        "loss": torch.tensor([1.0, 3.0]),
        "grad_norm": torch.tensor([2.0, 4.0]),
        "all_mb_metrics": {
            "kl_penalty": [0.1, 0.3],
            "probs_ratio_min": [0.5, 0.4],
            "probs_ratio_max": [1.1, 1.2],
        },
        "lr": [0.1, 0.2],
        "wd": [0.0, 0.0],
        "global_valid_seqs": [4.0, 4.0],
        "global_valid_toks": [10.0, 20.0],
        "num_skipped_steps": 1,
    }
    assert summarize_training(results) == pytest.approx(
        {
            "loss": 2.0,
            "grad_norm": 3.0,
            "kl_penalty": 0.2,
            "probs_ratio_min": 0.4,
            "probs_ratio_max": 1.2,
            "lr": 0.2,
            "wd": 0.0,
            "global_valid_seqs": 8.0,
            "global_valid_toks": 30.0,
            "num_skipped_steps": 1.0,
        }
    )
