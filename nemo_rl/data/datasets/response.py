# SPDX-License-Identifier: Apache-2.0
"""Data sets of prompts and responses from files, in one row format.

Read are JSON lines, JSON and Parquet files, directories that ``datasets.save_to_disk`` wrote, and names that
``datasets.load_dataset`` knows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DEFAULT_CHAT_KEY = "messages"


class ResponseDataset(Sequence[dict[str, Any]]):
    """Rows ``{"messages": [...], "task_name": ...}`` made from raw rows.

    Args:
        rows: Raw rows; anything with ``len`` and integer indexing.
        task_name: Name that the rows carry.
        input_key: Column with the prompt; with ``output_key``, each row is one question and one answer.
        output_key: Column with the answer.
        chat_key: Column with a list of ``{"role", "content"}``; used if the two keys are ``None``.

    Raises:
        ValueError: If the first row lacks a column.
    """

    def __init__(
        self,
        rows: Any,
        *,
        task_name: str,
        input_key: str | None = None,
        output_key: str | None = None,
        chat_key: str | None = None,
    ) -> None:
        if (input_key is None) != (output_key is None):
            raise ValueError(
                "data.*.input_key and data.*.output_key belong together; set both, or neither and chat_key instead"
            )
        self.rows = rows
        self.task_name = task_name
        self.input_key = input_key
        self.output_key = output_key
        self.chat_key = DEFAULT_CHAT_KEY if chat_key is None else chat_key
        if len(rows):
            self[0]  # a wrong key is an error at start

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        row = self.rows[index]
        if self.input_key is not None and self.output_key is not None:
            messages = [
                {"role": "user", "content": str(_column(row, self.input_key, "input_key", index))},
                {"role": "assistant", "content": str(_column(row, self.output_key, "output_key", index))},
            ]
        else:
            messages = [dict(message) for message in _column(row, self.chat_key, "chat_key", index)]
            for message in messages:
                if "role" not in message or "content" not in message:
                    raise ValueError(
                        f"row {index}: a message of column {self.chat_key!r} has keys {sorted(message)}, not role and "
                        "content; set data.*.chat_key, or input_key and output_key"
                    )
        return {"messages": messages, "task_name": self.task_name}


def read_rows(data_path: str, split: str | None = None, subset: str | None = None) -> Any:
    """Raw rows of a file, a saved data set or a data set name.

    Args:
        data_path: ``.jsonl``, ``.json`` or ``.parquet`` file, a directory of ``save_to_disk``, or a name.
        split: Which split to read; needed if there are several.
        subset: Named subset of a data set name.

    Returns:
        A list of dicts, or a ``datasets.Dataset``.

    Raises:
        ValueError: If nothing is there, a line is not JSON, or the split does not exist.
    """
    path = Path(data_path)
    if path.suffix in (".jsonl", ".json"):
        return _read_json(path)
    import datasets

    if path.suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(_existing(path)))
    if path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        return _one_split(datasets.load_from_disk(str(path)), data_path, split)
    if path.is_absolute() or data_path.startswith("."):
        _existing(path)
    return _one_split(datasets.load_dataset(data_path, subset), data_path, split)


def take_and_split(
    rows: Any, *, num_examples: int | None, validation_size: float, seed: int
) -> tuple[Any, Any | None]:
    """Take ``num_examples`` rows and split a part off for validation.

    Args:
        rows: Anything with ``len`` and integer indexing.
        num_examples: Rows to keep, counted from the start; ``None`` keeps all.
        validation_size: A share below 1 or a number of rows; 0 splits nothing off.
        seed: Which rows go to validation.

    Returns:
        Training rows and validation rows, disjoint, both in their original order; ``None`` if nothing is
        split off.

    Raises:
        ValueError: If no training row would be left.
    """
    total = len(rows) if num_examples is None else min(num_examples, len(rows))
    num_validation = round(validation_size * total) if validation_size < 1 else int(validation_size)
    if validation_size == 0:
        return (rows if total == len(rows) else Subset(rows, range(total))), None
    if not 0 < num_validation < total:
        raise ValueError(
            f"data.*.split_validation_size={validation_size} of {total} rows leaves {num_validation} for "
            f"validation and {total - num_validation} for training; use a value between "
            f"{1 / total:.3g} and {1 - 1 / total:.3g}, or a number of rows"
        )
    chosen = set(random.Random(seed).sample(range(total), num_validation))
    training = [index for index in range(total) if index not in chosen]
    return Subset(rows, training), Subset(rows, sorted(chosen))


class Subset(Sequence[Any]):
    """Some rows of another data set, by index."""

    def __init__(self, rows: Any, indices: Sequence[int]) -> None:
        self.rows = rows
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return self.rows[self.indices[index]]


class Concatenation(Sequence[Any]):
    """Several data sets one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        offset = index if index >= 0 else index + len(self)
        if not 0 <= offset < len(self):
            raise IndexError(index)
        for part in self.parts:
            if offset < len(part):
                return part[offset]
            offset -= len(part)
        raise AssertionError("unreachable: the index was checked against the total length")


def _read_json(path: Path) -> list[dict[str, Any]]:
    text = _existing(path).read_text(encoding="utf-8")
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return json.loads(text)
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"data_path={str(path)!r}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(
                f"data_path={str(path)!r}, line {number} is a {type(row).__name__}, not an object"
            )
        rows.append(row)
    return rows


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"data.*.data_path={str(path)!r} does not exist")
    return path


def _one_split(loaded: Any, data_path: str, split: str | None) -> Any:
    if not isinstance(loaded, Mapping):
        if split is not None:
            raise ValueError(f"data.*.split={split!r}, but {data_path!r} has no splits; set split to null")
        return loaded
    names = list(loaded)
    if split is None and len(names) == 1:
        return loaded[names[0]]
    if split not in loaded:
        raise ValueError(f"data.*.split={split!r} is not in {data_path!r}; use one of {', '.join(names)}")
    return loaded[split]


def _column(row: Mapping[str, Any], name: str, key: str, index: int) -> Any:
    if name not in row:
        raise ValueError(f"row {index} has no column {name!r} (columns: {', '.join(row)}); set data.*.{key}")
    return row[name]
