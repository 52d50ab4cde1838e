# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_megatron_generation do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megatron_bridge import AutoBridge
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.interfaces import GenerationSamplingParams
from nemo_rl.models.generation.megatron import MegatronGenerator
from nemo_rl.models.megatron.setup import build_dims
from nemo_rl.models.policy.megatron_config import MegatronConfig
from tests.support.world import init_megatron

VOCAB = 97


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """97 tokens of one to three letters, so that texts have many tokenisations."""
    letters = "abcdefgh"
    texts = list(letters) + [a + b for a in letters for b in letters] + [f"{a}x{a}" for a in letters]
    texts += ["z", " ", "."]
    vocab = {text: index for index, text in enumerate(["<pad>", "<s>", "</s>", *texts])}
    vocab |= {f"<{index}>": index for index in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def make_generator(
    path: str,
    *,
    tp: int = 1,
    pp: int = 1,
    sp: bool = False,
    vpp: int | None = None,
    config: dict[str, Any],
    max_total: int = 256,
) -> MegatronGenerator:
    """A generator on the HuggingFace model at `path`, in the layout of this world."""
    if vpp is None:
        init_megatron(tp=tp, pp=pp)
    else:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(
            tp, pp, virtual_pipeline_model_parallel_size=vpp, create_gloo_process_groups=False
        )
    layout = MegatronConfig(
        enabled=True, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=sp
    )
    dims = build_dims(layout, torch.device("cpu"))
    bridge = AutoBridge.from_hf_pretrained(path)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = tp
    provider.pipeline_model_parallel_size = pp
    provider.virtual_pipeline_model_parallel_size = vpp
    provider.sequence_parallel = sp
    provider.finalize()
    chunks = bridge.to_megatron_model(provider)
    return MegatronGenerator(
        chunks,
        dims,
        GenerationConfig.coerce({"_pad_token_id": 0, **config}),
        vocab_size=VOCAB,
        tokenizer=letters_tokenizer(),
        max_total_sequence_length=max_total,
    )


def generate(
    path: str,
    calls: list[dict[str, Any]],
    config: dict[str, Any],
    tp: int = 1,
    pp: int = 1,
    sp: bool = False,
    vpp: int | None = None,
    max_total: int = 256,
) -> list[dict[str, Any]]:
    """Run several generate calls on one generator.

    Args:
        path: HuggingFace directory.
        calls: per call `data` (columns), `greedy`, and optionally `sampling` (arguments of
            GenerationSamplingParams).
        config: `policy.generation`.
        tp, pp, sp, vpp: the layout.
        max_total: longest sequence.

    Returns:
        Per call the columns, plus what the rank saw (group sizes, shapes) for checks of the layout.
    """
    torch.manual_seed(100 + dist.get_rank())  # ranks need not agree on torch's generator
    generator = make_generator(path, tp=tp, pp=pp, sp=sp, vpp=vpp, config=config, max_total=max_total)
    results = []
    for call in calls:
        data = BatchedDataDict(call["data"])
        sampling = GenerationSamplingParams(**call["sampling"]) if "sampling" in call else None
        out = dict(generator.generate(data, call["greedy"], sampling=sampling))
        assert all(not value.is_inference() for value in out.values() if isinstance(value, Tensor))
        out["cache_bytes"] = generator.last_cache_bytes
        results.append(out)
    return results


def refusal(**arguments: Any) -> str:
    """The message of the ValueError that :func:`generate` raises with these arguments."""
    with pytest.raises(ValueError, match=r".+") as error:
        generate(**arguments)
    return str(error.value)


def count_traffic(path: str, data: dict[str, Tensor], tp: int, pp: int, sp: bool) -> dict[str, Any]:
    """Which collectives a generation uses, the chunk's shapes and layers: shows that a layout is real."""
    generator = make_generator(path, tp=tp, pp=pp, sp=sp, config={"max_new_tokens": 3, "stop_token_ids": []})
    calls: dict[str, int] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        generator.generate(BatchedDataDict(data), True)
    for event in profile.events():
        if event.name.startswith("gloo:") or event.name.startswith("c10d::"):
            calls[event.name] = calls.get(event.name, 0) + 1
    (chunk,) = generator._chunks
    qkv = chunk.decoder.layers[0].self_attention.linear_qkv.weight
    return {"calls": calls, "layers": len(chunk.decoder.layers), "qkv": tuple(qkv.shape)}


def train_and_generate(
    config: dict[str, Any], train_data: dict[str, Any], data: dict[str, Tensor], rounds: int
) -> list[dict[str, Any]]:
    """A policy worker that trains one step and generates, `rounds` times; the rows are split over data
    parallelism.

    Returns:
        Per round the columns of this rank's rows, the row numbers, and the weights they were generated with.
    """
    from nemo_rl.algorithms.loss.nll import NLLLoss
    from tests.integration.worlds_policy import make_worker, shard

    worker = make_worker(config)
    dims = worker.dims
    rows = torch.arange(len(data["input_lengths"]))[dims.dp_rank :: dims.dp]
    results = []
    for _ in range(rounds):
        worker.train(shard(train_data, dims.dp_rank, dims.dp), NLLLoss())
        gather_open = worker.engine._gather_pending
        out = dict(
            worker.generate(
                data=BatchedDataDict({key: value[rows] for key, value in data.items()}), greedy=True
            )
        )
        weights = {name: tensor.clone() for name, tensor in worker.engine.iter_hf_weights()}
        results.append({"out": out, "rows": rows, "weights": weights, "gather_open": gather_open})
    return results


def generate_and_score(config: dict[str, Any], data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Responses with the sampler's log-probs (`logprobs`) and the trainer's for the same tokens (`recomputed`)."""
    from tests.integration.worlds_policy import make_worker

    worker = make_worker(config)
    out = dict(worker.generate(data=BatchedDataDict(data)))
    scored = BatchedDataDict(input_ids=out["output_ids"], input_lengths=out["unpadded_sequence_lengths"])
    return out | {"recomputed": worker.get_logprobs(data=scored)["logprobs"]}
