# SPDX-License-Identifier: Apache-2.0
"""The exit code of a training command (case 30) and what it says where it cannot start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nemo_rl.cli.train as cli
from nemo_rl.algorithms.config import SFTMasterConfig
from nemo_rl.algorithms.loop import Cadence, LoopState
from nemo_rl.utils.config import load

CONFIG = Path(__file__).parents[2] / "configs" / "cpu" / "sft_arithmetic.yaml"


@pytest.fixture
def config(tmp_path: Path) -> SFTMasterConfig:
    return load(CONFIG, [f"logger.log_dir={tmp_path / 'run'}"], SFTMasterConfig)


@pytest.mark.parametrize(("done", "code"), [(10, 0), (7, cli.STOPPED_EARLY)])
def test_fewer_steps_than_asked_for_are_no_success(
    config: SFTMasterConfig, monkeypatch: pytest.MonkeyPatch, done: int, code: int
) -> None:
    closed: list[bool] = []

    class Loop:
        def __init__(self, *_: Any) -> None: ...

        def run(self) -> LoopState:
            return LoopState(step=done)

    context = SimpleNamespace(close=lambda: closed.append(True))
    cadence = Cadence(max_steps=10, val_period=0, val_at_start=False, val_at_end=False)
    monkeypatch.setattr(cli, "_build", lambda *_: (context, cadence, LoopState()))
    monkeypatch.setattr(cli, "SFT", lambda *_: None)
    monkeypatch.setattr(cli, "TrainLoop", Loop)
    assert cli.train(config) == code
    assert closed == [True]


def test_what_the_user_can_change_is_one_line(
    config: SFTMasterConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("set policy.x to 3\nand a traceback")

    monkeypatch.setattr(cli, "_build", refuse)
    assert cli.train(config) == 2
    assert capsys.readouterr().err.splitlines()[0] == "nemo-rl: set policy.x to 3"
    assert "and a traceback" in (tmp_path / "run" / "error.log").read_text()


def test_a_run_directory_that_cannot_be_written_is_one_line(
    config: SFTMasterConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("a file")
    assert cli.train(config) == 2
    message = capsys.readouterr().err
    assert message.startswith("nemo-rl: logger.log_dir=")
    assert "Traceback" not in message
