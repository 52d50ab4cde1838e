# SPDX-License-Identifier: Apache-2.0
"""Counters, cadence, saving and resuming, with an algorithm that is one number."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.config import SFTMasterConfig
from nemo_rl.algorithms.context import Context
from nemo_rl.algorithms.loop import (
    Cadence,
    StepResult,
    TrainLoop,
    load_dataloader_state,
    parse_duration,
    resume_state,
)
from nemo_rl.data.dataloader import StatefulDataLoader
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger, deterministic_view, read_jsonl
from nemo_rl.utils.timer import Timer


class Stop(Exception):
    pass


class Number:
    """Policy and algorithm in one: a number that every batch changes."""

    name = "number"
    headline = ("loss",)

    def __init__(self, fail_at: int | None = None):
        self.value = 1.0
        self.fail_at = fail_at
        self.validated: list[int] = []

    def step(self, batch: list[int], step: int, timer: Timer) -> StepResult:
        if step == self.fail_at:
            raise Stop
        with timer.time("update"):
            self.value = (self.value * 31 + sum(batch)) % 1009
        return StepResult({"loss": self.value, "grad_norm": 0.0}, len(batch), 3 * len(batch))

    def validate(self, step: int, timer: Timer) -> tuple[dict[str, float], list[dict[str, Any]]]:
        self.validated.append(step)
        return {"accuracy": self.value}, [{"prompt": "p", "response": "r", "reward": 1.0}]

    def save_checkpoint(self, weights: str, optimizer: str | None, tokenizer: str, config: Any) -> None:
        Path(weights).parent.mkdir(parents=True, exist_ok=True)
        Path(weights).write_text(str(self.value))


def run(
    run_dir: Path, algorithm: Number, cadence: Cadence, **checkpointing: Any
) -> tuple[TrainLoop, CheckpointManager]:
    config = SFTMasterConfig(
        policy={"model_name": "none"},
        data={"train": {"dataset_name": "arithmetic"}},
        logger={"log_dir": str(run_dir), "tensorboard_enabled": False},
        checkpointing={"save_period": 4, **checkpointing},
    )
    manager = CheckpointManager(config.checkpointing)
    manager.remove_unfinished()
    state, checkpoint = resume_state(manager)
    loader = StatefulDataLoader(list(range(40)), 4, seed=3, collate_fn=list)
    if checkpoint is not None:
        loader.load_state_dict(load_dataloader_state(checkpoint))
        algorithm.value = float((checkpoint / "policy" / "weights").read_text())
    run_dir.mkdir(exist_ok=True)
    context = Context(
        config=config,
        run_dir=run_dir,
        tokenizer=None,
        policy=algorithm,  # type: ignore[arg-type]
        generation=None,  # type: ignore[arg-type]
        weight_sync=None,  # type: ignore[arg-type]
        environments={},
        train_loader=loader,
        val_loaders={},
        logger=Logger(config.logger, run_dir, None if checkpoint is None else state.step),
        checkpointer=manager,
        pad_token_id=0,
        cleanup=ExitStack(),
    )
    return TrainLoop(context, algorithm, cadence, state), manager


CADENCE = Cadence(max_steps=15, val_period=5, val_at_start=True, val_at_end=False)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [deterministic_view(record) for record in read_jsonl(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("fail_at", [2, 4, 7, 13])
def test_interrupted_run_ends_like_an_uninterrupted_one(tmp_path: Path, fail_at: int) -> None:
    straight = Number()
    run(tmp_path / "straight", straight, CADENCE)[0].run()
    broken = Number(fail_at=fail_at)
    with pytest.raises(Stop):
        run(tmp_path / "broken", broken, CADENCE)[0].run()
    resumed = Number()
    loop, manager = run(tmp_path / "broken", resumed, CADENCE)
    loop.run()
    assert resumed.value == straight.value
    assert records(tmp_path / "broken") == records(tmp_path / "straight")
    assert manager.load_training_info()["step"] == 15
    assert manager.load_training_info()["consumed_samples"] == 60


def test_cadence_of_validation_and_saving(tmp_path: Path) -> None:
    algorithm = Number()
    loop, manager = run(tmp_path, algorithm, CADENCE)
    loop.run()
    assert algorithm.validated == [0, 5, 10, 15]
    assert sorted(p.name for p in Path(manager.checkpoint_dir).glob("step_*")) == [
        "step_12",
        "step_15",
        "step_4",
        "step_8",
    ]
    late = Number()
    run(tmp_path / "late", late, Cadence(12, 5, False, True, val_start_at=6))[0].run()
    assert late.validated == [10, 12]


def test_a_finished_run_does_nothing_again(tmp_path: Path) -> None:
    run(tmp_path, Number(), CADENCE)[0].run()
    before = records(tmp_path)
    again = Number(fail_at=15)
    loop, _ = run(tmp_path, again, CADENCE)
    assert loop.run().step == 15
    assert records(tmp_path) == before


def test_a_metric_that_is_never_measured_is_refused(tmp_path: Path) -> None:
    loop, _ = run(tmp_path, Number(), CADENCE, metric_name="val:acuracy")
    with pytest.raises(ValueError, match=r"val:acuracy.*val:accuracy"):
        loop.run()


def test_time_limit_saves_and_stops(tmp_path: Path) -> None:
    loop, manager = run(tmp_path, Number(), CADENCE, checkpoint_must_save_by="00:00:00:00")
    assert loop.run().step == 1
    assert manager.load_training_info()["step"] == 1


def test_durations() -> None:
    assert parse_duration("01:02:03:04") == 93784
    with pytest.raises(ValueError, match="DD:HH:MM:SS"):
        parse_duration("3:00")


def test_resume_at_an_epoch_boundary_runs_the_next_epoch(tmp_path: Path) -> None:
    """Case 30: ten batches per epoch, a checkpoint after the tenth step, steps 11 to 15 still run."""
    first = Number(fail_at=10)
    with pytest.raises(Stop):
        run(tmp_path, first, CADENCE, save_period=10)[0].run()
    loop, manager = run(tmp_path, Number(), CADENCE, save_period=10)
    assert loop.state.step == 10
    assert loop.run().step == 15
    assert manager.load_training_info()["step"] == 15
    straight = tmp_path / "straight"
    run(straight, Number(), CADENCE, save_period=10)[0].run()
    assert records(tmp_path) == records(straight)


def test_steps_without_a_gradient_are_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, Number(), CADENCE)[0].run()  # Number reports a gradient norm of 0
    assert sum("had no gradient" in record.message for record in caplog.records) == 1


def test_the_last_validation_survives_a_resume(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(tmp_path, Number(fail_at=13), CADENCE, metric_name="val:accuracy")[0].run()
    loop, manager = run(tmp_path, Number(), Cadence(14, 0, False, False), metric_name="val:accuracy")
    loop.run()
    latest, before = (
        manager.load_training_info(),
        manager.load_training_info(tmp_path / "checkpoints" / "step_12"),
    )
    assert latest["step"] == 14
    assert latest["val:accuracy"] == before["val:accuracy"]
