# SPDX-License-Identifier: Apache-2.0
"""From the ``data`` section to processed data sets."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.chat import find_history_rewrite
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
    env_config: Mapping[str, Any] | None = None,
    *,
    only_unmask_final: bool = False,
    max_rollout_turns: int = 1,
) -> ResponseData:
    """Load, split and wrap everything that ``data`` names.

    Args:
        tokenizer: With a chat template.
        data_config: The section.
        env_config: The ``env`` section for reinforcement learning; ``None`` for supervised fine-tuning.
        only_unmask_final: ``sft.only_unmask_final``.
        max_rollout_turns: ``grpo.max_rollout_turns``; with several turns, a chat template that rewrites history is
            reported.

    Raises:
        ValueError: For anything in the section that cannot be, with the key to change.
    """
    rewrite = find_history_rewrite(tokenizer) if max_rollout_turns > 1 else None
    if rewrite is not None:
        logger.warning("%s. Rollouts keep the tokens as they were sampled; a chat server would not", rewrite)
    default_processor = DEFAULT_SFT_PROCESSOR if env_config is None else DEFAULT_RL_PROCESSOR
    train_raw = _load_all(data_config.train_sets())
    validation_raw = _load_all(data_config.validation_sets())
    if not train_raw:
        raise ValueError("data.train is an empty list; name at least one data set")
    env_of_task = {} if env_config is None else _environments([*train_raw, *validation_raw], list(env_config))
    stop_strings = {} if env_config is None else _stop_strings(env_of_task, env_config)
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
            rows[0] if len(rows) == 1 else Concatenation(rows),
            tokenizer,
            TaskDataSpec(),
            processors,
            data_config.max_input_seq_length,
            stop_strings,
        )

    held_out = [(raw, raw.dataset) for raw in validation_raw]
    held_out += [(raw, raw.val_dataset) for raw in train_raw if raw.val_dataset is not None]
    data = ResponseData(
        train=wrap([(raw, raw.dataset) for raw in train_raw]),
        validation=_named({raw.task_name: wrap([(raw, part)]) for raw, part in held_out}, len(held_out)),
        env_of_task=env_of_task,
    )
    for rows in (data.train, *data.validation.values()):
        _check_first_row(rows, tokenizer)
    logger.info(
        "data: %d training rows, validation %s",
        len(data.train),
        {name: len(rows) for name, rows in data.validation.items()},
    )
    return data


def _check_first_row(rows: AllTaskProcessedDataset, tokenizer: TokenizerType) -> None:
    """Meet a missing chat template or column now, not after the model has been loaded."""
    if sum(len(message["token_ids"]) for message in rows[0]["message_log"]) == 0:
        raise ValueError(
            f"the first row of task {rows[0].get('task_name')!r} has no tokens: either it is empty, or "
            f"policy.tokenizer.name={tokenizer.name_or_path!r} lacks its vocabulary files"
        )


def _load_all(entries: Sequence[ResponseDatasetConfig]) -> list[RawDataset]:
    """Load every entry; task names are made unique, as each has its own wording, processor and environment."""
    loaded: list[RawDataset] = []
    for entry in entries:
        base = "ResponseDataset" if entry.dataset_name is None else entry.dataset_name
        taken = [raw.task_name for raw in loaded]
        names = (base, *(f"{base}_{number}" for number in range(2, len(entries) + 1)))
        loaded.append(load_response_dataset(entry, next(name for name in names if name not in taken)))
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


def _stop_strings(env_of_task: Mapping[str, str], env_config: Mapping[str, Any]) -> dict[str, list[str]]:
    """The texts that end the first response of each task, for environments that have a ``stop_strings`` key."""
    sections = {task: env_config[name] for task, name in env_of_task.items()}
    return {
        task: list(section["stop_strings"])
        for task, section in sections.items()
        if section.get("stop_strings")
    }


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
