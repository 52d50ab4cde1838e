# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the likelihood of the assistant's tokens."""

from __future__ import annotations

from typing import Any

from nemo_rl.algorithms.config import SFTMasterConfig
from nemo_rl.algorithms.context import Context
from nemo_rl.algorithms.loop import StepResult
from nemo_rl.algorithms.loss.nll import NLLLoss
from nemo_rl.algorithms.stages import summarize_training
from nemo_rl.data.llm_message_utils import message_logs_to_batch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.timer import Timer


class SFT:
    """The algorithm that `nemo_rl.algorithms.loop.TrainLoop` runs for `nemo-rl sft`."""

    name = "sft"
    headline: tuple[str, ...] = ("loss", "grad_norm", "lr")

    def __init__(self, context: Context, config: SFTMasterConfig):
        """Build the loss.

        Args:
            context: the run's parts.
            config: the whole tree.
        """
        self.context = context
        self.config = config
        self.loss_fn = NLLLoss()

    def step(self, batch: BatchedDataDict[Any], step: int, timer: Timer) -> StepResult:
        """One optimizer step on a batch of conversations."""
        del step
        with timer.time("data_processing"):
            train = self.training_batch(batch)
        with timer.time("training_prep"):
            self.context.policy.prepare_for_training()
        with timer.time("policy_training"):
            results = self.context.policy.train(train, self.loss_fn)
        metrics = summarize_training(results)
        return StepResult(
            metrics=metrics,
            num_samples=batch.size,
            num_valid_tokens=int(metrics["global_valid_toks"]),
            num_skipped_steps=results["num_skipped_steps"],
        )

    def training_batch(self, batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Flatten conversations [B] to `input_ids`, `input_lengths`, `token_mask` and `sample_mask`."""
        train = message_logs_to_batch(
            batch["message_log"],
            pad_token_id=self.context.pad_token_id,
            make_sequence_length_divisible_by=self.config.policy.make_sequence_length_divisible_by,
        )
        train["sample_mask"] = batch["loss_multiplier"].float()
        del train["generation_logprobs"]
        return train

    def validate(self, step: int, timer: Timer) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Loss on held-out conversations: the mean over tokens, per validation set and over all."""
        del step
        sft, policy = self.config.sft, self.context.policy
        metrics: dict[str, float] = {}
        total, tokens = 0.0, 0.0
        for name, loader in self.context.val_loaders.items():
            set_total, set_tokens = 0.0, 0.0
            for index, batch in enumerate(loader):
                if 0 <= sft.val_batches <= index:
                    break
                with timer.time("policy_validation"):
                    results = policy.train(
                        self.training_batch(batch),
                        self.loss_fn,
                        eval_mode=True,
                        gbs=sft.val_global_batch_size,
                        mbs=sft.val_micro_batch_size,
                    )
                valid = sum(results["global_valid_toks"])
                set_total += float(results["loss"].sum()) * valid
                set_tokens += valid
            metrics[f"{name}/loss"] = set_total / max(set_tokens, 1.0)
            total, tokens = total + set_total, tokens + set_tokens
        return {"loss": total / max(tokens, 1.0), "num_valid_tokens": tokens, **metrics}, []
