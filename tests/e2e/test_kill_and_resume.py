# SPDX-License-Identifier: Apache-2.0
"""kill -9 of the driver or of a worker, then the same command again: the run ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_rl.utils.logger import deterministic_view, read_jsonl
from tests.e2e.support import NEMO_RL, export_bytes, tiny_grpo_command

STEPS, SAVE_PERIOD = 6, 2
DEADLINE_S = 420.0
FAILURE_DEADLINE_S = 60.0  # from the death of a worker to the end of the driver


@dataclass(frozen=True)
class Point:
    """When to kill: a name, and a test of the run directory."""

    name: str
    reached: Callable[[Path], bool]


def steps_done(run_dir: Path) -> int:
    return max((r["step"] for r in read_jsonl(run_dir / "metrics.jsonl") if "train/loss" in r), default=0)


def is_saving(run_dir: Path, step: int) -> bool:
    return (run_dir / "checkpoints" / f"tmp_step_{step}").exists()


BEFORE_FIRST_SAVE = Point("before the first checkpoint", lambda d: steps_done(d) >= 1)
DURING_SAVE = Point("during a save", lambda d: is_saving(d, 4))
BETWEEN_SAVES = Point("between two checkpoints", lambda d: steps_done(d) >= 5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "base"
    sizes = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
    subprocess.run([*NEMO_RL, "tiny-model", str(out), *sizes], check=True, timeout=120)
    return out


@pytest.fixture(scope="module")
def straight(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], bytes]:
    """Metrics and exported weights of an undisturbed run."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    subprocess.run(tiny_grpo_command(model_dir, run_dir, STEPS, SAVE_PERIOD), check=True, timeout=DEADLINE_S)
    metrics = records(run_dir)
    assert any(record.get("train/grad_norm", 0.0) > 0 for record in metrics), "the run must really train"
    return metrics, export_bytes(run_dir, STEPS, model_dir)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [deterministic_view(record) for record in read_jsonl(run_dir / "metrics.jsonl")]


def policy_workers(driver: int) -> list[psutil.Process]:
    """The driver's Megatron workers: Ray runs below the driver's supervisor."""
    family = psutil.Process(driver).children(recursive=True)
    return [p for p in family if any("MegatronPolicyWorker" in part for part in p.cmdline()[:1])]


def kill_at(point: Point, victim: str, command: list[str], run_dir: Path) -> None:
    """Start the run, kill -9 the victim at the point, and wait for the driver to end."""
    driver = subprocess.Popen(command)
    try:
        end = time.monotonic() + DEADLINE_S
        while not point.reached(run_dir):
            assert driver.poll() is None, f"the run ended before it was {point.name}"
            assert time.monotonic() < end, f"the run was never {point.name}"
            time.sleep(0.005)
        if victim == "driver":
            family = psutil.Process(driver.pid).children(recursive=True)
            os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
            _, alive = psutil.wait_procs(family, timeout=30)
            assert not alive, f"left behind by the dead driver: {alive}"
        else:
            workers = policy_workers(driver.pid)
            assert len(workers) == 2
            workers[1].kill()
            assert driver.wait(timeout=FAILURE_DEADLINE_S) != 0
    finally:
        if driver.poll() is None:
            driver.kill()
            driver.wait()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("victim", "point"),
    [
        pytest.param("driver", DURING_SAVE, id="driver-during-a-save"),
        pytest.param("worker", BETWEEN_SAVES, id="worker-between-saves"),
        pytest.param("driver", BEFORE_FIRST_SAVE, id="driver-before-a-save", marks=pytest.mark.slow),
        pytest.param("driver", BETWEEN_SAVES, id="driver-between-saves", marks=pytest.mark.slow),
        pytest.param("worker", BEFORE_FIRST_SAVE, id="worker-before-a-save", marks=pytest.mark.slow),
        pytest.param("worker", DURING_SAVE, id="worker-during-a-save", marks=pytest.mark.slow),
    ],
)
def test_killed_run_resumes_bit_equal(
    victim: str, point: Point, model_dir: Path, straight: tuple[list[dict[str, Any]], bytes], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = tiny_grpo_command(model_dir, run_dir, STEPS, SAVE_PERIOD)
    kill_at(point, victim, command, run_dir)
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    metrics, weights = straight
    assert records(run_dir) == metrics
    assert export_bytes(run_dir, STEPS, model_dir) == weights
    assert not list((run_dir / "checkpoints").glob("tmp_*"))
