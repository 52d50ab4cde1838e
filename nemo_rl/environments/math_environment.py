# SPDX-License-Identifier: Apache-2.0
"""``env.math``: one turn, reward 1 if the response holds the right answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.config import MathEnvConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.metrics import answer_metrics
from nemo_rl.environments.verifier_pool import Verdict, VerifierPool


class MathEnvironmentMetadata(TypedDict):
    """State of a row: the right answer."""

    ground_truth: str


class MathEnvironment(EnvironmentInterface[MathEnvironmentMetadata]):
    """Compares the response with the right answer.

    ``verifier_type: math`` understands mathematics (math-verify, in worker processes under a time limit of
    ``timeout_s`` per row); it takes ``3+4`` for a right answer to ``3+4``. ``exact`` compares text without the white
    space around it, ``last_number`` the last number in the response with the right one, both in this process.

    A row whose verification hangs, crashes or fails is reported in ``errors`` by type; it is not a reward
    of 0.

    Args:
        config: The section ``env.math``, or a mapping with its keys.
    """

    def __init__(self, config: MathEnvConfig | Mapping[str, Any]) -> None:
        self.config = config if isinstance(config, MathEnvConfig) else MathEnvConfig(**config)
        self._pool: VerifierPool | None = None
        if self.config.verifier_type == "math":
            self._pool = VerifierPool(self.config.num_workers, self.config.timeout_s)
            self._pool.start()

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MathEnvironmentMetadata]
    ) -> EnvironmentReturn[MathEnvironmentMetadata]:
        """Judge the last assistant message of each conversation; see :class:`EnvironmentInterface`."""
        responses = [last_response(log) for log in message_log_batch]
        truths = [str(state["ground_truth"]) for state in metadata]
        if self._pool is None:
            judge = _LOCAL_VERIFIERS[self.config.verifier_type]
            verdicts = [judge(*pair) for pair in zip(responses, truths, strict=True)]
        else:
            verdicts = self._pool.verify(responses, truths)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": _comment(verdict)} for verdict in verdicts],
            metadata=metadata,
            next_stop_strings=[self.config.stop_strings] * len(verdicts),
            rewards=torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float32),
            terminateds=torch.ones(len(verdicts), dtype=torch.bool),
            answers=[verdict.answer for verdict in verdicts],
            errors=[verdict.error for verdict in verdicts],
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """The metrics of :func:`nemo_rl.environments.metrics.answer_metrics`."""
        return batch, answer_metrics(batch)

    def shutdown(self) -> None:
        """Kill the verifier processes."""
        if self._pool is not None:
            self._pool.shutdown()


def last_response(message_log: LLMMessageLogType) -> str:
    """The text of the last assistant message; empty if there is none."""
    for message in reversed(message_log):
        if message["role"] == "assistant":
            return str(message["content"])
    return ""


def exact_verdict(response: str, ground_truth: str) -> Verdict:
    """Reward 1 if the texts are the same but for white space around them."""
    answer = response.strip()
    return Verdict(score=float(answer == ground_truth.strip()), answer=answer, error=None)


def last_number_verdict(response: str, ground_truth: str) -> Verdict:
    """Reward 1 if the last number in the response equals the right one; thousands may be set off by commas."""
    numbers = _NUMBER.findall(response)
    answer = numbers[-1].replace(",", "") if numbers else None
    right = answer is not None and float(answer) == float(ground_truth.replace(",", ""))
    return Verdict(score=float(right), answer=answer, error=None)


_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")
_LOCAL_VERIFIERS = {"exact": exact_verdict, "last_number": last_number_verdict}


def _comment(verdict: Verdict) -> str:
    if verdict.error is not None:
        return f"Environment: not judged ({verdict.error})"
    return "Environment: correct" if verdict.score >= 1.0 else "Environment: incorrect"
