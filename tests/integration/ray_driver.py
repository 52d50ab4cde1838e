# SPDX-License-Identifier: Apache-2.0
"""A driver for `test_ray_runtime`: starts Ray and a worker, says which processes there are, and waits or ends.

`python -m tests.integration.ray_driver OUT MODE`; writes a JSON object to the file OUT.
"""

from __future__ import annotations

import json
import os
import sys
import time

import psutil
import ray

from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed._ray_runtime import start_local_ray
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup


def fake_gpus(out: str) -> None:
    """Two groups that share every GPU of a node which claims to have devices 4 to 7."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"
    virtual_cluster._local_ray = start_local_ray(None, "--num-gpus=4")
    init_ray()
    cluster = RayVirtualCluster([3], use_gpus=True, max_colocated_worker_groups=2, num_gpus_per_node=4)
    builder = RayWorkerBuilder("tests.integration.ray_workers.EchoWorker")
    groups = [RayWorkerGroup(cluster, builder, name_prefix="gpu") for _ in range(2)]
    report = {
        "environments": [group.call_all_workers("environment") for group in groups],
        "ids": [group.call_all_workers("gpu_ids") for group in groups],
        "free": ray.available_resources()["GPU"],
    }
    try:
        RayVirtualCluster([2]).get_placement_groups()
    except virtual_cluster.ResourceInsufficientError as error:
        report["refused"] = str(error)
    virtual_cluster.shutdown_ray()
    with open(out, "w") as file:
        json.dump(report, file)


def main(out: str, mode: str, log_dir: str | None) -> None:
    if mode == "fake-gpus":
        fake_gpus(out)
        return
    init_ray(log_dir)
    init_ray(log_dir)  # again: nothing happens
    builder = RayWorkerBuilder("tests.integration.ray_workers.EchoWorker")
    group = RayWorkerGroup(RayVirtualCluster([1], use_gpus=False), builder)
    pids = group.call_all_workers("pid") + group.call_all_workers("start_child")
    local = virtual_cluster._local_ray
    if local is not None:
        supervisor = psutil.Process(local.supervisor.pid)
        pids += [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]
    report = {
        "pids": pids,
        "address": ray.get_runtime_context().gcs_address,
        "session": ray._private.worker._global_node.get_session_dir_path(),
        "auth": {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")},
    }
    with open(out + ".tmp", "w") as file:
        json.dump(report, file)
    os.rename(out + ".tmp", out)
    if mode == "wait":
        time.sleep(300)
    if mode == "raise":
        raise KeyError("the driver fails")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
