# SPDX-License-Identifier: Apache-2.0
"""The clipped policy-gradient loss and the family of losses that its options span.

PPO clipping (Schulman et al. 2017, eq. 7), asymmetric clipping (DAPO), dual clipping (Ye et al. 2020), CISPO
(MiniMax-M1 2025, eq. 4), sequence-level ratios (GSPO, Zheng et al. 2025, eq. 7), REINFORCE, a KL penalty towards a
reference, and importance weights that correct for a sampler whose probabilities differ from the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from nemo_rl.algorithms.interfaces import LossType, Metric
from nemo_rl.algorithms.loss.base import TokenLogprobLoss
from nemo_rl.algorithms.loss.config import ClippedPGLossConfig
from nemo_rl.algorithms.loss.functional import (
    clamped_exp,
    js_divergence_estimate,
    kl_estimate,
    loss_mask,
    row_mean,
    safe_count,
    zero_outside,
)


class ClippedPGLossDataDict(TypedDict):
    """Columns that :class:`ClippedPGLossFn` reads: [B, S] (position i belongs to token i), ``sample_mask`` [B]."""

    input_ids: Tensor
    advantages: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    __extra__: Any


@dataclass(frozen=True)
class _Batch:
    """The micro-batch with everything outside the mask set to 0; all [B, S]."""

    mask: Tensor
    current: Tensor
    previous: Tensor
    sampled: Tensor
    advantages: Tensor


class ClippedPGLossFn(TokenLogprobLoss):
    """Clipped policy-gradient loss; each option of :class:`ClippedPGLossConfig` has the effect its description says."""

    def __init__(self, cfg: ClippedPGLossConfig | Mapping[str, Any]) -> None:
        """Check that the options fit together.

        Args:
            cfg: the ``loss_fn`` section, as a model or a plain mapping.

        Raises:
            ValueError: options that contradict each other; names them and a combination that works.
        """
        self.cfg = ClippedPGLossConfig.coerce(cfg).checked("loss_fn")
        self.loss_type = LossType.TOKEN_LEVEL if self.cfg.token_level_loss else LossType.SEQUENCE_LEVEL

    def compute(
        self,
        token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss of one micro-batch.

        Args:
            token_logprobs: [B, S], the current policy's log-probs, with gradient.
            data: see :class:`ClippedPGLossDataDict`.
            global_valid_seqs: rows of the global batch.
            global_valid_toks: unmasked tokens of the global batch.

        Returns:
            Scalar loss (already divided by the global count) and metrics.
        """
        cfg = self.cfg
        batch = self._prepare(token_logprobs, data)
        counts = (safe_count(global_valid_seqs), safe_count(global_valid_toks))
        ratio = _policy_ratio(batch, cfg)
        clipped = (
            ratio
            if cfg.disable_ppo_ratio
            else ratio.clamp(1.0 - cfg.ratio_clip_min, 1.0 + cfg.ratio_clip_max)
        )
        terms = _policy_terms(batch, ratio, clipped, cfg)
        weights, num_out_of_bounds = _sampler_weights(batch, cfg)
        actor_loss = self._reduce(weights * terms, batch.mask, *counts)
        kl_loss = self._kl_loss(batch, data, counts)
        loss = actor_loss + kl_loss
        with torch.no_grad():
            metrics = _ratio_metrics(ratio, clipped, batch.mask, counts[1])
            metrics |= _sampler_metrics(batch, cfg, counts[1])
            metrics["sampling_importance_ratio"] = Metric(self._reduce(weights, batch.mask, *counts))
            metrics["is_oob_ratio"] = Metric(num_out_of_bounds / counts[1])
            metrics["kl_penalty"] = Metric(kl_loss.detach() / (cfg.reference_policy_kl_penalty or 1.0))
            metrics["num_valid_samples"] = Metric(data["sample_mask"].sum())
            metrics["loss"] = Metric(loss.detach())
        return loss, metrics

    def _prepare(self, token_logprobs: Tensor, data: Mapping[str, Any]) -> _Batch:
        mask = loss_mask(data)
        current = zero_outside(token_logprobs, mask)
        if self.cfg.force_on_policy_ratio:  # one update per batch: the previous policy is the current one
            previous = current.detach()
        else:
            previous = zero_outside(data["prev_logprobs"], mask)
        return _Batch(
            mask=mask,
            current=current,
            previous=previous,
            sampled=zero_outside(data["generation_logprobs"], mask),
            advantages=zero_outside(data["advantages"], mask),
        )

    def _reduce(self, terms: Tensor, mask: Tensor, num_seqs: Tensor, num_toks: Tensor) -> Tensor:
        """Token mean over the global batch, or the mean over its rows of each row's token mean."""
        if self.loss_type is LossType.TOKEN_LEVEL:
            return (terms * mask).sum() / num_toks
        return (row_mean(terms, mask) * mask.amax(-1)).sum() / num_seqs  # amax: the row's sample_mask

    def _kl_loss(self, batch: _Batch, data: Mapping[str, Any], counts: tuple[Tensor, Tensor]) -> Tensor:
        cfg = self.cfg
        if cfg.reference_policy_kl_penalty == 0 or cfg.use_kl_in_reward:
            return batch.current.new_zeros(())
        kl = kl_estimate(
            batch.current,
            zero_outside(data["reference_policy_logprobs"], batch.mask),
            cfg.reference_policy_kl_type,
            cfg.kl_input_clamp_value,
            cfg.kl_output_clamp_value,
        )
        # The gradient also flows through the sampling distribution: the weight is 1 in value on policy.
        behaviour = batch.sampled if cfg.use_on_policy_kl_approximation else batch.current.detach()
        weight = clamped_exp(batch.current - behaviour)
        return cfg.reference_policy_kl_penalty * self._reduce(weight * kl, batch.mask, *counts)


def _policy_ratio(batch: _Batch, cfg: ClippedPGLossConfig) -> Tensor:
    """Pi / pi_previous per token; without a ratio (REINFORCE), the log-prob itself, whose gradient is what counts."""
    if cfg.disable_ppo_ratio:
        return batch.current
    log_ratio = batch.current - batch.previous
    if cfg.sequence_level_importance_ratios:
        log_ratio = row_mean(log_ratio, batch.mask).unsqueeze(-1).expand_as(log_ratio)
    return clamped_exp(log_ratio)


def _policy_terms(batch: _Batch, ratio: Tensor, clipped: Tensor, cfg: ClippedPGLossConfig) -> Tensor:
    advantages = batch.advantages
    if cfg.use_cispo:
        return -advantages * clipped.detach() * batch.current
    terms = torch.maximum(-advantages * ratio, -advantages * clipped)
    if cfg.ratio_clip_c is None:
        return terms
    bounded = torch.minimum(terms, -advantages * cfg.ratio_clip_c)
    return torch.where(advantages < 0, bounded, terms)


@torch.no_grad()
def _sampler_weights(batch: _Batch, cfg: ClippedPGLossConfig) -> tuple[Tensor, Tensor]:
    """Importance weights trainer / sampler, truncated as configured.

    Returns:
        Weights [B, S] (1 without correction) and the number of tokens whose weight was out of bounds.
    """
    mask = batch.mask
    log_ratio = batch.previous - batch.sampled
    if cfg.sequence_level_importance_ratios:
        weights = clamped_exp((log_ratio * mask).sum(-1, keepdim=True)).expand_as(mask)
    else:
        weights = clamped_exp(log_ratio)
    none_outside = mask.new_zeros(())
    if not cfg.use_importance_sampling_correction:
        return torch.ones_like(mask), none_outside
    if cfg.truncated_importance_sampling_ratio is None:
        return weights, none_outside
    low = cfg.truncated_importance_sampling_ratio_min or 0.0
    high = cfg.truncated_importance_sampling_ratio
    if cfg.truncated_importance_sampling_type == "seq-mask-tis":
        geometric_mean = clamped_exp(row_mean(log_ratio, mask)).unsqueeze(-1).expand_as(mask)
        outside = (geometric_mean < low) | (geometric_mean > high)
    else:
        outside = (weights < low) | (weights > high)
    num_outside = (outside * mask).sum()
    if cfg.truncated_importance_sampling_type == "tis":
        return weights.clamp(low, high), num_outside
    return weights.masked_fill(outside, 0.0), num_outside


def _ratio_metrics(ratio: Tensor, clipped: Tensor, mask: Tensor, num_toks: Tensor) -> dict[str, Metric]:
    selected = mask > 0
    metrics = {}
    for name, values in (("probs_ratio", ratio), ("probs_ratio_clamped", clipped)):
        values = values.detach()
        metrics[name] = Metric((values * mask).sum() / num_toks)
        metrics[f"{name}_min"] = Metric(values.masked_fill(~selected, torch.inf).min(), "min")
        metrics[f"{name}_max"] = Metric(values.masked_fill(~selected, -torch.inf).max(), "max")
    return metrics


def _sampler_metrics(batch: _Batch, cfg: ClippedPGLossConfig, num_toks: Tensor) -> dict[str, Metric]:
    """How far the sampler is from the trainer: means over the global batch's tokens."""
    previous, sampled, current = batch.previous, batch.sampled, batch.current.detach()
    clamps = (cfg.reference_policy_kl_type, cfg.kl_input_clamp_value, cfg.kl_output_clamp_value)
    per_token = {
        "token_mult_prob_error": clamped_exp((sampled - previous).abs()),
        "gen_kl_error": kl_estimate(sampled, previous, *clamps),
        "policy_kl_error": kl_estimate(previous, sampled, *clamps),
        "js_divergence_error": js_divergence_estimate(sampled, previous),
        "approx_entropy": -clamped_exp(current - sampled) * current,
    }
    return {name: Metric((values * batch.mask).sum() / num_toks) for name, values in per_token.items()}
