# SPDX-License-Identifier: Apache-2.0
"""Config of the Megatron backend: `policy.megatron_cfg`. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, Hint, NotYet, OptionOf, Violation

_FUSED = Hint("a fused CUDA kernel; results do not depend on it")
_MOE = "mixture-of-experts models are not supported yet; leave the key out"


class MegatronOptimizerConfig(ConfigModel):
    """`megatron_cfg.optimizer`: megatron-core's optimizer."""

    optimizer: Literal["adam", "sgd"] = Field("adam", description="Optimizer: AdamW or SGD with momentum.")
    lr: float = Field(5e-6, ge=0, description="Peak learning rate.")
    min_lr: float = Field(5e-7, ge=0, description="Learning rate at the end of the decay.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    bf16: bool = Field(
        True, description="Train in bfloat16 with fp32 masters; follows policy.precision if left out."
    )
    fp16: Annotated[bool, NotYet((False,), "bfloat16 or float32")] = Field(
        False, description="Train in float16 with loss scaling."
    )
    params_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="dtype of the optimizer's master parameters (NeMo RL's key); masters are float32.",
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay of the first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Adam's decay of the second moment.")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's denominator floor.")
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")
    use_distributed_optimizer: bool = Field(
        True, description="Shard masters and moments over data parallelism."
    )
    use_precision_aware_optimizer: bool = Field(
        False, description="Keep moments in lower precision; needs Transformer Engine, so CUDA only."
    )
    clip_grad: float | None = Field(
        1.0, ge=0, description="Global gradient-norm clip; null or 0 turns it off."
    )
    optimizer_cpu_offload: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Run the optimizer step on the CPU."
    )
    optimizer_offload_fraction: Annotated[float, NotYet((0.0, 0), "0.0")] = Field(
        0.0, ge=0, le=1, description="Part of the optimizer state that is kept on the CPU."
    )
    overlap_cpu_optimizer_d2h_h2d: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Overlap the copies of an offloaded optimizer."
    )


class MegatronSchedulerConfig(ConfigModel):
    """`megatron_cfg.scheduler`: learning-rate and weight-decay schedule, counted in optimizer steps."""

    start_weight_decay: float = Field(
        0.01, ge=0, description="Weight decay at the start; follows optimizer.weight_decay."
    )
    end_weight_decay: float = Field(
        0.01, ge=0, description="Weight decay at the end; follows optimizer.weight_decay."
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How weight decay goes from start to end."
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        "constant", description="How the learning rate decays after warm-up."
    )
    lr_decay_iters: int | None = Field(
        None, ge=1, description="Steps of the decay; null is the whole training."
    )
    lr_warmup_iters: int = Field(0, ge=0, description="Steps of linear warm-up.")
    lr_warmup_init: float = Field(0.0, ge=0, description="Learning rate at the first warm-up step.")


class MegatronDDPConfig(ConfigModel):
    """`megatron_cfg.distributed_data_parallel_config`: megatron-core's gradient buffers."""

    gone: ClassVar[Mapping[str, str]] = {
        "average_in_collective": "is gone: gradients are summed and losses divide by global counts; remove it"
    }

    grad_reduce_in_fp32: bool = Field(False, description="Reduce gradients over data parallelism in float32.")
    overlap_grad_reduce: bool = Field(
        True, description="Overlap the gradient reduction with the backward pass."
    )
    overlap_param_gather: bool = Field(
        True, description="Overlap the parameter gather of the distributed optimizer with the forward pass."
    )
    use_custom_fsdp: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Megatron's own FSDP."
    )
    data_parallel_sharding_strategy: Annotated[str, Hint("it belongs to use_custom_fsdp, which is off")] = (
        Field("optim_grads_params", description="What Megatron's FSDP shards.")
    )


class MegatronCheckpointConfig(ConfigModel):
    """`megatron_cfg.checkpoint`: how megatron-core writes a distributed checkpoint."""

    async_save: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Write in the background."
    )
    ckpt_assume_constant_structure: Annotated[bool, Hint("it only speeds up saves")] = Field(
        False, description="Reuse the save plan of the first checkpoint."
    )
    ckpt_fully_parallel_save_process_group: Annotated[str, NotYet(("dp",), "dp")] = Field(
        "dp", description="Group over which saving is spread."
    )
    ckpt_fully_parallel_load_process_group: Annotated[str, NotYet(("dp",), "dp")] = Field(
        "dp", description="Group over which loading is spread."
    )
    ckpt_fully_parallel_load_exchange_algo: Annotated[str, Hint("it only speeds up loads")] = Field(
        "broadcast", description="How loaded tensors are exchanged."
    )


class MegatronPeftConfig(ConfigModel):
    """`megatron_cfg.peft`: LoRA adapters (not supported yet)."""

    enabled: Annotated[bool, NotYet((False,), "peft.enabled=false (all weights are trained)")] = Field(
        False, description="Train low-rank adapters instead of all weights."
    )
    target_modules: list[str] = Field(default_factory=list, description="Modules that get adapters.")
    exclude_modules: list[str] = Field(default_factory=list, description="Modules that get none.")
    dim: int = Field(8, ge=1, description="Rank of the adapters.")
    alpha: int = Field(32, ge=1, description="Scale of the adapters.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in front of or behind the adapter.")
    dropout_position: Literal["pre", "post"] = Field("post", description="Where the dropout sits.")
    lora_A_init_method: str = Field("xavier", description="Initialisation of A.")  # noqa: N815
    lora_B_init_method: str = Field("zero", description="Initialisation of B.")  # noqa: N815
    a2a_experimental: bool = Field(False, description="All-to-all form of the adapter's communication.")
    lora_dtype: str | None = Field(None, description="dtype of the adapter weights.")


class Fp8Config(ConfigModel):
    """`megatron_cfg.fp8_cfg`: 8-bit training (not supported yet)."""

    enabled: Annotated[bool, NotYet((False,), "fp8_cfg.enabled=false")] = Field(
        False, description="Train in FP8."
    )
    fp8: str = Field("e4m3", description="FP8 format.")
    fp8_recipe: str = Field("blockwise", description="Scaling recipe.")
    fp8_param: bool = Field(False, description="Keep parameters in FP8.")
    force_clear_fp8_caches: bool = Field(False, description="Clear FP8 caches before a refit.")


class MegatronConfig(ConfigModel):
    """`policy.megatron_cfg`: parallel layout, precision, memory and optimizer of the Megatron backend."""

    gone: ClassVar[Mapping[str, str]] = {
        "converter_type": "is gone: the bridge finds the model family in its HuggingFace config; remove it"
    }

    enabled: bool = Field(True, description="Train with the Megatron backend.")
    env_vars: dict[str, str] | None = Field(None, description="Environment variables of the policy workers.")
    train_iters: int | None = Field(
        None, ge=1, description="Optimizer steps of the whole run; filled in at run time, not by the user."
    )

    # Parallel layout
    tensor_model_parallel_size: int = Field(1, ge=1, description="Ranks that share each layer (TP).")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Pipeline stages (PP).")
    context_parallel_size: Annotated[int, NotYet((1,), "1")] = Field(
        1, ge=1, description="Ranks that share each sequence (CP)."
    )
    expert_model_parallel_size: Annotated[int, NotYet((1,), "1")] = Field(
        1, ge=1, description="Ranks that share the experts (EP)."
    )
    expert_tensor_parallel_size: Annotated[int, NotYet((1,), "1")] = Field(
        1, ge=1, description="Tensor-parallel ranks inside an expert (ETP)."
    )
    sequence_parallel: bool = Field(
        False, description="Shard norms and dropout along the sequence over the TP ranks; needs TP > 1."
    )
    num_layers_in_first_pipeline_stage: int | None = Field(
        None, ge=1, description="Layers of the first stage where stages are uneven."
    )
    num_layers_in_last_pipeline_stage: int | None = Field(
        None, ge=1, description="Layers of the last stage where stages are uneven."
    )
    virtual_pipeline_model_parallel_size: Annotated[int | None, NotYet((None, 1), "null")] = Field(
        None, ge=1, description="Model chunks per pipeline rank (VPP)."
    )
    use_gloo_process_groups: Annotated[bool, Hint("CPU runs always use gloo, CUDA runs NCCL")] = Field(
        False, description="Create gloo groups beside the NCCL ones."
    )

    # Model and dtype
    pipeline_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="dtype of activations between stages; follows policy.precision."
    )
    apply_rope_fusion: Annotated[bool, _FUSED] = Field(True, description="Fused rotary embedding.")
    bias_activation_fusion: Annotated[bool, _FUSED] = Field(True, description="Fused bias and activation.")
    gradient_accumulation_fusion: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Accumulate weight gradients inside the GEMM (needs apex)."
    )
    use_fused_weighted_squared_relu: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Fused activation of some mixture-of-experts models."
    )
    defer_fp32_logits: Annotated[bool | None, Hint("logits are always upcast chunk by chunk")] = Field(
        None, description="Upcast logits to float32 as late as possible."
    )
    attention_backend: Annotated[str | None, NotYet((None, "auto"), "null")] = Field(
        None, description="Attention kernel by megatron-core's name."
    )
    transformer_impl: Annotated[str | None, NotYet((None, "local"), "null")] = Field(
        None, description="Layer implementation of megatron-core."
    )
    layernorm_epsilon: float | None = Field(None, gt=0, description="Overrides the model's norm epsilon.")
    model_overrides: dict[str, Any] = Field(
        default_factory=dict, description="Attributes set on the model provider, for what has no key here."
    )
    force_reconvert_from_hf: Annotated[
        bool, Hint("weights are read from the HuggingFace files on every start")
    ] = Field(False, description="Ignore a cached conversion of the HuggingFace weights.")

    # Memory
    empty_unused_memory_level: int = Field(
        1,
        ge=0,
        le=2,
        description="Free cached device memory: 0 never, 1 after training passes, 2 also after a step.",
    )
    activation_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    recompute_granularity: Literal["full", "selective"] = Field(
        "full", description="Recompute whole layers or the modules in recompute_modules."
    )
    recompute_modules: list[str] | None = Field(None, description="Modules to recompute with `selective`.")
    fine_grained_activation_offloading: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Move activations to the CPU."
    )
    offload_modules: Annotated[
        list[str] | None, OptionOf("policy.megatron_cfg.fine_grained_activation_offloading")
    ] = Field(None, description="Modules whose activations are moved.")
    clear_memory_caches_before_refit: Annotated[bool, Hint("refit here needs no extra memory")] = Field(
        False, description="Free caches before weights are sent."
    )
    use_linear_ce_fusion_loss: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Fused projection and cross-entropy kernel."
    )
    use_fused_linear_logprobs: Annotated[bool, NotYet((False,), "policy.logprob_chunk_size")] = Field(
        False, description="Fused projection and log-prob kernel."
    )
    fused_linear_logprobs_chunk_size: Annotated[
        int, OptionOf("policy.megatron_cfg.use_fused_linear_logprobs")
    ] = Field(256, ge=1, description="Chunk of the fused kernel.")

    # CUDA graphs
    cuda_graph_impl: Annotated[str, NotYet(("none",), "none")] = Field(
        "none", description="CUDA graph capture."
    )
    cuda_graph_modules: Annotated[list[str], OptionOf("policy.megatron_cfg.cuda_graph_impl")] = Field(
        default_factory=list, description="Modules captured in CUDA graphs."
    )
    cuda_graph_warmup_steps: Annotated[int, OptionOf("policy.megatron_cfg.cuda_graph_impl")] = Field(
        3, ge=0, description="Steps before the capture."
    )
    inference_cuda_graph_scope: Annotated[str | None, NotYet((None, "none"), "null")] = Field(
        None, description="CUDA graph scope of generation."
    )

    # Mixture of experts
    freeze_moe_router: Annotated[bool, Hint(_MOE)] = Field(True, description="Do not train the MoE router.")
    moe_router_dtype: Annotated[str | None, Hint(_MOE)] = Field("fp64", description="dtype of the router.")
    moe_router_load_balancing_type: Annotated[str, Hint(_MOE)] = Field("none", description="Balancing loss.")
    moe_router_bias_update_rate: Annotated[float, Hint(_MOE)] = Field(
        0.0, description="Rate of the bias update."
    )
    moe_permute_fusion: Annotated[bool, Hint(_MOE)] = Field(True, description="Fused token permutation.")
    moe_per_layer_logging: Annotated[bool, Hint(_MOE)] = Field(
        False, description="Log MoE metrics per layer."
    )
    moe_enable_deepep: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="DeepEP dispatcher."
    )
    moe_token_dispatcher_type: Annotated[str, Hint(_MOE)] = Field("alltoall", description="Token dispatcher.")
    moe_shared_expert_overlap: Annotated[bool, Hint(_MOE)] = Field(
        False, description="Overlap the shared expert."
    )
    moe_grouped_gemm: Annotated[bool | None, Hint(_MOE)] = Field(
        None, description="Grouped GEMM for experts."
    )
    moe_router_num_groups: Annotated[int | None, NotYet((None,), "null")] = Field(
        None, description="Expert groups of group-limited routing."
    )
    moe_router_group_topk: Annotated[int | None, NotYet((None,), "null")] = Field(
        None, description="Groups a token may use."
    )
    moe_flex_dispatcher_backend: Annotated[str | None, NotYet((None,), "null")] = Field(
        None, description="Backend of the flexible dispatcher."
    )
    moe_hybridep_num_sms: Annotated[int | None, NotYet((None,), "null")] = Field(
        None, description="SMs of the HybridEP dispatcher."
    )
    hybridep_num_ranks_per_nvlink_domain: Annotated[int | None, NotYet((None,), "null")] = Field(
        None, description="Ranks per NVLink domain for HybridEP."
    )
    hybridep_use_mnnvl: Annotated[bool | None, NotYet((None, False), "null")] = Field(
        None, description="Multi-node NVLink for HybridEP."
    )
    inference_moe_token_dispatcher_type: Annotated[str | None, NotYet((None,), "null")] = Field(
        None, description="Token dispatcher of generation."
    )
    inference_grouped_gemm_backend: Annotated[str | None, NotYet((None,), "null")] = Field(
        None, description="Grouped GEMM of generation."
    )
    moe_pad_experts_for_cuda_graph_inference: Annotated[bool | None, NotYet((None, False), "null")] = Field(
        None, description="Pad experts so that generation can be captured."
    )

    # Multi-token prediction
    mtp_num_layers: Annotated[int | None, NotYet((None, 0), "0")] = Field(
        0, ge=0, description="Multi-token prediction layers."
    )
    mtp_loss_scaling_factor: Annotated[float, OptionOf("policy.megatron_cfg.mtp_num_layers")] = Field(
        0.0, ge=0, description="Weight of the multi-token prediction loss."
    )
    mtp_use_repeated_layer: Annotated[bool, OptionOf("policy.megatron_cfg.mtp_num_layers")] = Field(
        False, description="Share one layer between prediction depths."
    )
    mtp_detach_heads: Annotated[bool, OptionOf("policy.megatron_cfg.mtp_num_layers")] = Field(
        False, description="Stop gradients from the prediction heads."
    )

    # Vision and sound
    radio_force_cpe_eval_mode: Annotated[bool | None, NotYet((None, False), "null")] = Field(
        None, description="Evaluation mode of the vision position encoding."
    )
    freeze_vision_model: Annotated[bool | None, NotYet((None, False), "null")] = Field(
        None, description="Do not train the vision tower."
    )
    freeze_vision_projection: Annotated[bool | None, NotYet((None, False), "null")] = Field(
        None, description="Do not train the vision projection."
    )
    freeze_sound_encoder: Annotated[bool | None, NotYet((None, False), "null")] = Field(
        None, description="Do not train the sound encoder."
    )
    freeze_sound_projection: Annotated[bool | None, NotYet((None, False), "null")] = Field(
        None, description="Do not train the sound projection."
    )
    freeze_config: Annotated[dict[str, Any] | None, NotYet((None,), "null")] = Field(
        None, description="Which parts of a multimodal model are frozen."
    )

    # Sub-sections
    peft: MegatronPeftConfig = Field(default_factory=MegatronPeftConfig, description="LoRA adapters.")
    optimizer: MegatronOptimizerConfig = Field(
        default_factory=MegatronOptimizerConfig, description="Optimizer."
    )
    scheduler: MegatronSchedulerConfig = Field(
        default_factory=MegatronSchedulerConfig, description="Learning-rate and weight-decay schedule."
    )
    distributed_data_parallel_config: MegatronDDPConfig = Field(
        default_factory=MegatronDDPConfig, description="Gradient buffers and their reduction."
    )
    checkpoint: MegatronCheckpointConfig = Field(
        default_factory=MegatronCheckpointConfig, description="How distributed checkpoints are written."
    )
    fp8_cfg: Fp8Config = Field(default_factory=Fp8Config, description="8-bit training.")

    def violations(self) -> Iterator[Violation]:
        """Options of layout, memory, optimizer and schedule that do not fit together."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if self.sequence_parallel and tp == 1:
            yield Violation(
                "sequence_parallel",
                "needs TP ranks, and tensor_model_parallel_size is 1; set it to false, or TP to 2 or more",
                ("tensor_model_parallel_size",),
            )
        for key in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if self[key] is not None and pp == 1:
                yield Violation(
                    key,
                    "there is one pipeline stage; set it to null, or pipeline_model_parallel_size to 2 or more",
                    ("pipeline_model_parallel_size",),
                )
        if self.recompute_modules is not None and self.recompute_granularity == "full":
            yield Violation(
                "recompute_modules",
                "chooses modules for recompute_granularity=selective; set it to null, or the granularity to selective",
                ("recompute_granularity",),
            )
        if self.offload_modules is not None and not self.fine_grained_activation_offloading:
            yield Violation("offload_modules", "has no effect without activation offloading; set it to null")
        ddp = "distributed_data_parallel_config.overlap_param_gather"
        if (
            self.distributed_data_parallel_config.overlap_param_gather
            and not self.optimizer.use_distributed_optimizer
        ):
            yield Violation(
                ddp,
                "only the distributed optimizer gathers parameters; set it to false, "
                "or optimizer.use_distributed_optimizer=true",
                ("optimizer.use_distributed_optimizer",),
            )
        if self.optimizer.optimizer == "sgd" and self.optimizer.use_distributed_optimizer:
            yield Violation(
                "optimizer.use_distributed_optimizer",
                "megatron-core shards Adam only; set it to false for optimizer=sgd",
                ("optimizer.optimizer",),
            )
        yield from self._schedule_violations()

    def _schedule_violations(self) -> Iterator[Violation]:
        lr, schedule = self.optimizer.lr, self.scheduler
        if schedule.lr_decay_style != "constant" and self.optimizer.min_lr > lr:
            yield Violation(
                "optimizer.min_lr",
                f"{self.optimizer.min_lr} is above optimizer.lr={lr}; set it to {lr / 10:g}",
                ("optimizer.lr", "scheduler.lr_decay_style"),
            )
        if schedule.lr_warmup_iters > 0 and schedule.lr_warmup_init > lr:
            yield Violation(
                "scheduler.lr_warmup_init",
                f"{schedule.lr_warmup_init} is above optimizer.lr={lr}; set it to 0",
                ("optimizer.lr", "scheduler.lr_warmup_iters"),
            )
        if schedule.lr_decay_iters is not None and schedule.lr_warmup_iters >= schedule.lr_decay_iters:
            yield Violation(
                "scheduler.lr_warmup_iters",
                f"{schedule.lr_warmup_iters} steps of warm-up leave none of lr_decay_iters={schedule.lr_decay_iters}; "
                f"set it to {schedule.lr_decay_iters // 10}",
                ("scheduler.lr_decay_iters",),
            )
        start, end = schedule.start_weight_decay, schedule.end_weight_decay
        if schedule.weight_decay_incr_style == "constant" and start != end:
            yield Violation(
                "scheduler.end_weight_decay",
                f"a constant weight decay of {start} cannot end at {end}; set both to one value, "
                "or weight_decay_incr_style=linear",
                ("scheduler.start_weight_decay", "scheduler.weight_decay_incr_style"),
            )
        if start > end:
            yield Violation(
                "scheduler.end_weight_decay",
                f"weight decay may only grow; set it to {start} or more",
                ("scheduler.start_weight_decay",),
            )


class MegatronConfigDisabled(MegatronConfig):
    """`policy.megatron_cfg` where another backend trains: same keys, without effect."""

    enabled: Literal[False] = Field(False, description="The Megatron backend is off.")  # type: ignore[assignment]
