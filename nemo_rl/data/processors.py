# SPDX-License-Identifier: Apache-2.0
"""Processors: one row of a data set in, one :class:`DatumSpec` out.

A row is ``{"messages": [{"role", "content"}, ...], "task_name": ...}``; for reinforcement learning the last
message is the assistant's, and holds the right answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from nemo_rl.data.chat import Segment, conversation_segments, encode, render
from nemo_rl.data.interfaces import (
    DatumSpec,
    LLMMessageLogType,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    TokenizerType,
)

OVERLONG_TOKENS_PER_MESSAGE = 4
"""What is left of each message of an over-long row, which stays in the batch with ``loss_multiplier`` 0."""


def math_hf_data_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """A prompt for sampling, with the right answer for the environment.

    Args:
        datum_dict: The row; all messages but a final assistant one make the prompt.
        task_data_spec: Wording of prompt and system message.
        tokenizer: With a chat template.
        max_seq_length: Most tokens of a prompt; a longer one gets ``loss_multiplier`` 0.
        idx: Index of the row.

    Returns:
        A row whose ``message_log`` is one user message: the rendered prompt, ending where the response
        begins, and whose ``extra_env_info`` is ``{"ground_truth": answer}``.

    Raises:
        ValueError: If the row has no prompt or no answer.
    """
    messages = [dict(message) for message in _messages(datum_dict, idx)]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            f"row {idx} of task {task_data_spec.task_name!r} has no answer: its last message must be the "
            "assistant's; set data.*.output_key to the column with the answer"
        )
    answer = str(messages.pop()["content"])
    prompt = _worded(messages, task_data_spec)
    text = render(tokenizer, prompt, add_generation_prompt=True)
    log: LLMMessageLogType = [_message("user", text, encode(tokenizer, text))]
    return _datum(log, max_seq_length, idx, datum_dict, extra_env_info={"ground_truth": answer})


def sft_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
    *,
    add_bos: bool = True,
    add_eos: bool = True,
    add_generation_prompt: bool = True,
    only_unmask_final: bool = False,
) -> DatumSpec:
    """A conversation with a loss mask on what the assistant said.

    Args:
        datum_dict: The row.
        task_data_spec: Wording of the first user message and the system message.
        tokenizer: With a chat template.
        max_seq_length: Most tokens of a row; a longer one gets ``loss_multiplier`` 0.
        idx: Index of the row.
        add_bos: Put the tokenizer's beginning-of-sequence token in front, if it has one and the template
            does not.
        add_eos: End the row with the end-of-sequence token if the template does not close the last
            assistant turn.
        add_generation_prompt: See :func:`nemo_rl.data.chat.conversation_segments`.
        only_unmask_final: Supervise the last assistant turn only (``sft.only_unmask_final``).

    Returns:
        A row whose messages have ``token_ids`` and ``token_loss_mask``. The number of supervised
        end-of-turn tokens equals the number of supervised assistant turns.

    Raises:
        ValueError: If the row has no assistant message.
        ChatTemplateError: If the assistant's tokens cannot be told from the rest.
    """
    messages = _messages(datum_dict, idx)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"row {idx} of task {task_data_spec.task_name!r} has no assistant message to learn from"
        )
    segments = conversation_segments(
        tokenizer, _worded(messages, task_data_spec), add_generation_prompt=add_generation_prompt
    )
    final = max(index for index, segment in enumerate(segments) if segment.role == "assistant")
    log: LLMMessageLogType = []
    for index, segment in enumerate(segments):
        token_ids, mask = list(segment.token_ids), list(segment.loss_mask)
        if add_eos and index == final == len(segments) - 1 and _lacks_end(segment, tokenizer):
            token_ids.append(tokenizer.eos_token_id)
            mask.append(1)
        if only_unmask_final and index != final:
            mask = [0] * len(mask)
        log.append(_message(segment.role, segment.text, token_ids, mask))
    bos = tokenizer.bos_token_id
    if add_bos and bos is not None and int(log[0]["token_ids"][0]) != bos:
        first = log[0]
        for key, value in (("token_ids", bos), ("token_loss_mask", 0)):
            first[key] = torch.cat([torch.tensor([value]), cast("torch.Tensor", first[key])])
    return _datum(log, max_seq_length, idx, datum_dict, extra_env_info={})


PROCESSORS: dict[str, TaskDataProcessFnCallable] = {
    "math_hf_data_processor": math_hf_data_processor,
    "math_data_processor": math_hf_data_processor,
    "sft_processor": sft_processor,
}


def register_processor(name: str, processor: TaskDataProcessFnCallable) -> None:
    """Make ``data.*.processor: <name>`` mean ``processor``.

    Raises:
        ValueError: If the name is taken by another function.
    """
    if name in PROCESSORS and PROCESSORS[name] is not processor:
        raise ValueError(f"a processor named {name!r} is registered already; choose another name")
    PROCESSORS[name] = processor


def get_processor(name: str) -> TaskDataProcessFnCallable:
    """The processor registered as ``name``.

    Raises:
        ValueError: If there is none.
    """
    if name not in PROCESSORS:
        raise ValueError(f"data.*.processor={name!r} is unknown; use one of {', '.join(sorted(PROCESSORS))}")
    return PROCESSORS[name]


def _messages(datum_dict: Mapping[str, Any], idx: int) -> Sequence[Mapping[str, Any]]:
    messages = datum_dict.get("messages", None)
    if not messages:
        raise ValueError(f"row {idx} has no messages")
    return messages


def _worded(messages: Sequence[Mapping[str, Any]], spec: TaskDataSpec) -> list[dict[str, Any]]:
    """The messages with the task's prompt around the first user message and its system message in front."""
    worded = [dict(message) for message in messages]
    if spec.prompt is not None:
        first = next(message for message in worded if message["role"] == "user")
        try:
            first["content"] = spec.prompt.format(first["content"])
        except (IndexError, KeyError, ValueError) as error:
            raise ValueError(
                f"data.*.prompt_file={spec.prompt_file!r}: {error}; the row's prompt goes where {{}} stands, and other "
                "braces must be doubled: {{ and }}"
            ) from None
    if spec.system_prompt is not None and worded[0]["role"] != "system":
        worded.insert(0, {"role": "system", "content": spec.system_prompt})
    return worded


def _lacks_end(segment: Segment, tokenizer: TokenizerType) -> bool:
    return not segment.closed and segment.token_ids[-1:] != [tokenizer.eos_token_id]


def _message(role: str, text: str, token_ids: list[int], mask: list[int] | None = None) -> dict[str, Any]:
    return {
        "role": role,
        "content": text,
        "token_ids": torch.tensor(token_ids, dtype=torch.int64),
        "token_loss_mask": torch.tensor([0] * len(token_ids) if mask is None else mask, dtype=torch.int64),
    }


def _datum(
    log: LLMMessageLogType,
    max_seq_length: int | None,
    idx: int,
    datum_dict: Mapping[str, Any],
    *,
    extra_env_info: dict[str, Any],
) -> DatumSpec:
    length = sum(len(message["token_ids"]) for message in log)
    multiplier = 1.0
    if max_seq_length is not None and length > max_seq_length:
        multiplier = 0.0
        keep = max(1, min(OVERLONG_TOKENS_PER_MESSAGE, max_seq_length // len(log)))
        for message in log:
            message["token_ids"] = message["token_ids"][:keep]
            message["token_loss_mask"] = message["token_loss_mask"][:keep]
        length = sum(len(message["token_ids"]) for message in log)
    datum = DatumSpec(
        message_log=log, length=length, extra_env_info=extra_env_info, loss_multiplier=multiplier, idx=idx
    )
    if "task_name" in datum_dict:
        datum["task_name"] = datum_dict["task_name"]
    return datum
