# SPDX-License-Identifier: Apache-2.0
"""Config of the cluster: the `cluster` section. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, NotYet


class ClusterConfig(ConfigModel):
    """The `cluster` section: how many devices, and of which kind."""

    gpus_per_node: int = Field(1, ge=1, description="GPUs per node; on CPU, worker processes per node.")
    num_nodes: int = Field(1, ge=1, description="Nodes.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto` takes CUDA where the driver's cluster has GPUs, else the CPU."
    )
    master_port_range_low: int | None = Field(None, ge=1, le=65535, description="First port for rendezvous.")
    master_port_range_high: int | None = Field(None, ge=1, le=65535, description="Last port for rendezvous.")
    segment_size: Annotated[int | None, NotYet((None,), "null")] = Field(
        None, ge=1, description="Nodes of an NVLink domain that stay together."
    )
