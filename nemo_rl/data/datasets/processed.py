# SPDX-License-Identifier: Apache-2.0
"""A data set whose rows are processed when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.data.interfaces import DatumSpec, TaskDataProcessFnCallable, TaskDataSpec, TokenizerType


class AllTaskProcessedDataset(Sequence[DatumSpec]):
    """Rows of one or several tasks, each through its task's processor.

    Args:
        dataset: Anything with ``len`` and integer indexing; rows are dicts.
        tokenizer: Passed to the processors.
        default_task_data_spec: Fills what a task's own spec leaves open.
        task_data_processors: One processor for all rows, or per ``task_name`` its spec and processor.
        max_seq_length: Passed to the processors; ``None`` is no limit.
        stop_strings: Per ``task_name``, texts that end a response, for rows that have none of their own.

    Raises:
        ValueError: On access to a row whose task has no processor.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: TokenizerType,
        default_task_data_spec: TaskDataSpec,
        task_data_processors: Mapping[str, tuple[TaskDataSpec, TaskDataProcessFnCallable]]
        | TaskDataProcessFnCallable,
        max_seq_length: int | None = None,
        stop_strings: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.default_task_data_spec = default_task_data_spec
        self.task_data_processors = task_data_processors
        self.max_seq_length = max_seq_length
        self.stop_strings = {} if stop_strings is None else dict(stop_strings)
        if isinstance(task_data_processors, Mapping):
            for spec, _ in task_data_processors.values():
                spec.copy_defaults(default_task_data_spec)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:  # type: ignore[override]
        row = self.dataset[idx]
        if not isinstance(self.task_data_processors, Mapping):
            spec, processor = self.default_task_data_spec, self.task_data_processors
        else:
            task = row["task_name"]
            if task not in self.task_data_processors:
                known = ", ".join(self.task_data_processors)
                raise ValueError(f"row {idx} is of task {task!r}, which has no processor; known are {known}")
            spec, processor = self.task_data_processors[task]
        datum = processor(row, spec, self.tokenizer, self.max_seq_length, idx)
        if "stop_strings" not in datum and datum.get("task_name") in self.stop_strings:
            datum["stop_strings"] = self.stop_strings[datum["task_name"]]
        return datum
