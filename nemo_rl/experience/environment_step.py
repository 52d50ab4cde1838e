# SPDX-License-Identifier: Apache-2.0
"""Stepping the environments of a mixed batch, and what becomes of one that raises."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowOutcome:
    """What an environment said about one row in one turn.

    Attributes:
        observation: ``{"role", "content"}``.
        metadata: State for the next turn.
        stop_strings: Texts that end the next response, or ``None``.
        rewards: Reward by name; a single, unnamed reward has the name ``""``.
        terminated: Whether the conversation is over.
        error: Type of what went wrong, or ``None``; then the rewards mean nothing.
    """

    observation: Mapping[str, str]
    metadata: Any
    stop_strings: list[str] | None
    rewards: Mapping[str, float]
    terminated: bool
    error: str | None


def step_environments(
    message_logs: Sequence[LLMMessageLogType],
    metadata: Sequence[Any],
    task_names: Sequence[str],
    task_to_env: Mapping[str, EnvironmentInterface[Any]],
) -> list[RowOutcome]:
    """Step each row in the environment of its task, all rows of a task at once.

    If an environment raises, its rows are stepped again one by one, and only those that raise then are errors.

    Args:
        message_logs: n conversations.
        metadata: n states.
        task_names: n names.
        task_to_env: Environment of each task.

    Returns:
        n outcomes, in order.

    Raises:
        ValueError: If a task has no environment.
        RuntimeError: If an environment raises for every one of several rows: then it is broken, not a row.
    """
    rows_of_task: dict[str, list[int]] = {}
    for row, task in enumerate(task_names):
        if task not in task_to_env:
            raise ValueError(f"task {task!r} has no environment; known tasks are {', '.join(task_to_env)}")
        rows_of_task.setdefault(task, []).append(row)
    outcomes: dict[int, RowOutcome] = {}
    for task, rows in rows_of_task.items():
        logs, states = [message_logs[row] for row in rows], [metadata[row] for row in rows]
        outcomes |= dict(zip(rows, _step_task(task, task_to_env[task], logs, states), strict=True))
    return [outcomes[row] for row in range(len(message_logs))]


def _step_task(
    task: str, environment: EnvironmentInterface[Any], logs: list[LLMMessageLogType], states: list[Any]
) -> list[RowOutcome]:
    try:
        return _outcomes(environment.step(logs, states), len(logs))
    except Exception as error:  # noqa: BLE001 - foreign code; counted by type, and raised if no row gets through
        logger.warning(
            "the environment of task %r raised on a batch of %d rows, stepping them one by one: %s: %s",
            task,
            len(logs),
            type(error).__name__,
            error,
        )
    outcomes: list[RowOutcome] = []
    last_error: Exception | None = None
    for log, state in zip(logs, states, strict=True):
        try:
            outcomes += _outcomes(environment.step([log], [state]), 1)
        except Exception as error:  # noqa: BLE001 - as above
            last_error = error
            outcomes.append(_failed(error, state))
    if last_error is not None and len(logs) > 1 and all(outcome.error is not None for outcome in outcomes):
        raise RuntimeError(
            f"the environment of task {task!r} raised on every one of {len(logs)} rows; the last error was "
            f"{type(last_error).__name__}: {last_error}"
        ) from last_error
    return outcomes


def _outcomes(result: EnvironmentReturn[Any], num_rows: int) -> list[RowOutcome]:
    named = result.rewards if isinstance(result.rewards, dict) else {"": result.rewards}
    columns = {name: torch.as_tensor(values).float().tolist() for name, values in named.items()}
    ended = torch.as_tensor(result.terminateds).bool().tolist()
    errors = [None] * num_rows if result.errors is None else result.errors
    lengths = {
        len(ended),
        len(errors),
        len(result.observations),
        *(len(column) for column in columns.values()),
    }
    if lengths != {num_rows}:
        raise ValueError(f"an environment stepped {num_rows} rows but answered for {sorted(lengths)}")
    return [
        RowOutcome(
            observation=result.observations[row],
            metadata=result.metadata[row],
            stop_strings=result.next_stop_strings[row],
            rewards={name: column[row] for name, column in columns.items()},
            terminated=ended[row],
            error=errors[row],
        )
        for row in range(num_rows)
    ]


def _failed(error: Exception, state: Any) -> RowOutcome:
    # Through Ray, the exception that the environment raised is the cause of what arrives here.
    cause = error.__cause__ if type(error).__name__.startswith("RayTaskError") and error.__cause__ else error
    return RowOutcome(
        observation={"role": "environment", "content": ""},
        metadata=state,
        stop_strings=None,
        rewards={},
        terminated=True,
        error=type(cause).__name__,
    )
