# SPDX-License-Identifier: Apache-2.0
"""Waiting for workers: the first failure of any of them ends the wait, with a clear exception."""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

logger = logging.getLogger(__name__)

_GRACE_S = (
    2.0  # after the first failure: time for other ranks to fail too, one of which may be the root cause
)
_NOTE_EVERY_S = 300.0
# What a rank says when a peer of its collective went away: a consequence, not a cause.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by (remote )?peer|broken pipe|remote process exited|DistNetwork",
    re.I,
)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_LAST_LINE_ERROR = re.compile(r"^(?:([\w.]+)\.)?(\w+): ", re.M)


class WorkerError(RuntimeError):
    """A worker raised, died or did not answer in time.

    The first line of the message says which worker, in what, and the last line of its traceback; the traceback follows.

    Attributes:
        rank: global rank of the worker that failed first by cause, not by time.
        worker_name: its name.
        method: what it was doing.
        group_usable: every called worker raised, so none is left waiting inside a collective.
    """

    rank: int
    worker_name: str
    method: str
    group_usable: bool = False


class WorkerInputError(WorkerError, ValueError):
    """A worker raised ValueError: what it was given, usually the configuration, is wrong."""


@dataclass(frozen=True)
class Call:
    """One method call in flight on one worker."""

    rank: int
    name: str
    method: str
    ref: ray.ObjectRef


@dataclass(frozen=True)
class _Failure:
    call: Call
    error: RayError

    @property
    def died(self) -> bool:
        return isinstance(self.error, RayActorError) and not self.error.actor_init_failed

    @property
    def text(self) -> str:
        return _COLOUR.sub("", str(self.error)).strip()

    @property
    def order(self) -> int:
        """Root causes first: a dead process, then an exception of its own, then a lost connection."""
        if self.died:
            return 0
        return 2 if _CONSEQUENCE.search(self.text.rsplit("\n", 3)[-1]) else 1


def collect(calls: Sequence[Call], deadline_s: float) -> list[Any]:
    """Results of ``calls``, in their order.

    Raises:
        WorkerError: a worker raised (with its traceback), died, or the deadline passed.
    """
    pending = {call.ref: call for call in calls}
    results: dict[ray.ObjectRef, Any] = {}
    failures: list[_Failure] = []
    start = time.monotonic()
    end, note = start + deadline_s, start + _NOTE_EVERY_S
    while pending:
        now = time.monotonic()
        if now >= end:
            break
        done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, min(end, note) - now))
        for ref in done:
            call = pending.pop(ref)
            try:
                results[ref] = ray.get(ref)
            except RayError as error:
                failures.append(_Failure(call, error))
                end = min(end, time.monotonic() + _GRACE_S)
        if not done and time.monotonic() >= note:
            note += _NOTE_EVERY_S
            logger.warning(
                "waiting for %s since %.0f s", _describe(list(pending.values())), time.monotonic() - start
            )
    if failures:
        raise _failure_error(failures, list(pending.values()), len(results))
    if pending:
        raise _timeout_error(list(pending.values()), deadline_s)
    return [results[call.ref] for call in calls]


def _failure_error(failures: list[_Failure], pending: list[Call], succeeded: int) -> WorkerError:
    first, *others = sorted(failures, key=lambda failure: failure.order)
    verb = "died during" if first.died else "failed in"
    where = f"worker {first.call.name} (rank {first.call.rank}) {verb} {first.call.method}"
    lines = [f"{where}: {_last_line(first.text)}", first.text]
    lines += [f"also {f.call.name} (rank {f.call.rank}): {_last_line(f.text)}" for f in others]
    if pending:
        lines.append(f"no result of {_describe(pending)}")
    kind = WorkerInputError if _is_value_error(first) else WorkerError
    error = kind("\n".join(lines))
    error.rank, error.worker_name, error.method = first.call.rank, first.call.name, first.call.method
    error.group_usable = (
        not pending and not succeeded and all(isinstance(f.error, RayTaskError) for f in failures)
    )
    error.__cause__ = first.error.cause if isinstance(first.error, RayTaskError) else first.error
    return error


def _timeout_error(pending: list[Call], deadline_s: float) -> WorkerError:
    error = WorkerError(f"no answer within {deadline_s:.0f} s from {_describe(pending)}")
    error.rank, error.worker_name, error.method = pending[0].rank, pending[0].name, pending[0].method
    return error


def _is_value_error(failure: _Failure) -> bool:
    """Whether the worker raised ValueError or a subclass; an exception of a constructor arrives as text only."""
    if isinstance(failure.error, RayTaskError):
        return isinstance(failure.error.cause, ValueError)
    names = [] if failure.died else _LAST_LINE_ERROR.findall(failure.text)
    if not names:
        return False
    module, name = names[-1]
    try:
        kind = getattr(importlib.import_module(module or "builtins"), name, None)
    except ImportError:
        return False
    return isinstance(kind, type) and issubclass(kind, ValueError)


def _last_line(text: str) -> str:
    return text.rsplit("\n", 1)[-1]


def _describe(calls: list[Call]) -> str:
    ranks = sorted(call.rank for call in calls)
    listed = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{calls[0].method} on {calls[0].name.rsplit('-', 1)[0]} rank(s) {listed}"
