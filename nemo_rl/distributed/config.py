# SPDX-License-Identifier: Apache-2.0
"""Config of the cluster: the `cluster` section. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, NotYet, Violation


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

    def violations(self) -> Iterator[Violation]:
        """A port range with one end, or an empty one."""
        low, high = self.master_port_range_low, self.master_port_range_high
        if (low is None) != (high is None):
            missing = "master_port_range_low" if low is None else "master_port_range_high"
            yield Violation(missing, "the port range needs both ends; set it, or both to null")
        if low is not None and high is not None and low >= high:
            yield Violation("master_port_range_high", f"must be above master_port_range_low={low}")
