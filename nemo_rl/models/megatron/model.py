# SPDX-License-Identifier: Apache-2.0
"""From config to this rank's model chunks, wrapped in Megatron's gradient buffers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module, MegatronModule
from transformers import AutoConfig

from megatron_bridge.auto_bridge import AutoBridge
from megatron_bridge.provider import ModelProvider
from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.models.policy.config import PolicyConfig

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def open_bridge(config: PolicyConfig) -> AutoBridge:
    """The bridge of ``policy.model_name``, with ``policy.hf_config_overrides`` applied to its config.

    Raises:
        ValueError: an override names an attribute that the model's config does not have.
    """
    directory = resolve_model_dir(config.model_name)
    if not config.hf_config_overrides:
        return AutoBridge.from_hf_pretrained(directory)
    hf_config = AutoConfig.from_pretrained(directory)
    for name, value in config.hf_config_overrides.items():
        if name not in hf_config.to_dict():
            raise ValueError(
                f"policy.hf_config_overrides.{name} is no attribute of {type(hf_config).__name__}; it has "
                f"{', '.join(sorted(hf_config.to_dict()))}"
            )
        setattr(hf_config, name, value)
    return AutoBridge(hf_config, directory)


def resolve_model_dir(model_name: str) -> Path:
    """The directory of a model: a path as it is, or the local copy of a HuggingFace repository (downloaded if needed).

    Raises:
        ValueError: neither a directory nor a repository that can be reached.
    """
    if Path(model_name).is_dir():
        return Path(model_name)
    try:
        return Path(
            snapshot_download(
                model_name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
            )
        )
    except (OSError, HFValidationError) as error:
        raise ValueError(
            f"policy.model_name={model_name!r} is no directory, and no HuggingFace repository of that name can be read "
            f"({type(error).__name__}); give the path of a model directory with config.json"
        ) from error


def build_provider(bridge: AutoBridge, config: PolicyConfig) -> ModelProvider:
    """Describe the model in the configured layout; nothing is built yet.

    Raises:
        ValueError: the model does not fit the layout, or a name in ``model_overrides`` is unknown.
    """
    mcfg = config.megatron_cfg
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = mcfg.tensor_model_parallel_size
    provider.pipeline_model_parallel_size = mcfg.pipeline_model_parallel_size
    provider.context_parallel_size = mcfg.context_parallel_size
    provider.expert_model_parallel_size = mcfg.expert_model_parallel_size
    provider.expert_tensor_parallel_size = mcfg.expert_tensor_parallel_size
    provider.sequence_parallel = mcfg.sequence_parallel
    provider.num_layers_in_first_pipeline_stage = mcfg.num_layers_in_first_pipeline_stage
    provider.num_layers_in_last_pipeline_stage = mcfg.num_layers_in_last_pipeline_stage
    provider.params_dtype = DTYPES[config.precision]
    provider.pipeline_dtype = DTYPES[mcfg.pipeline_dtype]
    provider.perform_initialization = False
    provider.overrides |= _transformer_overrides(config)
    provider.finalize()
    return provider


def _transformer_overrides(config: PolicyConfig) -> dict[str, Any]:
    mcfg = config.megatron_cfg
    overrides: dict[str, Any] = {
        # The schedule and the gradient buffers then only sum: every loss is divided by a global count already.
        "calculate_per_token_loss": True,
    }
    if mcfg.activation_checkpointing:
        overrides["recompute_granularity"] = mcfg.recompute_granularity
        if mcfg.recompute_granularity == "full":
            overrides |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        elif mcfg.recompute_modules is not None:
            overrides["recompute_modules"] = mcfg.recompute_modules
    if mcfg.layernorm_epsilon is not None:
        overrides["layernorm_epsilon"] = mcfg.layernorm_epsilon
    taken = set(mcfg.model_overrides) & (set(overrides) | _OWN_KEYS)
    if taken:
        raise ValueError(
            f"policy.megatron_cfg.model_overrides sets {sorted(taken)}, which have keys of their own in "
            "policy.megatron_cfg or are fixed; remove them there"
        )
    return overrides | mcfg.model_overrides


_OWN_KEYS = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "params_dtype",
    "pipeline_dtype",
}


def wrap_chunks(
    chunks: list[GPTModel], config: PolicyConfig, dims: ParallelDims, *, distributed_optimizer: bool
) -> list[MegatronModule]:
    """Wrap model chunks for training: mixed precision if bf16, and contiguous gradient buffers.

    Args:
        chunks: this rank's model chunks with their weights.
        config: the policy section.
        dims: the layout.
        distributed_optimizer: whether masters and moments are sharded over data parallelism.
    """
    wanted = config.megatron_cfg.distributed_data_parallel_config
    several = dims.dp * dims.cp > 1
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=wanted.grad_reduce_in_fp32,
        overlap_grad_reduce=wanted.overlap_grad_reduce and several,
        overlap_param_gather=wanted.overlap_param_gather and several and distributed_optimizer,
        use_distributed_optimizer=distributed_optimizer,
        check_for_nan_in_grad=False,  # the optimizer step looks at the norm
        average_in_collective=False,
    )
    wrapped: list[MegatronModule] = []
    for index, chunk in enumerate(chunks):
        transformer_config = chunk.config
        module: MegatronModule = chunk
        if config.precision != "float32":
            module = Float16Module(transformer_config, module)
        wrapped.append(
            DistributedDataParallel(
                config=transformer_config, ddp_config=ddp_config, module=module, disable_bucketing=index > 0
            )
        )
    return wrapped


def unwrap(module: torch.nn.Module) -> GPTModel:
    """The model inside the wrappers."""
    while isinstance(module, DistributedDataParallel | Float16Module):
        module = module.module
    assert isinstance(module, GPTModel)
    return module
