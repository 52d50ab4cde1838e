# SPDX-License-Identifier: Apache-2.0
"""Advantages of sampled rows, from their rewards: pure functions of tensors.

Every estimator has one method,

``compute_advantage(prompt_ids, rewards, mask, *, valid=None, ...) -> [B, S]``

* ``prompt_ids`` int64 [B], or [B, P] padded prompt tokens: equal rows form a group, in whatever order they
  come;
* ``rewards`` float [B];
* ``mask`` [B, S], 1 on the tokens that the loss covers; the advantage is 0 elsewhere;
* ``valid`` [B], 0 for a row without a reward (its environment raised): it gets advantage 0 and influences
  no other row. ``None`` means that all rows have one.

A row that has a reward but is kept out of the loss (``sample_mask`` 0) still counts for its group's baseline.

Statistics are computed in float64 with the two-pass formula, and a standard deviation below rounding error
is 0: the one-pass formula turns rewards ``[0.35] * 7 + [0.0]`` into an advantage of -2000 for the last row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nemo_rl.algorithms.loss.functional import KLType, kl_estimate

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import AdvEstimatorConfig

NORMALIZE_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

RELATIVE_STD_FLOOR = 1e-6
"""A standard deviation below this share of the group's largest absolute reward is rounding error, hence 0."""

VARIANCE_CLAMP = 1e-8
"""Smallest variance of a z-score over the batch."""


class AdvantageEstimator(Protocol):
    """What the training loop calls; see the module docstring for the arguments."""

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        *,
        valid: Tensor | None = None,
        reward_components: Mapping[str, Tensor] | None = None,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
    ) -> Tensor:
        """Return advantages [B, S] in the dtype of ``rewards``."""
        ...


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
    std_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Baseline and standard deviation of each row's group.

    Args:
        prompts: [B] group ids or [B, P] prompt tokens; equal rows form a group. Groups may differ in size,
            and their rows may come in any order.
        rewards: [B].
        valid_mask: [B], 0 for rows that count for nothing.
        leave_one_out_baseline: Whether a row's own reward is left out of its baseline and its deviation.
        std_rewards: [B], rewards to take the deviation of, if not ``rewards`` (dynamic sampling looks at
            rewards before shaping).

    Returns:
        Baseline [B] and unbiased standard deviation [B], in the dtype of ``rewards``. A row that is
        invalid, or the only valid one of its group, has its own reward as baseline (so that its advantage
        is 0) and deviation 0.

    Raises:
        ValueError: If the lengths differ.
    """
    group_of_row = _group_indices(prompts, rewards.shape[0])
    values = rewards.detach().double()
    spread = values if std_rewards is None else std_rewards.detach().double()
    valid = valid_mask.to(rewards.device) > 0
    baseline, std = values.clone(), torch.zeros_like(values)
    for group in range(int(group_of_row.max()) + 1 if len(group_of_row) else 0):
        rows = torch.nonzero((group_of_row == group) & valid).flatten()
        if len(rows) < 2:
            continue
        baseline[rows] = _mean(values[rows], leave_one_out_baseline)
        std[rows] = _std(spread[rows], leave_one_out_baseline)
    return baseline.to(rewards.dtype), std.to(rewards.dtype)


def informative_rows(prompts: Tensor, rewards: Tensor, valid_mask: Tensor) -> Tensor:
    """Which rows belong to a group whose valid rewards differ: the ones that dynamic sampling keeps.

    Args:
        prompts: [B] or [B, P], as above.
        rewards: [B].
        valid_mask: [B].

    Returns:
        bool [B]; whole groups are true or false, invalid rows included, so that groups keep their size.
    """
    group_of_row = _group_indices(prompts, rewards.shape[0])
    _, std = calculate_baseline_and_std_per_prompt(prompts, rewards, valid_mask, leave_one_out_baseline=False)
    spread = torch.zeros(int(group_of_row.max()) + 1 if len(group_of_row) else 0, dtype=std.dtype)
    spread.scatter_reduce_(0, group_of_row, std, reduce="amax")
    return spread[group_of_row] > 0


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clamp advantages [B, S] to ``[low, high]``; ``None`` leaves that side open."""
    return advantages if low is None and high is None else advantages.clamp(min=low, max=high)


def build_advantage_estimator(
    config: AdvEstimatorConfig,
    *,
    kl_coef: float = 0.0,
    kl_type: KLType = "k3",
    use_kl_in_reward: bool = False,
) -> AdvantageEstimator:
    """The estimator that ``grpo.adv_estimator`` describes.

    Args:
        config: The section, with its ``name``.
        kl_coef: ``loss_fn.reference_policy_kl_penalty``.
        kl_type: ``loss_fn.reference_policy_kl_type``.
        use_kl_in_reward: ``loss_fn.use_kl_in_reward``.

    Raises:
        ValueError: For a name without an estimator, or a KL in the reward for an estimator that ignores it.
    """
    if use_kl_in_reward and config.name != "reinforce_plus_plus":
        raise ValueError(
            "loss_fn.use_kl_in_reward=true needs grpo.adv_estimator.name=reinforce_plus_plus, "
            f"not {config.name!r}"
        )
    match config.name:
        case "grpo":
            return GRPOAdvantageEstimator(
                normalize_rewards=config.normalize_rewards,
                use_leave_one_out_baseline=config.use_leave_one_out_baseline,
            )
        case "gdpo":
            return GDPOAdvantageEstimator(
                normalize_rewards=config.normalize_rewards,
                use_leave_one_out_baseline=config.use_leave_one_out_baseline,
                reward_weights=config.reward_weights,
            )
        case "reinforce_plus_plus":
            return ReinforcePlusPlusAdvantageEstimator(
                minus_baseline=config.minus_baseline,
                kl_coef=kl_coef if use_kl_in_reward else 0.0,
                kl_type=kl_type,
            )
        case _:
            raise ValueError(
                f"grpo.adv_estimator.name={config.name!r} has no estimator; use grpo, gdpo or reinforce_plus_plus"
            )


class GRPOAdvantageEstimator:
    """``A = reward - baseline``, divided by the group's deviation if ``normalize_rewards`` and it is not 0.

    GRPO (https://arxiv.org/abs/2402.03300, equation 3 with outcome supervision). With
    ``normalize_rewards=False`` and the leave-one-out baseline it is RLOO (https://arxiv.org/abs/2402.14740,
    equation 6).
    """

    def __init__(self, *, normalize_rewards: bool = True, use_leave_one_out_baseline: bool = True) -> None:
        self.normalize_rewards = normalize_rewards
        self.use_leave_one_out_baseline = use_leave_one_out_baseline

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        *,
        valid: Tensor | None = None,
        reward_components: Mapping[str, Tensor] | None = None,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
    ) -> Tensor:
        """Return advantages [B, S]; see the module docstring."""
        del reward_components, logprobs_policy, logprobs_reference
        per_row = self.per_row(prompt_ids, rewards, _valid_or_all(valid, rewards))
        return per_row.unsqueeze(1) * mask.to(per_row.dtype)

    def per_row(self, prompt_ids: Tensor, rewards: Tensor, valid: Tensor) -> Tensor:
        """Return advantages [B] of one reward."""
        baseline, std = calculate_baseline_and_std_per_prompt(
            prompt_ids, rewards, valid, self.use_leave_one_out_baseline
        )
        advantages = rewards - baseline
        if self.normalize_rewards:
            advantages = torch.where(std > 0, advantages / (std + NORMALIZE_EPSILON), advantages)
        return torch.where(valid > 0, advantages, torch.zeros_like(advantages))


class GDPOAdvantageEstimator:
    """GRPO per reward component, weighted and summed, then a z-score over the batch.

    Group reward-Decoupled normalisation (https://arxiv.org/abs/2601.05242): components are normalised
    within their group before they are summed, so that one with a large scale cannot drown the others.
    """

    def __init__(
        self,
        *,
        normalize_rewards: bool = True,
        use_leave_one_out_baseline: bool = True,
        reward_weights: Mapping[str, float] | Sequence[float] | None = None,
    ) -> None:
        self._one = GRPOAdvantageEstimator(
            normalize_rewards=normalize_rewards, use_leave_one_out_baseline=use_leave_one_out_baseline
        )
        self.reward_weights = reward_weights

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        *,
        valid: Tensor | None = None,
        reward_components: Mapping[str, Tensor] | None = None,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
    ) -> Tensor:
        """Return advantages [B, S]; ``reward_components`` maps each component's name to its rewards [B].

        Raises:
            ValueError: With fewer than two components, or weights that do not match them.
        """
        del logprobs_policy, logprobs_reference
        components = {} if reward_components is None else dict(reward_components)
        if len(components) < 2:
            raise ValueError(
                f"grpo.adv_estimator.name=gdpo needs an environment with two or more rewards, this one has "
                f"{len(components)}; use grpo.adv_estimator.name=grpo"
            )
        counted = _valid_or_all(valid, rewards)
        total = torch.zeros_like(rewards)
        for weight, component in zip(self._weights(list(components)), components.values(), strict=True):
            total = total + weight * self._one.per_row(prompt_ids, component.to(rewards.dtype), counted)
        scored = _masked_z_score(total, counted)
        return scored.unsqueeze(1) * mask.to(scored.dtype)

    def _weights(self, names: list[str]) -> list[float]:
        if self.reward_weights is None:
            return [1.0] * len(names)
        given = self.reward_weights
        if isinstance(given, Mapping):
            if set(given) != set(names):
                raise ValueError(
                    f"grpo.adv_estimator.reward_weights names {sorted(given)}, but the environment returns "
                    f"{sorted(names)}"
                )
            return [float(given[name]) for name in names]
        if len(given) != len(names):
            raise ValueError(
                f"grpo.adv_estimator.reward_weights has {len(given)} values for {len(names)} rewards "
                f"({', '.join(names)})"
            )
        return [float(weight) for weight in given]


class ReinforcePlusPlusAdvantageEstimator:
    """Reward minus the group mean, minus KL per token, then one z-score over all tokens of the batch.

    Reinforce++ with baseline (https://arxiv.org/abs/2501.03262, section 3). ``kl_coef`` above 0 puts the
    penalty against the reference policy into the reward.
    """

    def __init__(self, *, minus_baseline: bool = True, kl_coef: float = 0.0, kl_type: KLType = "k3") -> None:
        self.minus_baseline = minus_baseline
        self.kl_coef = kl_coef
        self.kl_type = kl_type

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        *,
        valid: Tensor | None = None,
        reward_components: Mapping[str, Tensor] | None = None,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
    ) -> Tensor:
        """Return advantages [B, S]; the log-probs [B, S] are needed only if ``kl_coef`` is not 0.

        Raises:
            ValueError: If the KL is to be in the reward and log-probs are missing.
        """
        del reward_components
        counted = _valid_or_all(valid, rewards)
        per_row = rewards
        if self.minus_baseline:
            baseline, _ = calculate_baseline_and_std_per_prompt(prompt_ids, rewards, counted, False)
            per_row = rewards - baseline
        tokens = mask.to(rewards.dtype) * (counted > 0).to(rewards.dtype).unsqueeze(1)
        per_token = per_row.unsqueeze(1).expand(tokens.shape)
        if self.kl_coef != 0.0:
            if logprobs_policy is None or logprobs_reference is None:
                raise ValueError(
                    "loss_fn.use_kl_in_reward=true needs log-probs of the policy and of the reference; set "
                    "grpo.skip_reference_policy_logprobs_calculation=false"
                )
            per_token = per_token - self.kl_coef * kl_estimate(
                logprobs_policy, logprobs_reference, self.kl_type
            )
        return _masked_z_score(per_token, tokens)


def _valid_or_all(valid: Tensor | None, rewards: Tensor) -> Tensor:
    return torch.ones_like(rewards) if valid is None else valid.to(rewards.device)


def _group_indices(prompts: Tensor, num_rows: int) -> Tensor:
    """Index of each row's group, [B] on the device of ``prompts``."""
    if prompts.shape[0] != num_rows:
        raise ValueError(f"{prompts.shape[0]} prompts for {num_rows} rewards")
    return torch.unique(prompts, dim=0, return_inverse=True)[1].flatten()


def _mean(values: Tensor, leave_one_out: bool) -> Tensor:
    """Mean for each of ``n >= 2`` values, of all of them or of the other ones."""
    if not leave_one_out:
        return values.mean().expand(len(values))
    return _others(values).mean(dim=1)


def _std(values: Tensor, leave_one_out: bool) -> Tensor:
    """Unbiased deviation for each of ``n >= 2`` values; 0 where one value is left, or for rounding error."""
    samples = _others(values) if leave_one_out else values.unsqueeze(0)
    if samples.shape[1] < 2:
        return torch.zeros_like(values)
    deviation = samples - samples.mean(dim=1, keepdim=True)
    std = (deviation.square().sum(dim=1) / (samples.shape[1] - 1)).sqrt()
    floor = RELATIVE_STD_FLOOR * samples.abs().amax(dim=1)
    return torch.where(std > floor, std, torch.zeros_like(std)).expand(len(values))


def _others(values: Tensor) -> Tensor:
    """[n, n - 1]: row i holds every value but the i-th."""
    n = len(values)
    off_diagonal = ~torch.eye(n, dtype=torch.bool, device=values.device)
    return values.unsqueeze(0).expand(n, n)[off_diagonal].view(n, n - 1)


def _masked_z_score(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / std`` over the positions where ``mask`` is not 0, and 0 elsewhere."""
    kept = mask > 0
    if not bool(kept.any()):
        return torch.zeros_like(values)
    chosen = values[kept].double()
    mean = chosen.mean()
    variance = (chosen - mean).square().mean().clamp(min=VARIANCE_CLAMP)
    scored = ((values.double() - mean) / variance.sqrt()).to(values.dtype)
    return torch.where(kept, scored, torch.zeros_like(scored))
