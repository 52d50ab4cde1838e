# SPDX-License-Identifier: Apache-2.0
"""Process group, parallel layout, threads and random seeds of one Megatron process."""

from __future__ import annotations

import logging
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.models.policy.megatron_config import MegatronConfig

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for the other ranks before it fails and names itself."""


def device_from_env() -> torch.device:
    """The device of this process: ``NRL_DEVICE`` (cpu, cuda or auto), and on CUDA the device ``LOCAL_RANK``.

    Raises:
        ValueError: ``NRL_DEVICE`` is something else.
    """
    wanted = os.environ.get("NRL_DEVICE", "auto")
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"NRL_DEVICE is {wanted!r}; use cpu, cuda or auto (cluster.device sets it)")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device


def set_threads_from_env() -> None:
    """Give torch the threads that the worker group allots (``NRL_NUM_THREADS``); without it, leave torch's choice."""
    if threads := os.environ.get("NRL_NUM_THREADS"):
        torch.set_num_threads(max(1, int(threads)))


def setup_distributed(device: torch.device) -> None:
    """Join the process group of the training ranks, unless the process is in one already.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a world of one needs none of them.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
        )
    else:
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device_id)


def destroy_parallel_state() -> None:
    """Leave Megatron's groups and the process group; safe to call twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def build_dims(config: MegatronConfig, device: torch.device) -> ParallelDims:
    """Form Megatron's process groups as configured, and describe them.

    Raises:
        ValueError: the number of processes does not fit the degrees; names sizes that do.
    """
    tp, pp, cp = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    world = dist.get_world_size()
    if world % (tp * pp * cp):
        raise ValueError(
            f"{world} processes do not divide by tensor_model_parallel_size x pipeline_model_parallel_size x "
            f"context_parallel_size = {tp} x {pp} x {cp}; start a multiple of {tp * pp * cp} (cluster.gpus_per_node x "
            "cluster.num_nodes), or lower a degree in policy.megatron_cfg"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        )
    dp = world // (tp * pp * cp)

    def unless_alone(group: ProcessGroup, size: int) -> ProcessGroup | None:
        assert group.size() == size, (
            f"megatron-core made a group of {group.size()} ranks where {size} were asked for"
        )
        return group if size > 1 else None

    dims = ParallelDims(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size,
        sequence_parallel=config.sequence_parallel,
        rank=dist.get_rank(),
        device=device,
        tp_group=unless_alone(parallel_state.get_tensor_model_parallel_group(), tp),
        pp_group=unless_alone(parallel_state.get_pipeline_model_parallel_group(), pp),
        cp_group=unless_alone(parallel_state.get_context_parallel_group(), cp),
        dp_group=unless_alone(parallel_state.get_data_parallel_group(), dp),
        dp_cp_group=unless_alone(parallel_state.get_data_parallel_group(with_context_parallel=True), dp * cp),
        mp_group=unless_alone(parallel_state.get_model_parallel_group(), tp * pp),
    )
    coordinates = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    assert coordinates == (dims.tp_rank, dims.pp_rank, dims.dp_rank), f"rank order differs: {coordinates}"
    return dims


def seed_everything(seed: int, dims: ParallelDims) -> None:
    """Seed Python, numpy, torch and Megatron's tracker.

    Ranks of one tensor-parallel group share the default stream (replicated activations) and have their own
    model-parallel stream (split ones); stages and data-parallel ranks differ in both.
    """
    own = seed + 100 * dims.pp_rank + 10_000 * dims.dp_rank
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    tensor_parallel.model_parallel_cuda_manual_seed(own)
