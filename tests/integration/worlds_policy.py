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
from nemo_rl.distributed.vocab_parallel import (
    Projection,
    gather_logits,
    logprobs_from_logits,
    token_logprobs,
    top_k_logits,
)
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


def vocab_parallel(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None) -> dict[str, Tensor]:
    """Everything in `distributed.vocab_parallel` on this rank's rows of `weight`."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    vocab = weight.shape[0]
    rows = -(-vocab // size)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, rows * size - vocab))
    own = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    projection = Projection(own, rank * rows, vocab)
    logprobs, entropies = token_logprobs(
        hidden, projection, targets, temperature=0.7, tp_group=group, chunk_size=chunk, with_entropy=True
    )
    assert entropies is not None
    scale = torch.linspace(0.5, 2.0, targets.shape[0])
    grad_hidden, grad_weight = torch.autograd.grad((logprobs * scale + entropies).sum(), (hidden, own))
    logits = (projection(hidden.detach()) / 0.7).requires_grad_()
    from_logits = logprobs_from_logits(logits, targets, tp_rank=rank, tp_group=group)
    (grad_logits,) = torch.autograd.grad(from_logits.sum(), logits)
    return {
        "logprobs": logprobs.detach(),
        "entropies": entropies.detach(),
        "grad_hidden": grad_hidden,
        "grad_weight": grad_weight,
        "from_logits": from_logits.detach(),
        "grad_logits": grad_logits,
        "top_indices": top_k_logits(hidden, projection, 4, tp_group=group, chunk_size=chunk)[1],
        "gathered": gather_logits(projection(hidden.detach()), vocab, group),
    }


def vocab_parallel_memory(tokens: int, vocab: int, chunk: int, entropy: bool) -> dict[str, int]:
    """Peak of what one forward and backward allocates, from the profiler's running total."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if size > 1 else None
    width = 8
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab // size, width, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    dist.broadcast(targets, src=0)
    projection = Projection(weight, rank * vocab // size, vocab)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logprobs, entropies = token_logprobs(
            hidden, projection, targets, tp_group=group, chunk_size=chunk, with_entropy=entropy
        )
        value = logprobs.sum() if entropies is None else (logprobs + entropies).sum()
        value.backward()
    total = peak = 0
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.name == "[memory]":
            total += event.cpu_memory_usage
            peak = max(peak, total)
    fixed = 16 * tokens * 4 + 2 * (hidden.numel() + weight.numel()) * 4
    return {"peak_bytes": peak, "fixed_bytes": fixed}
