# SPDX-License-Identifier: Apache-2.0
"""Negative log-likelihood of the unmasked tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nemo_rl.algorithms.interfaces import LossType, Metric
from nemo_rl.algorithms.loss.base import TokenLogprobLoss
from nemo_rl.algorithms.loss.functional import loss_mask, row_mean, safe_count, zero_outside


class NLLLoss(TokenLogprobLoss):
    """``-sum(log p * mask) / global tokens``; the loss of supervised fine-tuning."""

    loss_type = LossType.TOKEN_LEVEL

    def compute(
        self,
        token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        *,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss of one micro-batch.

        Args:
            token_logprobs: [B, S], position i is the log-prob of token i.
            data: ``token_mask`` [B, S], ``sample_mask`` [B].
            global_valid_seqs: rows of the global batch.
            global_valid_toks: unmasked tokens of the global batch.
            dpo_loss: return one value per row, [B], not divided by a global count.
            dpo_average_log_probs: with ``dpo_loss``, the mean over the row's tokens instead of the sum.

        Returns:
            The loss (scalar, or [B] with ``dpo_loss``) and metrics.
        """
        mask = loss_mask(data)
        logprobs = zero_outside(token_logprobs, mask)
        if dpo_loss:
            per_row = -(row_mean(logprobs, mask) if dpo_average_log_probs else (logprobs * mask).sum(-1))
            return per_row, {}
        loss = -(logprobs * mask).sum() / safe_count(global_valid_toks)
        metrics = {
            "loss": Metric(loss.detach()),
            "num_unmasked_tokens": Metric(mask.sum()),
            "num_valid_samples": Metric(data["sample_mask"].sum()),
        }
        return loss, metrics
