# SPDX-License-Identifier: Apache-2.0
"""Which parameters a model has, over all pipeline stages: one list, in one order, on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from megatron_bridge.comm import ModelGroups, gather_objects
from megatron_bridge.errors import UnsupportedModelError
from megatron_bridge.mapping.base import ParamMapping
from megatron_bridge.mapping.patterns import local_layout
from megatron_bridge.models.common import HF_EMBEDDING, MEGATRON_OUTPUT
from megatron_bridge.registry import Family

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ParamTask:
    """One parameter of the whole model.

    Attributes:
        name: global megatron-core name (layers counted over all stages).
        mapping: its mapping with concrete names.
        stages: pipeline ranks that hold it; the first one is the owner for exports.
        shape: of one tensor-parallel shard.
        dtype: of the parameter.
        exported: False for the second copy of tied weights.
        local: this rank's shard, or None if it is on other stages.
    """

    name: str
    mapping: ParamMapping
    stages: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    exported: bool = True
    local: Tensor | None = field(default=None, repr=False)


def unwrap(chunk: nn.Module) -> GPTModel:
    """The model inside DDP and mixed-precision wrappers."""
    while isinstance(chunk, DistributedDataParallel | Float16Module):
        chunk = cast(nn.Module, chunk.module)
    assert isinstance(chunk, GPTModel), f"expected a GPTModel, got {type(chunk).__name__}"
    return chunk


def groups_of(chunk: GPTModel) -> ModelGroups:
    """The process groups that the chunk was built with."""
    return ModelGroups(tp=chunk.pg_collection.tp, pp=chunk.pg_collection.pp)


def named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters under their global names: the layer number is read off the layer, never recomputed."""
    for chunk in chunks:
        model = unwrap(chunk)
        numbers = [cast(int, layer.layer_number) - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            layer = _LAYER.match(name)
            if layer:
                name = f"decoder.layers.{numbers[int(layer[1])]}.{name[layer.end() :]}"
            yield name, parameter


def build_plan(chunks: Sequence[nn.Module], family: Family, *, tied: bool) -> list[ParamTask]:
    """Lists the parameters of the whole model. Collective over the pipeline group.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        family: the tables.
        tied: whether the output layer is the embedding.

    Raises:
        UnsupportedModelError: if a parameter has no mapping.
    """
    groups = groups_of(unwrap(chunks[0]))
    local = dict(named_parameters(chunks))
    described = [(name, tuple(p.shape), p.dtype) for name, p in local.items()]
    stages: dict[str, tuple[int, ...]] = {}
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for stage, entries in enumerate(gather_objects(described, groups.pp)):
        for name, shape, dtype in entries:
            stages[name] = (*stages.get(name, ()), stage)
            specs[name] = (shape, dtype)
    tasks: list[tuple[tuple[int, int, int], ParamTask]] = []
    for name, (shape, dtype) in specs.items():
        order, mapping = _mapping_of(name, family)
        copy = tied and name == MEGATRON_OUTPUT
        if copy:
            mapping = replace(mapping, hf=(HF_EMBEDDING,))
        task = ParamTask(name, mapping, stages[name], shape, dtype, exported=not copy, local=local.get(name))
        tasks.append((order, task))
    return [task for _, task in sorted(tasks, key=lambda entry: entry[0])]


def _mapping_of(name: str, family: Family) -> tuple[tuple[int, int, int], ParamMapping]:
    """The parameter's mapping, and its place in the order: embedding, layers by number, the rest."""
    layer = _LAYER.match(name)
    for index, candidate in enumerate(family.params):
        mapping = candidate.resolve(local_layout(name))
        if mapping is not None:
            if layer:
                return (1, int(layer[1]), index), mapping
            return (0 if name.startswith("embedding.") else 2, 0, index), mapping
    raise UnsupportedModelError(f"parameter {name} has no mapping in the table of {family.architecture}")
