# SPDX-License-Identifier: Apache-2.0
"""HuggingFace weights into a model: every rank reads the slices that it needs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from megatron_bridge.errors import CheckpointError
from megatron_bridge.export import hf_specs
from megatron_bridge.hf_io import HFCheckpoint
from megatron_bridge.mapping import patterns
from megatron_bridge.mapping.base import Shard
from megatron_bridge.plan import ParamTask
from megatron_bridge.registry import Family


@torch.no_grad()
def load_weights(
    tasks: Sequence[ParamTask],
    checkpoint: HFCheckpoint,
    family: Family,
    shard: Shard,
    track: Callable[[Sequence[ParamTask]], Iterable[ParamTask]] = iter,
) -> None:
    """Fills this rank's parameters.

    Args:
        tasks: the plan of the whole model.
        checkpoint: where to read.
        family: for the tensors that may be ignored.
        shard: this rank's share.
        track: wraps the list of tasks, for progress display.

    Raises:
        CheckpointError: names tensors that are missing, not used, or of another shape.
    """
    check_names(tasks, checkpoint, family)
    for task in track(tasks):
        if task.local is None:
            continue
        sources = {name: checkpoint[name] for name in task.mapping.hf}
        for name, (shape, _) in hf_specs(task, shard.geometry, shard.size).items():
            if sources[name].shape != shape:
                raise CheckpointError(
                    f"{checkpoint.file_of(name)}: {name} has shape {sources[name].shape}, "
                    f"but the model's config.json asks for {shape}"
                )
        task.local.copy_(task.mapping.hf_to_local(sources, shard))


def check_names(tasks: Sequence[ParamTask], checkpoint: HFCheckpoint, family: Family) -> None:
    """Every tensor of the model must be in the checkpoint, and every tensor of the checkpoint in the model."""
    wanted = {name for task in tasks for name in task.mapping.hf}
    present = set(checkpoint.names)
    missing = sorted(wanted - present)
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} tensors of the model: {_some(missing)}"
        )
    tied_copies = {"lm_head.weight"} if any(not task.exported for task in tasks) else set()
    unused = sorted(name for name in present - wanted - tied_copies if not _ignored(name, family))
    if unused:
        raise CheckpointError(
            f"{checkpoint.path} holds {len(unused)} tensors that the model does not use: {_some(unused)}"
        )


def _ignored(name: str, family: Family) -> bool:
    return any(patterns.match(pattern, name) is not None for pattern in family.ignored)


def _some(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
