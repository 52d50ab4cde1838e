# SPDX-License-Identifier: Apache-2.0
"""An environment that lives in a Ray actor, behind the interface of a local one."""

from __future__ import annotations

import contextlib
from typing import Any

import ray

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

STEP_DEADLINE_S = 1800.0
"""How long one step of a whole batch may take."""


class RemoteEnvironment(EnvironmentInterface[Any]):
    """Forwards every call to an actor and waits for the answer.

    Args:
        name: What errors call the environment.
        cls: The environment's class.
        config: Its only argument.

    Raises:
        TimeoutError: From a call that does not end within :data:`STEP_DEADLINE_S`.
    """

    def __init__(self, name: str, cls: type[EnvironmentInterface[Any]], config: Any) -> None:
        self.name = name
        self._actor = ray.remote(cls).options(num_cpus=0).remote(config)

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """Step in the actor; its exception is raised here."""
        return self._wait(self._actor.step.remote(message_log_batch, metadata), "step")

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """Metrics from the actor."""
        return self._wait(self._actor.global_post_process_and_metrics.remote(batch), "metrics")

    def shutdown(self) -> None:
        """Shut the environment down, then its actor."""
        with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(self._actor.shutdown.remote(), timeout=30)  # else the kill ends it
        ray.kill(self._actor)

    def _wait(self, reference: Any, what: str) -> Any:
        try:
            return ray.get(reference, timeout=STEP_DEADLINE_S)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"environment {self.name!r} did not finish its {what} within {STEP_DEADLINE_S:.0f} s"
            ) from None
