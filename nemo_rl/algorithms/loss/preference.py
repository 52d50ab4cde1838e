# SPDX-License-Identifier: Apache-2.0
"""Losses over pairs of a chosen and a rejected row: Bradley-Terry preference loss and DPO.

Rows come in pairs, chosen first: 0 and 1, 2 and 3, ... They share shard and micro-batch (``rows_per_unit = 2``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl.algorithms.interfaces import LossInputType, LossType, Metric
from nemo_rl.algorithms.loss.base import TokenLogprobLoss
from nemo_rl.algorithms.loss.functional import loss_mask, row_mean, safe_count, zero_outside
from nemo_rl.algorithms.loss.preference_config import DPOLossConfig


class PreferenceLossDataDict(TypedDict):
    """Columns of pairs: [B, S] and [B]."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DPOLossDataDict(TypedDict):
    """Columns of pairs with the reference's log-probs (position i belongs to token i): [B, S] and [B]."""

    input_ids: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class PreferenceLoss(TokenLogprobLoss):
    """``-log sigmoid(r_chosen - r_rejected)``, mean over pairs (Bradley-Terry).

    Called with ``rewards`` [B] (or [B, 1, 1], as a reward model's logits), one per row.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.LOGIT
    rows_per_unit = 2

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss: ``(rewards, data, global_valid_seqs, global_valid_toks)``."""
        return self.compute(*args, **kwargs)

    def split_output_tensor(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen rows and rejected rows."""
        return tensor[::2], tensor[1::2]

    def compute(
        self,
        token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss of one micro-batch; ``token_logprobs`` holds the rewards here."""
        del global_valid_toks
        rewards = token_logprobs.float().reshape(token_logprobs.shape[0])
        return self.preference_loss(rewards, data["sample_mask"].float(), global_valid_seqs)

    def preference_loss(
        self, rewards: Tensor, sample_mask: Tensor, global_valid_seqs: Tensor, beta: float = 1.0
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Loss and metrics of rewards [B] with ``beta`` times their margin in the sigmoid."""
        chosen, rejected = self.split_output_tensor(rewards)
        mask, _ = self.split_output_tensor(sample_mask)
        num_pairs = safe_count(global_valid_seqs) / 2

        def mean(values: Tensor) -> Tensor:
            return (torch.where(mask > 0, values, torch.zeros_like(values)) * mask).sum() / num_pairs

        margin = beta * (chosen - rejected)
        loss = mean(-F.logsigmoid(margin))
        metrics = {
            "loss": Metric(loss.detach()),
            "accuracy": Metric(mean((margin > 0).float())),
            "rewards_chosen_mean": Metric(mean(chosen).detach()),
            "rewards_rejected_mean": Metric(mean(rejected).detach()),
            "num_valid_samples": Metric(mask.sum()),
        }
        return loss, metrics


class DPOLossFn(PreferenceLoss):
    """Direct preference optimization (Rafailov et al. 2023, eq. 7), optionally with the chosen rows' likelihood."""

    input_type: ClassVar[LossInputType] = LossInputType.TOKEN_LOGPROBS

    def __init__(self, cfg: DPOLossConfig | Mapping[str, Any]) -> None:
        """Take the ``dpo`` section's loss options."""
        self.cfg = DPOLossConfig.coerce(cfg)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss from ``token_logprobs`` or from logits."""
        return TokenLogprobLoss.__call__(self, *args, **kwargs)

    def compute(
        self,
        token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss of one micro-batch of pairs."""
        del global_valid_toks
        cfg = self.cfg
        mask = loss_mask(data)
        logprobs = zero_outside(token_logprobs, mask)
        gain = logprobs - zero_outside(data["reference_policy_logprobs"], mask)
        rewards = row_mean(gain, mask) if cfg.preference_average_log_probs else (gain * mask).sum(-1)
        sample_mask = data["sample_mask"].float()
        preference, metrics = self.preference_loss(
            rewards, sample_mask, global_valid_seqs, beta=cfg.reference_policy_kl_penalty
        )
        loss = cfg.preference_loss_weight * preference
        if cfg.sft_loss_weight > 0:
            nll = -(row_mean(logprobs, mask) if cfg.sft_average_log_probs else (logprobs * mask).sum(-1))
            chosen_nll, weight = self.split_output_tensor(nll)[0], self.split_output_tensor(sample_mask)[0]
            sft = (chosen_nll * weight).sum() / (safe_count(global_valid_seqs) / 2)
            loss = loss + cfg.sft_loss_weight * sft
            metrics["sft_loss"] = Metric(sft.detach())
        metrics["preference_loss"] = Metric(preference.detach())
        metrics["loss"] = Metric(loss.detach())
        return loss, metrics
