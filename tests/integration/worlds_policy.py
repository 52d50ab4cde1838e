# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_megatron_*` do: build a policy worker and use it."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nemo_rl.algorithms.interfaces import LossFunction
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.vocab_parallel import (
    Projection,
    gather_logits,
    logprobs_from_logits,
    token_logprobs,
    top_k_logits,
)
from nemo_rl.models.megatron.engine import MegatronEngine
from nemo_rl.models.megatron.optimizer import chained
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
    worker._engine.__class__ = RecordingEngine
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
        "grad_dtype": next(worker.engine.models()[0].parameters()).main_grad.dtype,
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


def moments(engine: MegatronEngine) -> dict[str, Tensor]:
    """Everything the optimizer of this rank remembers, by a name that two runs share."""
    found: dict[str, Tensor] = {}
    assert engine.optimizer is not None
    for index, part in enumerate(chained(engine.optimizer)):
        for g, group in enumerate(part.optimizer.param_groups):
            for i, main in enumerate(group["params"]):
                found[f"{index}.{g}.{i}.main"] = main.detach().clone()
                for name, value in part.optimizer.state[main].items():
                    if isinstance(value, Tensor):
                        found[f"{index}.{g}.{i}.{name}"] = value.clone()
            found[f"{index}.{g}.lr"] = torch.tensor([group["lr"], group["weight_decay"]])
    return found


def train_and_save(
    config: dict[str, Any],
    data: Data,
    loss_fn: LossFunction,
    directory: str,
    steps_before: int,
    steps_after: int,
    save: bool,
    load: bool,
) -> dict[str, Any]:
    """Train, optionally from a checkpoint, optionally saving one in between; everything that must be bit-equal."""
    paths = (f"{directory}/weights", f"{directory}/optimizer")
    weights_path, optimizer_path = paths if load else (None, None)
    worker = make_worker(config, weights_path=weights_path, optimizer_path=optimizer_path)
    dims = worker.dims
    own = shard(data, dims.dp_rank, dims.dp, config["train_global_batch_size"])
    if load:
        assert steps_before == 0
    else:  # make the random states differ from a fresh process's
        torch.rand(3 + dims.rank)
        random.random()
        np.random.rand()
    for _ in range(steps_before):
        worker.train(own, loss_fn)
    if save:
        worker.save_checkpoint(*paths)
    restored = moments(worker.engine)
    reference = worker.get_reference_policy_logprobs(data=own)["reference_logprobs"]
    results = [worker.train(own, loss_fn) for _ in range(steps_after)]
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(4)
    return {
        "restored": restored,
        "results": [{k: v for k, v in r.items() if k != "train_elapsed_seconds"} for r in results],
        "moments": moments(worker.engine),
        "weights": {name: tensor.clone() for name, tensor in worker.engine.iter_hf_weights()},
        "reference": reference,
        "random": [
            torch.rand(4),
            torch.tensor(random.random()),
            torch.from_numpy(np.random.rand(2)),
            tracked,
        ],
        "num_samples": worker.engine.scheduler.num_steps,
    }


def edge_steps(config: dict[str, Any], batches: list[Data], loss_fn: LossFunction) -> list[dict[str, Any]]:
    """One training step for each batch; weights and moments before and after."""
    worker = make_worker(config)
    dims = worker.dims
    out = []
    for data in batches:
        own = shard(data, dims.dp_rank, dims.dp, config["train_global_batch_size"])
        before = {name: tensor.clone() for name, tensor in worker.engine.iter_hf_weights()}
        moments_before = moments(worker.engine)
        result = worker.train(own, loss_fn)
        out.append(
            {
                "result": result,
                "gradients": worker.engine.recorded,
                "before": before,
                "after": {name: tensor.clone() for name, tensor in worker.engine.iter_hf_weights()},
                "moments_before": moments_before,
                "moments_after": moments(worker.engine),
                "skipped_total": worker.engine.num_skipped_steps,
            }
        )
    return out


def inference(config: dict[str, Any], data: Data, loss_fn: LossFunction, steps: int) -> dict[str, Any]:
    """Log-probs, reference log-probs, top-k and evaluation around some training steps."""
    worker = make_worker(config)
    dims = worker.dims
    own = shard(data, dims.dp_rank, dims.dp, config["train_global_batch_size"])
    start = worker.get_logprobs(data=own)["logprobs"]
    evaluated = worker.train(own, loss_fn, eval_mode=True)
    unchanged = worker.get_logprobs(data=own)["logprobs"]
    trained = [worker.train(own, loss_fn) for _ in range(steps)]
    before = {name: tensor.clone() for name, tensor in worker.engine.named_local_state().items()}
    reference = worker.get_reference_policy_logprobs(data=own)["reference_logprobs"]
    by_3 = worker.get_reference_policy_logprobs(data=own, micro_batch_size=3)["reference_logprobs"]
    after = worker.engine.named_local_state()
    top = worker.get_topk_logits(data=own, k=5)
    return {
        "coordinates": (dims.tp_rank, dims.pp_rank, dims.dp_rank),
        "logprobs": start,
        "evaluated": evaluated,
        "unchanged": unchanged,
        "trained": trained,
        "final": worker.get_logprobs(data=own)["logprobs"],
        "reference": reference,
        "reference_by_3": by_3,
        "restored": all(torch.equal(before[name], after[name]) for name in before),
        "topk_logits": top["topk_logits"],
        "topk_indices": top["topk_indices"],
        "refit_info": worker.prepare_refit_info(),
        "attributes": worker.check_tensor_parallel_attributes(),
        "gpu_info": worker.get_gpu_info(),
        "device_id": worker.report_device_id(),
        "free": worker.get_free_memory_bytes(),
    }


def failures(configs: list[dict[str, Any]], data: Data, loss_fn: LossFunction) -> list[str | None]:
    """The message of the ValueError that each config ends in; None where it works."""
    messages: list[str | None] = []
    for config in configs:
        try:
            make_worker(config).train(data, loss_fn)
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append(None)
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    return messages


def generate_after_training(
    config: dict[str, Any], prompts: Data, data: Data, loss_fn: LossFunction, steps: int
) -> dict[str, Any]:
    """Train (which may leave a parameter gather open), sample from the new weights, and score what was sampled."""
    worker = make_worker(config)
    dims = worker.dims
    own = shard(data, dims.dp_rank, dims.dp, config["train_global_batch_size"])
    for _ in range(steps):
        worker.train(own, loss_fn)
    own_prompts = shard(prompts, dims.dp_rank, dims.dp)
    sampled = worker.generate(data=BatchedDataDict(own_prompts))
    greedy = worker.generate(data=BatchedDataDict(own_prompts), greedy=True)
    rows = {"input_ids": sampled["output_ids"], "input_lengths": sampled["unpadded_sequence_lengths"]}
    scored = worker.get_logprobs(data=rows)["logprobs"]
    after = worker.train(own, loss_fn)  # generation leaves the engine able to train
    return {
        "coordinates": (dims.tp_rank, dims.pp_rank, dims.dp_rank),
        "sampled": dict(sampled),
        "greedy": dict(greedy),
        "scored": scored,
        "after": after["grad_norm"],
        "prompt_lengths": own_prompts["input_lengths"],
    }


def export(config: dict[str, Any], data: Data, loss_fn: LossFunction, path: str) -> dict[str, Any]:
    """Train with and without the hooks of the overlapped gather, then write a HuggingFace directory."""
    worker = make_worker(config)
    dims = worker.dims
    own = shard(data, dims.dp_rank, dims.dp, config["train_global_batch_size"])
    worker.train(own, loss_fn)
    worker.disable_forward_pre_hook()
    worker.train(own, loss_fn)
    worker.train(own, loss_fn)
    worker.enable_forward_pre_hook()
    worker.train(own, loss_fn)
    worker.export_hf(path)
    return {
        "coordinates": (dims.tp_rank, dims.pp_rank, dims.dp_rank),
        "logprobs": worker.get_logprobs(data=own)["logprobs"],
    }


def inference_only(config: dict[str, Any], data: Data) -> dict[str, Any]:
    """A worker without optimizer and reference: log-probs, and that it says what it cannot do."""
    worker = make_worker(config, init_optimizer=False, init_reference_model=False)
    dims = worker.dims
    own = shard(data, dims.dp_rank, dims.dp)
    refused = []
    attempts = [
        lambda: worker.get_reference_policy_logprobs(data=own),
        lambda: worker.save_checkpoint("/nowhere/weights", "/nowhere/optimizer"),
    ]
    for attempt in attempts:
        try:
            attempt()
        except ValueError as error:
            refused.append(str(error))
    return {
        "coordinates": (dims.tp_rank, dims.pp_rank, dims.dp_rank),
        "logprobs": worker.get_logprobs(data=own)["logprobs"],
        "refused": refused,
    }
