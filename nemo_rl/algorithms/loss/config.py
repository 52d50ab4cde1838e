# SPDX-License-Identifier: Apache-2.0
"""Config of the losses: the `loss_fn` section. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, NotYet


class ClippedPGLossConfig(ConfigModel):
    """`loss_fn` of GRPO: clipped policy gradient with an optional KL penalty."""

    reference_policy_kl_penalty: float = Field(
        0.01, ge=0, description="Weight of the KL to the reference policy."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field("k3", description="KL estimator.")
    kl_input_clamp_value: float | None = Field(20.0, gt=0, description="Clamp of the log-ratio in the KL.")
    kl_output_clamp_value: float | None = Field(10.0, gt=0, description="Clamp of the KL per token.")
    ratio_clip_min: float = Field(0.2, ge=0, description="The ratio is clipped below at 1 minus this.")
    ratio_clip_max: float = Field(0.2, ge=0, description="The ratio is clipped above at 1 plus this.")
    ratio_clip_c: float | None = Field(None, gt=1, description="Dual-clip bound for negative advantages.")
    use_on_policy_kl_approximation: bool = Field(
        False, description="Weight the KL by the ratio of current policy to sampler."
    )
    use_importance_sampling_correction: bool = Field(
        False, description="Weight by the ratio of trainer to sampler log-probs."
    )
    truncated_importance_sampling_ratio: float | None = Field(
        None, gt=0, description="Upper bound of that weight."
    )
    truncated_importance_sampling_ratio_min: float | None = Field(
        None, ge=0, description="Lower bound of that weight."
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] = Field(
        "tis", description="How the weight is bounded: clamp, zero outside, or drop the sequence."
    )
    token_level_loss: bool = Field(True, description="Average over tokens; false averages over sequences.")
    sequence_level_importance_ratios: bool = Field(False, description="One ratio per sequence (GSPO).")
    disable_ppo_ratio: bool = Field(False, description="Plain policy gradient: log-prob times advantage.")
    force_on_policy_ratio: bool = Field(
        False, description="Ratio 1 with its gradient; needs one update per step."
    )
    use_cispo: bool = Field(False, description="CISPO: clipped ratio as a constant weight.")
    use_kl_in_reward: bool = Field(
        False, description="The KL is subtracted from the reward instead of the loss."
    )
    positive_example_nll_weight: Annotated[float, NotYet((0.0, 0), "0.0")] = Field(
        0.0, ge=0, description="Weight of a likelihood term on rewarded rows (VAPO)."
    )
