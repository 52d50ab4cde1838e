# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from one format to the other in a single process: no launcher, no GPU, no other rank.

The megatron-core checkpoint is layout-free (``torch_dist``): it loads at any TP x PP.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed.checkpoint.api import CheckpointException

from megatron_bridge.auto_bridge import AutoBridge
from megatron_bridge.contents import check_contents
from megatron_bridge.errors import CheckpointError
from megatron_bridge.hf_io import atomic_directory, parse_size
from megatron_bridge.platform import prepare_platform

logger = logging.getLogger(__name__)

Track = Callable[[Iterable[Any], str, int], Iterable[Any]]
# Where a training run keeps its weights, seen from the directory of a step.
_PLACES = (".", "weights", "policy/weights")
_ADVICE = "Give the config.json of the model that it was made from."


def untracked[T](items: Iterable[T], description: str, total: int) -> Iterable[T]:
    """No progress display."""
    del description, total
    return items


@contextmanager
def single_process() -> Generator[None]:
    """A process group of one, and megatron-core's groups in it."""
    if dist.is_initialized():
        raise RuntimeError("conversion makes a process group of its own; run it outside of a distributed job")
    prepare_platform("cpu")
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(minutes=10)
    )
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def import_checkpoint(
    hf_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    track: Track = untracked,
) -> None:
    """HuggingFace directory -> megatron-core distributed checkpoint.

    Args:
        hf_dir: HuggingFace directory.
        out: new directory; appears complete or not at all.
        dtype: of the checkpoint; None takes the dtype of the HuggingFace weights.
        track: wraps iterables for progress display.

    Raises:
        CheckpointError: names the file or tensor at fault.
        UnsupportedModelError: the architecture, or an option of it, is not supported.
    """
    bridge = AutoBridge.from_hf_pretrained(hf_dir)
    with atomic_directory(out) as temporary, single_process():
        model = _build(bridge, dtype or bridge.weights_dtype())
        bridge.load_hf_weights([model], track=lambda tasks: track(tasks, "reading", len(tasks)))
        for _ in track(["checkpoint"], "writing", 1):
            dist_checkpointing.save(_state(model), str(temporary))


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    hf_dir: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    track: Track = untracked,
) -> None:
    """Megatron-core distributed checkpoint -> HuggingFace directory.

    Args:
        checkpoint: directory of the checkpoint, or of a training step that contains it.
        out: new directory; appears complete or not at all.
        hf_dir: HuggingFace directory with the model's config and tokenizer (its weights are not read).
        dtype: of the export; None takes the dtype that config.json names.
        max_shard_size: upper bound of one safetensors file.
        track: wraps iterables for progress display.

    Raises:
        CheckpointError: names the file or tensor at fault.
        UnsupportedModelError: the architecture, or an option of it, is not supported.
    """
    bridge = AutoBridge.from_hf_pretrained(hf_dir)
    source = find_checkpoint(checkpoint)
    limit = parse_size(max_shard_size)
    with single_process():
        model = _build(bridge, dtype or _config_dtype(bridge))
        state = _state(model)
        for _ in track(["checkpoint"], "reading", 1):
            check_contents(state, source, bridge.config.vocab_size, _ADVICE)
            try:
                loaded = dist_checkpointing.load(state, str(source), strict=StrictHandling.RAISE_UNEXPECTED)
            except (CheckpointingException, CheckpointException, RuntimeError, OSError) as error:
                raise CheckpointError(f"{source} cannot be read: {error}") from error
            assert isinstance(loaded, dict)
            model.load_state_dict(loaded, strict=False)
        bridge.save_hf_pretrained(
            [model], out, max_shard_size=limit, track=lambda stream, total: track(stream, "writing", total)
        )


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The distributed checkpoint in a directory, or in the usual places below it."""
    root = Path(path)
    for place in _PLACES:
        if dist_checkpointing.check_is_distributed_checkpoint(str(root / place)):
            return root / place
    looked = ", ".join(str(root / place) for place in _PLACES)
    raise CheckpointError(f"no megatron-core distributed checkpoint in {looked}")


def _build(bridge: AutoBridge, dtype: torch.dtype) -> GPTModel:
    """The whole model on this rank, weights uninitialised."""
    provider = bridge.to_megatron_provider()
    provider.params_dtype = dtype
    provider.perform_initialization = False
    (model,) = provider.provide()
    return model


def _config_dtype(bridge: AutoBridge) -> torch.dtype:
    """The dtype that config.json names; fp32 if none."""
    dtype = bridge.config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _state(model: GPTModel) -> dict[str, Any]:
    """The model's sharded state, without the entries that carry nothing."""
    return {k: v for k, v in model.sharded_state_dict().items() if not k.endswith("_extra_state")}
