# SPDX-License-Identifier: Apache-2.0
"""`loss_fn.force_on_policy_ratio=true` spares the pass of the previous log-probs and trains the same."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.utils.logger import read_jsonl
from tests.e2e.support import NEMO_RL, tiny_grpo_command

SAME = ("train/loss", "train/grad_norm", "train/gen_kl_error", "train/approx_entropy", "train/reward")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forced_on_policy_ratio_gives_the_same_update_without_previous_logprobs(tmp_path: Path) -> None:
    sizes = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
    subprocess.run([*NEMO_RL, "tiny-model", str(tmp_path / "model"), *sizes], check=True, timeout=120)
    runs: dict[str, list[dict[str, Any]]] = {}
    for forced in ("false", "true"):
        overrides = [
            f"loss_fn.force_on_policy_ratio={forced}",
            "grpo.val_at_start=false",
            "grpo.num_generations_per_prompt=32",  # enough rows for some to end early
            "policy.train_global_batch_size=128",
            "cluster.gpus_per_node=1",
            "policy.megatron_cfg.tensor_model_parallel_size=1",
        ]
        run_dir = tmp_path / forced
        subprocess.run(
            tiny_grpo_command(tmp_path / "model", run_dir, 2, 10, *overrides), check=True, timeout=240
        )
        runs[forced] = [r for r in read_jsonl(run_dir / "metrics.jsonl") if "train/loss" in r]
        rows = read_jsonl(run_dir / "rollouts" / "step_1.jsonl")
        assert all(("ratio" in row) == (forced == "false") for row in rows)
    for with_pass, without in zip(runs["false"], runs["true"], strict=True):
        for name in SAME:
            assert without[name] == pytest.approx(with_pass[name], rel=1e-4, abs=1e-6), name
    assert any(record["train/grad_norm"] > 0 for record in runs["true"])
