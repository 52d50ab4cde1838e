# SPDX-License-Identifier: Apache-2.0
"""Config of the losses: the `loss_fn` section. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, NotYet, Violation


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
        False,
        description="Ratio 1 with its gradient; needs one update per step, and spares the previous log-probs' pass.",
    )
    use_cispo: bool = Field(False, description="CISPO: clipped ratio as a constant weight.")
    use_kl_in_reward: bool = Field(
        False, description="The KL is subtracted from the reward instead of the loss."
    )
    positive_example_nll_weight: Annotated[float, NotYet((0.0, 0), "0.0")] = Field(
        0.0, ge=0, description="Weight of a likelihood term on rewarded rows (VAPO)."
    )

    def violations(self) -> Iterator[Violation]:
        """Options of the ratio that contradict each other."""
        if self.sequence_level_importance_ratios and self.token_level_loss:
            yield Violation(
                "sequence_level_importance_ratios",
                "one ratio per row needs token_level_loss=false",
                ("token_level_loss",),
            )
        ratio_options = ("force_on_policy_ratio", "sequence_level_importance_ratios")
        if self.disable_ppo_ratio:
            for key in ratio_options:
                if self[key]:
                    yield Violation(key, f"there is no ratio with disable_ppo_ratio=true; set {key}=false")
        if self.use_cispo:
            if not self.token_level_loss:
                yield Violation("use_cispo", "needs token_level_loss=true", ("token_level_loss",))
            if self.ratio_clip_c is not None:
                yield Violation("use_cispo", "needs ratio_clip_c=null", ("ratio_clip_c",))
            for key in ("disable_ppo_ratio", *ratio_options):
                if self[key]:
                    yield Violation("use_cispo", f"needs {key}=false", (key,))
        bounds = ("truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min")
        for key in bounds:
            if self[key] is not None and not self.use_importance_sampling_correction:
                yield Violation(key, "bounds a weight that needs use_importance_sampling_correction=true")
        high, low = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if low is not None and (high is None or low > high):
            yield Violation(bounds[1], f"must lie below {bounds[0]}, which is {high}", (bounds[0],))
        kind = self.truncated_importance_sampling_type
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            yield Violation(
                "truncated_importance_sampling_type",
                "seq-mask-tis needs token-level ratios; use tis or icepop, or sequence_level_importance_ratios=false",
            )
