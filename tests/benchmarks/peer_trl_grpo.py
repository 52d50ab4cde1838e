# SPDX-License-Identifier: Apache-2.0
"""Runs in the peer's own environment: GRPO steps of trl's GRPOTrainer, one for each line on standard input.

For each step one JSON line with the seconds of its phases. A step starts when a line arrives and ends where the next
one could start (after logging and with the next batch at hand), so that two programs can take turns.

usage: python peer_trl_grpo.py MODEL_DIR STEPS THREADS
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 4, 4, 8, 64


class Turns(transformers.TrainerCallback):
    """Waits for a line before every step, and reports what the step took."""

    def __init__(self, answers: Any) -> None:
        """Write one line per step to ``answers``."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._answers = answers
        self._begun = self._trained = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The last step is over."""
        self._report()
        sys.stdin.readline()
        self.seconds.clear()
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Forward, backward, clipping, optimizer and schedule are done."""
        self._trained = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The last one."""
        self._report()

    def _report(self) -> None:
        if self._begun:
            self.seconds["step"] = time.perf_counter() - self._begun
            self.seconds["train"] = self._trained - self._begun - self.seconds["rollout"]
        self._answers.write(json.dumps(self.seconds) + "\n")  # the first one says: ready
        self._answers.flush()

    def time(self, owner: object, name: str, label: str) -> None:
        """Add the duration of every call of a method to ``label``."""
        inner = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            out = inner(*args, **kwargs)
            self.seconds[label] += time.perf_counter() - start
            return out

        setattr(owner, name, call)


def main(model_dir: str, steps: int, threads: int) -> None:
    """Run `steps` steps."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # trl prints its metrics; standard output is for the answers
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    config = trl.GRPOConfig(
        output_dir="unused",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        max_steps=steps,
        beta=0.04,
        num_iterations=1,
        temperature=1.0,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=False,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
    )
    prompts = [f"{i % 10}+{i // 10 % 10}+{i % 7}={i % 9}+" for i in range(200)]
    assert all(len(tokenizer(prompt)["input_ids"]) == PROMPT_TOKENS for prompt in prompts)
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(text)) % 3) for text in completions]

    turns = Turns(answers)
    trainer = trl.GRPOTrainer(
        model, reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[turns]
    )
    turns.time(trainer.model, "generate", "generation")
    turns.time(
        trainer, "_generate_and_score_completions", "rollout"
    )  # generation, rewards, reference log-probs
    turns.time(trainer.ref_model, "forward", "reference")
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
