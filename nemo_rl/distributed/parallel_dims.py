# SPDX-License-Identifier: Apache-2.0
"""The parallel layout of one training process: degrees, coordinates, process groups, device.

Axes, slowest first (rank order ``[pp, dp, cp, tp]``, so neighbouring ranks share a tensor-parallel group):

======  ==========================================================================================
axis    what is split along it
======  ==========================================================================================
pp      layers; every stage sees every row, only the last one produces logits
dp      rows of a global batch; parameters are replicated (or sharded by the distributed optimizer)
cp      the tokens of a row (zig-zag chunks); parameters are replicated
tp      parameters; with ``sequence_parallel`` also the activations between the matrix products
ep/etp  experts of a mixture-of-experts layer, over the ranks of ``dp x cp x tp``
======  ==========================================================================================

A backend builds one :class:`ParallelDims` (for Megatron: ``nemo_rl.models.megatron.setup.build_dims``); everything
above takes groups and sizes from it and never asks a global registry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelDims:
    """Degrees, this process's rank and device, and its process groups.

    A group is ``None`` where no communication is needed (degree 1, or no ``torch.distributed`` at all): code that takes
    a group must treat ``None`` as "alone".

    Attributes:
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        cp: context-parallel degree.
        dp: data-parallel degree (without context parallelism).
        ep: expert-parallel degree.
        etp: tensor-parallel degree inside an expert.
        sequence_parallel: whether activations between tensor-parallel regions are split along the sequence.
        rank: global rank of this process.
        device: where parameters and batches of this process live.
        tp_group: ranks that share this process's rows, tokens and layers.
        pp_group: one rank per stage.
        cp_group: ranks that share this process's rows, each with a part of the tokens.
        dp_group: ranks with the same parameters and other rows.
        dp_cp_group: ``dp x cp``: ranks over which gradients are summed.
        mp_group: ``tp x pp``: ranks that together hold one copy of the parameters.
    """

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    sequence_parallel: bool
    rank: int
    device: torch.device
    tp_group: ProcessGroup | None
    pp_group: ProcessGroup | None
    cp_group: ProcessGroup | None
    dp_group: ProcessGroup | None
    dp_cp_group: ProcessGroup | None
    mp_group: ProcessGroup | None

    def __post_init__(self) -> None:
        degrees = (self.tp, self.pp, self.cp, self.dp, self.ep, self.etp)
        assert min(degrees) >= 1, f"parallel degrees must be at least 1, got {degrees}"
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} is outside a world of {self.world_size}"

    @property
    def world_size(self) -> int:
        """Number of processes, ``pp x dp x cp x tp``."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def model_parallel_size(self) -> int:
        """Processes that work on the same rows, ``pp x cp x tp``."""
        return self.pp * self.cp * self.tp

    @property
    def tp_rank(self) -> int:
        """Coordinate on the tensor-parallel axis."""
        return self.rank % self.tp

    @property
    def cp_rank(self) -> int:
        """Coordinate on the context-parallel axis."""
        return self.rank // self.tp % self.cp

    @property
    def dp_rank(self) -> int:
        """Coordinate on the data-parallel axis."""
        return self.rank // (self.tp * self.cp) % self.dp

    @property
    def pp_rank(self) -> int:
        """Coordinate on the pipeline axis: the index of this process's stage."""
        return self.rank // (self.tp * self.cp * self.dp)

    @property
    def is_first_stage(self) -> bool:
        """Whether this process holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the output layer (log-probs, losses and metrics come from here)."""
        return self.pp_rank == self.pp - 1

    @property
    def pp_ranks(self) -> list[int]:
        """Global ranks of this process's pipeline, first stage first."""
        stride = self.dp * self.cp * self.tp
        return [stage * stride + self.rank % stride for stage in range(self.pp)]

    @property
    def tp_ranks(self) -> list[int]:
        """Global ranks of this process's tensor-parallel group, in order."""
        start = self.rank - self.tp_rank
        return list(range(start, start + self.tp))

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this process's pipeline."""
        return self.pp_ranks[-1]

    def describe(self) -> str:
        """One line for logs and errors, for example ``tp=2 pp=1 cp=1 dp=2 ep=1 sp=False rank=3``."""
        return (
            f"tp={self.tp} pp={self.pp} cp={self.cp} dp={self.dp} ep={self.ep} "
            f"sp={self.sequence_parallel} rank={self.rank}"
        )


def single_process_dims(device: torch.device) -> ParallelDims:
    """The layout of one process on its own: every degree 1, no groups."""
    return ParallelDims(
        tp=1, pp=1, cp=1, dp=1, ep=1, etp=1, sequence_parallel=False, rank=0, device=device,
        tp_group=None, pp_group=None, cp_group=None, dp_group=None, dp_cp_group=None, mp_group=None,
    )  # fmt: skip
