# SPDX-License-Identifier: Apache-2.0
"""From conversations (lists of messages) to flat, padded batches, and back to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nemo_rl.data.interfaces import FlatMessagesType, LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

TOKEN_KEYS = ("token_ids", "token_loss_mask", "generation_logprobs")
"""Per-message tensors of one length. The last two may be missing in a message: then they are zeros."""


def message_log_to_flat_messages(message_log: LLMMessageLogType) -> FlatMessagesType:
    """Join a conversation's messages.

    Args:
        message_log: Messages; tensors among their values run along the tokens.

    Returns:
        Each tensor key concatenated over all messages (a message without it counts as zeros, if it has
        ``token_ids``), every other key as a list with one entry per message that has it.

    Raises:
        ValueError: If a tensor's length is not that of the message's ``token_ids``, or ``token_ids`` is
        missing from
            a message while others have it.
    """
    tensor_keys = list(
        dict.fromkeys(key for m in message_log for key, value in m.items() if isinstance(value, Tensor))
    )
    flat: dict[str, Any] = {}
    for key in dict.fromkeys(key for message in message_log for key in message):
        if key in tensor_keys:
            flat[key] = torch.cat([_tokens_of(message, key, message_log) for message in message_log])
        else:
            flat[key] = [message[key] for message in message_log if key in message]
    return flat


def batched_message_log_to_flat_message(
    message_log_batch: Sequence[LLMMessageLogType],
    pad_value_dict: Mapping[str, int] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict[Any], Tensor]:
    """Join and right-pad a batch of conversations.

    Args:
        message_log_batch: B conversations.
        pad_value_dict: Padding per key; 0 if a key is not in it.
        make_sequence_length_divisible_by: S is rounded up to a multiple of it.

    Returns:
        The columns (tensors [B, S], other keys as lists of lists) and the lengths int64 [B].
    """
    if not message_log_batch:
        return BatchedDataDict(), torch.zeros(0, dtype=torch.int64)
    rows = [message_log_to_flat_messages(log) for log in message_log_batch]
    lengths = torch.tensor([len(row["token_ids"]) if "token_ids" in row else 0 for row in rows])
    multiple = make_sequence_length_divisible_by
    width = -(-max(1, int(lengths.max())) // multiple) * multiple
    pads = dict(pad_value_dict) if pad_value_dict is not None else {}
    batch: BatchedDataDict[Any] = BatchedDataDict()
    for key in dict.fromkeys(key for row in rows for key in row):
        example = next(row[key] for row in rows if key in row)
        if not isinstance(example, Tensor):
            batch[key] = [row.get(key, []) for row in rows]
            continue
        column = torch.full((len(rows), width), pads.get(key, 0), dtype=example.dtype)
        for index, row in enumerate(rows):
            if key in row:
                values = cast("Tensor", row[key])
                column[index, : len(values)] = values
            elif int(lengths[index]):
                column[index, : int(lengths[index])] = 0
        batch[key] = column
    return batch, lengths


def message_logs_to_batch(
    message_log_batch: Sequence[LLMMessageLogType],
    *,
    pad_token_id: int,
    make_sequence_length_divisible_by: int = 1,
) -> BatchedDataDict[Any]:
    """The token columns that policy and losses read.

    Args:
        message_log_batch: B conversations with ``token_ids``.
        pad_token_id: Fills ``input_ids`` behind a row's end.
        make_sequence_length_divisible_by: S is rounded up to a multiple of it.

    Returns:
        ``input_ids`` int64 [B, S], ``input_lengths`` int64 [B], ``token_mask`` float [B, S] (the messages'
        ``token_loss_mask``) and ``generation_logprobs`` float [B, S] (0 where nothing was sampled).
    """
    flat, lengths = batched_message_log_to_flat_message(
        [[{key: m[key] for key in TOKEN_KEYS if key in m} for m in log] for log in message_log_batch],
        pad_value_dict={"token_ids": pad_token_id},
        make_sequence_length_divisible_by=make_sequence_length_divisible_by,
    )
    input_ids = flat["token_ids"]
    zeros = torch.zeros(input_ids.shape, dtype=torch.float32)
    return BatchedDataDict(
        input_ids=input_ids,
        input_lengths=lengths,
        token_mask=flat["token_loss_mask"].float() if "token_loss_mask" in flat else zeros,
        generation_logprobs=flat["generation_logprobs"].float()
        if "generation_logprobs" in flat
        else zeros.clone(),
    )


def joined_token_ids(message_log: LLMMessageLogType) -> Tensor:
    """All tokens of a conversation, int64 [n]."""
    return torch.cat([cast("Tensor", message["token_ids"]) for message in message_log])


def message_text(message_log: LLMMessageLogType, *, sampled: bool) -> str:
    """The text of what was sampled, or of the prompt: all messages before the first sampled one."""
    if sampled:
        return "".join(str(m["content"]) for m in message_log if "generation_logprobs" in m)
    parts: list[str] = []
    for message in message_log:
        if "generation_logprobs" in message:
            break
        parts.append(str(message["content"]))
    return "".join(parts)


def _tokens_of(message: Mapping[str, Any], key: str, message_log: LLMMessageLogType) -> Tensor:
    """A message's tensor, or zeros in its place."""
    if "token_ids" not in message:
        if key == "token_ids" or any("token_ids" in other for other in message_log):
            raise ValueError(f"message {_place(message, message_log)} has no token_ids while others have")
        return message[key]
    length = len(message["token_ids"])
    if key not in message:
        example = next(other[key] for other in message_log if key in other)
        return torch.zeros(length, dtype=cast("Tensor", example).dtype)
    if len(message[key]) != length:
        place = _place(message, message_log)
        raise ValueError(f"message {place} has {length} tokens, but {len(message[key])} values of {key}")
    return message[key]


def _place(message: Mapping[str, Any], message_log: LLMMessageLogType) -> int:
    return next(index for index, other in enumerate(message_log) if other is message)
