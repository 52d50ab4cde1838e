# SPDX-License-Identifier: Apache-2.0
"""Where workers go and what they are told: the pure part of the cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.distributed._placement import BundleLocation, NodeResources, choose_nodes, shortage
from nemo_rl.distributed._ray_environment import host_environment, setting_environment
from nemo_rl.distributed._worker_env import plan_seats, threads_per_worker, worker_environment
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, free_port


def node(name, gpus=8.0, free=None, cpus=16.0):
    return NodeResources(name, f"10.0.0.{name}", cpus, gpus, cpus, gpus if free is None else free)


def chosen(counts, nodes, strategy, use_gpus=True):
    found = choose_nodes(counts, nodes, use_gpus, strategy)
    return found and [n.node_id for n in found]


def test_spread_and_pack():
    nodes = [node("1"), node("2")]
    assert chosen([4, 4], nodes, "SPREAD") == ["1", "2"]
    assert chosen([4, 4], nodes, "PACK") == ["1", "1"]
    assert chosen([4, 4, 4], nodes, "SPREAD") == ["1", "2", "1"]
    assert chosen([4, 4, 4], nodes, "STRICT_SPREAD") is None
    assert chosen([4, 4], nodes, "STRICT_PACK") == ["1", "1"]
    assert chosen([8, 4], nodes, "STRICT_PACK") is None
    assert chosen([9], nodes, "SPREAD") is None
    assert chosen([2, 8], [node("1", free=2), node("2")], "SPREAD") == ["1", "2"]


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.lists(st.integers(0, 8), min_size=1, max_size=4),
    st.sampled_from(["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"]),
)
def test_no_node_is_overbooked(counts, gpus, strategy):
    nodes = [node(str(i), gpus=float(n)) for i, n in enumerate(gpus)]
    found = choose_nodes(counts, nodes, True, strategy)
    if found is None:
        return
    for n in nodes:
        assert sum(c for c, f in zip(counts, found, strict=True) if f is n) <= n.gpus
    if strategy == "STRICT_SPREAD":
        assert len({f.node_id for f in found}) == len(counts)
    if strategy == "STRICT_PACK":
        assert len({f.node_id for f in found}) == 1


def test_cpu_workers_share_cores():
    laptop = [node("1", gpus=0, cpus=2.0)]
    assert chosen([8], laptop, "SPREAD", use_gpus=False) == ["1"]
    assert chosen([41], laptop, "SPREAD", use_gpus=False) is None


def test_shortage_says_requested_available_and_what_to_do():
    text = shortage([4], [node("1", gpus=2, free=1)], True)
    assert "requested 4 GPUs" in text
    assert "available 2 on 1 node(s) [10.0.0.1: 2 (1 free)]" in text
    assert "cluster.gpus_per_node to at most 2" in text
    assert "cluster.device=cpu" in shortage([4], [node("1", gpus=0)], True)
    assert "stop what holds the others" in shortage([2], [node("1", gpus=2, free=0)], True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bundle_ct_per_node_list": [0]}, "positive count"),
        ({"bundle_ct_per_node_list": [1], "placement_group_strategy": "NEAR"}, "got 'NEAR'"),
        ({"bundle_ct_per_node_list": [1], "max_colocated_worker_groups": 0}, "at least 1"),
        ({"bundle_ct_per_node_list": [1], "port_range_low": 5}, "set both or neither"),
    ],
)
def test_cluster_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        RayVirtualCluster(**arguments)


def test_cluster_size_and_shares():
    cluster = RayVirtualCluster([4, 0, 2], max_colocated_worker_groups=3)
    assert (cluster.world_size(), cluster.node_count(), cluster.bundle_counts) == (6, 2, [4, 2])
    share = cluster.worker_resources()
    assert 3 * share["GPU"] <= 1.0 and share["GPU"] > 0.33
    assert 3 * share["CPU"] <= 0.05


def test_free_port_within_a_range():
    port = free_port(range(23400, 23420), [])
    assert port in range(23400, 23420)
    assert free_port(range(23400, 23420), [port]) != port
    with pytest.raises(RuntimeError, match=r"widen cluster\.master_port_range_low"):
        free_port(range(port, port + 1), [port])


def locations(*nodes, gpu=False):
    """One placement group for each node name; bundles in rank order."""
    return [
        [BundleLocation(name, f"10.0.0.{name}", i, 7 - i if gpu else None) for i in range(count)]
        for name, count in nodes
    ]


def test_seats_on_two_nodes():
    seats = plan_seats(locations(("a", 2), ("b", 2)), {"a": 8, "b": 4}, None, None)
    assert [(s.rank, s.node_rank, s.local_rank, s.num_threads) for s in seats] == [
        (0, 0, 0, 4),
        (1, 0, 1, 4),
        (2, 1, 0, 2),
        (3, 1, 1, 2),
    ]


def test_seats_of_two_groups_that_share_a_node():
    seats = plan_seats(locations(("a", 2), ("a", 2)), {"a": 2}, None, None)
    assert [(s.node_rank, s.local_rank, s.num_threads) for s in seats] == [(0, i, 1) for i in range(4)]


def test_local_rank_is_the_device_index_on_gpus():
    seats = plan_seats(locations(("a", 2), gpu=True), {"a": 8}, None, None)
    assert [s.local_rank for s in seats] == [7, 6]


def test_fewer_workers_than_bundles_and_tied_bundles():
    places = locations(("a", 4), ("b", 4))
    assert [s.node_id for s in plan_seats(places, {"a": 8, "b": 8}, [1, 2], None)] == ["a", "b", "b"]
    tied = plan_seats(places, {"a": 8, "b": 8}, None, [(0, [0, 1]), (1, [2, 3])])
    assert [(s.node_id, s.bundle_indices) for s in tied] == [("a", [0, 1]), ("b", [2, 3])]
    with pytest.raises(
        ValueError, match=r"workers_per_node=\[5, 5\] does not fit into bundles per node \[4, 4\]"
    ):
        plan_seats(places, {"a": 8, "b": 8}, 5, None)


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 2, 1), (2, 4, 1), (16, 4, 4), (7, 2, 3)])
def test_threads(cores, workers, threads):
    assert threads_per_worker(cores, workers) == threads


def test_worker_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.delenv("NRL_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    seat = plan_seats(locations(("a", 2)), {"a": 8}, None, None)[1]
    env = worker_environment(seat, 2, ("127.0.0.2", 99), use_gpus=False, env_vars={"X": "1", "RANK": "9"})
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["X"]) == ("1", "2", "1", "1")
    assert env["OMP_NUM_THREADS"] == env["NRL_NUM_THREADS"] == "4"
    assert (env["NRL_DEVICE"], env["MASTER_PORT"]) == ("cpu", "99")
    assert env["GLOO_SOCKET_IFNAME"].startswith("lo")
    remote = worker_environment(seat, 2, ("10.0.0.1", 99), use_gpus=True, env_vars={"NRL_NUM_THREADS": "3"})
    assert remote["OMP_NUM_THREADS"] == "3"
    assert remote["NRL_DEVICE"] == "cuda"
    assert "GLOO_SOCKET_IFNAME" not in remote


def test_only_listed_variables_reach_ray():
    """Case 46."""
    driver = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "HF_HOME": "/cache",
        "NCCL_DEBUG": "INFO",
        "TOKENIZERS_PARALLELISM": "false",
        "NRL_X": "1",
        "CUDA_VISIBLE_DEVICES": "1",
        "RAY_ADDRESS": "elsewhere",
        "HF_TOKEN": "secret",
        "NRL_API_KEY": "secret",
        "VLLM_API_KEY": "secret",
        "RAY_AUTH_TOKEN": "secret",
        "WANDB_API_KEY": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "DATABASE_URL": "secret",
    }
    host = host_environment(driver)
    assert "secret" not in host.values()
    assert set(host) == {
        "PATH",
        "LC_ALL",
        "HF_HOME",
        "NCCL_DEBUG",
        "TOKENIZERS_PARALLELISM",
        "NRL_X",
        "CUDA_VISIBLE_DEVICES",
    }
    assert set(setting_environment(driver)) == {"HF_HOME", "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "NRL_X"}
    assert host_environment({**driver, "NRL_PASS_ENV": "HF_TOKEN, NOT_SET"})["HF_TOKEN"] == "secret"
