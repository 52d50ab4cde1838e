# SPDX-License-Identifier: Apache-2.0
"""Ray itself (:func:`init_ray`) and the part of it that one job's workers live in (:class:`RayVirtualCluster`)."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
import uuid

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from nemo_rl.distributed._placement import (
    BundleLocation,
    NodeResources,
    ResourceInsufficientError,
    bundle_resources,
    choose_nodes,
    shortage,
)
from nemo_rl.distributed._ray_runtime import LocalRay, start_local_ray
from nemo_rl.distributed.config import ClusterConfig

__all__ = [
    "PY_EXECUTABLES",
    "BundleLocation",
    "ClusterConfig",
    "GetGPUIDActor",
    "RayVirtualCluster",
    "ResourceInsufficientError",
    "init_ray",
    "shutdown_ray",
]

logger = logging.getLogger(__name__)

_STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
_FREE_DEADLINE_S = 5.0  # devices that a former cluster just released take a moment to be free
_READY_DEADLINE_S = 60.0

_local_ray: LocalRay | None = None


class PY_EXECUTABLES:  # noqa: N801  (documented name)
    """Python interpreters that workers run in: there is one environment, the driver's."""

    SYSTEM = sys.executable


def init_ray(log_dir: str | None = None) -> None:
    """Connect this driver to Ray, once: to the cluster that RAY_ADDRESS names, or to a new one on this host.

    A new one listens on a loopback address only, asks for a token, reports no usage, gets an allow-listed
    environment (NRL_PASS_ENV names more variables) and ends with this process, even if that is killed.

    Args:
        log_dir: where the logs of a new Ray are copied when it ends.

    Raises:
        RuntimeError: a new Ray did not start.
        ConnectionError: no Ray answers at RAY_ADDRESS.
    """
    global _local_ray
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], logging_level=logging.WARNING)
        logger.info("connected to the Ray cluster at %s", os.environ["RAY_ADDRESS"])
        return
    if _local_ray is None:
        _local_ray = start_local_ray(log_dir)
        atexit.register(shutdown_ray)
    ray.init(address=_local_ray.address, logging_level=logging.WARNING)
    logger.info("started a Ray of this run at %s", _local_ray.address)


def shutdown_ray() -> None:
    """Disconnect from Ray, and stop it if :func:`init_ray` started it; may be called more than once."""
    global _local_ray
    ray.shutdown()
    if _local_ray is not None:
        running, _local_ray = _local_ray, None
        running.stop()
        atexit.unregister(shutdown_ray)


@ray.remote(num_cpus=0)
class GetGPUIDActor:
    """Tells which GPU Ray assigned to the bundle that it runs in."""

    def get_gpu_id(self) -> int | str:
        """Ray's id of the GPU."""
        return ray.get_gpu_ids()[0]

    def get_device_index(self) -> int:
        """Index of that GPU among the devices that processes of this node see."""
        gpu = str(ray.get_gpu_ids()[0])
        raylet_sees = (
            os.environ.get("NRL_NODE_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES") or ""
        )
        visible = [entry.strip() for entry in raylet_sees.split(",") if entry.strip()]
        return visible.index(gpu) if gpu in visible else int(gpu)


class RayVirtualCluster:
    """Bundles of resources, one per worker, reserved on the nodes of a Ray cluster on first use.

    Args:
        bundle_ct_per_node_list: workers per node; the bundles of one entry always share a node.
        use_gpus: each bundle holds a GPU; else bundles are CPU workers, which share the node's cores.
        max_colocated_worker_groups: worker groups that share every bundle; each takes an equal part of its resources.
        num_gpus_per_node: devices of a node, for worker classes that ask for it in ``configure_worker``.
        name: prefix of the placement groups' names.
        placement_group_strategy: SPREAD prefers a node of its own for each entry, PACK as few nodes as possible;
            STRICT_SPREAD and STRICT_PACK insist.
        port_range_low: first port that :meth:`get_available_address_and_port` may give out; None for any free one.
        port_range_high: last such port.

    Raises:
        ValueError: no bundle, an unknown strategy, or half a port range.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "SPREAD",
        port_range_low: int | None = None,
        port_range_high: int | None = None,
    ) -> None:
        self._counts = [count for count in bundle_ct_per_node_list if count > 0]
        if not self._counts or min(bundle_ct_per_node_list) < 0:
            raise ValueError(f"bundle_ct_per_node_list needs a positive count, got {bundle_ct_per_node_list}")
        if placement_group_strategy not in _STRATEGIES:
            raise ValueError(
                f"placement_group_strategy is one of {_STRATEGIES}, got {placement_group_strategy!r}"
            )
        if max_colocated_worker_groups < 1:
            raise ValueError(
                f"max_colocated_worker_groups must be at least 1, got {max_colocated_worker_groups}"
            )
        if (port_range_low is None) != (port_range_high is None):
            raise ValueError("port_range_low and port_range_high go together: set both or neither")
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        self._strategy = placement_group_strategy
        self._port_range = (
            None if port_range_low is None else range(port_range_low, (port_range_high or 0) + 1)
        )
        self._placement_groups: list[PlacementGroup] = []
        self._locations: list[list[BundleLocation]] = []
        self._issued_ports: set[tuple[str, int]] = set()

    # -- size and resources -------------------------------------------------------------------------------

    def world_size(self) -> int:
        """Number of bundles."""
        return sum(self._counts)

    def node_count(self) -> int:
        """Number of entries with bundles (which may share a node if there are too few)."""
        return len(self._counts)

    @property
    def bundle_counts(self) -> list[int]:
        """Bundles of each placement group."""
        return list(self._counts)

    def worker_resources(self) -> dict[str, float]:
        """CPUs and GPUs that one worker of one group takes of its bundle."""
        share = bundle_resources(self.use_gpus)
        return {
            kind: int(1e4 * amount / self.max_colocated_worker_groups) / 1e4 for kind, amount in share.items()
        }

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups, one per entry with bundles; reserves them on the first call.

        Raises:
            ResourceInsufficientError: Ray does not have the devices, or they stay in use by others.
        """
        if not self._placement_groups:
            self._reserve()
        return self._placement_groups

    def bundle_locations(self) -> list[list[BundleLocation]]:
        """Per placement group its bundles, in rank order (by device index on GPUs)."""
        self.get_placement_groups()
        return self._locations

    # -- addresses ----------------------------------------------------------------------------------------

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Address of rank 0's node and a port that is free there; a new port with every call."""
        return self.get_available_address_and_port(0, self.bundle_locations()[0][0].bundle_index)

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """Address of a bundle's node and a port that is free there; a new port with every call."""
        location = next(b for b in self.bundle_locations()[pg_idx] if b.bundle_index == bundle_idx)
        taken = [port for address, port in self._issued_ports if address == location.address]
        if location.node_id == ray.get_runtime_context().get_node_id():
            port = free_port(self._port_range, taken)
        else:
            probe = ray.remote(free_port).options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(location.node_id, soft=False)
            )
            port = ray.get(probe.remote(self._port_range, taken), timeout=_READY_DEADLINE_S)
        self._issued_ports.add((location.address, port))
        return location.address, port

    def shutdown(self) -> bool:
        """Release the bundles (which kills workers still in them); may be called more than once."""
        if ray.is_initialized():
            for group in self._placement_groups:
                remove_placement_group(group)
        self._placement_groups = []
        self._locations = []
        return True

    # -- reserving ----------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        init_ray()
        nodes = self._wait_for_free_nodes()
        groups = []
        try:
            for index, (count, node) in enumerate(zip(self._counts, nodes, strict=True)):
                bundle = {**bundle_resources(self.use_gpus), f"node:{node.address}": 0.001}
                name = f"{self.name or 'cluster'}-node{index}-{uuid.uuid4().hex[:8]}"
                groups.append(placement_group([bundle] * count, strategy="STRICT_PACK", name=name))
            for group in groups:
                if not group.wait(_READY_DEADLINE_S):
                    raise ResourceInsufficientError(
                        f"Ray did not reserve the bundles of {self.name or 'the cluster'} within "
                        f"{_READY_DEADLINE_S:.0f} s: {shortage(self._counts, ray_nodes(), self.use_gpus)}"
                    )
            self._placement_groups = groups
            self._locations = [self._locate(group) for group in groups]
        except BaseException:
            self._placement_groups = groups
            self.shutdown()
            raise

    def _wait_for_free_nodes(self) -> list[NodeResources]:
        end = time.monotonic() + _FREE_DEADLINE_S
        while True:
            nodes = ray_nodes()
            chosen = choose_nodes(self._counts, nodes, self.use_gpus, self._strategy)
            if chosen is not None:
                return chosen
            could_ever = choose_nodes(self._counts, nodes, self.use_gpus, self._strategy, free=False)
            if could_ever is None or time.monotonic() > end:
                raise ResourceInsufficientError(shortage(self._counts, nodes, self.use_gpus))
            time.sleep(0.2)

    def _locate(self, group: PlacementGroup) -> list[BundleLocation]:
        bundle_nodes = placement_group_table(group)["bundles_to_node_id"]
        addresses = {node.node_id: node.address for node in ray_nodes()}
        devices = self._device_indices(group) if self.use_gpus else [None] * len(bundle_nodes)
        located = [
            BundleLocation(bundle_nodes[index], addresses[bundle_nodes[index]], index, device)
            for index, device in enumerate(devices)
        ]
        return sorted(located, key=lambda b: (b.device_index or 0, b.bundle_index))

    def _device_indices(self, group: PlacementGroup) -> list[int]:
        actors = [
            GetGPUIDActor.options(  # type: ignore[attr-defined]
                num_gpus=0.001,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
                runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            ).remote()
            for index in range(group.bundle_count)
        ]
        try:
            return ray.get([actor.get_device_index.remote() for actor in actors], timeout=_READY_DEADLINE_S)
        finally:
            for actor in actors:
                ray.kill(actor)


def ray_nodes() -> list[NodeResources]:
    """The living nodes of the Ray cluster, with their resources in all and free."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        have, now = node["Resources"], free.get(node["NodeID"], {})
        cpus, gpus = have.get("CPU", 0.0), have.get("GPU", 0.0)
        address = node["NodeManagerAddress"]
        nodes.append(
            NodeResources(node["NodeID"], address, cpus, gpus, now.get("CPU", 0.0), now.get("GPU", 0.0))
        )
    return nodes


def free_port(allowed: range | None, taken: list[int]) -> int:
    """A TCP port that nothing on this host listens on.

    Args:
        allowed: ports to choose from; None lets the system choose.
        taken: ports that were given out before.

    Raises:
        RuntimeError: every allowed port is in use.
    """
    for candidate in allowed if allowed is not None else [0] * 100:
        if candidate and candidate in taken:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", candidate))
            except OSError:
                continue
            port = probe.getsockname()[1]
        if port not in taken:
            return port
    raise RuntimeError(
        f"no free port in {allowed}: widen cluster.master_port_range_low and cluster.master_port_range_high"
    )
