# SPDX-License-Identifier: Apache-2.0
"""Checkpoints appear whole or not at all, and retention never takes the only one (case 32)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl.utils.checkpoint import CheckpointManager, changed_keys, load_run_config


def save(manager: CheckpointManager, step: int, **info: float) -> None:
    path = Path(manager.init_tmp_checkpoint(step, {"step": step, **info}, {"a": 1}))
    (path / "policy").mkdir()
    (path / "policy" / "weights.bin").write_bytes(b"x" * 100)
    manager.finalize_checkpoint(path)


def steps(root: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in root.glob("step_*"))


def manager_at(root: Path, **options: object) -> CheckpointManager:
    return CheckpointManager({"checkpoint_dir": str(root), **options})


def test_saved_checkpoint_is_found_and_read_back(tmp_path: Path) -> None:
    manager = manager_at(tmp_path)
    assert manager.get_latest_checkpoint_path() is None
    assert manager.load_training_info() is None
    save(manager, 2)
    save(manager, 10)
    assert manager.get_latest_checkpoint_path() == str(tmp_path / "step_10")
    assert manager.load_training_info() == {"step": 10}
    assert (tmp_path / "step_10" / "config.yaml").read_text() == "a: 1\n"
    assert json.loads((tmp_path / "latest_checkpoint_status.json").read_text()) == {
        "step": 10,
        "path": "step_10",
    }


def test_what_changed_since_a_checkpoint(tmp_path: Path) -> None:
    old = {"policy": {"model_name": "a", "betas": [1, 2]}, "grpo": {"seed": 1}}
    path = Path(manager_at(tmp_path).init_tmp_checkpoint(2, {}, old))
    assert changed_keys(load_run_config(path), old) == []
    new = {"policy": {"model_name": "b", "betas": [1, 2]}, "grpo": {"seed": 1, "new": True}}
    assert changed_keys(load_run_config(path), new) == [
        "policy.model_name: 'a' -> 'b'",
        "grpo.new: None -> True",
    ]
    assert changed_keys(load_run_config(tmp_path), new) == [], "a checkpoint without a configuration"


@pytest.mark.parametrize("higher", [True, False])
def test_best_by_metric_stay_and_the_latest_always(tmp_path: Path, higher: bool) -> None:
    manager = manager_at(tmp_path, keep_top_k=2, metric_name="val:accuracy", higher_is_better=higher)
    sign = 1 if higher else -1
    for step, accuracy in [(1, 0.5), (2, 0.9), (3, 0.9), (4, 0.1), (5, 0.2)]:
        save(manager, step, **{"val:accuracy": sign * accuracy})
    assert steps(tmp_path) == [2, 3, 5]
    assert manager.get_best_checkpoint_path() == str(tmp_path / "step_3"), "the newer one wins a tie"


def test_checkpoints_without_the_metric_lose(tmp_path: Path) -> None:
    manager = manager_at(tmp_path, keep_top_k=1, metric_name="val:accuracy")
    save(manager, 1, **{"val:accuracy": 0.1})
    save(manager, 2)
    save(manager, 3)
    assert steps(tmp_path) == [1, 3]


def test_a_metric_that_is_nan_never_wins(tmp_path: Path) -> None:
    manager = manager_at(tmp_path, keep_top_k=1, metric_name="train:loss", higher_is_better=False)
    for step, loss in [(1, 0.5), (2, float("nan")), (3, 0.2), (4, float("nan")), (5, 0.9)]:
        save(manager, step, **{"train:loss": loss})
    assert steps(tmp_path) == [3, 5]
    assert manager.get_best_checkpoint_path() == str(tmp_path / "step_3")


def test_the_only_complete_checkpoint_survives_an_unfinished_save(tmp_path: Path) -> None:
    manager = manager_at(tmp_path, keep_top_k=1)
    save(manager, 1)
    manager.init_tmp_checkpoint(2, {"step": 2})
    fresh = manager_at(tmp_path, keep_top_k=1)
    assert fresh.get_latest_checkpoint_path() == str(tmp_path / "step_1")
    fresh.remove_unfinished()
    assert not list(tmp_path.glob("tmp_step_*"))
    assert steps(tmp_path) == [1]


def test_a_checkpoint_of_a_rolled_back_run_is_replaced(tmp_path: Path) -> None:
    manager = manager_at(tmp_path)
    save(manager, 4, loss=1.0)
    save(manager, 4, loss=2.0)
    assert manager.load_training_info() == {"step": 4, "loss": 2.0}
    assert [p.name for p in tmp_path.glob("*step*")] == ["step_4"]


def test_metric_name_needs_a_prefix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpointing\.metric_name='accuracy'.*val:accuracy"):
        manager_at(tmp_path, metric_name="accuracy")


_SAVER = """
import sys
from tests.unit.test_checkpoint import manager_at, save
manager = manager_at(sys.argv[1], keep_top_k=1)
print("ready", flush=True)
for step in range(1, 100000):
    save(manager, step)
"""


@pytest.mark.parametrize("delay_ms", [3, 11, 23, 40, 61])
def test_kill_at_any_point_leaves_a_complete_latest_checkpoint(tmp_path: Path, delay_ms: int) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _SAVER, str(tmp_path)],
        cwd=root,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    end = time.monotonic() + 30
    while not steps(tmp_path) and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(delay_ms / 1000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    manager = manager_at(tmp_path)
    latest = manager.get_latest_checkpoint_path()
    assert latest is not None
    for path in tmp_path.glob("step_*"):
        assert json.loads((path / "training_info.json").read_text())["step"] == int(path.name[5:])
        assert (path / "policy" / "weights.bin").stat().st_size == 100
    manager.remove_unfinished()
    assert {p.name.partition("_")[0] for p in tmp_path.glob("*step_*")} == {"step"}
