# SPDX-License-Identifier: Apache-2.0
"""Small helpers of policy workers, under their documented names."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import torch

_REFIT = (
    "{} belongs to weight transfers to vLLM, which arrive with that backend; "
    "generation.backend=megatron needs none"
)


class IPCProtocol(Enum):
    """Answers on the socket that announces weights."""

    COMPLETE = "complete"
    ACK = "ack"


def resolve_model_class(model_name: str) -> Any:
    """The transformers Auto class of a model: image-text-to-text for multimodal ones, else causal LM.

    Args:
        model_name: HuggingFace name or directory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model_name)
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if multimodal and not causal else AutoModelForCausalLM


def is_vllm_v1_engine_enabled() -> bool:
    """Whether vLLM's V1 engine is wanted (``NRL_VLLM_USE_V1``, on unless "0")."""
    return os.environ.get("NRL_VLLM_USE_V1", "1") == "1"


def import_class_from_path(name: str) -> Any:
    """The object that a dotted path names.

    Raises:
        ValueError: no dot in the path, or the module does not have it.
    """
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ValueError(f"{name!r} is no dotted path; give module.Class, such as torch.optim.AdamW")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"module {module_name} has no {attribute!r}") from None


def get_gpu_info(model: torch.nn.Module) -> dict[str, Any]:
    """Rank, device, memory in MB and one sample parameter of a worker; host memory where there is no GPU."""
    name, parameter = next(iter(model.named_parameters()))
    device = parameter.device
    info: dict[str, Any] = {
        "rank": int(os.environ.get("RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "local_device_id": device.index or 0,
        "global_device_id": device.index or 0,
        "device_count": torch.cuda.device_count(),
        "parameter_sample": {
            name: {"device": str(device), "shape": list(parameter.shape), "dtype": str(parameter.dtype)}
        },
        "env_vars": {
            key: value for key, value in os.environ.items() if key.startswith("CUDA") or key in _RANK_VARS
        },
    }
    mega = 1024**2
    if device.type == "cuda":
        info["device_name"] = torch.cuda.get_device_name(device)
        info["memory_allocated_mb"] = torch.cuda.memory_allocated(device) / mega
        info["memory_reserved_mb"] = torch.cuda.memory_reserved(device) / mega
        info["peak_memory_allocated_mb"] = torch.cuda.max_memory_allocated(device) / mega
        info["peak_memory_reserved_mb"] = torch.cuda.max_memory_reserved(device) / mega
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            mega if sys.platform == "darwin" else 1024
        )
        info["device_name"] = platform.processor() or platform.machine()
        info["memory_allocated_mb"] = info["memory_reserved_mb"] = _resident_mb()
        info["peak_memory_allocated_mb"] = info["peak_memory_reserved_mb"] = peak
    return info


_RANK_VARS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def _resident_mb() -> float:
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0.0
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024**2


def sliding_window_overwrite(model_name: str) -> dict[str, Any]:
    """Config overrides for models whose config says sliding window while their code does not use one.

    ``{"sliding_window": None}`` where the config sets a window but ``use_sliding_window`` is false, else ``{}``.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_name).to_dict()
    if config.get("use_sliding_window") is False and config.get("sliding_window") is not None:
        return {"sliding_window": None}
    return {}


def configure_dynamo_cache() -> None:
    """Turn inductor's local autotune cache off: ranks that share a file system would write the same file."""
    torch._inductor.config.autotune_local_cache = False


def get_runtime_env_for_policy_worker(policy_worker_name: str) -> dict[str, Any]:
    """Ray runtime environment of a worker: nsight profiling for the workers that ``NRL_NSYS_WORKER_PATTERNS`` names."""
    import fnmatch

    patterns = [p for p in os.environ.get("NRL_NSYS_WORKER_PATTERNS", "").split(",") if p]
    if any(fnmatch.fnmatch(policy_worker_name, pattern) for pattern in patterns):
        return {
            "nsight": {
                "t": "cuda,cudnn,cublas,nvtx",
                "o": f"'{policy_worker_name}_%p'",
                "stop-on-exit": "true",
            }
        }
    return {}


def get_megatron_checkpoint_dir() -> str:
    """Cache of converted checkpoints: ``NRL_MEGATRON_CHECKPOINT_DIR``, ``HF_HOME``/nemo_rl, or HF's default."""
    if own := os.environ.get("NRL_MEGATRON_CHECKPOINT_DIR"):
        return own
    if hf_home := os.environ.get("HF_HOME"):
        return os.path.join(hf_home, "nemo_rl")
    return os.path.join(os.path.expanduser("~"), ".cache", "huggingface", "nemo_rl")


def calculate_aligned_size(size_bytes: int, alignment: int = 512) -> int:
    """``size_bytes`` rounded up to a multiple of ``alignment``."""
    return -(-size_bytes // alignment) * alignment


def get_handle_from_tensor(tensor: torch.Tensor) -> tuple[Any]:
    """Not yet; see the message."""
    raise NotImplementedError(_REFIT.format("get_handle_from_tensor"))


def stream_weights_via_ipc_zmq_impl(
    params_generator: Any, buffer_size_bytes: int, zmq_socket: Any, rank: int, worker_name: str
) -> None:
    """Not yet; see the message."""
    raise NotImplementedError(_REFIT.format("stream_weights_via_ipc_zmq_impl"))


def rebuild_cuda_tensor_from_ipc(cuda_ipc_handle: tuple[Any], device_id: int) -> torch.Tensor:
    """Not yet; see the message."""
    raise NotImplementedError(_REFIT.format("rebuild_cuda_tensor_from_ipc"))
