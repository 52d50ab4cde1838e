# SPDX-License-Identifier: Apache-2.0
"""Silences the few messages of third parties that say nothing to our users, each by its own text.

Megatron-core warns that Transformer Engine and Apex are absent (our layer specs do not need them), that ``GPTModel``
will be replaced by ``HybridModel`` (once per build), that its multimodal configs are experimental, that it lays out the
gradient buffer by itself, and that the CPU generator moved inside a forked generator (on a CPU that is the point).
Everything else still reaches the user.
"""

from __future__ import annotations

import logging
import warnings

_WARNINGS = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed\. Falling back to Torch Norm",
    r"full scope is deprecated\. Use empty cuda_graph_modules",
    r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to load",
    r"The argument order of load has been changed",
    r"MimoModelConfig is experimental",
    r"invalid escape sequence '\\-'",  # a docstring of megatron-core, whenever it is compiled first
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    r".*torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base)",
)
_CPU_WARNINGS = (
    r"When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
)
_LOG_LINES = {
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}


class _DropPrefix(logging.Filter):
    """Drops the records of one logger that start with a given text."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.prefix)


def quiet_known_messages(cpu: bool = False) -> None:
    """Installs the filters. Idempotent; call it before ``megatron.core`` is imported.

    Args:
        cpu: drop advice about CUDA settings too.
    """
    for text in _WARNINGS + (_CPU_WARNINGS if cpu else ()):
        warnings.filterwarnings("ignore", message=text)
    for name, prefix in _LOG_LINES.items():
        target = logging.getLogger(name)
        if not any(isinstance(existing, _DropPrefix) for existing in target.filters):
            target.addFilter(_DropPrefix(prefix))
