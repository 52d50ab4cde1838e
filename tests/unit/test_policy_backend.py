# SPDX-License-Identifier: Apache-2.0
"""The driver's choice of backend and layout."""

from __future__ import annotations

import pytest

from nemo_rl.models.policy.backend import backend_for, worker_grid


def config(**megatron):
    return {"model_name": "m", "megatron_cfg": megatron}


def test_megatron_is_the_backend():
    backend = backend_for(config(tensor_model_parallel_size=2, env_vars={"A": "b"}))
    assert backend.worker_class_fqn == "nemo_rl.models.policy.megatron_policy_worker.MegatronPolicyWorker"
    assert backend.degrees.model_parallel == 2
    assert backend.env_vars == {"A": "b"}


def test_no_backend():
    with pytest.raises(ValueError, match=r"set policy\.megatron_cfg\.enabled=true"):
        backend_for(config(enabled=False))


def test_two_backends():
    with pytest.raises(ValueError, match=r"both true: set one of them to false"):
        backend_for({**config(), "dtensor_cfg": {"enabled": True}})


def test_backend_that_does_not_exist_yet():
    with pytest.raises(ValueError, match=r"DTensor backend does not exist yet"):
        backend_for({**config(enabled=False), "dtensor_cfg": {"enabled": True}})


def test_rank_order_is_pipeline_major_and_tensor_minor():
    grid = worker_grid(backend_for(config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)), 8)
    assert grid.shape == {
        "pipeline_parallel": 2,
        "data_parallel": 2,
        "context_parallel": 1,
        "tensor_parallel": 2,
    }
    assert grid.get_ranks_by_coord(pipeline_parallel=0, data_parallel=1) == [2, 3]
    assert grid.get_ranks_by_coord(pipeline_parallel=1, data_parallel=0) == [4, 5]


@pytest.mark.parametrize(("world", "works"), [(6, "use 4 or 8 workers"), (3, "use 4 workers")])
def test_world_that_does_not_divide(world, works):
    backend = backend_for(config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    with pytest.raises(ValueError, match=works) as caught:
        worker_grid(backend, world)
    assert "tensor_model_parallel_size=2 x pipeline_model_parallel_size=2" in str(caught.value)
    assert "cluster.gpus_per_node" in str(caught.value)
