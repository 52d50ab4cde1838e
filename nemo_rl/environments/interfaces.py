# SPDX-License-Identifier: Apache-2.0
"""What an environment is: it looks at conversations and answers with rewards, observations and an end."""

from __future__ import annotations

import abc
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

MetadataT = TypeVar("MetadataT")


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """What :meth:`EnvironmentInterface.step` gives for n conversations.

    Attributes:
        observations: n dicts ``{"role", "content"}``, the environment's answers. Role ``user`` is rendered
            as a user turn of the chat template, followed by the generation prompt; any other role goes in
            as it is.
        metadata: n states to hand to the next step.
        next_stop_strings: n lists of texts that end the next response, or ``None``.
        rewards: float [n], added up over turns; or several named rewards, ``{name: float [n]}``, whose sum
            counts.
        terminateds: bool [n], whether the conversation is over.
        answers: n extracted answers, or ``None``.
        errors: n entries: the type of what went wrong where the environment could not judge a row, else
            ``None``. Such a row is left out of baseline, loss and metrics, whatever its reward says.
            ``None``: no row.
    """

    observations: list[dict[str, str]]
    metadata: list[MetadataT]
    next_stop_strings: list[list[str] | None] | list[None]
    rewards: Tensor | dict[str, Tensor]
    terminateds: Tensor
    answers: list[str | None] | None
    errors: list[str | None] | None = None


class EnvironmentInterface(abc.ABC, Generic[MetadataT]):
    """Steps a batch of conversations. State lives in the metadata, so that rows may be stepped in any
    grouping.
    """

    @abc.abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """Judge or answer the last assistant message of each conversation.

        Args:
            message_log_batch: n conversations.
            metadata: Their states, at first the rows' ``extra_env_info``.

        If this raises, each row is stepped again on its own, and only rows that raise then are left out.
        """

    @abc.abstractmethod
    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """Metrics of a finished batch, as :func:`nemo_rl.experience.rollouts.run_multi_turn_rollout`
        returns it.

        Returns:
            The batch, changed if the environment wants that, and metrics by name.
        """

    def shutdown(self) -> None:
        """Release processes and other resources; may be called twice."""
