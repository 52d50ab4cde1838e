# SPDX-License-Identifier: Apache-2.0
"""The stages between rollouts and a training batch: pure functions of tensors and message logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.llm_message_utils import message_logs_to_batch, message_text
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.hashing import hash64

_NO_TOKENS = -1.0  # documented value of `_min` and `_max` metrics where no token carried weight


def to_training_batch(
    rollouts: BatchedDataDict[Any], *, pad_token_id: int, divisible_by: int
) -> BatchedDataDict[Any]:
    """Flatten rollouts to the columns that the policy reads.

    Args:
        rollouts: finished rollouts [B] with `message_log`, `loss_multiplier` and `reward_valid`.
        pad_token_id: fills `input_ids` behind a row's end.
        divisible_by: S is rounded up to a multiple of it.

    Returns:
        `input_ids` int64 [B, S], `input_lengths` int64 [B], `token_mask` float [B, S] (1 on sampled tokens),
        `generation_logprobs` float [B, S], `sample_mask` float [B] (0 for rows that stay out of the loss).
    """
    logs = [
        [{**message, "token_loss_mask": _sampled_tokens(message)} for message in log]
        for log in rollouts["message_log"]
    ]
    batch = message_logs_to_batch(
        logs, pad_token_id=pad_token_id, make_sequence_length_divisible_by=divisible_by
    )
    batch["sample_mask"] = rollouts["loss_multiplier"].float() * (rollouts["reward_valid"] > 0).float()
    return batch


def _sampled_tokens(message: Mapping[str, Any]) -> Tensor:
    """1 on every token of a message that the policy sampled, else 0."""
    return torch.full(message["token_ids"].shape, "generation_logprobs" in message, dtype=torch.int64)


def permute_rewards(rewards: Tensor, seed: int, step: int) -> Tensor:
    """Rewards [B] dealt to other rows at random: the control run of a learning claim.

    The permutation is a function of the run's seed and the step.
    """
    generator = torch.Generator().manual_seed(hash64("permute_rewards", seed, step))
    return rewards[torch.randperm(len(rewards), generator=generator)]


def summarize_training(results: Mapping[str, Any]) -> dict[str, float]:
    """One number per metric of a `Policy.train` call.

    Losses and sums are means over the call's global batches; `_min` and `_max` metrics keep their meaning, and are -1
    where no token carried weight.
    """
    out = {"loss": _mean(results["loss"]), "grad_norm": _mean(results["grad_norm"])}
    for name, values in results["all_mb_metrics"].items():
        if name.endswith("_min"):
            out[name] = min((value for value in values if value != math.inf), default=_NO_TOKENS)
        elif name.endswith("_max"):
            out[name] = max((value for value in values if value != -math.inf), default=_NO_TOKENS)
        else:
            out[name] = sum(values) / len(values)
    for name in ("lr", "wd"):
        out[name] = results[name][-1]
    for name in ("global_valid_seqs", "global_valid_toks"):
        out[name] = sum(results[name])
    out["num_skipped_steps"] = float(results["num_skipped_steps"])
    return out


def _mean(values: Tensor) -> float:
    """Mean over optimizer steps; NaN and infinity stay visible."""
    return values.double().mean().item() if len(values) else 0.0


def rollout_rows(
    rollouts: BatchedDataDict[Any],
    *,
    weight_version: int,
    advantages: Tensor | None = None,
    training: Mapping[str, Tensor] | None = None,
) -> list[dict[str, Any]]:
    """What is kept of each rollout, for people to read afterwards.

    Args:
        rollouts: finished rollouts [B].
        weight_version: version of the weights that sampled them.
        advantages: [B, S], the advantages of the rows' tokens.
        training: columns of the training batch [B, S]: `input_ids`, `token_mask`, `generation_logprobs` and, where
            they were computed, `prev_logprobs`.

    Returns:
        B JSON-serialisable rows: prompt, response, reward, and per sampled token its id, the sampler's log-prob and
        (with `prev_logprobs`) the ratio of trainer to sampler.
    """
    rows = []
    for index, log in enumerate(rollouts["message_log"]):
        row: dict[str, Any] = {
            "idx": int(rollouts["idx"][index]),
            "prompt": message_text(log, sampled=False),
            "response": message_text(log, sampled=True),
            "ground_truth": _ground_truth(rollouts["extra_env_info"][index]),
            "reward": float(rollouts["total_reward"][index]),
            "valid": bool(rollouts["reward_valid"][index] > 0),
            "error": rollouts["errors"][index],
            "truncated": bool(rollouts["truncated"][index]),
            "weight_version": weight_version,
        }
        if training is not None:
            row |= _token_columns(training, index)
        if advantages is not None and training is not None:
            sampled = training["token_mask"][index] > 0
            row["advantage"] = float(advantages[index][sampled].mean()) if bool(sampled.any()) else 0.0
        rows.append(row)
    return rows


def _ground_truth(metadata: Any) -> str | None:
    """The right answer, where the environment's state holds one."""
    return (
        str(metadata["ground_truth"])
        if isinstance(metadata, Mapping) and "ground_truth" in metadata
        else None
    )


def _token_columns(training: Mapping[str, Tensor], index: int) -> dict[str, Any]:
    sampled = training["token_mask"][index] > 0
    generated = training["generation_logprobs"][index][sampled]
    columns = {
        "token_ids": training["input_ids"][index][sampled].tolist(),
        "generation_logprobs": generated.tolist(),
    }
    if "prev_logprobs" in training:
        columns["ratio"] = (training["prev_logprobs"][index][sampled] - generated).exp().tolist()
    return columns
