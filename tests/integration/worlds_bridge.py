# SPDX-License-Identifier: Apache-2.0
"""What the bridge's tests run on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file
from torch import Tensor

from megatron_bridge import AutoBridge
from megatron_bridge.export import export_weights
from megatron_bridge.layers.attention import AttentionMeta
from megatron_bridge.layers.decoder import DecoderLayer, DecoderSelfAttention
from megatron_bridge.plan import groups_of, named_parameters, unwrap
from tests.support.world import init_megatron


def build(
    path: str,
    tp: int = 1,
    pp: int = 1,
    sp: bool = False,
    vpp: int | None = None,
    dtype: torch.dtype = torch.float32,
    load_weights: bool = True,
    **overrides: Any,
) -> tuple[AutoBridge, list[Any]]:
    """Bridge and this rank's chunks; megatron must be initialised."""
    bridge = AutoBridge.from_hf_pretrained(path)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = tp
    provider.pipeline_model_parallel_size = pp
    provider.virtual_pipeline_model_parallel_size = vpp
    provider.sequence_parallel = sp
    provider.params_dtype = dtype
    provider.overrides.update(overrides)
    return bridge, bridge.to_megatron_model(provider, load_weights=load_weights)


def token_logprobs(
    hidden_states: Tensor, output_layer: Any, output_weight: Any, input_ids: Tensor, **_: Any
) -> Tensor:
    """[B, S] log-probs in our convention, from gathered logits without the padding columns."""
    logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=True)
    logprobs = torch.log_softmax(logits.transpose(0, 1)[:, :-1, :97].float(), dim=-1)
    found = logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(found, (1, 0))


def forward_step(batch: Any, model: Any, losses: list[Tensor], weights: Tensor | None = None) -> Any:
    """One micro-batch through megatron's schedule; keeps the log-probs of the last stage."""
    input_ids = next(batch)
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    meta = AttentionMeta(positions)
    out = model(input_ids, positions, None, packed_seq_params=meta, output_processor=token_logprobs)

    def loss(logprobs: Tensor) -> Any:
        losses.append(logprobs.detach().clone())
        total = logprobs.sum() if weights is None else (logprobs * weights).sum()
        return total, torch.tensor(0, dtype=torch.int), {}

    return out, loss


def run(
    chunks: list[Any], input_ids: Tensor, forward_only: bool, weights: Tensor | None = None
) -> Tensor | None:
    """All rows as one micro-batch each pair; returns log-probs [B, S] on the last stage."""
    seen: list[Tensor] = []
    micro = [input_ids[i : i + 2] for i in range(0, len(input_ids), 2)]
    per_micro = None
    if weights is not None:
        assert len(micro) == 1
        per_micro = weights
    get_forward_backward_func()(
        forward_step_func=partial(forward_step, losses=seen, weights=per_micro),
        data_iterator=[iter(list(micro)) for _ in chunks] if len(chunks) > 1 else iter(micro),
        model=chunks,
        num_microbatches=len(micro),
        seq_length=input_ids.shape[1],
        micro_batch_size=2,
        forward_only=forward_only,
    )
    return torch.cat(seen) if seen else None


def logprobs_and_round_trip(
    paths: list[str], input_ids: Tensor, tp: int, pp: int, sp: bool, vpp: int | None = None
) -> list[dict[str, Any]]:
    """For each model: log-probs, and whether the export equals the source bit for bit."""
    init_megatron(tp, pp)
    if vpp:
        from megatron.core import parallel_state

        parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
    results = []
    for path in paths:
        bridge, chunks = build(path, tp, pp, sp, vpp)
        source = load_file(Path(path) / "model.safetensors")
        exported: dict[str, Tensor] = {}
        for name, tensor in bridge.export_hf_weights(chunks):
            assert name not in exported, f"{name} came twice"
            exported[name] = tensor.clone()
        specs = bridge.hf_weight_specs(chunks)
        assert {n: (tuple(t.shape), t.dtype) for n, t in exported.items()} == specs
        _check_bucket_sizes(bridge, chunks, exported)
        with torch.no_grad():
            logprobs = run([c.eval() for c in chunks], input_ids, forward_only=True)
        results.append(
            {
                "logprobs": logprobs,
                "names": list(exported),
                "wrong": [
                    n for n, t in source.items() if n not in exported or not torch.equal(exported[n], t)
                ],
                "shapes": {n: tuple(p.shape) for n, p in named_parameters(chunks)},
                "specs": specs,
            }
        )
    return results


def _check_bucket_sizes(bridge: AutoBridge, chunks: list[Any], exported: dict[str, Tensor]) -> None:
    """However the parameters are bundled, and with a conversion on the way, the stream is the same."""
    groups, geometry = groups_of(unwrap(chunks[0])), bridge._geometry(chunks)
    for size, dtype in ((1, None), (3000, None), (3000, torch.bfloat16)):
        stream = export_weights(
            bridge.plan(chunks), geometry, groups, torch.device("cpu"), dtype, bucket_bytes=size
        )
        names = []
        for name, tensor in stream:
            names.append(name)
            assert torch.equal(tensor, exported[name].to(dtype or tensor.dtype)), (name, size, dtype)
        assert names == list(exported)


def gradients(
    paths: list[str], input_ids: Tensor, weights: Tensor, tp: int, sp: bool, **overrides: Any
) -> list[Any]:
    """Gradients of sum(weights * log-probs) under HuggingFace names; partial ones are summed over ranks."""
    from megatron.core import parallel_state

    init_megatron(tp)
    results = []
    for path in paths:
        bridge, chunks = build(path, tp, sp=sp, **overrides)
        chunks[0].train()
        run(chunks, input_ids, forward_only=False, weights=weights)
        for name, parameter in named_parameters(chunks):
            assert parameter.grad is not None, name
            qk_norm = "q_layernorm" in name or "k_layernorm" in name
            partial_sum = getattr(parameter, "sequence_parallel", False) or qk_norm
            if tp > 1 and partial_sum:
                torch.distributed.all_reduce(
                    parameter.grad, group=parallel_state.get_tensor_model_parallel_group()
                )
            parameter.data = parameter.grad
        results.append({name: tensor.clone() for name, tensor in bridge.export_hf_weights(chunks)})
    return results


def bf16_round_trip(path: str, tp: int, pp: int) -> list[str]:
    """Names whose bits changed on the way through a bf16 model."""
    init_megatron(tp, pp)
    bridge, chunks = build(path, tp, pp, dtype=torch.bfloat16)
    config = DistributedDataParallelConfig()
    chunks = [DistributedDataParallel(c.config, config, Float16Module(c.config, c)) for c in chunks]
    source = load_file(Path(path) / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in source.values())
    exported = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(chunks)}
    assert exported.keys() == source.keys()
    return [name for name, tensor in source.items() if not torch.equal(exported[name], tensor)]


def fill_layers(path: str, tp: int, pp: int, vpp: int | None, first: int | None = None) -> dict[str, float]:
    """Each layer filled with its number; what arrives under which name (case 37)."""
    init_megatron(tp, pp)
    if vpp:
        from megatron.core import parallel_state

        parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
    bridge = AutoBridge.from_hf_pretrained(path)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size, provider.pipeline_model_parallel_size = tp, pp
    provider.virtual_pipeline_model_parallel_size = vpp
    provider.num_layers_in_first_pipeline_stage = first
    chunks = bridge.to_megatron_model(provider)
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            for parameter in layer.parameters():
                parameter.data.fill_(float(layer.layer_number - 1))
    arrived: dict[str, float] = {}
    for name, tensor in bridge.export_hf_weights(chunks):
        assert name not in arrived, name
        if ".layers." in name:
            assert bool((tensor == tensor.flatten()[0]).all()), name
        arrived[name] = float(tensor.flatten()[0])
    return arrived


def save(
    path: str, target: str, tp: int, pp: int, change: dict[str, Any] | None = None, **options: Any
) -> None:
    """Loads and saves a HuggingFace directory, its config changed on the way if asked for."""
    init_megatron(tp, pp)
    bridge, chunks = build(path, tp, pp)
    for name, value in (change or {}).items():
        setattr(bridge.config, name, value)
    bridge.save_hf_pretrained(chunks, target, **options)


def packed_logprobs(path: str, rows: list[Tensor], tp: int, sp: bool) -> Tensor:
    """Rows packed into one, padded to a multiple of 4; log-probs [T] of tokens given those before in their row."""
    init_megatron(tp)
    _, chunks = build(path, tp, sp=sp)
    lengths = torch.tensor([len(row) for row in rows])
    padding = -int(lengths.sum()) % 4
    input_ids = torch.nn.functional.pad(torch.cat(rows), (0, padding))[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows] + [torch.arange(padding)])[None]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    meta = AttentionMeta(positions, cu_seqlens)
    with torch.no_grad():
        return chunks[0].eval()(
            input_ids, positions, None, packed_seq_params=meta, output_processor=token_logprobs
        )[0]


def bf16_logits(path: str, input_ids: Tensor) -> Tensor:
    """[B, S, V] logits of a bf16 model."""
    init_megatron()
    _, chunks = build(path, dtype=torch.bfloat16)
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    with torch.no_grad():
        return chunks[0].eval()(input_ids, positions, None, packed_seq_params=AttentionMeta(positions))


def error_of(path: str, tp: int = 1, pp: int = 1, **options: Any) -> str:
    """The message of the ValueError that building gives."""
    init_megatron(tp, pp)
    try:
        build(path, tp, pp, **options)
    except ValueError as error:
        return str(error)
    return "no error"


def padding_rows(path: str, tp: int, load_weights: bool) -> Any:
    """Vocabulary rows that do not exist, and the sizes a head needs to mask them."""
    init_megatron(tp)
    _, chunks = build(path, tp, load_weights=load_weights)
    weight = chunks[0].embedding.word_embeddings.weight
    rank = torch.distributed.get_rank()
    real = max(0, min(weight.shape[0], 97 - rank * weight.shape[0]))
    return (
        weight[real:].abs().sum().item(),
        weight.shape[0] - real,
        chunks[0].vocab_size,
        weight[:real].abs().sum().item(),
    )


def dropout_smoke(path: str, input_ids: Tensor, tp: int, recompute: str | None) -> dict[str, Any]:
    """Two training passes with dropout from the same RNG state must agree, and differ from a third one."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    init_megatron(tp)
    overrides: dict[str, Any] = {"attention_dropout": 0.3, "hidden_dropout": 0.2}
    if recompute == "full":
        overrides |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif recompute == "selective":
        overrides |= {"recompute_granularity": "selective"}
    _, chunks = build(path, tp, **overrides)
    model = chunks[0].train()
    weights = torch.ones(2, input_ids.shape[1])

    def once() -> dict[str, Tensor]:
        model.zero_grad()
        run([model], input_ids, forward_only=False, weights=weights)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    states, cpu = get_cuda_rng_tracker().get_states(), torch.get_rng_state()
    states = {name: state.clone() for name, state in states.items()}
    first = once()
    other = once()
    get_cuda_rng_tracker().set_states(states)
    torch.set_rng_state(cpu)
    again = once()
    return {
        "same": all(torch.equal(first[n], again[n]) for n in first),
        "differs": any(not torch.equal(first[n], other[n]) for n in first),
        "finite": all(bool(g.isfinite().all()) for g in first.values()),
        "gradients": first,
    }


def load_distributed(path: str, checkpoint: str, tp: int, pp: int) -> dict[str, Any]:
    """A random model filled from a distributed checkpoint of another layout."""
    from megatron.core import dist_checkpointing

    init_megatron(tp, pp)
    bridge, chunks = build(path, tp, pp, load_weights=False)
    state = {k: v for k, v in chunks[0].sharded_state_dict().items() if not k.endswith("_extra_state")}
    chunks[0].load_state_dict(dist_checkpointing.load(state, checkpoint), strict=False)
    source = load_file(Path(path) / "model.safetensors")
    exported = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(chunks)}
    padding = 0.0
    for name, parameter in named_parameters(chunks):
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rank = torch.distributed.get_rank() % tp
            padding += parameter[max(0, 97 - rank * parameter.shape[0]) :].abs().sum().item()
    return {
        "wrong": [name for name, tensor in source.items() if not torch.equal(exported[name], tensor)],
        "padding": padding,
    }


def save_distributed(path: str, checkpoint: str, tp: int, pp: int) -> None:
    """Doubles every weight and saves a distributed checkpoint."""
    from megatron.core import dist_checkpointing

    init_megatron(tp, pp)
    _, chunks = build(path, tp, pp)
    for parameter in chunks[0].parameters():
        parameter.data.mul_(2.0)
    if torch.distributed.get_rank() == 0:
        Path(checkpoint).mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(chunks[0].sharded_state_dict(), checkpoint)


def real_logprobs(path: str, input_ids: Tensor, tp: int, vocab: int) -> Tensor:
    """Log-probs [B, S] of a right-padded batch of real text, padding columns left out."""
    init_megatron(tp)
    _, chunks = build(path, tp)
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)

    def head(hidden_states: Tensor, output_layer: Any, output_weight: Any, **_: Any) -> Tensor:
        rows = []
        for b in range(input_ids.shape[0]):  # one row of logits at a time: the vocabulary is large
            logits, _bias = output_layer(
                hidden_states[:, b : b + 1], weight=output_weight, runtime_gather_output=True
            )
            logprobs = torch.log_softmax(logits[:-1, 0, :vocab].float(), dim=-1)
            rows.append(logprobs.gather(-1, input_ids[b, 1:, None]).squeeze(-1))
        return torch.nn.functional.pad(torch.stack(rows), (1, 0))

    with torch.no_grad():
        return chunks[0].eval()(
            input_ids, positions, None, packed_seq_params=AttentionMeta(positions), output_processor=head
        )


def short_and_long_way(paths: list[str], input_ids: Tensor, tp: int, sp: bool) -> list[tuple[Tensor, Tensor]]:
    """For each model its log-probs without gradients, by our layers' short way and by megatron-core's own forward."""
    init_megatron(tp)
    results = []
    for path in paths:
        _, chunks = build(path, tp, sp=sp)
        model = chunks[0].eval()
        layers = [m for m in model.modules() if isinstance(m, DecoderLayer | DecoderSelfAttention)]
        assert len(layers) == 4  # two layers, each with its attention
        assert all(layer._plain for layer in layers)
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        ways = []
        for plain in (True, False):
            for layer in layers:
                layer._plain = plain
            with torch.no_grad():
                ways.append(
                    model(
                        input_ids,
                        positions,
                        None,
                        packed_seq_params=AttentionMeta(positions),
                        output_processor=token_logprobs,
                    )
                )
        results.append((ways[0], ways[1]))
    return results
