# SPDX-License-Identifier: Apache-2.0
"""Model families by HuggingFace architecture string."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from megatron_bridge.config_map import DENSE_FIELDS
from megatron_bridge.errors import UnsupportedModelError
from megatron_bridge.mapping.base import ParamMapping


@dataclass(frozen=True)
class Family:
    """Everything that is particular to one architecture, as tables.

    Attributes:
        architecture: the string in config.json's ``architectures``.
        params: one mapping per kind of parameter, in the order in which tensors are exported.
        fields: megatron-core config field -> HuggingFace config attribute.
        fixed: megatron-core config fields with a value that the family always has.
        only: HuggingFace config attribute -> the one value that can be expressed.
        ignored: patterns of tensors that checkpoints may hold and that carry no weight of the model.
    """

    architecture: str
    params: tuple[ParamMapping, ...]
    fields: Mapping[str, str] = field(default_factory=lambda: DENSE_FIELDS)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Adds a family; registering an architecture twice is a bug."""
    assert family.architecture not in _FAMILIES, f"{family.architecture} is registered twice"
    _FAMILIES[family.architecture] = family
    return family


def supported_architectures() -> list[str]:
    """Architecture strings that can be converted, sorted."""
    return sorted(_FAMILIES)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a HuggingFace config.

    Raises:
        UnsupportedModelError: lists what is supported.
    """
    architectures = config.architectures or []
    for architecture in architectures:
        if architecture in _FAMILIES:
            return _FAMILIES[architecture]
    raise UnsupportedModelError(
        f"architecture {', '.join(architectures) or '(none in config.json)'} is not supported; supported: "
        + ", ".join(supported_architectures())
    )
