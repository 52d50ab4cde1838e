# SPDX-License-Identifier: Apache-2.0
"""Generation on a Megatron model against transformers' `generate`, side by side in one process, as JSON.

4 prompts x 4 samples x 64 tokens on a Llama of 0.6 M parameters at TP=PP=1. The two take turns and the fastest turn
counts, so that what else the machine does changes the ratio little.

usage: python -m tests.benchmarks.generation_speed [TURNS] [THREADS]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from megatron_bridge import AutoBridge
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_dims import single_process_dims
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.megatron import MegatronGenerator
from tests.support.models import tiny_hf_dir
from tests.support.world import init_megatron

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 4, 4, 24, 64
SHAPE = {"layers": 4, "hidden": 112, "heads": 4, "kv_heads": 2, "vocab": 512}


def measure(turns: int = 5, threads: int = 1) -> dict[str, float]:
    """Best seconds of both, and their ratio. Needs a process without a process group; leaves none behind."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_hf_dir(Path(folder) / "model", "llama", **SHAPE)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            init_megatron()
            return _compare(path, turns)
        finally:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _compare(path: str, turns: int) -> dict[str, float]:
    ids = torch.randint(3, SHAPE["vocab"], (PROMPTS, PROMPT_TOKENS)).repeat_interleave(SAMPLES, 0)
    lengths = torch.full((len(ids),), PROMPT_TOKENS)
    peer = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    bridge = AutoBridge.from_hf_pretrained(path)
    provider = bridge.to_megatron_provider()
    provider.finalize()
    generator = MegatronGenerator(
        bridge.to_megatron_model(provider),
        single_process_dims(torch.device("cpu")),
        GenerationConfig(max_new_tokens=NEW_TOKENS, stop_token_ids=[], pad_token_id=0),
        vocab_size=SHAPE["vocab"],
        tokenizer=None,
        max_total_sequence_length=256,
    )
    data = BatchedDataDict(input_ids=ids, input_lengths=lengths, seeds=torch.arange(len(ids)))

    def transformers_generate() -> None:
        out = peer.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            do_sample=True, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert out.shape[1] == PROMPT_TOKENS + NEW_TOKENS

    def ours() -> None:
        out = generator.generate(data)
        assert int(out["generation_lengths"].min()) == NEW_TOKENS

    best = {"ours": float("inf"), "transformers": float("inf")}
    both: dict[str, Callable[[], None]] = {"ours": ours, "transformers": transformers_generate}
    for _ in range(turns + 1):
        for name, call in both.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best | {"ratio": best["ours"] / best["transformers"]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(*map(int, sys.argv[1:]))) + "\n")
