# SPDX-License-Identifier: Apache-2.0
"""From the ``data`` section to processed data sets."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.config import DataConfig, ResponseDatasetConfig
from nemo_rl.data.datasets.processed import AllTaskProcessedDataset
from nemo_rl.data.datasets.response import Concatenation
from nemo_rl.data.interfaces import TaskDataProcessFnCallable, TaskDataSpec, TokenizerType
from nemo_rl.data.processors import get_processor, sft_processor
from nemo_rl.data.registry import RawDataset, load_response_dataset

logger = logging.getLogger(__name__)

DEFAULT_RL_PROCESSOR = "math_hf_data_processor"
DEFAULT_SFT_PROCESSOR = "sft_processor"


@dataclass(frozen=True)
class ResponseData:
    """What an algorithm trains and validates on.

    Attributes:
        train: All training entries, one after the other.
        validation: Validation data by name, each to be measured on its own; empty if there is none.
        env_of_task: For reinforcement learning, the key of ``env`` that scores each task's rows.
    """

    train: AllTaskProcessedDataset
    validation: dict[str, AllTaskProcessedDataset]
    env_of_task: dict[str, str]


def setup_response_data(
    tokenizer: TokenizerType,
    data_config: DataConfig,
    env_names: Sequence[str] | None = None,
    *,
    max_seq_length: int | None = None,
    only_unmask_final: bool = False,
) -> ResponseData:
    """Load, split and wrap everything that ``data`` names.

    Args:
        tokenizer: With a chat template.
        data_config: The section.
        env_names: Keys of the ``env`` section for reinforcement learning; ``None`` for supervised
            fine-tuning.
        max_seq_length: Limit if ``data.max_input_seq_length`` is null (``policy.max_total_sequence_length``).
        only_unmask_final: ``sft.only_unmask_final``.

    Raises:
        ValueError: For anything in the section that cannot be, with the key to change.
    """
    limit = data_config.max_input_seq_length
    limit = max_seq_length if limit is None else limit
    default_processor = DEFAULT_SFT_PROCESSOR if env_names is None else DEFAULT_RL_PROCESSOR
    train_raw = _load_all(data_config.train, data_config.default, "data.train")
    validation_raw = _load_all(data_config.validation, data_config.default, "data.validation")
    sft_options = {
        "add_bos": data_config.add_bos,
        "add_eos": data_config.add_eos,
        "add_generation_prompt": data_config.add_generation_prompt,
        "only_unmask_final": only_unmask_final,
    }

    def wrap(raws: Sequence[tuple[RawDataset, Any]]) -> AllTaskProcessedDataset:
        processors = {
            raw.task_name: (raw.task_spec, _processor(raw.processor, default_processor, sft_options))
            for raw, _ in raws
        }
        rows = [part for _, part in raws]
        return AllTaskProcessedDataset(
            rows[0] if len(rows) == 1 else Concatenation(rows), tokenizer, TaskDataSpec(), processors, limit
        )

    held_out = [(raw, raw.dataset) for raw in validation_raw]
    held_out += [(raw, raw.val_dataset) for raw in train_raw if raw.val_dataset is not None]
    data = ResponseData(
        train=wrap([(raw, raw.dataset) for raw in train_raw]),
        validation=_named({raw.task_name: wrap([(raw, part)]) for raw, part in held_out}, len(held_out)),
        env_of_task={} if env_names is None else _environments([*train_raw, *validation_raw], env_names),
    )
    logger.info(
        "data: %d training rows, validation %s",
        len(data.train),
        {name: len(rows) for name, rows in data.validation.items()},
    )
    return data


def merge_defaults(
    entry: ResponseDatasetConfig, default: ResponseDatasetConfig | None
) -> ResponseDatasetConfig:
    """The entry, with the keys that it does not set taken from ``data.default``."""
    if default is None:
        return entry
    given = {key: getattr(default, key) for key in default.model_fields_set}
    given |= {key: getattr(entry, key) for key in entry.model_fields_set}
    return ResponseDatasetConfig(**given)


def _load_all(
    entries: ResponseDatasetConfig | Sequence[ResponseDatasetConfig] | None,
    default: ResponseDatasetConfig | None,
    key: str,
) -> list[RawDataset]:
    """Load every entry; task names are made unique within the key, as each has its own wording and
    processor.
    """
    if entries is None:
        return []
    listed = [entries] if isinstance(entries, ResponseDatasetConfig) else list(entries)
    if not listed:
        raise ValueError(f"{key} is an empty list; name at least one data set, or set {key}=null")
    merged = [merge_defaults(entry, default) for entry in listed]
    loaded: list[RawDataset] = []
    for entry in merged:
        base = "ResponseDataset" if entry.dataset_name is None else entry.dataset_name
        taken = [raw.task_name for raw in loaded]
        name = next(n for n in (base, *(f"{base}_{i}" for i in range(2, len(merged) + 1))) if n not in taken)
        loaded.append(load_response_dataset(entry, name))
    return loaded


def _named(datasets: dict[str, AllTaskProcessedDataset], expected: int) -> dict[str, AllTaskProcessedDataset]:
    if len(datasets) != expected:
        raise ValueError(
            "a data set split off by data.train.split_validation_size has the name of one in data.validation; "
            "set split_validation_size=0 or data.validation=null"
        )
    return datasets


def _processor(name: str | None, default: str, sft_options: Mapping[str, bool]) -> TaskDataProcessFnCallable:
    processor = get_processor(default if name is None else name)
    return functools.partial(sft_processor, **sft_options) if processor is sft_processor else processor


def _environments(raws: Sequence[RawDataset], env_names: Sequence[str]) -> dict[str, str]:
    environments: dict[str, str] = {}
    for raw in raws:
        name = raw.env_name
        if name is None:
            if len(env_names) != 1:
                raise ValueError(
                    f"data.*.env_name of {raw.task_name!r} must say which of the environments {', '.join(env_names)} "
                    "scores it"
                )
            name = env_names[0]
        if name not in env_names:
            raise ValueError(
                f"data.*.env_name={name!r} of {raw.task_name!r} is not in env; use one of {', '.join(env_names)}"
            )
        if environments.setdefault(raw.task_name, name) != name:
            raise ValueError(
                f"task {raw.task_name!r} has env_name {environments[raw.task_name]!r} in training and {name!r} in "
                "validation; give the two the same"
            )
    return environments
