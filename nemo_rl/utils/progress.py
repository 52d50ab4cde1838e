# SPDX-License-Identifier: Apache-2.0
"""What a long run says about itself: a live bar on a terminal, plain lines in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

logger = logging.getLogger(__name__)


class StepProgress:
    """Shows finished steps and their main figures."""

    def __init__(self, title: str, total: int, done: int = 0, console: Console | None = None):
        """Prepare; nothing is shown before `__enter__`.

        Args:
            title: short name of the work.
            total: number of steps.
            done: steps that an earlier run has finished.
            console: default: standard error.
        """
        self._title, self._total, self._done = title, total, done
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._last = time.monotonic()

    def __enter__(self) -> StepProgress:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(
                *columns,
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._done, figures="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, figures: Mapping[str, float]) -> None:
        """Report that `step` steps are finished.

        Args:
            step: finished steps.
            figures: a few numbers worth reading.
        """
        now = time.monotonic()
        text = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=text)
        else:
            logger.info("%s step %d/%d  %s  (%.1f s)", self._title, step, self._total, text, now - self._last)
        self._last = now

    def note(self, text: str) -> None:
        """Say something between two steps."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            logger.info("%s", text)
