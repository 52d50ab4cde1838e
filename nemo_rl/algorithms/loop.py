# SPDX-License-Identifier: Apache-2.0
"""The loop that every algorithm runs in: counters, cadence of validation and saving, resume, stop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from nemo_rl.algorithms.context import Context
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.progress import StepProgress
from nemo_rl.utils.timer import Timer

logger = logging.getLogger(__name__)

_DATALOADER_FILE = "train_dataloader.pt"
FLAT_STEPS = 5
"""So many steps in a row without a gradient are worth a warning."""


@dataclass
class LoopState:
    """Counters of a run, kept in training_info.json.

    Attributes:
        step: finished training steps.
        consumed_samples: rows of the data set used so far.
        total_valid_tokens: tokens that the loss covered so far.
        num_skipped_steps: optimizer steps skipped so far (no valid token, or a gradient that was not finite).
        validation: metrics of the last validation.
    """

    step: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    num_skipped_steps: int = 0
    validation: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_training_info(cls, info: Mapping[str, Any]) -> LoopState:
        """Counters of a checkpoint."""
        return cls(**{name: info[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class StepResult:
    """What an algorithm reports of one step.

    Attributes:
        metrics: name -> number, equal in two runs of one configuration.
        num_samples: rows of the data set consumed.
        num_valid_tokens: tokens that the loss covered.
        num_skipped_steps: optimizer steps skipped.
        rows: rollouts, JSON-serialisable; empty for algorithms without.
    """

    metrics: dict[str, float]
    num_samples: int
    num_valid_tokens: int
    num_skipped_steps: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Cadence:
    """When to validate and when to stop.

    Attributes:
        max_steps: total number of steps.
        val_period: validate after every so many steps; 0: never.
        val_at_start: validate before the first step of a new run.
        val_at_end: validate after the last step.
        val_start_at: no periodic validation before this step; -1: no such limit.
    """

    max_steps: int
    val_period: int
    val_at_start: bool
    val_at_end: bool
    val_start_at: int = -1


class Algorithm(Protocol):
    """One training step and one validation; everything else is the loop's."""

    name: str
    headline: tuple[str, ...]  # metrics worth a place in the progress line

    def step(self, batch: Any, step: int, timer: Timer) -> StepResult:
        """Train on one batch of the loader; `step` counts from 0."""
        ...

    def validate(self, step: int, timer: Timer) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Measure on held-out data; metrics and rows to keep."""
        ...


class Deadline:
    """The run time after which a run saves and stops, `checkpointing.checkpoint_must_save_by`."""

    def __init__(self, limit: str | None, first_step: int):
        """Start the clock.

        Args:
            limit: `DD:HH:MM:SS`, or None for no limit.
            first_step: steps done before.
        """
        self._seconds = None if limit is None else parse_duration(limit)
        self._first_step = first_step
        self._start = time.monotonic()

    def reached(self, step: int) -> bool:
        """Whether another step of mean length would end past the limit."""
        if self._seconds is None:
            return False
        elapsed = time.monotonic() - self._start
        return elapsed + elapsed / (step - self._first_step) >= self._seconds


def parse_duration(text: str) -> int:
    """Seconds of `DD:HH:MM:SS`.

    Raises:
        ValueError: the text is something else.
    """
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise ValueError(
            f"checkpointing.checkpoint_must_save_by={text!r} must have the form DD:HH:MM:SS, such as 00:03:45:00"
        )
    days, hours, minutes, seconds = map(int, parts)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class TrainLoop:
    """Runs an algorithm from its last checkpoint to its last step."""

    def __init__(self, context: Context, algorithm: Algorithm, cadence: Cadence, state: LoopState):
        """Bind the parts.

        Args:
            context: what `algorithms.setup.build` made.
            algorithm: the algorithm.
            cadence: validation and stop.
            state: counters to go on from.
        """
        self.context = context
        self.algorithm = algorithm
        self.cadence = cadence
        self.state = state
        self.timer = Timer()
        self.deadline = Deadline(context.checkpointing.checkpoint_must_save_by, state.step)
        self._flat_steps = 0  # steps in a row without a gradient

    def run(self) -> LoopState:
        """Run to the end.

        Returns:
            The final counters.
        """
        state, cadence, checkpointing = self.state, self.cadence, self.context.checkpointing
        with StepProgress(self.algorithm.name, cadence.max_steps, state.step) as progress:
            if state.step == 0 and cadence.val_at_start:
                self._validate(progress)
            while state.step < cadence.max_steps:
                with self.timer.time("total_step_time"):
                    batch = next(self.context.train_loader)
                    result = self.algorithm.step(batch, state.step, self.timer)
                self._count(result)
                last = state.step == cadence.max_steps
                self._log(result, progress)
                if self._validation_due() or (last and cadence.val_at_end):
                    self._validate(progress)
                out_of_time = self.deadline.reached(state.step)
                if checkpointing.enabled and (last or out_of_time or self._due(checkpointing.save_period)):
                    self._save(result)
                self.timer.reset()
                if out_of_time and not last:
                    progress.note(f"stopping after step {state.step}: checkpointing.checkpoint_must_save_by")
                    break
        return state

    def _due(self, period: int) -> bool:
        return period > 0 and self.state.step % period == 0

    def _validation_due(self) -> bool:
        return self._due(self.cadence.val_period) and self.state.step >= self.cadence.val_start_at

    def _count(self, result: StepResult) -> None:
        self.state.step += 1
        self.state.consumed_samples += result.num_samples
        self.state.total_valid_tokens += result.num_valid_tokens
        self.state.num_skipped_steps += result.num_skipped_steps

    def _log(self, result: StepResult, progress: StepProgress) -> None:
        step, sink = self.state.step, self.context.logger
        self._warn(result)
        sink.log_metrics(result.metrics, step, "train")
        seconds = self.timer.seconds()
        sink.log_metrics(seconds, step, "timing/train")
        tokens = result.num_valid_tokens / seconds["total_step_time"]
        sink.log_metrics({"valid_tokens_per_sec": tokens}, step, "performance")
        if result.rows:
            sink.log_rows("rollouts", step, result.rows)
        progress.update(step, {name: result.metrics[name] for name in self.algorithm.headline})

    def _warn(self, result: StepResult) -> None:
        """Say so when a step taught nothing."""
        step, metrics = self.state.step, result.metrics
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name]):
                logger.warning("step %d: %s is %s; the optimizer step was skipped", step, name, metrics[name])
        if result.num_valid_tokens == 0:
            logger.warning(
                "step %d: no row counts (see rollouts/step_%d.jsonl); nothing was learnt", step, step
            )
        self._flat_steps = self._flat_steps + 1 if metrics["grad_norm"] == 0 else 0
        if self._flat_steps == FLAT_STEPS:
            logger.warning(
                "the last %d steps had no gradient (with GRPO: in every group all rewards were equal); the task may "
                "be too hard or too easy for this model",
                FLAT_STEPS,
            )

    def _validate(self, progress: StepProgress) -> None:
        timer = Timer()
        with timer.time("total_validation_time"):
            metrics, rows = self.algorithm.validate(self.state.step, timer)
        self.state.validation = dict(metrics)
        self.context.logger.log_metrics(metrics, self.state.step, "validation")
        self.context.logger.log_metrics(timer.seconds(), self.state.step, "timing/validation")
        if rows:
            self.context.logger.log_rows("validation", self.state.step, rows)
        for row in rows[: self.context.config.logger.num_val_samples_to_print]:
            progress.note(f"  {row['prompt']!r} -> {row['response']!r}  reward {row['reward']:.3g}")
        figures = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "/" not in name)
        progress.note(f"validation after step {self.state.step}: {figures}")

    def _save(self, result: StepResult) -> None:
        manager, config = self.context.checkpointer, self.context.config
        info: dict[str, Any] = asdict(self.state)
        info |= {f"train:{name}": value for name, value in result.metrics.items()}
        info |= {f"val:{name}": value for name, value in self.state.validation.items()}
        with self.timer.time("checkpointing"):
            check_metric_name(manager, info)
            path = Path(manager.init_tmp_checkpoint(self.state.step, info, config.to_dict()))
            policy = path / "policy"
            self.context.policy.save_checkpoint(
                str(policy / "weights"),
                str(policy / "optimizer") if self.context.checkpointing.save_optimizer else None,
                str(policy / "tokenizer"),
                self.context.checkpointing,
            )
            torch.save(self.context.train_loader.state_dict(), path / _DATALOADER_FILE)
            manager.finalize_checkpoint(path)


def check_metric_name(manager: CheckpointManager, info: Mapping[str, Any]) -> None:
    """Refuse a `checkpointing.metric_name` that this run never measures."""
    name = manager.config.metric_name
    kind = None if name is None else name.partition(":")[0]
    known = [key for key in info if key.startswith(f"{kind}:")]
    if name is not None and known and name not in known:
        raise ValueError(
            f"checkpointing.metric_name={name!r} is not measured; there are {', '.join(sorted(known))}"
        )


def resume_state(manager: CheckpointManager) -> tuple[LoopState, Path | None]:
    """Where a run goes on.

    Returns:
        The counters, and the directory of the checkpoint they come from (None for a new run).
    """
    latest = manager.get_latest_checkpoint_path()
    info = manager.load_training_info(latest) if latest else None
    if latest is None or info is None:
        return LoopState(), None
    return LoopState.from_training_info(info), Path(latest)


def load_dataloader_state(checkpoint: Path) -> dict[str, Any]:
    """The training loader's position at a checkpoint."""
    return torch.load(checkpoint / _DATALOADER_FILE, weights_only=True)
