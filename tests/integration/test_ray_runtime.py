# SPDX-License-Identifier: Apache-2.0
"""A Ray that a driver starts ends with that driver, and only that one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[2]


def start_driver(
    tmp_path: Path, mode: str, name: str = "driver", **env: str
) -> tuple[subprocess.Popen[bytes], dict]:
    out = tmp_path / f"{name}.json"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_A")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.ray_driver", str(out), mode, str(tmp_path / "logs")],
        cwd=REPO,
        env={**clean, **env},
    )
    end = time.monotonic() + 120
    while not out.exists():
        assert process.poll() in (None, 0, 1), f"the driver ended with {process.returncode}"
        assert time.monotonic() < end, "the driver did not report within 120 s"
        time.sleep(0.1)
    return process, json.loads(out.read_text())


def running(pids: list[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def assert_all_gone(report: dict) -> None:
    end = time.monotonic() + 15
    temp_dir = Path(report["session"]).parent
    while (left := running(report["pids"])) or temp_dir.exists():
        assert time.monotonic() < end, f"still there: {left}, {temp_dir}"
        time.sleep(0.1)


@pytest.mark.parametrize("end", ["kill", pytest.param("raise", marks=pytest.mark.slow), "return"])
def test_nothing_is_left_when_the_driver_ends(tmp_path: Path, end: str) -> None:
    process, report = start_driver(tmp_path, {"kill": "wait"}.get(end, end))
    assert len(report["pids"]) >= 6  # worker, its child, supervisor, GCS, raylet, agents
    assert report["address"].startswith("127.")
    if end == "kill":
        process.send_signal(signal.SIGKILL)
    assert process.wait(60) == {"kill": -9, "raise": 1, "return": 0}[end]
    assert_all_gone(report)
    assert list((tmp_path / "logs").glob("raylet*")), "Ray's logs were not kept"


def test_attaching_leaves_the_cluster_alone(tmp_path: Path) -> None:
    """RAY_ADDRESS: the second driver starts no Ray, and its end takes only its own workers with it."""
    owner, ours = start_driver(tmp_path, "wait", "owner")
    guest, theirs = start_driver(tmp_path, "return", "guest", RAY_ADDRESS=ours["address"], **ours["auth"])
    assert guest.wait(60) == 0
    assert theirs["address"] == ours["address"]
    assert len(theirs["pids"]) == 2
    end = time.monotonic() + 15
    while running(theirs["pids"]):
        assert time.monotonic() < end, "workers of the guest are left"
        time.sleep(0.1)
    assert set(running(ours["pids"])) == set(ours["pids"])
    owner.send_signal(signal.SIGTERM)
    owner.wait(60)
    assert_all_gone(ours)


def test_workers_of_two_groups_share_gpus(tmp_path: Path) -> None:
    """On a node that claims GPUs 4 to 7: LOCAL_RANK is the index of the worker's GPU among the visible ones."""
    process, report = start_driver(tmp_path, "fake-gpus")
    assert process.wait(60) == 0
    for envs, ids in zip(report["environments"], report["ids"], strict=True):
        assert [env["NRL_DEVICE"] for env in envs] == ["cuda"] * 3
        assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["4,5,6,7"] * 3
        assert [int(env["LOCAL_RANK"]) + 4 for env in envs] == [int(gpu) for [gpu] in ids]
        assert len({env["LOCAL_RANK"] for env in envs}) == 3
    assert report["ids"][0] == report["ids"][1]
    assert report["free"] == 1.0
    assert "requested 2 GPUs" in report["refused"]
    assert "4 (1 free)" in report["refused"]
