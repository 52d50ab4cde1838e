# SPDX-License-Identifier: Apache-2.0
"""Worker groups on a real Ray: placement, dispatch, failures, and what is left behind."""

from __future__ import annotations

import os
import re
import time

import numpy as np
import psutil
import pytest
import ray
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, ResourceInsufficientError
from nemo_rl.distributed.worker_groups import (
    MultiWorkerFuture,
    RayWorkerBuilder,
    RayWorkerGroup,
    WorkerError,
    WorkerInputError,
)
from tests.integration.conftest import SECRET

ECHO = "tests.integration.ray_workers.EchoWorker"
GLOO = "tests.integration.ray_workers.GlooWorker"
AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


def grid(pp=1, dp=1, cp=1, tp=1):
    return NamedSharding(np.arange(pp * dp * cp * tp).reshape(pp, dp, cp, tp), AXES)


@pytest.fixture(scope="module")
def echo(ray_session):
    """Four workers for the tests that leave them as they were; a test sets the annotations it wants."""
    cluster = RayVirtualCluster([4], use_gpus=False, name="echo")
    group = RayWorkerGroup(cluster, RayWorkerBuilder(ECHO), name_prefix="echo", env_vars={"NRL_EXTRA": "1"})
    yield group
    group.shutdown()
    cluster.shutdown()


def wait_until(condition, deadline=10.0):
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def gone(pid):
    return wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5.0
    )


def test_environment_of_workers(echo):
    envs = echo.call_all_workers("environment")
    cores = int(ray.cluster_resources()["CPU"])
    for rank, env in enumerate(envs):
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert (env["WORLD_SIZE"], env["NODE_RANK"], env["NRL_DEVICE"], env["NRL_EXTRA"]) == (
            "4",
            "0",
            "cpu",
            "1",
        )
        assert env["NRL_NUM_THREADS"] == env["OMP_NUM_THREADS"] == str(max(1, cores // 4))
        assert env["MASTER_ADDR"].startswith("127.") and int(env["MASTER_PORT"]) > 0
    assert len({env["MASTER_PORT"] for env in envs}) == 1
    assert [m["name"] for m in echo.worker_metadata] == ["echo-0", "echo-1", "echo-2", "echo-3"]


def test_no_secret_of_the_driver_reaches_ray_or_a_worker(echo):
    """Case 46. The secret was in the driver's environment before Ray started."""
    assert SECRET in os.environ
    env = echo.call_all_workers("environment")[0]
    assert SECRET not in env
    assert env["PATH"] == os.environ["PATH"]
    raylet = psutil.Process(int(env["RAY_RAYLET_PID"]))
    assert SECRET not in raylet.environ()


def test_more_workers_than_cores_share_them(cpu_cluster):
    cores = int(ray.cluster_resources()["CPU"])
    cluster = cpu_cluster(cores + 1, max_colocated_worker_groups=2)
    groups = [
        RayWorkerGroup(cluster, RayWorkerBuilder(ECHO), name_prefix="many", workers_per_node=count)
        for count in (None, 1)
    ]
    assert [len(set(group.call_all_workers("pid"))) for group in groups] == [cores + 1, 1]
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize(("use_gpus", "count"), [(True, 4), (False, 100_000)])
def test_too_many_devices_fail_at_once(ray_session, use_gpus, count):
    """Case 45."""
    if use_gpus and ray.cluster_resources().get("GPU", 0) >= count:
        pytest.skip("this machine has the GPUs")
    cluster = RayVirtualCluster([count], use_gpus=use_gpus)
    start = time.monotonic()
    with pytest.raises(ResourceInsufficientError, match=rf"requested {count} .*available \d+ on 1 node"):
        cluster.get_placement_groups()
    assert time.monotonic() - start < 3


def test_devices_held_by_another_cluster(echo, cpu_cluster):
    free = round(ray.cluster_resources()["CPU"] / 0.05) - 4
    released = wait_until(lambda: round(ray.available_resources()["CPU"] / 0.05) == free)
    assert released, "clusters of earlier tests still hold CPUs"
    cpu_cluster(free - 1).get_placement_groups()
    start = time.monotonic()
    with pytest.raises(
        ResourceInsufficientError, match=r"requested 2 CPU workers.*\(1 free\).*stop what holds"
    ):
        cpu_cluster(2).get_placement_groups()
    assert time.monotonic() - start < 10


def test_ports_are_distinct_and_within_range(cpu_cluster):
    cluster = cpu_cluster(1, port_range_low=23450, port_range_high=23459)
    found = [cluster.get_master_address_and_port() for _ in range(3)]
    assert len(set(found)) == 3
    assert all(23450 <= port <= 23459 for _, port in found)


def test_sharded_dispatch_and_replicated_output(echo):
    group = echo
    group.sharding_annotations = grid(dp=2, tp=2)
    future = group.run_all_workers_sharded_data(
        "add",
        data=[10, 20],
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=AXES[2:] + AXES[:1],
        output_is_replicated=["tensor_parallel"],
        common_kwargs={"bias": 1},
    )
    assert (future.called_workers, future.return_from_workers) == ([0, 1, 2, 3], [0, 2])
    assert future.get_results(group) == [11, 21]
    assert [group.get_dp_leader_worker_idx(i) for i in range(group.dp_size)] == [0, 2]
    with pytest.raises(IndexError, match="shard 2 of 2"):
        group.get_dp_leader_worker_idx(2)

    free = group.run_all_workers_sharded_data("echo", data=["a", "b"], in_sharded_axes=["data_parallel"])
    assert free.called_workers == [0, 2]
    dummy = group.run_all_workers_sharded_data(
        "echo", data=["a", "b"], in_sharded_axes=["data_parallel"], make_dummy_calls_to_free_axes=True
    )
    assert [kwargs["data"] for _, _, kwargs in ray.get(dummy.futures)] == ["a", None, "b", None]

    two_axes = group.run_all_workers_sharded_data(
        "echo", data=[["a", "b"], ["c", "d"]], in_sharded_axes=["data_parallel", "tensor_parallel"]
    )
    assert [kwargs["data"] for _, _, kwargs in two_axes.get_results(group)] == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match="one entry for each of 2 shards, got 3"):
        group.run_all_workers_sharded_data("echo", data=[1, 2, 3], in_sharded_axes=["data_parallel"])
    with pytest.raises(ValueError, match="by name"):
        group.run_all_workers_sharded_data("echo", [1, 2], in_sharded_axes=["data_parallel"])
    with pytest.raises(ValueError, match="both sharded and replicated"):
        group.run_all_workers_sharded_data(
            "echo", data=[1, 2], in_sharded_axes=["data_parallel"], replicate_on_axes=["data_parallel"]
        )


def test_other_ways_to_call(echo):
    group = echo
    group.sharding_annotations = grid(dp=2, tp=2)
    refs = group.run_all_workers_multiple_data(
        "add", [1, 2], run_rank_0_only_axes=["tensor_parallel"], common_kwargs={"bias": 5}
    )
    assert ray.get(refs) == [6, 7]
    with pytest.raises(ValueError, match="3 entries for 4 workers"):
        group.run_all_workers_multiple_data("add", [1, 2, 3])
    assert ray.get(group.run_single_worker_single_data("add", 3, 1, bias=2)) == 3
    stream = group._workers[0].actor.count.options(num_returns="streaming").remote(3)
    assert MultiWorkerFuture([stream]).get_results(group) == [[0, 1, 2]]


@pytest.mark.parametrize("layout", [{"dp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"cp": 4}])
def test_bytes_per_step_do_not_depend_on_model_parallelism(echo, layout, tmp_path):
    """Case 49: a shard is stored once and read by its replicas, and their equal results are not sent back."""
    group = echo
    group.sharding_annotations = grid(**layout)
    ids = torch.arange(2**20).reshape(64, -1)
    batch = BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((64,), 2**14)})
    size = sum(column.nbytes for column in batch.values())
    assert wait_until(lambda: object_store_bytes() < 0.01 * size), (
        "objects of an earlier test are still there"
    )
    replicated = ["pipeline_parallel", "context_parallel", "tensor_parallel"]
    gate = tmp_path / "gate"
    future = group.run_all_workers_sharded_data(
        "fill",
        data=batch.shard_by_batch_size(group.dp_size),
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=replicated,
        output_is_replicated=replicated,
        common_kwargs={"gate": str(gate)},
    )
    sent = object_store_bytes()  # the workers hold their parts until the gate opens
    assert size <= sent <= 1.1 * size, f"{sent} bytes sent for a batch of {size}"
    gate.touch()
    ray.wait(future.futures, num_returns=len(future.futures), timeout=60)
    # the parts are freed soon, and only the results remain
    assert wait_until(lambda: ids.nbytes <= object_store_bytes() <= 1.1 * ids.nbytes), object_store_bytes()
    results = future.get_results(group)
    assert [len(result) for result in results] == [ids.nbytes // group.dp_size] * group.dp_size


def object_store_bytes() -> int:
    from ray._private.internal_api import node_stats

    node = ray.nodes()[0]
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.object_store_bytes_used


def test_workers_may_write_to_what_they_get(echo):
    """Shared memory is read-only; scaling an input in place must neither crash nor change the replica's."""
    echo.sharding_annotations = grid(tp=4)
    data = BatchedDataDict({"input_ids": torch.ones(64, 4096, dtype=torch.int64)})
    for _ in range(2):
        future = echo.run_all_workers_sharded_data("scale_in_place", data=data, replicate_on_axes=AXES)
        assert future.get_results(echo) == [2 * 64 * 4096] * 4
    assert int(data["input_ids"].sum()) == 64 * 4096


@pytest.mark.parametrize("how", ["raise", pytest.param("exit", marks=pytest.mark.slow), "kill"])
def test_failure_of_one_rank_while_others_wait_in_a_collective(cpu_cluster, how):
    group = RayWorkerGroup(cpu_cluster(2), RayWorkerBuilder(GLOO), name_prefix="gloo")
    assert group.call_all_workers("total", 2.0) == [4.0, 4.0]
    name = group.worker_metadata[1]["name"]
    pids = [worker.__ray_call__.remote(lambda self: os.getpid()) for worker in group.workers]
    pids = ray.get(pids)
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.call_all_workers("fail", 1, how)
    assert time.monotonic() - start < 8
    message = str(caught.value)
    assert (caught.value.rank, caught.value.worker_name, caught.value.method) == (1, name, "fail")
    if how == "raise":
        assert f"{name} (rank 1) failed in fail" in message
        assert "raise KeyError" in message and "ray_workers.py" in message
        assert isinstance(caught.value.__cause__, KeyError)
    else:
        assert f"{name} (rank 1) died during fail" in message
    assert all(gone(pid) for pid in pids)
    with pytest.raises(WorkerError, match=rf"group gloo is down: worker {name}"):
        group.call_all_workers("total", 1.0)
    assert group.shutdown()


def test_worker_killed_between_calls(cpu_cluster):
    group = RayWorkerGroup(cpu_cluster(2), RayWorkerBuilder(ECHO), name_prefix="idle")
    os.kill(group.call_all_workers("pid")[0], 9)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"idle[^ ]*-0 \(rank 0\) died during pid"):
        group.call_all_workers("pid")
    assert time.monotonic() - start < 8


@pytest.mark.parametrize("how", ["fail_rank", "die_rank"])
def test_failure_while_starting(cpu_cluster, how):
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        RayWorkerGroup(cpu_cluster(2), RayWorkerBuilder(ECHO, **{how: 1}), name_prefix="start")
    assert time.monotonic() - start < 15
    assert caught.value.rank == 1
    assert re.search(r"start[^ ]*-1 \(rank 1\)", str(caught.value))
    if how == "fail_rank":
        assert isinstance(caught.value, WorkerInputError)
        assert "set policy.x to 3" in str(caught.value) and "ray_workers.py" in str(caught.value)


def test_error_of_every_rank_leaves_the_group_usable(echo):
    with pytest.raises(WorkerInputError, match="bad argument on every rank"):
        echo.call_all_workers("raise_value_error")
    assert len(echo.call_all_workers("pid")) == 4


def test_call_deadline_names_what_it_waited_for(cpu_cluster, monkeypatch):
    group = RayWorkerGroup(cpu_cluster(2), RayWorkerBuilder(GLOO), name_prefix="late")
    monkeypatch.setenv("NRL_WORKER_CALL_TIMEOUT_S", "1.5")
    ref = group.run_single_worker_single_data("total", 0, 1.0)  # rank 1 is never called
    with pytest.raises(WorkerError, match=r"no answer within 2 s from total on late[^ ]* rank\(s\) 0"):
        MultiWorkerFuture([ref], called_workers=[0], method="total").get_results(group)


def test_shutdown_leaves_no_process(cpu_cluster):
    group = RayWorkerGroup(cpu_cluster(2), RayWorkerBuilder(ECHO))
    pids = group.call_all_workers("pid") + group.call_all_workers("start_child")
    assert group.shutdown(cleanup_method="shutdown")
    assert group.shutdown()
    assert all(gone(pid) for pid in pids)


def test_unknown_worker_class(cpu_cluster):
    with pytest.raises(ValueError, match=r"no class 'Nope'"):
        RayWorkerGroup(cpu_cluster(1), RayWorkerBuilder("tests.integration.ray_workers.Nope"))
    with pytest.raises(ValueError, match=r"cannot import worker class 'no_such\.Thing'"):
        RayWorkerGroup(cpu_cluster(1), RayWorkerBuilder("no_such.Thing"))


def test_constructor_arguments_arrive(cpu_cluster):
    group = RayWorkerGroup(cpu_cluster(2), RayWorkerBuilder(ECHO, {"a": 1}, 2, tokenizer=["x"]))
    assert group.call_all_workers("constructor_arguments") == [(({"a": 1}, 2), {"tokenizer": ["x"]})] * 2
    group.shutdown()
