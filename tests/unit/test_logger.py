# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl, rollouts and the run directory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.utils.logger import Logger, deterministic_view, read_jsonl
from nemo_rl.utils.logger_config import LoggerConfig
from nemo_rl.utils.run_dir import describe_run, exclusive_run_dir

QUIET = LoggerConfig(tensorboard_enabled=False)


def test_resume_drops_lines_after_the_restored_step(tmp_path: Path) -> None:
    first = Logger(QUIET, tmp_path)
    for step in (1, 2, 3):
        first.log_metrics({"loss": float(step)}, step, "train")
    first.close()
    resumed = Logger(QUIET, tmp_path, last_step=2)
    resumed.log_metrics({"loss": 30.0}, 3, "train")
    resumed.close()
    assert [line["train/loss"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 30.0]


def test_a_new_run_starts_a_new_file_and_a_cut_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n{"step": 2, "tra')
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1
    Logger(QUIET, tmp_path).close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_records_are_strict_json_and_deterministic_apart_from_time(tmp_path: Path) -> None:
    log = Logger(QUIET, tmp_path)
    log.log_metrics({"loss": math.nan, "n": 3}, 1, "train")
    log.log_metrics({"total": 1.5}, 1, "timing/train")
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]
    assert deterministic_view(lines[0]) == {"step": 1, "train/loss": "nan", "train/n": 3}
    assert deterministic_view(lines[1]) == {"step": 1}


def test_tensorboard_events_hold_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Logger(LoggerConfig(), tmp_path)
    log.log_metrics({"loss": 2.5}, 7, "train")
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(7, 2.5)]


def test_rows_are_one_file_per_step(tmp_path: Path) -> None:
    log = Logger(QUIET, tmp_path)
    path = log.log_rows("rollouts", 3, [{"prompt": "1+1=", "reward": 1.0}, {"prompt": "é", "reward": 0.0}])
    log.close()
    assert path == tmp_path / "rollouts" / "step_3.jsonl"
    assert [row["prompt"] for row in read_jsonl(path)] == ["1+1=", "é"]


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    code = f"""
from nemo_rl.utils.run_dir import exclusive_run_dir
try:
    with exclusive_run_dir({str(tmp_path)!r}): pass
except ValueError as error: print(error)
"""
    with exclusive_run_dir(tmp_path):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "logger.log_dir" in out
    assert "another run" in out
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert again == ""


def test_the_run_directory_explains_itself_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    describe_run(tmp_path, {"policy": {"model_name": "m"}})
    assert (tmp_path / "config.resolved.yaml").read_text() == "policy:\n  model_name: m\n"
    text = (tmp_path / "env.json").read_text()
    assert json.loads(text)["packages"]["torch"]
    assert "very-secret" not in text
    describe_run(tmp_path, {"policy": {"model_name": "m"}}, resumed_step=20)
    assert (tmp_path / "env.json").read_text() == text
    assert (tmp_path / "env.step_20.json").is_file()
