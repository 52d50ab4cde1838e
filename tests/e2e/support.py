# SPDX-License-Identifier: Apache-2.0
"""The commands as a user types them, with the interpreter that runs the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NEMO_RL = [sys.executable, "-m", "nemo_rl.cli.main"]
MEGATRON_BRIDGE = [sys.executable, "-m", "megatron_bridge.cli"]
CONFIGS = Path(__file__).parents[2] / "configs"
SHORT_ANSWERS = (
    "grpo.reward_shaping="
    "{enabled: true, overlong_buffer_length: 5, overlong_buffer_penalty: 1.0, max_response_length: 5}"
)
"""A random model solves nothing; a reward for short answers gives it gradients all the same."""


def tiny_grpo_command(
    model_dir: Path, run_dir: Path, steps: int, save_period: int, *overrides: str
) -> list[str]:
    """`nemo-rl grpo` on the shipped CPU config, made tiny: TP=2, 4 prompts x 4 samples, seconds."""
    return [
        *NEMO_RL,
        "grpo",
        "--config",
        str(CONFIGS / "cpu" / "grpo_arithmetic.yaml"),
        f"policy.model_name={model_dir}",
        f"logger.log_dir={run_dir}",
        f"grpo.max_num_steps={steps}",
        f"checkpointing.save_period={save_period}",
        "checkpointing.keep_top_k=null",
        "checkpointing.metric_name=null",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "grpo.val_period=3",
        "grpo.max_val_samples=8",
        "policy.train_global_batch_size=16",
        "policy.train_micro_batch_size=8",
        "policy.logprob_batch_size=8",
        SHORT_ANSWERS,
        *overrides,
    ]


def export_bytes(run_dir: Path, step: int, model_dir: Path) -> bytes:
    """The run's final weights as the bytes of a HuggingFace safetensors file."""
    out = run_dir.parent / f"{run_dir.name}_hf"
    weights = run_dir / "checkpoints" / f"step_{step}"
    command = [*MEGATRON_BRIDGE, "export", str(weights), str(out), "--hf", str(model_dir)]
    subprocess.run(command, check=True, timeout=180)
    return (out / "model.safetensors").read_bytes()
