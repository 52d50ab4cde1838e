# SPDX-License-Identifier: Apache-2.0
"""Pieces that losses share: masks, masked reductions, estimators of the KL divergence. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

KLType = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""|log ratio| is clamped to this before every exp: beyond it neither value nor gradient means anything, and inf - inf
and 0 * inf would be NaN."""


def safe_count(count: Tensor) -> Tensor:
    """The divisor for a sum over ``count`` items: ``count``, or 1 where there are none (the sum is 0 then)."""
    return torch.where(count > 0, count, torch.ones_like(count))


def loss_mask(data: Mapping[str, Any]) -> Tensor:
    """Weight of each token in the loss.

    Args:
        data: ``token_mask`` [B, S] and ``sample_mask`` [B].

    Returns:
        float32 [B, S]: their product; column 0 is 0, since the first token is never predicted.
    """
    mask = data["token_mask"].float() * data["sample_mask"].float().unsqueeze(-1)
    return torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` as float32 with everything outside the mask replaced by 0, so that garbage there cannot spread.

    Multiplying by the mask is not enough: NaN times 0 is NaN, and so is the gradient of an overflowed exp.
    """
    return torch.where(mask > 0, values.float(), values.new_zeros((), dtype=torch.float32))


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """Exp of a log ratio clamped to +-20; finite in value and gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the unmasked tokens of each row, [B, S] -> [B]; 0 for an empty row."""
    return (values * mask).sum(-1) / safe_count(mask.sum(-1))


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kl_type: KLType = "k3",
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Tensor:
    """Per-token estimate of KL(p || reference) from tokens sampled from p.

    With ``l = log reference - log p``: k1 is ``-l``, k2 is ``l^2 / 2``, k3 is ``e^l - 1 - l`` (J. Schulman,
    "Approximating KL Divergence", 2020).

    Args:
        logprobs: log p of the sampled tokens, any shape.
        reference_logprobs: log of the reference, same shape.
        kl_type: which estimator.
        input_clamp: ``l`` is clamped to +-this before anything else; None for no clamp.
        output_clamp: the estimate is clamped to +-this; None for no clamp.

    Returns:
        The estimate, same shape, with gradient to ``logprobs`` inside the clamps.

    Raises:
        ValueError: unknown ``kl_type``.
    """
    log_ratio = reference_logprobs - logprobs
    if input_clamp is not None:
        log_ratio = log_ratio.clamp(-input_clamp, input_clamp)
    if kl_type == "k1":
        estimate = -log_ratio
    elif kl_type == "k2":
        estimate = log_ratio.square() / 2
    elif kl_type == "k3":
        estimate = torch.expm1(log_ratio) - log_ratio
    else:
        raise ValueError(f"loss_fn.reference_policy_kl_type is {kl_type!r}; use 'k1', 'k2' or 'k3'")
    if output_clamp is not None:
        estimate = estimate.clamp(-output_clamp, output_clamp)
    return estimate


def js_divergence_estimate(logprobs_a: Tensor, logprobs_b: Tensor) -> Tensor:
    """Per-token k3 estimate of two policies' Jensen-Shannon divergence, from log-probs of sampled tokens."""
    half = torch.tensor(0.5, device=logprobs_a.device).log()
    mixture = torch.logaddexp(logprobs_a, logprobs_b) + half
    to_mixture = [kl_estimate(mixture, side, "k3") for side in (logprobs_a, logprobs_b)]
    return 0.5 * (to_mixture[0] + to_mixture[1])
