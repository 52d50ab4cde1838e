# SPDX-License-Identifier: Apache-2.0
"""What happens to rewards between the environment and the advantages: scaling, shaping, overlong filtering.

Pure functions of tensors with one entry per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import RewardScalingConfig, RewardShapingConfig


def scale_rewards(rewards: Tensor, config: RewardScalingConfig) -> Tensor:
    """Map rewards [B] linearly from the source to the target range; what lies outside the source range is
    clamped.

    Raises:
        ValueError: If the source range is empty.
    """
    if not config.enabled:
        return rewards
    width = config.source_max - config.source_min
    if width <= 0:
        raise ValueError(
            f"grpo.reward_scaling.source_max={config.source_max} must be above "
            f"source_min={config.source_min}, for example {config.source_min + 1}"
        )
    share = (rewards.clamp(config.source_min, config.source_max) - config.source_min) / width
    return config.target_min + share * (config.target_max - config.target_min)


def shape_rewards(
    rewards: Tensor, response_lengths: Tensor, truncated: Tensor, config: RewardShapingConfig
) -> Tensor:
    """Penalise responses that are cut off or that come near the length limit.

    With ``stop_properly_penalty_coef`` a truncated row keeps that share of its reward. Else the soft
    overlong penalty of DAPO (https://arxiv.org/abs/2503.14476, equation 13): past ``max_response_length -
    overlong_buffer_length`` tokens the reward falls linearly, by ``overlong_buffer_penalty`` at
    ``max_response_length``.

    Args:
        rewards: [B].
        response_lengths: [B], number of sampled tokens.
        truncated: bool [B], whether generation was cut off.
        config: The section ``grpo.reward_shaping``.

    Raises:
        ValueError: If keys of the overlong penalty are missing or do not fit together.
    """
    if not config.enabled:
        return rewards
    if config.stop_properly_penalty_coef is not None:
        return rewards.where(~truncated.bool(), rewards * config.stop_properly_penalty_coef)
    buffer, penalty, longest = (
        config.overlong_buffer_length,
        config.overlong_buffer_penalty,
        config.max_response_length,
    )
    if buffer is None or penalty is None or longest is None:
        raise ValueError(
            "grpo.reward_shaping.enabled=true needs overlong_buffer_length, overlong_buffer_penalty and "
            "max_response_length (or stop_properly_penalty_coef)"
        )
    if not 0 < buffer <= longest:
        raise ValueError(
            f"grpo.reward_shaping.overlong_buffer_length={buffer} must lie between 1 and "
            f"max_response_length={longest}"
        )
    excess = (response_lengths - (longest - buffer)).to(rewards.dtype)
    return rewards + (-excess / buffer * penalty).clamp(max=0.0)


def filter_overlong(sample_mask: Tensor, truncated: Tensor, enabled: bool) -> Tensor:
    """The loss multiplier [B], with 0 for truncated rows if ``grpo.overlong_filtering`` is on."""
    return sample_mask * (~truncated.bool()).to(sample_mask.dtype) if enabled else sample_mask
