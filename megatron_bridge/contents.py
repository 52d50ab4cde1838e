# SPDX-License-Identifier: Apache-2.0
"""Whether a megatron-core distributed checkpoint holds a model, before anything of it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_bridge.errors import CheckpointError

_MAX_NAMED = 3
_OPTIMIZER = "optimizer."  # a checkpoint of Megatron-LM keeps these beside the weights


def check_contents(
    state: Mapping[str, Any],
    source: str | os.PathLike[str],
    vocab_size: int,
    advice: str,
    max_padding: int | None = None,
) -> None:
    """Every parameter must be in the checkpoint with its shape, and the checkpoint must hold no other.

    Collective over the default process group: each rank brings its part of the model, and all of them raise the same
    error.

    Args:
        state: sharded state of this rank; entries that are no tensors are passed over.
        source: directory of the checkpoint.
        vocab_size: of the model, without padding. The rows that pad it may be of another number.
        advice: ends the message: what would work.
        max_padding: rows that the writer can have added at most; None where that is not known.

    Raises:
        CheckpointError: names the checkpoint, and the first tensors at fault with both shapes.
    """
    wanted = _shapes_of_all_ranks(state)
    present = {
        name: tuple(tensor.global_shape)
        for name, tensor in dist_checkpointing.load_tensors_metadata(str(source)).items()
    }
    problems = []
    for name, (shape, is_padded) in wanted.items():
        found = present.get(name)
        if found is None:
            problems.append(f"{name} is missing (the model has it with shape {shape})")
        elif is_padded and found[1:] == shape[1:]:
            padding = found[0] - vocab_size
            if padding < 0 or (max_padding is not None and padding > max_padding):
                problems.append(
                    f"{name} has shape {found}, but the model has a vocabulary of {vocab_size}: {shape}"
                )
        elif found != shape:
            problems.append(f"{name} has shape {found}, but the model asks for {shape}")
    problems += [
        f"{name} with shape {shape} is not part of the model"
        for name, shape in present.items()
        if name not in wanted and not name.startswith(_OPTIMIZER)
    ]
    if problems:
        more = len(problems) - _MAX_NAMED
        named = "; ".join(problems[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError(f"{source} does not hold this model: {named}. {advice}")


def _shapes_of_all_ranks(state: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """By name: shape of the whole tensor, and whether its rows are a padded vocabulary."""
    own = {}
    for entry in state.values():
        tensors = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        for tensor in tensors:
            if isinstance(tensor, ShardedTensor):
                own[tensor.key] = (tuple(tensor.global_shape), bool(tensor.allow_shape_mismatch))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return {name: shape for part in everybody for name, shape in part.items()}
