# SPDX-License-Identifier: Apache-2.0
"""Data sets by name: ``data.train.dataset_name`` to rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.config import ResponseDatasetConfig
from nemo_rl.data.datasets.arithmetic import ArithmeticDataset, Split
from nemo_rl.data.datasets.response import ResponseDataset, read_rows, take_and_split
from nemo_rl.data.interfaces import TaskDataSpec


@dataclass(frozen=True)
class RawDataset:
    """Rows ``{"messages": [...], "task_name": ...}`` and what belongs to them.

    Attributes:
        task_name: Name that every row carries.
        dataset: Rows to train on (or to validate on, if the config says so).
        val_dataset: Rows split off for validation, disjoint from ``dataset``; ``None`` if none were.
        task_spec: Wording of the prompts.
        processor: Registered name of the processor; ``None`` leaves it to the algorithm.
        env_name: Environment that scores the rows; ``None`` leaves it to the algorithm.
    """

    task_name: str
    dataset: Any
    val_dataset: Any | None
    task_spec: TaskDataSpec
    processor: str | None
    env_name: str | None


Loader = Callable[[ResponseDatasetConfig, str], tuple[Any, Any | None]]
"""Takes the config and the task name; returns rows, and rows split off for validation or ``None``."""


def load_response_dataset(config: ResponseDatasetConfig, task_name: str | None = None) -> RawDataset:
    """Load one entry of ``data.train`` or ``data.validation``.

    Args:
        config: The entry, with the keys of ``data.default`` filled in.
        task_name: Name that the rows carry; ``None`` is the data set's own name.

    Raises:
        ValueError: For an unknown name, missing files or columns, or sizes that do not fit.
    """
    name = "ResponseDataset" if config.dataset_name is None else config.dataset_name
    if name not in _LOADERS:
        raise ValueError(
            f"data.*.dataset_name={name!r} is unknown; use one of {', '.join(sorted(_LOADERS))}, "
            "or ResponseDataset with data_path"
        )
    task = name if task_name is None else task_name
    dataset, val_dataset = _LOADERS[name](config, task)
    if len(dataset) == 0:
        raise ValueError(f"data.*.dataset_name={name!r} has no rows")
    return RawDataset(
        task_name=task,
        dataset=dataset,
        val_dataset=val_dataset,
        task_spec=TaskDataSpec(
            task_name=task, prompt_file=config.prompt_file, system_prompt_file=config.system_prompt_file
        ),
        processor=config.processor,
        env_name=config.env_name,
    )


def register_dataset(name: str, loader: Loader) -> None:
    """Make ``data.*.dataset_name: <name>`` call ``loader``.

    Raises:
        ValueError: If the name is taken by another loader.
    """
    if name in _LOADERS and _LOADERS[name] is not loader:
        raise ValueError(f"a data set named {name!r} is registered already; choose another name")
    _LOADERS[name] = loader


def _load_arithmetic(config: ResponseDatasetConfig, task_name: str) -> tuple[Any, Any | None]:
    """``split`` says which part (default: train); the other part comes as validation if a size is given."""
    part: Split = "train" if config.split is None else config.split  # type: ignore[assignment]

    def make(split: Split, num_examples: int | None) -> ArithmeticDataset:
        try:
            return ArithmeticDataset(
                split, num_examples=num_examples, seed=config.seed, task_name=task_name, **config.kwargs
            )
        except TypeError as error:
            raise ValueError(f"data.*.kwargs={config.kwargs!r} of the arithmetic data set: {error}") from None

    rows = make(part, config.num_examples)
    size = config.split_validation_size
    if size == 0:
        return rows, None
    wanted = round(size * len(rows)) if size < 1 else int(size)
    return rows, make("validation" if part == "train" else "train", wanted)


def _load_response(config: ResponseDatasetConfig, task_name: str) -> tuple[Any, Any | None]:
    if config.data_path is None:
        raise ValueError(
            "data.*.dataset_name=ResponseDataset needs data.*.data_path, such as data/train.jsonl"
        )
    if config.kwargs:
        raise ValueError(f"data.*.kwargs={config.kwargs!r}: ResponseDataset takes none; set kwargs to {{}}")
    parts = take_and_split(
        read_rows(config.data_path, config.split, config.subset),
        num_examples=config.num_examples,
        validation_size=config.split_validation_size,
        seed=config.seed,
    )
    keys = {"input_key": config.input_key, "output_key": config.output_key, "chat_key": config.chat_key}
    train, validation = (
        None if part is None else ResponseDataset(part, task_name=task_name, **keys) for part in parts
    )
    return train, validation


_LOADERS: dict[str, Loader] = {
    "arithmetic": _load_arithmetic,
    "ResponseDataset": _load_response,
    "openai_format": _load_response,
}


def renamed(raw: RawDataset, **changes: Any) -> RawDataset:
    """A copy with other attributes."""
    return dataclasses.replace(raw, **changes)
