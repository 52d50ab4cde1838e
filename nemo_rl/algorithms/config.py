# SPDX-License-Identifier: Apache-2.0
"""Config of the algorithms: the `grpo` and `sft` sections and the whole trees. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.algorithms.batch_plan import LAYOUT_KEYS, batch_violations
from nemo_rl.algorithms.loss.config import ClippedPGLossConfig
from nemo_rl.data.config import DataConfig
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.environments.config import MathEnvConfig
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.utils.checkpoint_config import CheckpointingConfig
from nemo_rl.utils.config_model import ConfigModel, Derived, NotYet, OptionOf, Violation
from nemo_rl.utils.logger_config import LoggerConfig


class RewardShapingConfig(ConfigModel):
    """`grpo.reward_shaping`: penalties on long or truncated responses."""

    enabled: bool = Field(False, description="Shape rewards.")
    overlong_buffer_length: int | None = Field(
        None, ge=0, description="Tokens before the limit where the penalty starts."
    )
    overlong_buffer_penalty: float | None = Field(None, ge=0, description="Penalty at the limit.")
    max_response_length: int | None = Field(None, ge=1, description="The limit in response tokens.")
    stop_properly_penalty_coef: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Factor on the reward of truncated responses; excludes the overlong penalty.",
    )

    def violations(self) -> Iterator[Violation]:
        """Keys of one penalty that are missing or belong to the other."""
        overlong = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
        missing = [key for key in overlong if self[key] is None]
        if self.stop_properly_penalty_coef is None:
            for key in missing:
                yield Violation(
                    key, "is needed with reward_shaping.enabled=true (or set stop_properly_penalty_coef)"
                )
        elif len(missing) < len(overlong):
            yield Violation(
                "stop_properly_penalty_coef",
                f"excludes the overlong penalty; set {' and '.join(overlong)} to null",
            )
        buffer, longest = self.overlong_buffer_length, self.max_response_length
        if buffer is not None and longest is not None and not 0 < buffer <= longest:
            yield Violation(
                "overlong_buffer_length", f"{buffer} must lie between 1 and max_response_length={longest}"
            )


class RewardScalingConfig(ConfigModel):
    """`grpo.reward_scaling`: clamp to the source range, then map linearly to the target range."""

    enabled: bool = Field(False, description="Scale rewards.")
    source_min: float = Field(0.0, description="Reward mapped to target_min.")
    source_max: float = Field(1.0, description="Reward mapped to target_max.")
    target_min: float = Field(0.0, description="Lowest scaled reward.")
    target_max: float = Field(1.0, description="Highest scaled reward.")

    def violations(self) -> Iterator[Violation]:
        """An empty source range."""
        if self.source_max <= self.source_min:
            yield Violation("source_max", f"must be above source_min={self.source_min}", ("source_min",))


class AdvEstimatorConfig(ConfigModel):
    """`grpo.adv_estimator`: how rewards become advantages."""

    name: Annotated[
        Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"],
        NotYet(("grpo", "gdpo", "reinforce_plus_plus"), "grpo"),
    ] = Field("grpo", description="Estimator.")
    normalize_rewards: bool = Field(
        True, description="Divide by the standard deviation; follows grpo.normalize_rewards."
    )
    use_leave_one_out_baseline: bool = Field(
        True, description="Baseline without the row itself; follows grpo.use_leave_one_out_baseline."
    )
    reward_weights: list[float] | None = Field(None, description="Weights of the reward components (gdpo).")
    minus_baseline: bool = Field(True, description="Subtract the group mean first (reinforce_plus_plus).")


class AsyncGRPOConfig(ConfigModel):
    """`grpo.async_grpo`: generation and training at the same time (not supported yet)."""

    enabled: Annotated[bool, NotYet((False,), "async_grpo.enabled=false")] = Field(
        False, description="Generate while training."
    )
    max_trajectory_age_steps: int = Field(1, ge=0, description="Oldest weights a row may come from.")
    max_generation_failures: int = Field(0, ge=0, description="Failures that are tolerated.")
    in_flight_weight_updates: bool = Field(False, description="Update weights during generation.")
    recompute_kv_cache_after_weight_updates: bool = Field(False, description="Recompute KV rows then.")


class GRPOConfig(ConfigModel):
    """The `grpo` section."""

    derived: ClassVar[tuple[Derived, ...]] = (
        Derived("adv_estimator.normalize_rewards", "normalize_rewards"),
        Derived("adv_estimator.use_leave_one_out_baseline", "use_leave_one_out_baseline"),
    )

    num_prompts_per_step: int = Field(32, ge=1, description="Prompts per step.")
    num_generations_per_prompt: int = Field(16, ge=1, description="Rollouts per prompt: the group.")
    max_num_epochs: int = Field(1, ge=1, description="Passes over the data, at most.")
    max_num_steps: int = Field(1_000_000, ge=1, description="Steps, at most.")
    max_rollout_turns: int = Field(1, ge=1, description="Turns of a conversation with the environment.")
    normalize_rewards: bool = Field(True, description="Divide advantages by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(True, description="A row's baseline leaves the row out.")
    advantage_clip_low: float | None = Field(None, description="Lowest advantage.")
    advantage_clip_high: float | None = Field(None, description="Highest advantage.")
    val_period: int = Field(10, ge=0, description="Steps between validations; 0 turns them off.")
    val_start_at: int = Field(
        -1, ge=-1, description="First step with a periodic validation; -1 has no effect."
    )
    val_batch_size: int = Field(256, ge=1, description="Prompts per validation batch.")
    val_at_start: bool = Field(False, description="Validate before the first step.")
    val_at_end: bool = Field(False, description="Validate after the last step.")
    max_val_samples: int = Field(256, ge=1, description="Validation prompts, at most.")
    val_num_generations_per_prompt: Annotated[int, NotYet((1,), "1")] = Field(
        1, ge=1, description="Rollouts per validation prompt."
    )
    stop_at_validation_metric: Annotated[str | None, NotYet((None,), "null")] = Field(
        None, description="Metric that ends the run."
    )
    stop_at_validation_threshold: Annotated[float | None, OptionOf("grpo.stop_at_validation_metric")] = Field(
        None, description="Value at which it does."
    )
    skip_reference_policy_logprobs_calculation: bool = Field(
        False, description="Leave out the reference pass; needs a KL penalty of 0."
    )
    seed: int = Field(42, ge=0, description="Seed of data order, sampling and initialisation.")
    async_grpo: AsyncGRPOConfig = Field(default_factory=AsyncGRPOConfig, description="Asynchronous training.")
    overlong_filtering: bool = Field(False, description="Leave truncated rows out of the loss.")
    use_dynamic_sampling: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Sample again until enough groups have spread rewards (DAPO)."
    )
    dynamic_sampling_max_gen_batches: Annotated[int, OptionOf("grpo.use_dynamic_sampling")] = Field(
        10, ge=1, description="Batches sampled for a step, at most."
    )
    batch_multiplier: Annotated[float, OptionOf("grpo.use_dynamic_sampling")] = Field(
        1.0, gt=0, description="Prompts drawn per prompt needed, with dynamic sampling."
    )
    reward_shaping: RewardShapingConfig = Field(
        default_factory=RewardShapingConfig, description="Reward shaping."
    )
    reward_scaling: RewardScalingConfig = Field(
        default_factory=RewardScalingConfig, description="Reward scaling."
    )
    calculate_advantages_on_gpu: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Compute advantages on the device."
    )
    seq_logprob_error_threshold: Annotated[float | None, NotYet((None,), "null")] = Field(
        None, gt=0, description="Leave out rows whose sampler and trainer log-probs differ more."
    )
    invalid_tool_call_advantage: Annotated[float | None, NotYet((None,), "null")] = Field(
        None, description="Advantage of invalid tool calls."
    )
    malformed_thinking_advantage: Annotated[float | None, NotYet((None,), "null")] = Field(
        None, description="Advantage of malformed thinking tags."
    )
    shuffle_rewards: bool = Field(
        False,
        description="Deal rewards to other rows at random: the control run of a learning claim.",
    )
    adv_estimator: AdvEstimatorConfig = Field(
        default_factory=AdvEstimatorConfig, description="How rewards become advantages."
    )
    deduplicate_multimodal_data: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Send equal media once."
    )
    debug_payload_metrics: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Log payload sizes."
    )

    def violations(self) -> Iterator[Violation]:
        """Sizes and options of the algorithm that do not fit together."""
        if self.adv_estimator.name == "grpo" and self.num_generations_per_prompt == 1:
            yield Violation(
                "num_generations_per_prompt",
                "a group of 1 has no baseline, so that every advantage is 0; set it to 2 or more",
                ("adv_estimator.name",),
            )
        if self.adv_estimator.reward_weights is not None and self.adv_estimator.name != "gdpo":
            yield Violation(
                "adv_estimator.reward_weights",
                "belongs to adv_estimator.name=gdpo; set it to null",
                ("adv_estimator.name",),
            )
        if self.batch_multiplier != 1.0 and not self.use_dynamic_sampling:
            yield Violation(
                "batch_multiplier",
                "needs use_dynamic_sampling=true; set it to 1.0",
                ("use_dynamic_sampling",),
            )
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low >= high:
            yield Violation(
                "advantage_clip_high", f"must be above advantage_clip_low={low}", ("advantage_clip_low",)
            )


class RewardPenaltyTokenIdsConfig(ConfigModel):
    """`reward_penalties.token_ids`."""

    unwanted: list[int] = Field(default_factory=list, description="Tokens that are penalised.")
    think_open: int | None = Field(None, description="Token that opens thinking.")
    think_close: int | None = Field(None, description="Token that closes it.")


class RewardPenaltiesConfig(ConfigModel):
    """`reward_penalties`: penalties of NeMo-Gym runs (not supported yet)."""

    penalize_duplicated_reasoning: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Penalise an answer that repeats its reasoning."
    )
    penalize_empty_final_answer: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Penalise an empty answer."
    )
    penalize_unwanted_tokens: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Penalise unwanted tokens."
    )
    penalize_malformed_think_tag: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Penalise malformed thinking tags."
    )
    token_ids: Annotated[
        RewardPenaltyTokenIdsConfig, OptionOf("reward_penalties.penalize_unwanted_tokens")
    ] = Field(default_factory=RewardPenaltyTokenIdsConfig, description="Tokens that the penalties look for.")


class SFTConfig(ConfigModel):
    """The `sft` section."""

    max_num_steps: int = Field(60, ge=1, description="Steps, at most.")
    max_num_epochs: int = Field(1, ge=1, description="Passes over the data, at most.")
    val_period: int = Field(10, ge=0, description="Steps between validations; 0 turns them off.")
    val_batches: int = Field(8, ge=-1, description="Validation batches; -1 takes all.")
    val_global_batch_size: int = Field(32, ge=1, description="Rows per validation batch.")
    val_micro_batch_size: int = Field(1, ge=1, description="Rows per forward pass in validation.")
    val_at_start: bool = Field(True, description="Validate before the first step.")
    val_at_end: bool = Field(False, description="Validate after the last step.")
    seed: int = Field(42, ge=0, description="Seed of data order and initialisation.")
    only_unmask_final: bool = Field(False, description="Train on the last assistant message only.")


class MasterConfig(ConfigModel):
    """What every algorithm's tree has."""

    derived: ClassVar[tuple[Derived, ...]] = (
        Derived("checkpointing.checkpoint_dir", "logger.log_dir", "{}/checkpoints"),
        Derived("data.max_input_seq_length", "policy.max_total_sequence_length"),
    )

    policy: PolicyConfig = Field(description="Model, parallel layout, batch sizes.")
    data: DataConfig = Field(description="Training and validation data.")
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="Run directory and metrics.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Devices.")
    checkpointing: CheckpointingConfig = Field(
        default_factory=CheckpointingConfig, description="When to save, what to keep."
    )

    def rows_per_step(self) -> tuple[int, int]:
        """Give the two factors of the rows of one step: prompts and generations per prompt."""
        return self.policy.train_global_batch_size, 1

    def violations(self) -> Iterator[Violation]:
        """What does not fit together across sections."""
        yield from batch_violations(self)
        longest = self.policy.max_total_sequence_length
        if self.data.max_input_seq_length > longest:
            yield Violation(
                "data.max_input_seq_length",
                f"{self.data.max_input_seq_length} exceeds policy.max_total_sequence_length={longest}; leave it out",
                ("policy.max_total_sequence_length",),
            )
        precise = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer"
        if self.cluster.device == "cpu" and self.policy.megatron_cfg.optimizer.use_precision_aware_optimizer:
            yield Violation(
                precise,
                "needs Transformer Engine, which needs CUDA; set it to false on CPU",
                ("cluster.device",),
            )


class GRPOMasterConfig(MasterConfig):
    """The whole tree of `nemo-rl grpo`."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig, description="The algorithm.")
    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig, description="The loss.")
    env: dict[str, MathEnvConfig] = Field(
        default_factory=dict, description="Environments by name; data sets point to them by env_name."
    )
    reward_penalties: RewardPenaltiesConfig = Field(
        default_factory=RewardPenaltiesConfig, description="Penalties of NeMo-Gym runs."
    )

    def rows_per_step(self) -> tuple[int, int]:
        """Give prompts and generations per prompt of one step."""
        return self.grpo.num_prompts_per_step, self.grpo.num_generations_per_prompt

    def violations(self) -> Iterator[Violation]:
        """What does not fit together across sections."""
        yield from super().violations()
        yield from self._sampling_violations()
        yield from self._loss_violations()
        yield from self._data_violations()

    def _sampling_violations(self) -> Iterator[Violation]:
        generation = self.policy.generation
        if generation is None:
            yield Violation("policy.generation", "is needed for GRPO; set policy.generation.max_new_tokens")
            return
        reason = (
            "the sampler renormalises over the tokens it keeps and the trainer does not yet, so that every ratio would "
            "be off by the mass that is cut; set it to"
        )
        if generation.top_p < 1.0:
            yield Violation("policy.generation.top_p", f"{generation.top_p}: {reason} 1.0")
        if generation.top_k not in (None, -1, 0):
            yield Violation("policy.generation.top_k", f"{generation.top_k}: {reason} null")
        if generation.temperature == 0:
            yield Violation(
                "policy.generation.temperature", "0 explores nothing and has no log-probs; set it to 1.0"
            )

    def _loss_violations(self) -> Iterator[Violation]:
        loss, grpo = self.loss_fn, self.grpo
        if grpo.skip_reference_policy_logprobs_calculation and loss.reference_policy_kl_penalty != 0:
            yield Violation(
                "grpo.skip_reference_policy_logprobs_calculation",
                "the KL penalty needs reference log-probs; set it to false, or loss_fn.reference_policy_kl_penalty=0",
                ("loss_fn.reference_policy_kl_penalty",),
            )
        if loss.use_kl_in_reward and grpo.adv_estimator.name != "reinforce_plus_plus":
            yield Violation(
                "loss_fn.use_kl_in_reward",
                "only grpo.adv_estimator.name=reinforce_plus_plus subtracts the KL; set it to false",
                ("grpo.adv_estimator.name",),
            )
        rows = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        if loss.force_on_policy_ratio and self.policy.train_global_batch_size != rows:
            yield Violation(
                "loss_fn.force_on_policy_ratio",
                f"needs one update per step; set policy.train_global_batch_size={rows}",
                (
                    "policy.train_global_batch_size",
                    "grpo.num_prompts_per_step",
                    "grpo.num_generations_per_prompt",
                ),
            )

    def _data_violations(self) -> Iterator[Violation]:
        yield from self.data.environment_violations(list(self.env))
        grpo = self.grpo
        if (grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end) and not self.data.has_validation():
            yield Violation(
                "data.validation",
                "is needed for validation; set it, or grpo.val_period=0, val_at_start=false and val_at_end=false",
                ("data.train", "grpo.val_period", "grpo.val_at_start", "grpo.val_at_end"),
            )


class SFTMasterConfig(MasterConfig):
    """The whole tree of `nemo-rl sft`."""

    sft: SFTConfig = Field(default_factory=SFTConfig, description="The algorithm.")

    def violations(self) -> Iterator[Violation]:
        """What does not fit together across sections."""
        yield from super().violations()
        sft = self.sft
        if not (sft.val_period > 0 or sft.val_at_start or sft.val_at_end):
            return
        if not self.data.has_validation():
            yield Violation(
                "data.validation",
                "is needed for validation; set it, or sft.val_period=0, val_at_start=false and val_at_end=false",
                ("data.train", "sft.val_period", "sft.val_at_start", "sft.val_at_end"),
            )
        megatron, cluster = self.policy.megatron_cfg, self.cluster
        model_parallel = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
        replicas = max(1, cluster.gpus_per_node * cluster.num_nodes // model_parallel)
        rows, unit = sft.val_global_batch_size, replicas * sft.val_micro_batch_size
        if rows % unit:
            yield Violation(
                "sft.val_global_batch_size",
                f"{rows} is not DP {replicas} x sft.val_micro_batch_size={sft.val_micro_batch_size} x a whole number; "
                f"{-(-rows // unit) * unit} works",
                ("sft.val_micro_batch_size", *LAYOUT_KEYS),
            )


MASTER_CONFIGS: dict[str, type[GRPOMasterConfig] | type[SFTMasterConfig]] = {
    "grpo": GRPOMasterConfig,
    "sft": SFTMasterConfig,
}
