# SPDX-License-Identifier: Apache-2.0
"""A small environment with several turns: guess a number, told each time whether it is higher or lower."""

from __future__ import annotations

import re
from typing import Any, TypedDict

import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.math_environment import last_response
from nemo_rl.environments.metrics import answer_metrics

_NUMBER = re.compile(r"-?\d+")


class GuessNumberMetadata(TypedDict):
    """State of a game: the number, and how many guesses are left."""

    target: int
    guesses_left: int


class GuessNumberEnvironment(EnvironmentInterface[GuessNumberMetadata]):
    """Reward 1 for the right number; a game ends then, or when no guess is left.

    Its observations have role ``user``, so that they go through the chat template like any other user turn.
    """

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[GuessNumberMetadata]
    ) -> EnvironmentReturn[GuessNumberMetadata]:
        """Compare the first number of each response with the game's number."""
        observations, states, answers = [], [], list[str | None]()
        rewards, ended = [], []
        for log, state in zip(message_log_batch, metadata, strict=True):
            found = _NUMBER.search(last_response(log))
            guess = None if found is None else int(found.group())
            left = state["guesses_left"] - 1
            observations.append({"role": "user", "content": _hint(guess, state["target"])})
            states.append(GuessNumberMetadata(target=state["target"], guesses_left=left))
            answers.append(None if guess is None else str(guess))
            rewards.append(float(guess == state["target"]))
            ended.append(guess == state["target"] or left <= 0)
        return EnvironmentReturn(
            observations=observations,
            metadata=states,
            next_stop_strings=[None] * len(states),
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(ended, dtype=torch.bool),
            answers=answers,
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """The metrics of :func:`nemo_rl.environments.metrics.answer_metrics`."""
        return batch, answer_metrics(batch)


def _hint(guess: int | None, target: int) -> str:
    if guess is None:
        return "number?"
    if guess == target:
        return "yes"
    return "higher" if guess < target else "lower"
