# SPDX-License-Identifier: Apache-2.0
"""HuggingFace RoPE settings -> rotary table, with transformers' own inverse frequencies."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_bridge.errors import UnsupportedModelError
from megatron_bridge.layers.attention import RotaryTable

# Types whose frequencies do not depend on the length of the sequence; computed by transformers itself.
_STATIC_TYPES = ("linear", "llama3", "yarn")


def head_dim(config: PreTrainedConfig) -> int:
    """Size of one attention head: explicit in newer configs, hidden size / heads otherwise."""
    explicit = getattr(config, "head_dim", None)
    return explicit if explicit is not None else config.hidden_size // config.num_attention_heads


def rotary_table(config: PreTrainedConfig) -> RotaryTable:
    """Builds the table for a config in transformers 5's ``rope_parameters`` form (older forms are converted on load).

    Raises:
        UnsupportedModelError: for a RoPE type that is unknown, or that depends on each row's own length.
    """
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        rotary_dim = int(head_dim(config) * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
        return RotaryTable(1.0 / (parameters["rope_theta"] ** exponents))
    if kind in _STATIC_TYPES:
        return RotaryTable(*ROPE_INIT_FUNCTIONS[kind](config))
    raise UnsupportedModelError(
        f"rope_type {kind!r} in the model's config.json is not supported yet; supported: default, "
        + ", ".join(_STATIC_TYPES)
    )
