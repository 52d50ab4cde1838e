# SPDX-License-Identifier: Apache-2.0
"""Config of the policy: the `policy` section. Torch-free; `nemo_rl.models.policy` re-exports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.policy.dtensor_config import DTensorConfig, DTensorConfigDisabled, LoRAConfig
from nemo_rl.models.policy.megatron_config import (
    Fp8Config,
    MegatronCheckpointConfig,
    MegatronConfig,
    MegatronConfigDisabled,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronPeftConfig,
    MegatronSchedulerConfig,
)
from nemo_rl.utils.config_model import ConfigModel, Derived, Hint, NotYet, OptionOf, Violation

__all__ = [
    "DTensorConfig",
    "DTensorConfigDisabled",
    "DraftConfig",
    "DynamicBatchingConfig",
    "DynamicBatchingConfigDisabled",
    "Fp8Config",
    "LoRAConfig",
    "MegatronCheckpointConfig",
    "MegatronConfig",
    "MegatronConfigDisabled",
    "MegatronDDPConfig",
    "MegatronOptimizerConfig",
    "MegatronPeftConfig",
    "MegatronSchedulerConfig",
    "PolicyConfig",
    "PretrainedCheckpointConfig",
    "PytorchOptimizerConfig",
    "RewardModelConfig",
    "RouterReplayConfig",
    "SchedulerMilestones",
    "SequencePackingConfig",
    "SequencePackingConfigDisabled",
    "SinglePytorchMilestonesConfig",
    "SinglePytorchSchedulerConfig",
    "TokenizerConfig",
]

SchedulerMilestones = dict[str, list[int]]


class TokenizerConfig(ConfigModel):
    """`policy.tokenizer`."""

    name: str = Field("", description="HuggingFace name or folder; follows policy.model_name.")
    chat_template: str | None = Field(
        "default",
        description="`default` is the tokenizer's own; null joins message contents; "
        "else a path ending in .jinja, or Jinja text.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Arguments passed to the chat template."
    )
    audio: Annotated[dict[str, Any] | None, NotYet((None,), "null")] = Field(
        None, description="Audio processor."
    )
    video: Annotated[dict[str, Any] | None, NotYet((None,), "null")] = Field(
        None, description="Video processor."
    )
    use_processor: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Load a multimodal processor instead of a tokenizer."
    )
    use_fastokens: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Use the fastokens tokenizer."
    )


class PytorchOptimizerConfig(ConfigModel):
    """`policy.optimizer`: torch optimizer of the DTensor backend."""

    name: str = Field("torch.optim.AdamW", description="Dotted class name.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of the class.")


class SinglePytorchSchedulerConfig(ConfigModel):
    """One torch scheduler of `policy.scheduler`."""

    name: str = Field(description="Dotted class name.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of the class.")


class SinglePytorchMilestonesConfig(ConfigModel):
    """The milestones between the schedulers of `policy.scheduler`."""

    milestones: list[int] = Field(description="Steps at which the next scheduler takes over.")


class SequencePackingConfig(ConfigModel):
    """`policy.sequence_packing`: several rows in one padded-free row."""

    enabled: Annotated[bool, NotYet((False,), "sequence_packing.enabled=false")] = Field(
        False, description="Pack several rows into one."
    )
    train_mb_tokens: int | None = Field(None, ge=1, description="Tokens per packed row in training.")
    logprob_mb_tokens: int | None = Field(None, ge=1, description="Tokens per packed row in log-prob passes.")
    algorithm: str = Field("modified_first_fit_decreasing", description="Bin-packing algorithm.")
    microbatch_order: Literal["packer", "largest_first"] = Field(
        "packer", description="Order of packed rows."
    )
    sequence_length_round: int = Field(64, ge=1, description="Packed rows are padded to a multiple of this.")
    fuse_loss: bool = Field(
        False, description="NeMo RL's fused loss over a packed row; here always the case."
    )


class SequencePackingConfigDisabled(SequencePackingConfig):
    """`policy.sequence_packing`, off: same keys, without effect."""

    enabled: Literal[False] = Field(False, description="Packing is off.")  # type: ignore[assignment]


class DynamicBatchingConfig(ConfigModel):
    """`policy.dynamic_batching`: micro-batches by token count."""

    enabled: Annotated[bool, NotYet((False,), "dynamic_batching.enabled=false")] = Field(
        False, description="Choose micro-batches by token count."
    )
    train_mb_tokens: int | None = Field(None, ge=1, description="Tokens per micro-batch in training.")
    logprob_mb_tokens: int | None = Field(
        None, ge=1, description="Tokens per micro-batch in log-prob passes."
    )
    sequence_length_round: int = Field(64, ge=1, description="Lengths are rounded up to a multiple of this.")


class DynamicBatchingConfigDisabled(DynamicBatchingConfig):
    """`policy.dynamic_batching`, off: same keys, without effect."""

    enabled: Literal[False] = Field(False, description="Dynamic batching is off.")  # type: ignore[assignment]


class RewardModelConfig(ConfigModel):
    """`policy.reward_model_cfg`: train a scalar head (not supported yet)."""

    enabled: Annotated[bool, NotYet((False,), "reward_model_cfg.enabled=false")] = Field(
        False, description="Train a reward model."
    )
    reward_model_type: str = Field("bradley_terry", description="Kind of reward model.")


class DraftConfig(ConfigModel):
    """`policy.draft`: online training of a draft model (not supported yet)."""

    enabled: Annotated[bool, NotYet((False,), "draft.enabled=false")] = Field(
        False, description="Train a draft model for speculative decoding."
    )
    model_name: str | None = Field(None, description="Draft model.")
    loss_weight: float = Field(0.1, ge=0, description="Weight of its loss.")
    num_layers: int | None = Field(None, ge=1, description="Its number of layers.")
    aux_layer_indices: list[int] | None = Field(None, description="Layers whose hidden states it reads.")


class RouterReplayConfig(ConfigModel):
    """`policy.router_replay`: replay recorded MoE routes (not supported yet)."""

    enabled: Annotated[bool, NotYet((False,), "router_replay.enabled=false")] = Field(
        False, description="Replay the routes recorded in generation."
    )


class PretrainedCheckpointConfig(ConfigModel):
    """`policy.pretrained_checkpoint`: start from a Megatron checkpoint (not supported yet)."""

    path: str = Field(description="Folder of the checkpoint.")
    format: Literal["megatron_bridge", "megatron_lm"] = Field("megatron_bridge", description="Its format.")


class PolicyConfig(ConfigModel):
    """The `policy` section: model, batch sizes, precision, backends and generation."""

    gone: ClassVar[Mapping[str, str]] = {
        "megatron_recipe": "is not supported: the architecture comes from policy.model_name; remove it"
    }

    derived: ClassVar[tuple[Derived, ...]] = (
        Derived("tokenizer.name", "model_name"),
        Derived("logprob_batch_size", "train_micro_batch_size"),
        Derived("make_sequence_length_divisible_by", "megatron_cfg.tensor_model_parallel_size"),
        Derived("megatron_cfg.pipeline_dtype", "precision"),
        Derived("megatron_cfg.optimizer.bf16", "precision", equals="bfloat16"),
        Derived("megatron_cfg.optimizer.clip_grad", "max_grad_norm"),
        Derived("megatron_cfg.scheduler.start_weight_decay", "megatron_cfg.optimizer.weight_decay"),
        Derived("megatron_cfg.scheduler.end_weight_decay", "megatron_cfg.optimizer.weight_decay"),
    )

    model_name: str = Field(description="HuggingFace name or folder of the model to train.")
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="Tokenizer and chat template."
    )
    train_global_batch_size: int = Field(32, ge=1, description="Rows per optimizer step, over all ranks.")
    train_micro_batch_size: int = Field(
        1, ge=1, description="Rows per forward and backward pass of one rank."
    )
    logprob_batch_size: int = Field(
        1, ge=1, description="Rows per forward pass of a log-prob pass; follows train_micro_batch_size."
    )
    logprob_chunk_size: int | None = Field(
        None, ge=1, description="Tokens whose logits exist at the same time; null lets the backend choose."
    )
    generation: GenerationConfig | None = Field(None, description="Sampling and its engine; needed for RL.")
    generation_batch_size: int = Field(
        32,
        ge=1,
        description="Rows decoded at the same time per data-parallel rank; mcore_generation_config.num_slots overrides it.",
    )
    precision: Annotated[
        Literal["bfloat16", "float16", "float32"], NotYet(("bfloat16", "float32"), "bfloat16 or float32")
    ] = Field("bfloat16", description="dtype of the weights.")
    reward_model_cfg: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="Reward model head."
    )
    dtensor_cfg: DTensorConfig = Field(default_factory=DTensorConfig, description="DTensor backend.")
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig, description="Megatron backend.")
    draft: DraftConfig = Field(default_factory=DraftConfig, description="Draft model training.")
    pretrained_checkpoint: Annotated[
        PretrainedCheckpointConfig | None,
        NotYet((None,), "null, and a HuggingFace folder in policy.model_name"),
    ] = Field(None, description="Megatron checkpoint to start from.")
    router_replay: RouterReplayConfig = Field(
        default_factory=RouterReplayConfig, description="MoE route replay."
    )
    hf_config_overrides: dict[str, Any] = Field(
        default_factory=dict, description="Attributes set on the model's HuggingFace config."
    )
    dynamic_batching: DynamicBatchingConfig = Field(
        default_factory=DynamicBatchingConfig, description="Micro-batches by token count."
    )
    sequence_packing: SequencePackingConfig = Field(
        default_factory=SequencePackingConfig, description="Several rows in one."
    )
    make_sequence_length_divisible_by: int = Field(
        1,
        ge=1,
        description="Padded lengths are a multiple of this; follows the tensor-parallel size.",
    )
    max_total_sequence_length: int = Field(
        512, ge=1, description="Most tokens of prompt and response together."
    )
    max_grad_norm: float | None = Field(
        1.0, ge=0, description="Global gradient-norm clip; null turns it off."
    )
    refit_buffer_size_gb: Annotated[float | None, Hint("generation reads the policy's own weights")] = Field(
        None, gt=0, description="Buffer of a refit; null chooses."
    )
    optimizer: Annotated[PytorchOptimizerConfig | None, OptionOf("policy.dtensor_cfg.enabled")] = Field(
        None, description="torch optimizer, for the DTensor backend."
    )
    scheduler: Annotated[
        list[SinglePytorchSchedulerConfig | SinglePytorchMilestonesConfig] | SchedulerMilestones | None,
        Hint("it belongs to the DTensor backend; see policy.megatron_cfg.scheduler"),
    ] = Field(None, description="torch schedulers, for the DTensor backend.")
    offload_optimizer_for_logprob: bool = Field(
        False, description="Move optimizer state off the device during log-prob passes."
    )
    offload_optimizer_for_refit: bool = Field(
        True, description="Move optimizer state off the device during generation (CUDA only)."
    )
    batch_size: int | None = Field(None, ge=1, description="Rows per pass of `score`.")
    dequantize_base_checkpoint: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Dequantise the base checkpoint."
    )
    is_vlm: Annotated[bool, NotYet((False,), "false")] = Field(False, description="The model takes images.")
    quant_cfg: Annotated[str | None, NotYet((None,), "null")] = Field(
        None, description="Quantisation-aware training."
    )
    quant_calib_data: Annotated[str | None, OptionOf("policy.quant_cfg")] = Field(
        None, description="Calibration data of quantisation."
    )
    quant_calib_size: Annotated[int | None, OptionOf("policy.quant_cfg")] = Field(
        None, ge=1, description="Calibration rows of quantisation."
    )
    quant_batch_size: Annotated[int | None, OptionOf("policy.quant_cfg")] = Field(
        None, ge=1, description="Calibration batch of quantisation."
    )
    quant_sequence_length: Annotated[int | None, OptionOf("policy.quant_cfg")] = Field(
        None, ge=1, description="Calibration length of quantisation."
    )
    disable_modelopt_layer_spec: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Layer spec switch of quantisation."
    )

    def violations(self) -> Iterator[Violation]:
        """Backends, precision and batch sizes that do not fit together."""
        megatron = self.megatron_cfg
        if not megatron.enabled and not self.dtensor_cfg.enabled:
            yield Violation(
                "megatron_cfg.enabled",
                "no backend is on; set it to true",
                ("dtensor_cfg.enabled", "megatron_cfg"),
            )
        if megatron.enabled and self.dtensor_cfg.enabled:
            yield Violation(
                "dtensor_cfg.enabled", "two backends are on; set it to false", ("megatron_cfg.enabled",)
            )
        if not megatron.enabled:
            return
        if self.optimizer is not None:
            yield Violation(
                "optimizer",
                "belongs to the DTensor backend; set it to null and use policy.megatron_cfg.optimizer",
            )
        if megatron.optimizer.bf16 != (self.precision == "bfloat16"):
            yield Violation(
                "megatron_cfg.optimizer.bf16",
                f"does not fit policy.precision={self.precision}; leave it out, or set it to "
                f"{str(self.precision == 'bfloat16').lower()}",
                ("precision",),
            )
        if megatron.pipeline_dtype != self.precision:
            yield Violation(
                "megatron_cfg.pipeline_dtype",
                f"does not fit policy.precision={self.precision}; leave it out",
                ("precision",),
            )
        tp = megatron.tensor_model_parallel_size
        if megatron.sequence_parallel and self.make_sequence_length_divisible_by % tp:
            yield Violation(
                "make_sequence_length_divisible_by",
                f"must be a multiple of the tensor-parallel size with sequence_parallel=true; set it to {tp}",
                ("megatron_cfg.tensor_model_parallel_size", "megatron_cfg.sequence_parallel"),
            )
        yield from self._generation_violations()

    def _generation_violations(self) -> Iterator[Violation]:
        if self.generation is None:
            return
        engine, tp = self.generation.mcore_generation_config, self.megatron_cfg.tensor_model_parallel_size
        if engine.num_slots is not None and engine.num_slots % tp:
            yield Violation(
                "generation.mcore_generation_config.num_slots",
                f"{engine.num_slots} is not a multiple of the tensor-parallel size {tp}; "
                f"{-(-engine.num_slots // tp) * tp} works",
                ("megatron_cfg.tensor_model_parallel_size",),
            )
        longest = engine.max_model_len
        if longest is not None and longest < self.max_total_sequence_length:
            yield Violation(
                "generation.mcore_generation_config.max_model_len",
                f"{longest} is less than policy.max_total_sequence_length={self.max_total_sequence_length}; "
                "leave it out",
                ("max_total_sequence_length",),
            )
