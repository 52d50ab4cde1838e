# SPDX-License-Identifier: Apache-2.0
"""On which nodes worker bundles go: a pure function of what is asked for and what is free."""

from __future__ import annotations

from dataclasses import dataclass

CPU_SHARE = 0.05  # CPUs that a worker bundle reserves: workers share cores, so that 4 of them fit on a laptop


class ResourceInsufficientError(Exception):
    """Ray has fewer devices than a virtual cluster asks for; the message says both numbers."""


@dataclass(frozen=True)
class NodeResources:
    """What one Ray node has and what of it is free, in CPUs and GPUs."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


@dataclass(frozen=True)
class BundleLocation:
    """Where one bundle lies: node, the node's address, and the GPU's index on it (None on CPU)."""

    node_id: str
    address: str
    bundle_index: int
    device_index: int | None


def bundle_resources(use_gpus: bool) -> dict[str, float]:
    """What one worker bundle reserves."""
    return {"CPU": CPU_SHARE, "GPU": 1.0} if use_gpus else {"CPU": CPU_SHARE}


def capacity(node: NodeResources, use_gpus: bool, *, free: bool) -> int:
    """How many worker bundles a node holds, in all or in what is free now."""
    cpus, gpus = (node.free_cpus, node.free_gpus) if free else (node.cpus, node.gpus)
    by_cpu = int(cpus / CPU_SHARE + 1e-6)
    return min(by_cpu, int(gpus + 1e-6)) if use_gpus else by_cpu


def choose_nodes(
    counts: list[int], nodes: list[NodeResources], use_gpus: bool, strategy: str, *, free: bool = True
) -> list[NodeResources] | None:
    """One node for each entry of ``counts`` (bundles that stay together), or None if they do not fit.

    Large entries choose first. SPREAD strategies take the node with the fewest entries so far, PACK strategies the
    fullest node that still has room; STRICT_SPREAD never uses a node twice, STRICT_PACK only one.
    """
    left = {node.node_id: capacity(node, use_gpus, free=free) for node in nodes}
    used = dict.fromkeys(left, 0)
    chosen: dict[int, NodeResources] = {}
    for index in sorted(range(len(counts)), key=lambda i: -counts[i]):
        fitting = [node for node in nodes if left[node.node_id] >= counts[index]]
        if strategy == "STRICT_SPREAD":
            fitting = [node for node in fitting if not used[node.node_id]]
        if strategy == "STRICT_PACK" and chosen:
            fitting = [node for node in fitting if used[node.node_id]]
        if not fitting:
            return None
        if strategy.endswith("SPREAD"):
            best = min(fitting, key=lambda n: (used[n.node_id], -left[n.node_id], n.address))
        else:
            best = min(fitting, key=lambda n: (-used[n.node_id], left[n.node_id], n.address))
        chosen[index] = best
        left[best.node_id] -= counts[index]
        used[best.node_id] += 1
    return [chosen[index] for index in range(len(counts))]


def shortage(counts: list[int], nodes: list[NodeResources], use_gpus: bool) -> str:
    """What was asked for, what there is, and what to change, for ResourceInsufficientError."""
    kind = "GPUs" if use_gpus else "CPU workers"
    in_all = [capacity(node, use_gpus, free=False) for node in nodes]
    free = [capacity(node, use_gpus, free=True) for node in nodes]
    listed = ", ".join(
        f"{node.address}: {total} ({now} free)" for node, total, now in zip(nodes, in_all, free, strict=True)
    )
    advice = f"set cluster.gpus_per_node to at most {max(in_all, default=0)}"
    if use_gpus and max(in_all, default=0) == 0:
        advice = "set cluster.device=cpu, or start Ray on nodes with GPUs"
    elif sum(in_all) >= sum(counts) and max(counts) <= max(in_all):
        advice = "stop what holds the others, or ask for fewer"
    return (
        f"requested {sum(counts)} {kind} (per node: {counts}), available {sum(in_all)} on {len(nodes)} node(s) "
        f"[{listed}]: {advice}"
    )
