# SPDX-License-Identifier: Apache-2.0
"""Config of the DTensor backend: `policy.dtensor_cfg` (not supported yet). Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, NotYet


class LoRAConfig(ConfigModel):
    """`dtensor_cfg.lora_cfg`: LoRA adapters of the DTensor backend."""

    enabled: bool = Field(False, description="Train low-rank adapters instead of all weights.")
    target_modules: list[str] = Field(default_factory=list, description="Modules that get adapters.")
    exclude_modules: list[str] = Field(default_factory=list, description="Modules that get none.")
    match_all_linear: bool = Field(True, description="Give every linear layer an adapter.")
    dim: int = Field(8, ge=1, description="Rank of the adapters.")
    alpha: int = Field(32, ge=1, description="Scale of the adapters.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in front of or behind the adapter.")
    dropout_position: Literal["pre", "post"] = Field("post", description="Where the dropout sits.")
    lora_A_init: Literal["xavier", "uniform"] = Field("xavier", description="Initialisation of A.")  # noqa: N815
    use_triton: bool = Field(True, description="Fused adapter kernel.")


class DTensorConfig(ConfigModel):
    """`policy.dtensor_cfg`: parallel layout of the DTensor (FSDP2) backend."""

    enabled: Annotated[bool, NotYet((False,), "the Megatron backend: policy.megatron_cfg.enabled=true")] = (
        Field(False, description="Train with the DTensor backend.")
    )
    env_vars: dict[str, str] | None = Field(None, description="Environment variables of the policy workers.")
    v2: bool = Field(True, alias="_v2", description="Use the second form of the worker.")
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share each layer.")
    context_parallel_size: int = Field(1, ge=1, description="Ranks that share each sequence.")
    expert_parallel_size: int = Field(1, ge=1, description="Ranks that share the experts.")
    dp_replicate_size: int = Field(1, ge=1, description="Replicas of the sharded model (HSDP).")
    sequence_parallel: bool = Field(False, description="Shard norms along the sequence over the TP ranks.")
    activation_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    cpu_offload: bool = Field(False, description="Keep parameters and optimizer state on the CPU.")
    custom_parallel_plan: str | None = Field(None, description="Dotted path to a tensor-parallel plan.")
    defer_fsdp_grad_sync: bool = Field(False, description="Reduce gradients once per global batch.")
    moe_parallelizer: dict[str, Any] | None = Field(None, description="Options of expert parallelism.")
    lora_cfg: LoRAConfig = Field(default_factory=LoRAConfig, description="LoRA adapters.")
    automodel_kwargs: dict[str, Any] = Field(default_factory=dict, description="Options of the model loader.")
    clear_cache_every_n_steps: int | None = Field(
        None, ge=1, description="Free cached memory every n micro-batches."
    )


class DTensorConfigDisabled(DTensorConfig):
    """`policy.dtensor_cfg` where another backend trains: same keys, without effect."""

    enabled: Literal[False] = Field(False, description="The DTensor backend is off.")  # type: ignore[assignment]
