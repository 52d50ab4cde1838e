# SPDX-License-Identifier: Apache-2.0
"""Which worker class trains a policy, and in which layout: the one place of the driver that chooses a backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.policy.config import PolicyConfig

MEGATRON_WORKER = "nemo_rl.models.policy.megatron_policy_worker.MegatronPolicyWorker"

PP_AXIS, DP_AXIS, CP_AXIS, TP_AXIS = AXES = (
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "tensor_parallel",
)


class Degrees(NamedTuple):
    """Model-parallel degrees; what is left of the world is data-parallel."""

    tensor: int
    pipeline: int
    context: int

    @property
    def model_parallel(self) -> int:
        """Workers that together hold one copy of the model (with context parallelism: process one batch)."""
        return self.tensor * self.pipeline * self.context


class Backend(NamedTuple):
    """What the driver must know of a backend.

    Attributes:
        worker_class_fqn: class of its workers.
        degrees: model-parallel degrees.
        env_vars: more environment variables of the workers.
        section: configuration section of the backend, for messages.
        degree_keys: keys of the three degrees in it.
    """

    worker_class_fqn: str
    degrees: Degrees
    env_vars: dict[str, str]
    section: str
    degree_keys: tuple[str, str, str]


def backend_for(config: PolicyConfig | Mapping[str, Any]) -> Backend:
    """The enabled backend of a policy.

    Raises:
        ValueError: both are enabled, or none, or one that does not exist yet.
    """
    config = PolicyConfig.coerce(config)
    megatron, dtensor = config.megatron_cfg, config.dtensor_cfg
    if megatron.enabled and dtensor.enabled:
        raise ValueError(
            "policy.megatron_cfg.enabled and policy.dtensor_cfg.enabled are both true: set one of them to false"
        )
    if dtensor.enabled:
        raise ValueError(
            "policy.dtensor_cfg.enabled=true: the DTensor backend does not exist yet; set it to false and "
            "policy.megatron_cfg.enabled=true"
        )
    if not megatron.enabled:
        raise ValueError("no training backend is enabled: set policy.megatron_cfg.enabled=true")
    return Backend(
        MEGATRON_WORKER,
        Degrees(
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
            megatron.context_parallel_size,
        ),
        dict(megatron.env_vars or {}),
        "policy.megatron_cfg",
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    )


def worker_grid(backend: Backend, world_size: int) -> NamedSharding:
    """Coordinates of all workers; ranks are pipeline-major, tensor-minor.

    Raises:
        ValueError: the world does not divide into copies of the model.
    """
    tp, pp, cp = backend.degrees
    copy = backend.degrees.model_parallel
    if world_size % copy:
        keys = " x ".join(
            f"{key}={size}" for key, size in zip(backend.degree_keys, backend.degrees, strict=True)
        )
        fitting = [n for n in (world_size // copy * copy, (world_size // copy + 1) * copy) if n]
        raise ValueError(
            f"cluster.gpus_per_node x cluster.num_nodes = {world_size} workers do not divide into copies of the model "
            f"of {copy} workers ({backend.section}: {keys}): use {' or '.join(map(str, fitting))} workers, or lower a "
            "degree"
        )
    return NamedSharding(np.arange(world_size).reshape(pp, -1, cp, tp), list(AXES))
