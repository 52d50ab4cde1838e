# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_megatron_*` do: build a policy worker and use it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nemo_rl.algorithms.interfaces import LossFunction
from nemo_rl.models.megatron.engine import MegatronEngine
from nemo_rl.models.policy.engine import OptimStep
from nemo_rl.models.policy.megatron_policy_worker import MegatronPolicyWorkerImpl

Data = dict[str, Any]


class RecordingEngine(MegatronEngine):
    """Keeps the gradients of each step, by HuggingFace name."""

    def optimizer_step(self, *, skip: bool = False) -> OptimStep:
        self.recorded = gradients(self)
        return super().optimizer_step(skip=skip)


def make_worker(config: dict[str, Any], **options: Any) -> MegatronPolicyWorkerImpl:
    os.environ["NRL_DEVICE"] = "cpu"
    os.environ["NRL_NUM_THREADS"] = "1"
    worker = MegatronPolicyWorkerImpl(config, None, **options)
    worker.engine.__class__ = RecordingEngine
    return worker


def gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    """Summed gradients under HuggingFace names: main_grad takes the place of each parameter for one export."""
    chunks = [chunk for chunk in engine.chunks if isinstance(chunk, DistributedDataParallel)]
    if chunks[0].ddp_config.use_distributed_optimizer:
        _gather_gradient_shards(chunks)
    kept = {}
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.module.parameters():
                kept[parameter] = parameter.data.clone()
                parameter.data.copy_(parameter.main_grad)
        named = {name: tensor.clone() for name, tensor in engine.iter_hf_weights()}
        for parameter, value in kept.items():
            parameter.data.copy_(value)
    return named


def _gather_gradient_shards(chunks: list[DistributedDataParallel]) -> None:
    for chunk in chunks:
        for group in chunk.bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shards = list(bucket.grad_data.chunk(ranks.size()))
                dist.all_gather(shards, shards[ranks.rank()].clone(), group=ranks)


def shard(data: Data, rank: int, size: int, gbs: int | None = None) -> Data:
    """Rows of one data-parallel rank: its part of global batch 0, then of 1, ..."""
    rows = data["input_ids"].shape[0]
    gbs = gbs or rows
    local = gbs // size
    picked = [g * gbs + rank * local + i for g in range(rows // gbs) for i in range(local)]
    return {key: value[picked] for key, value in data.items()}


@contextmanager
def communication() -> Iterator[Counter[str]]:
    """Counts of collectives and p2p messages by name of the c10d operator."""
    counts: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield counts
    for event in profiler.events():
        if event.name.startswith("c10d::"):
            counts[event.name.removeprefix("c10d::")] += 1


def train_step(
    config: dict[str, Any], data: Data, loss_fn: LossFunction, steps: int = 1, **worker_options: Any
) -> dict[str, Any]:
    """Log-probs, then `steps` training steps on the same data, with everything that the oracle knows too."""
    worker = make_worker(config, **worker_options)
    dims = worker.dims
    own = shard(data, dims.dp_rank, dims.dp, config["train_global_batch_size"])
    logprobs = worker.get_logprobs(data=own)["logprobs"]
    with communication() as counts:
        results = [worker.train(own, loss_fn)]
    first_gradients = worker.engine.recorded
    results += [worker.train(own, loss_fn) for _ in range(steps - 1)]
    return {
        "dims": dims.describe(),
        "coordinates": (dims.tp_rank, dims.pp_rank, dims.dp_rank),
        "logprobs": logprobs,
        "train": results,
        "gradients": first_gradients,
        "weights": {name: tensor.clone() for name, tensor in worker.engine.iter_hf_weights()},
        "communication": counts,
        "shapes": {name: tuple(p.shape) for name, p in worker.engine.models()[0].named_parameters()},
        "replicated_grads": replicated_gradients(worker),
    }


def replicated_gradients(worker: MegatronPolicyWorkerImpl) -> dict[str, Tensor]:
    """Gradients of parameters that every tensor-parallel rank holds whole (norms, some biases)."""
    if worker.engine.optimizer is None:
        return {}
    return {
        name: parameter.main_grad.clone()
        for name, parameter in worker.engine.models()[0].named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False)
    }
