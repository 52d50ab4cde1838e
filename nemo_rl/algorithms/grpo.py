# SPDX-License-Identifier: Apache-2.0
"""GRPO: sample a group of responses per prompt, score them, and follow the clipped policy gradient.

Group Relative Policy Optimization, https://arxiv.org/abs/2402.03300. One step, in order: `rollout`, `score`,
`logprobs`, `advantages`, `update`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.advantage_estimator import (
    build_advantage_estimator,
    calculate_baseline_and_std_per_prompt,
    clip_advantages,
)
from nemo_rl.algorithms.config import GRPOMasterConfig
from nemo_rl.algorithms.context import Context
from nemo_rl.algorithms.loop import StepResult
from nemo_rl.algorithms.loss.clipped_pg import ClippedPGLossFn
from nemo_rl.algorithms.reward import filter_overlong, scale_rewards, shape_rewards
from nemo_rl.algorithms.stages import permute_rewards, rollout_rows, summarize_training, to_training_batch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.experience.rollouts import run_multi_turn_rollout
from nemo_rl.experience.seeds import VALIDATION_STEP_OFFSET, batch_seeds
from nemo_rl.models.generation.interfaces import GenerationSamplingParams, sampling_params
from nemo_rl.utils.timer import Timer


class GRPO:
    """The algorithm that `nemo_rl.algorithms.loop.TrainLoop` runs for `nemo-rl grpo`."""

    name = "grpo"
    headline: tuple[str, ...] = ("reward", "loss", "grad_norm", "mean_response_length")

    def __init__(self, context: Context, config: GRPOMasterConfig):
        """Build loss and estimator.

        Args:
            context: the run's parts.
            config: the whole tree.
        """
        self.context = context
        self.config = config
        self.loss_fn = ClippedPGLossFn(config.loss_fn)
        # With one update per batch the loss takes the current log-probs for the previous ones.
        self._wants_previous = not config.loss_fn.force_on_policy_ratio or config.loss_fn.use_kl_in_reward
        self.estimator = build_advantage_estimator(
            config.grpo.adv_estimator,
            kl_coef=config.loss_fn.reference_policy_kl_penalty,
            kl_type=config.loss_fn.reference_policy_kl_type,
            use_kl_in_reward=config.loss_fn.use_kl_in_reward,
        )

    def step(self, batch: BatchedDataDict[Any], step: int, timer: Timer) -> StepResult:
        """One GRPO step on a batch of prompts; `step` counts from 0."""
        grpo, policy = self.config.grpo, self.context.policy
        prompts = batch.repeat_interleave(grpo.num_generations_per_prompt)
        seeds = batch_seeds(grpo.seed, step, batch.size, grpo.num_generations_per_prompt)
        rollouts, rollout_metrics = self.rollout(prompts, seeds, timer)
        with timer.time("data_processing"):
            rewards = self.score(rollouts, step)
            train = to_training_batch(
                rollouts,
                pad_token_id=self.context.pad_token_id,
                divisible_by=self.config.policy.make_sequence_length_divisible_by,
            )
            train["sample_mask"] = filter_overlong(
                train["sample_mask"], rollouts["truncated"], grpo.overlong_filtering
            )
        self.logprobs(train, timer)
        with timer.time("advantage_calculation"):
            train["advantages"] = self.advantages(train, rollouts, rewards)
        with timer.time("training_prep"):
            policy.prepare_for_training()
        with timer.time("policy_training"):
            results = policy.train(train, self.loss_fn)
        version = self.context.weight_sync.version
        self.context.weight_sync.mark_updated()
        metrics = (
            summarize_training(results) | rollout_metrics | self.reward_metrics(rollouts, rewards, train)
        )
        return StepResult(
            metrics=metrics,
            num_samples=batch.size,
            num_valid_tokens=int(metrics["global_valid_toks"]),
            num_skipped_steps=results["num_skipped_steps"],
            rows=rollout_rows(
                rollouts, weight_version=version, advantages=train["advantages"], training=train
            ),
        )

    def rollout(
        self,
        prompts: BatchedDataDict[Any],
        seeds: Tensor,
        timer: Timer,
        sampling: GenerationSamplingParams | None = None,
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """Sample responses and step the environments until every row has ended.

        Args:
            prompts: rows of the data set [B], each once per sample wanted.
            seeds: int64 [B], one per row, a function of run seed, step, prompt and place in the group.
            timer: gets the phases.
            sampling: other temperature, top-p and top-k than in training.
        """
        grpo, generation = self.config.grpo, self.context.generation
        with timer.time("prepare_for_generation"):
            self.context.weight_sync.ensure_fresh()
            generation.prepare_for_generation()
        with timer.time("generation"):
            out = run_multi_turn_rollout(
                policy_generation=generation,
                input_batch=prompts,
                tokenizer=self.context.tokenizer,
                task_to_env=dict(self.context.environments),
                max_seq_len=self.config.policy.max_total_sequence_length,
                max_rollout_turns=grpo.max_rollout_turns,
                seeds=seeds,
                sampling=sampling,
            )
            generation.finish_generation()
        return out

    def score(self, rollouts: BatchedDataDict[Any], step: int) -> Tensor:
        """Rewards [B] that the advantages are computed from."""
        grpo = self.config.grpo
        rewards = scale_rewards(rollouts["total_reward"].float(), grpo.reward_scaling)
        rewards = shape_rewards(
            rewards, rollouts["response_lengths"], rollouts["truncated"], grpo.reward_shaping
        )
        return permute_rewards(rewards, grpo.seed, step) if grpo.shuffle_rewards else rewards

    def logprobs(self, train: BatchedDataDict[Any], timer: Timer) -> None:
        """Add `prev_logprobs` and `reference_policy_logprobs` [B, S] to the batch, where something reads them."""
        policy = self.context.policy
        wants_reference = not self.config.grpo.skip_reference_policy_logprobs_calculation
        if self._wants_previous or wants_reference:
            with timer.time("logprob_inference_prep"):
                policy.prepare_for_lp_inference()
        with timer.time("policy_and_reference_logprobs"):
            columns = BatchedDataDict({key: train[key] for key in ("input_ids", "input_lengths")})
            if self._wants_previous:
                train["prev_logprobs"] = policy.get_logprobs(columns)["logprobs"]
            if wants_reference:
                reference = policy.get_reference_policy_logprobs(columns)
                train["reference_policy_logprobs"] = reference["reference_logprobs"]
            else:
                train["reference_policy_logprobs"] = torch.zeros_like(train["generation_logprobs"])

    def advantages(
        self, train: BatchedDataDict[Any], rollouts: BatchedDataDict[Any], rewards: Tensor
    ) -> Tensor:
        """Advantages [B, S], 0 on tokens that were not sampled."""
        advantages = self.estimator.compute_advantage(
            torch.tensor(rollouts["idx"]),
            rewards,
            train["token_mask"],
            valid=rollouts["reward_valid"],
            reward_components=reward_components(rollouts),
            logprobs_policy=train["prev_logprobs"] if self._wants_previous else None,
            logprobs_reference=train["reference_policy_logprobs"],
        )
        return clip_advantages(
            advantages, self.config.grpo.advantage_clip_low, self.config.grpo.advantage_clip_high
        )

    def reward_metrics(
        self, rollouts: BatchedDataDict[Any], rewards: Tensor, train: BatchedDataDict[Any]
    ) -> dict[str, float]:
        """Means over the rows whose environment gave a reward."""
        valid = rollouts["reward_valid"] > 0
        _, std = calculate_baseline_and_std_per_prompt(
            torch.tensor(rollouts["idx"]), rewards, rollouts["reward_valid"], leave_one_out_baseline=False
        )
        sampled = train["token_mask"] > 0
        advantages = train["advantages"][sampled]
        return {
            "reward": _mean(rollouts["total_reward"].float()[valid]),
            "shaped_reward": _mean(rewards[valid]),
            "informative_fraction": _mean((std > 0).float()[valid]),
            "mean_prompt_length": _mean(rollouts["prompt_lengths"].float()),
            "mean_response_length": _mean(rollouts["response_lengths"].float()),
            "truncated_fraction": _mean(rollouts["truncated"].float()),
            "num_invalid_rewards": float((~valid).sum()),
            "advantages/mean": _mean(advantages),
            "advantages/max": float(advantages.max()) if len(advantages) else 0.0,
            "advantages/min": float(advantages.min()) if len(advantages) else 0.0,
        }

    def validate(self, step: int, timer: Timer) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Accuracy on held-out prompts, per validation set and as the mean over all rows.

        Sampled with `policy.generation.val_temperature` (0 decodes greedily), `val_top_p` and `val_top_k`.
        """
        grpo, generation = self.config.grpo, self.config.policy.generation
        assert generation is not None
        metrics: dict[str, float] = {}
        rows: list[dict[str, Any]] = []
        totals: list[Tensor] = []
        sampling = sampling_params(generation, validation=True)
        for name, loader in self.context.val_loaders.items():
            parts = []
            left = grpo.max_val_samples
            for index, batch in enumerate(loader):
                batch = batch.slice(0, min(left, batch.size))
                seeds = batch_seeds(grpo.seed + index, step + VALIDATION_STEP_OFFSET, batch.size, 1)
                rollouts, _ = self.rollout(batch, seeds, timer, sampling)
                parts.append(rollouts)
                left -= batch.size
                if left <= 0:
                    break
            joined = BatchedDataDict.from_batches(parts)
            metrics |= {f"{name}/{key}": value for key, value in self._environment_metrics(joined).items()}
            rows += rollout_rows(joined, weight_version=self.context.weight_sync.version)
            totals.append(joined["total_reward"].float()[joined["reward_valid"] > 0])
        rewards = torch.cat(totals)
        return {"accuracy": _mean(rewards), "num_samples": float(len(rewards)), **metrics}, rows

    def _environment_metrics(self, rollouts: BatchedDataDict[Any]) -> dict[str, float]:
        environment: EnvironmentInterface[Any] = self.context.environments[rollouts["task_name"][0]]
        return environment.global_post_process_and_metrics(rollouts)[1]


def reward_components(rollouts: BatchedDataDict[Any]) -> dict[str, Tensor]:
    """The environment's named rewards [B]; empty where it gives one reward."""
    prefix = "reward/"
    return {key.removeprefix(prefix): rollouts[key] for key in rollouts if key.startswith(prefix)}


def _mean(values: Tensor) -> float:
    """The mean; NaN where there is nothing to measure."""
    return values.double().mean().item() if len(values) else math.nan
