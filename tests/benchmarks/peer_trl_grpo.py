# SPDX-License-Identifier: Apache-2.0
"""Runs in the peer's own environment: seconds of a step of trl's GRPOTrainer by phase, as JSON.

usage: python peer_trl_grpo.py MODEL_DIR STEPS THREADS
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 64


def main(model_dir: str, steps: int, threads: int) -> None:
    """Time `steps` steps after one warm-up step."""
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(owner: object, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            out = inner(*args, **kwargs)
            seconds[label].append(time.perf_counter() - start)
            return out

        setattr(owner, name, call)

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    config = trl.GRPOConfig(
        output_dir="unused",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        max_steps=steps + 1,
        beta=0.04,
        num_iterations=1,
        temperature=1.0,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=False,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
    )
    data = Dataset.from_list([{"prompt": f"{i % 10}+{i // 10 % 10}+{i % 7}={i % 9}+"} for i in range(200)])

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(text)) % 3) for text in completions]

    trainer = trl.GRPOTrainer(model, reward, args=config, train_dataset=data, processing_class=tokenizer)
    timed(trainer, "training_step", "step")
    timed(trainer.model, "generate", "generation")
    timed(trainer, "_get_per_token_logps_and_entropies", "logprobs")
    timed(trainer, "_generate_and_score_completions", "rollout")
    timed(trainer, "compute_loss", "loss_forward")
    trainer.create_optimizer()
    timed(trainer.optimizer, "step", "optimizer")
    start = time.perf_counter()
    trainer.train()
    total = time.perf_counter() - start
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    sys.stdout.write(json.dumps({"seconds": dict(seconds), "total": total, **versions}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
