# SPDX-License-Identifier: Apache-2.0
"""What a training backend provides. Nothing above this interface knows which backend it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.models.policy.heads import HeadOutput, OutputHead
from nemo_rl.models.policy.microbatch import Microbatch


@dataclass(frozen=True)
class OptimStep:
    """What one optimizer step did.

    Attributes:
        grad_norm: global norm before clipping; 0 where nothing had weight, inf or nan where it was not finite.
        lr: learning rate of the step.
        weight_decay: weight decay of the step.
        skipped: why the weights were left alone ("no weight in the batch", "gradient norm is nan"), or None.
    """

    grad_norm: float
    lr: float
    weight_decay: float
    skipped: str | None = None


class TrainEngine(Protocol):
    """A model with its parallel layout, gradients and optimizer.

    Attributes:
        dims: the layout.
        length_multiple: padded lengths must divide by this.
        uniform_microbatches: all micro-batches of one call must have one shape.
    """

    dims: ParallelDims
    length_multiple: int
    uniform_microbatches: bool

    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: OutputHead, *, forward_only: bool
    ) -> list[HeadOutput]:
        """Run micro-batches through model and head; gradients are summed over them and over data-parallel ranks.

        Starts from zero gradients. Collective over all ranks.

        Returns:
            One output per micro-batch on the last pipeline stage, an empty list on the others.
        """
        ...

    def optimizer_step(self, *, skip: bool = False) -> OptimStep:
        """Clip and update; with ``skip``, or where the norm is not finite, leave the weights alone."""
        ...

    def lr_step(self, num_samples: int) -> None:
        """Advance the schedules of learning rate and weight decay by ``num_samples`` rows."""
        ...

    def mode(self, training: bool) -> AbstractContextManager[None]:
        """Training mode, or inference mode (no gradients), for the duration of a block."""
        ...

    def named_local_state(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers themselves (no copies), by the backend's names."""
        ...

    def iter_hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by HuggingFace name. Collective: all ranks iterate to the end, in one order."""
        ...

    def hf_weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what :meth:`iter_hf_weights` yields."""
        ...

    def broadcast_from_last_stage(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Tensors of the last pipeline stage, on every stage."""
        ...

    def move(
        self, *, params: str | None = None, grads: str | None = None, optimizer: str | None = None
    ) -> None:
        """Move parts of the state to ``"cpu"`` or to the training device (``"device"``)."""
        ...

    def save(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Write sharded checkpoints of the weights and, if a path for it is given, the optimizer. Collective."""
        ...

    def load(self, weights_path: str | None, optimizer_path: str | None = None) -> None:
        """Read what :meth:`save` wrote. Collective."""
        ...

    def export_hf(self, path: str) -> None:
        """Write a HuggingFace model directory. Collective."""
        ...
