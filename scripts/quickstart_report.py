# SPDX-License-Identifier: Apache-2.0
"""Score the stages of the quickstart with plain transformers on held-out problems, and say where everything lies."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from nemo_rl.data.datasets.arithmetic import ArithmeticDataset
from nemo_rl.utils.logger import read_jsonl

NUM_PROBLEMS = 256


@torch.inference_mode()
def accuracy(model_dir: Path, problems: ArithmeticDataset) -> float:
    """Share of `problems` that greedy decoding answers exactly."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    chats = [problem["messages"] for problem in problems]
    prompts = [
        tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False) for chat in chats
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = model.generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    answers = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [answer.strip() == chat[1]["content"] for answer, chat in zip(answers, chats, strict=True)]
    return sum(right) / len(right)


def mean_step_seconds(run_dir: Path) -> float:
    """Mean seconds of a training step, the first one (warm-up) left out."""
    key = "timing/train/total_step_time"
    seconds = [record[key] for record in read_jsonl(run_dir / "metrics.jsonl") if key in record]
    return sum(seconds[1:]) / max(len(seconds) - 1, 1)


def main(out: Path) -> None:
    """Print the table."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = yaml.safe_load((out / "grpo" / "config.resolved.yaml").read_text())
    data = config["data"]["validation"]
    problems = ArithmeticDataset("validation", num_examples=NUM_PROBLEMS, seed=data["seed"], **data["kwargs"])
    table = Table(title=f"accuracy on {len(problems)} held-out problems (greedy, plain transformers)")
    for column in ("stage", "accuracy", "step time", "HuggingFace checkpoint", "run directory"):
        table.add_column(column, justify="right" if column in ("accuracy", "step time") else "left")
    for stage, weights, run_dir in (
        ("random", "base", None),
        ("SFT", "sft_hf", "sft"),
        ("GRPO", "grpo_hf", "grpo"),
    ):
        seconds = f"{mean_step_seconds(out / run_dir):.2f} s" if run_dir else ""
        where = str(out / run_dir) if run_dir else ""
        table.add_row(stage, f"{accuracy(out / weights, problems):.3f}", seconds, str(out / weights), where)
    console = Console(width=max(100, Console().width))
    console.print(table)
    for what, name in (("curves", "curves.png"), ("rollouts", "rollouts"), ("metrics", "metrics.jsonl")):
        console.print(f"{what:<8}  {out / 'grpo' / name}", highlight=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
