# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints through megatron-core's dist_checkpointing.

Weights and optimizer state are two checkpoints. The optimizer's is in the space of the model's parameters: each
state of a parameter (master, moments, momentum) is stored under the parameter's name with the parameter's own
sharding, whatever part of it each data-parallel rank holds at run time. It therefore loads at any tensor-, pipeline-
and data-parallel size, with or without the distributed optimizer. Random states are stored per rank, and restored
only at the same layout.
"""

from __future__ import annotations

import logging
import queue
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_bridge.contents import check_contents
from nemo_rl.models.megatron.optimizer import chained

logger = logging.getLogger(__name__)

_MASTER = "master"
_TP_OF_LAYOUT = 1  # see _layout()
_ADVICE = (
    "Resume with the policy.model_name that the run began with, or begin a new run in another logger.log_dir."
)


# -- weights -----------------------------------------------------------------------------------------------------------


def save_weights(path: str, models: list[GPTModel]) -> None:
    """Write the weights to the directory ``path``, which is created. Collective."""
    _write(path, _model_state(models))


def load_weights(path: str, models: list[GPTModel], vocab_size: int) -> None:
    """Read weights into ``models``, at any layout. Collective.

    Args:
        path: directory of the checkpoint.
        models: chunks of this rank.
        vocab_size: without the rows that pad it to the tensor-parallel size.

    Raises:
        ValueError: ``path`` is no checkpoint, or one of another model; the message names tensors and shapes.
    """
    wanted = _model_state(models)
    check_contents(wanted, path, vocab_size, _ADVICE, max_padding=_max_padding(_common(path)))
    state = _read(path, wanted)
    for index, model in enumerate(models):
        prefix = _chunk_prefix(index)
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        model.load_state_dict(own, strict=True)


def _max_padding(common: dict[str, Any]) -> int | None:
    """Rows by which the writer of a checkpoint can have padded the vocabulary; None: not one of our training runs."""
    return common["extra"]["layout"][_TP_OF_LAYOUT] - 1 if "extra" in common else None


def _chunk_prefix(index: int) -> str:
    return f"chunk{index}."


def _model_state(models: list[GPTModel]) -> ShardedStateDict:
    state: ShardedStateDict = {}
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    for index, model in enumerate(models):
        for name, value in model.sharded_state_dict(metadata=metadata).items():
            state[_chunk_prefix(index) + name] = value
    return state


# -- optimizer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shard:
    """What this rank optimizes of one model parameter.

    Attributes:
        main: the parameter that the torch optimizer steps: the model's own, an fp32 copy, or a flat piece of either.
        state: the torch optimizer's state of it, live.
        start: first element of the piece in the flattened parameter.
        is_copy: ``main`` is an fp32 master, which must be stored too.
    """

    main: Tensor
    state: dict[str, Any]
    start: int
    is_copy: bool


def save_optimizer(
    path: str, models: list[GPTModel], optimizer: MegatronOptimizer, extra: dict[str, Any]
) -> None:
    """Write masters, moments, ``extra`` and random states to the directory ``path``. Collective."""
    state: ShardedStateDict = {"extra": dict(extra), "rng": _rng_object(_rng_state())}
    shards = _shards(optimizer)
    names = _state_names(shards)
    state["extra"]["state_names"] = names
    state["extra"]["num_updates"] = _common_step(shards)
    group = _sharing_group(optimizer)
    for param_name, param, sharded in _optimized_parameters(models):
        shard = shards.get(id(param))
        for name in names:
            whole = _gather(param, shard, name, group)
            state[f"{name}.{param_name}"] = make_sharded_optimizer_tensor(sharded, whole, f"optimizer.{name}")
    _write(path, state)


def load_optimizer(path: str, models: list[GPTModel], optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Read what :func:`save_optimizer` wrote, into the live optimizer; gives ``extra`` back. Collective.

    Raises:
        ValueError: ``path`` is no checkpoint.
    """
    common = _common(path)["extra"]
    names: list[str] = common["state_names"]
    wanted: ShardedStateDict = {}
    targets: dict[str, tuple[Tensor, str]] = {}
    shards = _shards(optimizer)
    for param_name, param, sharded in _optimized_parameters(models):
        for name in names:
            whole = torch.empty(param.shape, dtype=torch.float32)
            key = f"{name}.{param_name}"
            wanted[key] = make_sharded_optimizer_tensor(sharded, whole, f"optimizer.{name}")
            targets[key] = (param, name)
    same_layout = common["layout"] == _layout()
    if same_layout:
        wanted["rng"] = _rng_object(None)
    else:
        logger.warning("the checkpoint %s is of another layout: random states start anew", path)
    loaded = _read(path, wanted)
    with torch.no_grad():
        for key, (param, name) in targets.items():
            shard = shards.get(id(param))
            if shard is not None:
                _scatter(loaded[key], shard, name)
        for shard in shards.values():
            if common["num_updates"] is not None:
                shard.state["step"] = torch.tensor(
                    float(common["num_updates"]), dtype=torch.float32, device=shard.main.device
                )
    _masters_to_model(optimizer, names)
    if same_layout:
        _set_rng_state(loaded["rng"])
    return common


def _shards(optimizer: MegatronOptimizer) -> dict[int, _Shard]:
    """By id of the model parameter, what this rank optimizes of it; parameters without a part here are missing."""
    found: dict[int, _Shard] = {}
    for part in chained(optimizer):
        for param, main, start in _pieces(part):
            found[id(param)] = _Shard(
                main=main,
                state=part.optimizer.state[main],
                start=start,
                is_copy=main.dtype != param.dtype,
            )
    return found


def _pieces(part: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(model parameter, optimized tensor, first element) of one optimizer."""
    if isinstance(part, DistributedOptimizer):
        for param, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            yield param, main, part._get_model_param_range_map(param)["param"].start
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for param, main in zip(models, mains, strict=True):
                yield param, main, 0
        for group in part.fp32_from_fp32_groups:
            for param in group:
                yield param, param, 0
    else:
        for param in part.get_parameters():
            yield param, param, 0


def _sharing_group(optimizer: MegatronOptimizer) -> ProcessGroup | None:
    """The ranks that each hold a piece of every parameter's optimizer state; None if each holds all of it."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = any(isinstance(part, DistributedOptimizer) for part in chained(optimizer))
    return group if sharded and group.size() > 1 else None


def _optimized_parameters(models: list[GPTModel]) -> Iterator[tuple[str, Tensor, Any]]:
    """(name, parameter, how the model shards it), in an order that is the same on all data-parallel ranks."""
    params: list[Tensor] = []
    names: list[str] = []
    for index, model in enumerate(models):
        for name, param in model.named_parameters():
            if param.requires_grad:
                params.append(param)
                names.append(_chunk_prefix(index) + name)
    sharded = get_param_id_to_sharded_param_map(_model_state(models), iter(params))
    for position, (name, param) in enumerate(zip(names, params, strict=True)):
        if position in sharded:  # the copy of a tied embedding on the last stage is stored by the first
            yield name, param, sharded[position]


def _state_names(shards: dict[int, _Shard]) -> list[str]:
    """Names of the per-element states, the same on every rank."""
    own = {
        name
        for shard in shards.values()
        for name, value in shard.state.items()
        if _is_elementwise(value, shard)
    }
    if any(shard.is_copy for shard in shards.values()):
        own.add(_MASTER)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, sorted(own))
    return sorted({name for names in everybody for name in names})


def _is_elementwise(value: Any, shard: _Shard) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.main.shape and value.dim() > 0


def _common_step(shards: dict[int, _Shard]) -> float | None:
    """Updates so far; Adam counts them per parameter, but all parameters are always updated together."""
    steps = {float(shard.state["step"]) for shard in shards.values() if "step" in shard.state}
    assert len(steps) <= 1, f"parameters have been updated unequally often: {steps}"
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, steps.pop() if steps else None)
    return next((step for step in everybody if step is not None), None)


def _gather(param: Tensor, shard: _Shard | None, name: str, group: ProcessGroup | None) -> Tensor:
    """One state of a whole (tensor-parallel) parameter; with ``group``, its ranks' pieces put together on the first.

    The others only say what shape there is: the first one writes.
    """
    value = None
    if shard is not None:
        value = shard.main.detach() if name == _MASTER else shard.state.get(name)
    if group is None and value is not None:
        return value.reshape(param.shape).float()
    whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    if value is not None and shard is not None:
        whole[shard.start : shard.start + value.numel()] = value.reshape(-1)
    if group is not None:
        dist.reduce(whole, group_dst=0, group=group)
        if group.rank() > 0:
            return torch.zeros(()).expand(param.shape)
    return whole.cpu().reshape(param.shape)


def _scatter(whole: Tensor, shard: _Shard, name: str) -> None:
    piece = whole.reshape(-1)[shard.start : shard.start + shard.main.numel()].reshape(shard.main.shape)
    if name == _MASTER:
        if shard.is_copy:
            shard.main.copy_(piece)
    elif name in shard.state:
        shard.state[name].copy_(piece)
    else:
        shard.state[name] = piece.to(shard.main.device).clone()


def _masters_to_model(optimizer: MegatronOptimizer, names: list[str]) -> None:
    """Where the checkpoint has no masters (it was written in fp32), they follow from the weights."""
    if _MASTER not in names:
        optimizer.reload_model_params()


# -- random states -----------------------------------------------------------------------------------------------------


def _layout() -> list[int]:
    return [
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    ]


def _rng_object(state: dict[str, Any] | None) -> ShardedObject:
    coordinates = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return ShardedObject("rng", state, tuple(_layout()), coordinates)


def _rng_state() -> dict[str, Any]:
    """All random states of this process, as tensors and plain values."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [
            str(kind),
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


# -- files -------------------------------------------------------------------------------------------------------------


def _write(path: str, state: ShardedStateDict) -> None:
    directory = Path(path)
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state.setdefault("extra", {})["layout"] = _layout()
    # A synchronous save writes and collects in this process. Megatron would start a process for the queue between the
    # two, which imports the main module again (seconds) and outlives a crash.
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(state, str(directory), validate_access_integrity=False)


def _common(path: str) -> dict[str, Any]:
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        raise ValueError(
            f"{path} is not a checkpoint of this project: it holds no megatron-core metadata.json"
        )
    return dist_checkpointing.load_common_state_dict(path)


def _read(path: str, wanted: ShardedStateDict) -> dict[str, Any]:
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        raise ValueError(
            f"{path} is not a checkpoint of this project: it holds no megatron-core metadata.json"
        )
    return dist_checkpointing.load(wanted, path, validate_access_integrity=False)
