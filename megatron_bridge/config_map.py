# SPDX-License-Identifier: Apache-2.0
"""HuggingFace config -> megatron-core config fields, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from transformers import PreTrainedConfig

from megatron_bridge.errors import UnsupportedModelError
from megatron_bridge.rope import head_dim

# megatron-core field -> the HuggingFace attribute that it takes its value from. All are required.
DENSE_FIELDS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "layernorm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
    "attention_dropout": "attention_dropout",
}

# What all families of RMSNorm, gated MLP and no biases share; a family's own fields come on top.
DENSE_DEFAULTS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}

ACTIVATIONS: Mapping[str, Callable[..., Any]] = {"silu": F.silu}


def model_fields(
    config: PreTrainedConfig, fields: Mapping[str, str], fixed: Mapping[str, Any], only: Mapping[str, Any]
) -> dict[str, Any]:
    """The architecture part of a megatron-core config.

    Args:
        config: HuggingFace config.
        fields: megatron-core field -> HuggingFace attribute.
        fixed: megatron-core fields that the family always has.
        only: HuggingFace attribute -> the one value that can be expressed; an absent attribute means that
            value.

    Raises:
        UnsupportedModelError: names the config.json key that cannot be expressed, or that is missing.
    """
    for name, expected in only.items():
        value = getattr(config, name, expected)
        if value != expected:
            raise UnsupportedModelError(
                f"{name}={value!r} in the model's config.json is not supported for {config.model_type}; "
                f"only {expected!r} is"
            )
    result = {**DENSE_DEFAULTS, **fixed, "kv_channels": head_dim(config)}
    for target, source in fields.items():
        value = getattr(config, source, None)
        if value is None:
            raise UnsupportedModelError(f"the model's config.json has no {source!r}")
        result[target] = value
    if config.hidden_act not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act={config.hidden_act!r} in the model's config.json is not supported; supported: "
            + ", ".join(ACTIVATIONS)
        )
    result["activation_func"] = ACTIVATIONS[config.hidden_act]
    return result
