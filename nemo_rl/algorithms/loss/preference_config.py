# SPDX-License-Identifier: Apache-2.0
"""Config of the losses of DPO and distillation. Torch-free; `nemo_rl.algorithms.loss_functions` re-exports it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel


class DPOLossConfig(ConfigModel):
    """Loss options of the `dpo` section."""

    reference_policy_kl_penalty: float = Field(
        0.05, ge=0, description="Beta: scale of the reward margin in the sigmoid."
    )
    preference_loss_weight: float = Field(1.0, ge=0, description="Weight of the preference loss.")
    sft_loss_weight: float = Field(0.0, ge=0, description="Weight of the chosen rows' likelihood.")
    preference_average_log_probs: bool = Field(
        False, description="Rewards are means over a row's tokens instead of sums."
    )
    sft_average_log_probs: bool = Field(
        False, description="The likelihood of a row is a mean over its tokens instead of a sum."
    )


class DistillationLossConfig(ConfigModel):
    """Loss options of distillation."""

    kl_type: Literal["forward", "reverse", "mixed"] = Field("mixed", description="Direction of the KL.")
    mixed_kl_weight: float = Field(
        0.5, ge=0, le=1, description="Weight of the forward KL in the mixed one; the rest is reverse."
    )
    zero_outside_topk: bool = Field(
        False, description="Correct for the teacher's mass outside its top-k tokens."
    )
