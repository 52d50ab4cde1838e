# SPDX-License-Identifier: Apache-2.0
"""Rollouts: the policy answers, the environments judge or answer back, until every conversation is over.

Tokens are only ever appended. What the policy sampled goes into the training row as it was sampled; nothing
is rendered or tokenised a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.chat import encode, end_of_turn_id, observation_text
from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
from nemo_rl.data.llm_message_utils import joined_token_ids
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.experience.environment_step import RowOutcome, step_environments
from nemo_rl.experience.seeds import turn_seeds
from nemo_rl.models.generation.interfaces import GenerationInterface, GenerationSamplingParams

NON_FINITE_REWARD = "NonFiniteReward"
"""Error type of a row whose reward is not a finite number."""

PROMPT_TOO_LONG = "PromptTooLong"
"""Error type of a row whose prompt is above ``data.max_input_seq_length`` or leaves no room for a response; it is not
sampled, and counts in no reward, baseline or accuracy."""


@dataclass
class _Row:
    """One conversation while it runs."""

    log: LLMMessageLogType
    metadata: Any
    task_name: str
    stop_strings: list[str] | None
    length: int
    prompt_length: int
    generated: int = 0
    observed: int = 0
    turns: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    error: str | None = None

    @property
    def active(self) -> bool:
        return not (self.terminated or self.truncated)


def run_multi_turn_rollout(
    policy_generation: GenerationInterface,
    input_batch: BatchedDataDict[Any],
    tokenizer: TokenizerType,
    task_to_env: Mapping[str, EnvironmentInterface[Any]],
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    *,
    seeds: Tensor | None = None,
    sampling: GenerationSamplingParams | None = None,
) -> tuple[BatchedDataDict[Any], dict[str, float]]:
    """Sample a response to every row, step its environment, and go on until it ends; one turn is the special case.

    A row ends when its environment says so, when a response is cut off by a length limit or an observation
    no longer fits (it is truncated), when its environment fails, or after ``max_rollout_turns`` turns.

    Args:
        policy_generation: Samples responses.
        input_batch: B rows as :func:`nemo_rl.data.collate_fn.rl_collate_fn` makes them, each once per sample wanted.
        tokenizer: Decodes responses and encodes observations.
        task_to_env: Environment of each task name.
        max_seq_len: Longest row in tokens.
        max_rollout_turns: Most turns.
        greedy: Take the most likely token instead of sampling.
        seeds: int64 [B], sampling seed of each row's first turn (:mod:`nemo_rl.experience.seeds`); later turns derive
            theirs from it. ``None`` leaves seeds to the backend.
        sampling: Other temperature, top-p and top-k than the backend's configuration (validation has its own).

    Returns:
        The batch, with the same rows in the same order, and metrics. In the batch, ``message_log`` has grown by
        assistant messages (with ``token_ids``, ``token_loss_mask`` of ones and ``generation_logprobs``) and
        observations. New are ``total_reward`` float [B] (sum over turns; 0 if the row has no valid reward), one
        ``reward/<name>`` float [B] per named reward, ``reward_valid`` float [B] (0 for an errored row), ``errors``
        (list of error types or ``None``), ``truncated`` bool [B], ``prompt_lengths``, ``response_lengths`` and
        ``num_turns`` int64 [B]. ``loss_multiplier`` is 0 where ``reward_valid`` is.

    Raises:
        ValueError: If a prompt has no tokens, or a task has no environment.
        RuntimeError: If an environment raises on every row.
    """
    rows = _start(input_batch, max_seq_len)
    for turn in range(max_rollout_turns):
        active = [index for index, row in enumerate(rows) if row.active]
        if not active:
            break
        turn_rows = [rows[index] for index in active]
        row_seeds = None if seeds is None else turn_seeds(seeds[active], turn)
        cut_off = _generate(policy_generation, turn_rows, tokenizer, greedy, row_seeds, sampling)
        outcomes = step_environments(
            [row.log for row in turn_rows],
            [row.metadata for row in turn_rows],
            [row.task_name for row in turn_rows],
            task_to_env,
        )
        last_turn = turn == max_rollout_turns - 1
        for row, outcome, cut in zip(turn_rows, outcomes, cut_off, strict=True):
            _take(row, outcome)
            row.truncated = row.truncated or cut
            if row.active and not last_turn:
                _observe(row, outcome, tokenizer, max_seq_len)
    return _finish(input_batch, rows), _metrics(rows)


def _start(batch: BatchedDataDict[Any], max_seq_len: int) -> list[_Row]:
    rows = []
    for index, log in enumerate(batch["message_log"]):
        length = sum(len(message["token_ids"]) for message in log)
        if length == 0:
            raise ValueError(f"the prompt of row {index} (idx {batch['idx'][index]}) has no tokens")
        # A processor cuts a prompt above data.max_input_seq_length to a stump and takes it out of the loss.
        too_long = length >= max_seq_len or float(batch["loss_multiplier"][index]) == 0.0
        rows.append(
            _Row(
                log=list(log),
                metadata=batch["extra_env_info"][index],
                task_name=batch["task_name"][index],
                stop_strings=batch["stop_strings"][index] if "stop_strings" in batch else None,
                length=length,
                prompt_length=length,
                terminated=too_long,
                truncated=too_long,
                error=PROMPT_TOO_LONG if too_long else None,
            )
        )
    return rows


def _generate(
    generation: GenerationInterface,
    rows: list[_Row],
    tokenizer: TokenizerType,
    greedy: bool,
    seeds: Tensor | None,
    sampling: GenerationSamplingParams | None,
) -> list[bool]:
    """Append one sampled message to each row; returns whether each response was cut off by a length limit."""
    token_rows = [joined_token_ids(row.log) for row in rows]
    lengths = torch.tensor([len(tokens) for tokens in token_rows], dtype=torch.int64)
    input_ids = torch.full((len(rows), int(lengths.max())), tokenizer.pad_token_id, dtype=torch.int64)
    for index, tokens in enumerate(token_rows):
        input_ids[index, : len(tokens)] = tokens
    request: BatchedDataDict[Any] = BatchedDataDict(input_ids=input_ids, input_lengths=lengths)
    if any(row.stop_strings for row in rows):
        request["stop_strings"] = [row.stop_strings for row in rows]
    if seeds is not None:
        request["seeds"] = seeds
    options = {} if sampling is None else {"sampling": sampling}  # backends may lack it
    output = generation.generate(request, greedy=greedy, **options)
    for index, row in enumerate(rows):
        start, end = int(lengths[index]), int(output["unpadded_sequence_lengths"][index])
        sampled = output["output_ids"][index, start:end].clone()
        row.log.append(
            {
                "role": "assistant",
                "content": tokenizer.decode(sampled.tolist(), skip_special_tokens=True),
                "token_ids": sampled,
                "token_loss_mask": torch.ones(len(sampled), dtype=torch.int64),
                "generation_logprobs": output["logprobs"][index, start:end].float().clone(),
            }
        )
        row.length += len(sampled)
        row.generated += len(sampled)
        row.turns += 1
    return output["truncated"].bool().tolist()


def _take(row: _Row, outcome: RowOutcome) -> None:
    """Add a turn's rewards to the row and note how it goes on."""
    row.metadata = outcome.metadata
    row.stop_strings = outcome.stop_strings
    row.terminated = outcome.terminated
    row.error = outcome.error
    for name, value in outcome.rewards.items():
        row.rewards[name] = row.rewards.get(name, 0.0) + value
    if row.error is None and not all(torch.isfinite(torch.tensor(list(row.rewards.values())))):
        row.error = NON_FINITE_REWARD
    if row.error is not None:
        row.terminated = True


def _observe(row: _Row, outcome: RowOutcome, tokenizer: TokenizerType, max_seq_len: int) -> None:
    """Append the environment's answer; cut it if the row would leave no room for a response, which ends the row."""
    role, content = outcome.observation["role"], outcome.observation["content"]
    closed = False
    if role == "user" and len(row.log[-1]["token_ids"]):
        closed = int(row.log[-1]["token_ids"][-1]) == end_of_turn_id(tokenizer)
    ids = encode(tokenizer, observation_text(tokenizer, role, content, closed))
    room = max_seq_len - row.length
    if len(ids) >= room:
        ids, row.truncated = ids[: max(0, room)], True
    row.log.append(
        {
            "role": role,
            "content": content,
            "token_ids": torch.tensor(ids, dtype=torch.int64),
            "token_loss_mask": torch.zeros(len(ids), dtype=torch.int64),
        }
    )
    row.length += len(ids)
    row.observed += len(ids)


def _finish(batch: BatchedDataDict[Any], rows: list[_Row]) -> BatchedDataDict[Any]:
    valid = torch.tensor([row.error is None for row in rows], dtype=torch.float32)
    finished: BatchedDataDict[Any] = BatchedDataDict(dict(batch))
    finished["message_log"] = [row.log for row in rows]
    finished["extra_env_info"] = [row.metadata for row in rows]
    finished["stop_strings"] = [row.stop_strings for row in rows]
    finished["length"] = torch.tensor([row.length for row in rows])
    finished["total_reward"] = torch.tensor(
        [sum(row.rewards.values()) if row.error is None else 0.0 for row in rows], dtype=torch.float32
    )
    for name in dict.fromkeys(name for row in rows for name in row.rewards if name):
        finished[f"reward/{name}"] = torch.tensor(
            [row.rewards.get(name, 0.0) if row.error is None else 0.0 for row in rows], dtype=torch.float32
        )
    finished["reward_valid"] = valid
    finished["errors"] = [row.error for row in rows]
    finished["truncated"] = torch.tensor([row.truncated for row in rows], dtype=torch.bool)
    finished["prompt_lengths"] = torch.tensor([row.prompt_length for row in rows])
    finished["response_lengths"] = torch.tensor([row.generated for row in rows])
    finished["num_turns"] = torch.tensor([row.turns for row in rows])
    finished["loss_multiplier"] = batch["loss_multiplier"] * valid
    return finished


def _metrics(rows: list[_Row]) -> dict[str, float]:
    """Metrics over the rows that the environments could judge, and the number of the others by type."""
    judged = [row for row in rows if row.error is None]
    num = max(1, len(judged))
    turns = [row.turns for row in judged]
    metrics = {
        "total_turns": float(sum(turns)),
        "avg_turns_per_sample": sum(turns) / num,
        "max_turns_per_sample": float(max(turns, default=0)),
        "natural_termination_rate": sum(row.terminated and not row.truncated for row in judged) / num,
        "truncation_rate": sum(row.truncated for row in judged) / num,
        "max_turns_reached_rate": sum(row.active for row in judged) / num,
        "mean_total_tokens_per_sample": sum(row.length for row in judged) / num,
        "mean_gen_tokens_per_sample": sum(row.generated for row in judged) / num,
        "max_gen_tokens_per_sample": float(max((row.generated for row in judged), default=0)),
        "mean_env_tokens_per_sample": sum(row.observed for row in judged) / num,
        "num_env_errors": float(len(rows) - len(judged)),
    }
    for error, count in sorted(Counter(row.error for row in rows if row.error is not None).items()):
        metrics[f"env_errors/{error}"] = float(count)
    return metrics
