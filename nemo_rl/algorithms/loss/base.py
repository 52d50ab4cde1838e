# SPDX-License-Identifier: Apache-2.0
"""The base of this project's losses, and the adapter for the older documented call form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nemo_rl.algorithms.interfaces import LossInputType, LossType, Metric


class TokenLogprobLoss:
    """A loss of per-token log-probabilities.

    Called as ``loss(data, global_valid_seqs, global_valid_toks, token_logprobs=[B, S])``. The older documented form
    ``loss(next_token_logits, data, global_valid_seqs, global_valid_toks)`` works too: the logits [B, S, V] are turned
    into log-probs of ``data["input_ids"]`` first.

    Attributes:
        loss_type: which global count divides the loss.
        input_type: ``TOKEN_LOGPROBS``.
        rows_per_unit: rows that must share shard and micro-batch.
        only_masked_tokens: the loss reads ``token_logprobs`` only where ``token_mask`` is not 0, so the others need
            not be computed.
    """

    loss_type: LossType = LossType.TOKEN_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.TOKEN_LOGPROBS
    rows_per_unit: int = 1
    only_masked_tokens: ClassVar[bool] = True

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss of one micro-batch; see the class for the two forms."""
        if args and isinstance(args[0], Tensor):
            logits, *rest = args
            data = rest[0] if rest else kwargs["data"]
            return self(*rest, token_logprobs=logits_to_token_logprobs(logits, data["input_ids"]), **kwargs)
        if "next_token_logits" in kwargs:
            return self(kwargs.pop("next_token_logits"), *args, **kwargs)
        return self.compute(kwargs.pop("token_logprobs"), *args, **kwargs)

    @abstractmethod
    def compute(
        self,
        token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss from ``token_logprobs`` [B, S]."""


def logits_to_token_logprobs(next_token_logits: Tensor, input_ids: Tensor) -> Tensor:
    """Log-probs of given tokens from whole logits.

    Args:
        next_token_logits: [B, S, V]; position i predicts token i + 1.
        input_ids: int64 [B, S].

    Returns:
        float32 [B, S]: position i is the log-prob of token i, position 0 is 0.
    """
    logits = next_token_logits[:, :-1].float()
    chosen = logits.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    logprobs = chosen - logits.logsumexp(-1)
    return torch.cat([torch.zeros_like(logprobs[:, :1]), logprobs], dim=1)


def as_metrics(
    metrics: Mapping[str, Metric | Tensor | float | int], device: torch.device
) -> dict[str, Metric]:
    """Metrics of a loss as :class:`Metric`; a bare number or tensor is summed, as the documented form means it."""
    out: dict[str, Metric] = {}
    for name, value in metrics.items():
        if isinstance(value, Metric):
            out[name] = value
        else:
            out[name] = Metric(torch.as_tensor(value, device=device, dtype=torch.float32).detach())
    return out
