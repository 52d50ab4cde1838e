# SPDX-License-Identifier: Apache-2.0
"""The types of the data pipeline: what a data set gives, what a processor makes of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict, Union

if TYPE_CHECKING:
    import torch

LLMMessageLogType = list[dict[str, Union[str, "torch.Tensor"]]]
"""A conversation: dicts with ``role`` and ``content``, and once tokenised ``token_ids`` int64 [n].

Concatenating the ``token_ids`` of all messages gives the row's tokens, template included. Optional per
message, aligned with its ``token_ids``: ``token_loss_mask`` [n] and, on what the policy sampled,
``generation_logprobs`` float [n].
"""

FlatMessagesType = dict[str, Union[list[str], "torch.Tensor"]]
"""A conversation joined: every tensor key concatenated over the messages, every text key a list."""

PathLike = Union[str, "os.PathLike[Any]"]
TokenizerType = Any
"""A ``transformers.PreTrainedTokenizerBase`` (not imported here: this module stays light)."""


class DatumSpec(TypedDict):
    """One processed row."""

    message_log: LLMMessageLogType
    length: int  # tokens over all messages
    extra_env_info: dict[str, Any]  # the environment's metadata, such as the right answer
    loss_multiplier: float  # 0 keeps the row out of the loss
    idx: int  # index in the data set
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str]]
    __extra__: NotRequired[Any]


class DPODatumSpec(TypedDict):
    """One processed pair for preference losses."""

    message_log_chosen: LLMMessageLogType
    message_log_rejected: LLMMessageLogType
    length_chosen: int
    length_rejected: int
    loss_multiplier: float
    idx: int


@dataclass
class TaskDataSpec:
    """How a task's prompts are worded.

    Attributes:
        task_name: Name that rows carry to find their environment.
        prompt_file: Text with ``{}`` where the row's own prompt goes.
        system_prompt_file: Text of the system message.
        prompt: Content of ``prompt_file``, or ``None``.
        system_prompt: Content of ``system_prompt_file``, or ``None``.
    """

    task_name: str | None = None
    prompt_file: PathLike | None = None
    system_prompt_file: PathLike | None = None

    def __post_init__(self) -> None:
        self.prompt: str | None = _read_prompt(self.prompt_file, "prompt_file")
        self.system_prompt: str | None = _read_prompt(self.system_prompt_file, "system_prompt_file")

    def copy_defaults(self, from_spec: TaskDataSpec) -> None:
        """Take over from ``from_spec`` whatever is ``None`` here."""
        for name in (*(field.name for field in fields(self)), "prompt", "system_prompt"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(from_spec, name))


class TaskDataProcessFnCallable(Protocol):
    """Turns one row of a data set into a :class:`DatumSpec`."""

    def __call__(
        self,
        datum_dict: dict[str, Any],
        task_data_spec: TaskDataSpec,
        tokenizer: TokenizerType,
        max_seq_length: int | None,
        idx: int,
    ) -> DatumSpec:
        """Process row ``idx``; over-long rows get ``loss_multiplier`` 0, they are not dropped."""
        raise NotImplementedError


def _read_prompt(path: PathLike | None, key: str) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"data.*.{key}={os.fspath(path)!r} does not exist; give the path of a text file"
        ) from None
