# SPDX-License-Identifier: Apache-2.0
"""The environment of each worker of a group: who it is, whom it meets, how many threads it may use."""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from nemo_rl.distributed._placement import BundleLocation
from nemo_rl.distributed._ray_environment import setting_environment
from nemo_rl.distributed._ray_runtime import package_path


@dataclass(frozen=True)
class WorkerSeat:
    """Where one worker sits.

    Attributes:
        rank: global rank.
        node_rank: index of its node among the nodes of the group.
        local_rank: index of its GPU on the node; on CPU, its index among the group's workers there.
        node_index: index of its placement group.
        bundle_indices: its bundles there; it is scheduled into the first.
        node_id: Ray's id of the node.
        num_threads: cores of the node over workers of this group on it, at least 1.
    """

    rank: int
    node_rank: int
    local_rank: int
    node_index: int
    bundle_indices: list[int]
    node_id: str
    num_threads: int


def plan_seats(
    locations: list[list[BundleLocation]],
    cores: Mapping[str, float],
    workers_per_node: int | list[int] | None,
    tied: list[tuple[int, list[int]]] | None,
) -> list[WorkerSeat]:
    """One seat for each worker, in rank order.

    Args:
        locations: per placement group its bundles, in rank order.
        cores: CPUs of each node, by Ray's node id.
        workers_per_node: workers in each placement group, one number or one for each; None for all its bundles.
        tied: (placement group, bundles) of each worker; replaces ``workers_per_node``.

    Raises:
        ValueError: more workers than bundles.
    """
    if tied is None:
        counts = workers_per_node if workers_per_node is not None else [len(bundles) for bundles in locations]
        counts = [counts] * len(locations) if isinstance(counts, int) else counts
        if len(counts) != len(locations) or any(n > len(b) for n, b in zip(counts, locations, strict=True)):
            available = [len(bundles) for bundles in locations]
            raise ValueError(f"workers_per_node={counts} does not fit into bundles per node {available}")
        tied = [(i, [bundle.bundle_index]) for i, n in enumerate(counts) for bundle in locations[i][:n]]
    found = [{bundle.bundle_index: bundle for bundle in bundles} for bundles in locations]
    places = [found[node][bundles[0]] for node, bundles in tied]
    nodes = list(dict.fromkeys(place.node_id for place in places))
    on_node = Counter(place.node_id for place in places)
    seen: Counter[str] = Counter()
    seats = []
    for rank, ((node, bundles), place) in enumerate(zip(tied, places, strict=True)):
        local = seen[place.node_id] if place.device_index is None else place.device_index
        seen[place.node_id] += 1
        threads = threads_per_worker(cores[place.node_id], on_node[place.node_id])
        seat = WorkerSeat(
            rank, nodes.index(place.node_id), local, node, list(bundles), place.node_id, threads
        )
        seats.append(seat)
    return seats


def worker_environment(
    seat: WorkerSeat, world_size: int, master: tuple[str, int], *, use_gpus: bool, env_vars: dict[str, str]
) -> dict[str, str]:
    """Variables of one worker: library settings of the driver, then ``env_vars``, then what the group decides."""
    settings = setting_environment() | {"PYTHONPATH": package_path()} | env_vars
    threads = settings.get("NRL_NUM_THREADS") or str(seat.num_threads)
    identity = {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(seat.local_rank),
        "NODE_RANK": str(seat.node_rank),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "NRL_DEVICE": "cuda" if use_gpus else "cpu",
        "NRL_NUM_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }
    if use_gpus:  # a worker sees all devices of its node and takes the one of its LOCAL_RANK
        identity["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    if ipaddress.ip_address(master[0]).is_loopback and "GLOO_SOCKET_IFNAME" not in settings:
        identity["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    return settings | identity


def threads_per_worker(cores: float, workers_on_node: int) -> int:
    """Cores of a node over the workers on it, at least 1: two threads per rank on two cores decode 5x slower."""
    return max(1, int(cores or os.cpu_count() or 1) // workers_on_node)


def _loopback_interface() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"
