# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: metrics.jsonl always, TensorBoard when asked, and rollouts as JSONL per step."""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.utils.logger_config import LoggerConfig

_VOLATILE = ("timing/", "performance/")


class LoggerInterface(ABC):
    """A sink for metrics."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """Record scalars.

        Args:
            metrics: name -> number.
            step: the training step they belong to.
            prefix: put before each name with a slash.
        """

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the configuration."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release files."""


def deterministic_view(record: Mapping[str, Any]) -> dict[str, Any]:
    """A metrics.jsonl record without what differs between two equal runs: timings and timestamps."""
    return {k: v for k, v in record.items() if k != "time" and not k.startswith(_VOLATILE)}


class JsonlLogger(LoggerInterface):
    """metrics.jsonl: one line for each call of `log_metrics`, flushed at once."""

    def __init__(self, path: Path, last_step: int | None = None):
        """Open the file for appending.

        Args:
            path: the file.
            last_step: step that the run resumes from; later lines are dropped. None starts a new file.
        """
        self.path = path
        kept = [] if last_step is None else [line for line in read_jsonl(path) if line["step"] <= last_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self._file = open(path, "a")  # noqa: SIM115 - lives as long as the logger

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """Append one line; see `LoggerInterface`."""
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        record |= {_join(prefix, name): _number(value) for name, value in metrics.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Nothing: config.resolved.yaml holds them."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger(LoggerInterface):
    """Scalars as TensorBoard events."""

    def __init__(self, path: Path, last_step: int | None = None):
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        self._writer = SummaryWriter(str(path), purge_step=None if last_step is None else last_step + 1)

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """Add the numeric values, as one event; see `LoggerInterface`."""
        numbers = {_join(prefix, name): _number(value) for name, value in metrics.items()}
        values = [
            self._summary.Value(tag=name, simple_value=number)
            for name, number in numbers.items()
            if isinstance(number, int | float)
        ]
        events = self._writer.file_writer
        assert events is not None, "the logger is closed"
        events.add_summary(self._summary(value=values), step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Add the configuration as text."""
        self._writer.add_text("config", f"```json\n{json.dumps(params, indent=1, default=str)}\n```")

    def close(self) -> None:
        """Flush the events."""
        self._writer.close()


class Logger(LoggerInterface):
    """Fans out to the sinks that `logger` enables."""

    def __init__(self, cfg: LoggerConfig, run_dir: Path, last_step: int | None = None):
        """Open the sinks.

        Args:
            cfg: the `logger` section.
            run_dir: the run directory.
            last_step: step that the run resumes from, None for a new run.
        """
        self.run_dir = run_dir
        self._sinks: list[LoggerInterface] = [JsonlLogger(run_dir / "metrics.jsonl", last_step)]
        if cfg.tensorboard_enabled:
            folder = cfg.tensorboard.log_dir
            path = run_dir / "tensorboard" if folder is None else Path(folder)
            self._sinks.append(TensorBoardLogger(path, last_step))

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """Record in every sink; see `LoggerInterface`."""
        for sink in self._sinks:
            sink.log_metrics(metrics, step, prefix)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record in every sink."""
        for sink in self._sinks:
            sink.log_hyperparams(params)

    def log_rows(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write rows as `<run_dir>/<name>/step_<step>.jsonl`, atomically.

        Args:
            name: a folder of the run directory, for example `rollouts`.
            step: the training step.
            rows: JSON-serialisable mappings.

        Returns:
            The file.
        """
        path = self.run_dir / name / f"step_{step}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        os.replace(temporary, path)
        return path

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a JSONL file; a last line cut short by a crash is left out; a missing file is empty."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _number(value: Any) -> Any:
    """A Python number of a number or one-element tensor; text passes; NaN and infinities become text."""
    if isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
