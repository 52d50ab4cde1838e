# SPDX-License-Identifier: Apache-2.0
"""One Ray for all integration tests of a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

SECRET = "NRL_TEST_WANDB_API_KEY"


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A Ray of this test session, started from an environment with a secret in it."""
    from nemo_rl.distributed.virtual_cluster import init_ray, shutdown_ray

    os.environ[SECRET] = "hunter2"
    init_ray()
    yield
    shutdown_ray()


@pytest.fixture
def cpu_cluster(ray_session: None) -> Iterator[Callable[..., object]]:
    """A factory of CPU clusters, `cpu_cluster(2)` or `cpu_cluster([2, 1], max_colocated_worker_groups=2)`."""
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

    made: list[RayVirtualCluster] = []

    def make(workers: int | list[int], **kwargs: object) -> RayVirtualCluster:
        counts = [workers] if isinstance(workers, int) else workers
        made.append(RayVirtualCluster(counts, use_gpus=False, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cluster in made:
        cluster.shutdown()
