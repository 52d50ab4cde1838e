# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense: norms on query and key, explicit head size."""

from megatron_bridge.models.common import QK_NORM, llama_like
from megatron_bridge.registry import Family, register

QWEN3 = register(
    Family(
        architecture="Qwen3ForCausalLM",
        params=llama_like(*QK_NORM),
        fixed={"qk_layernorm": True},
        only={"attention_bias": False, "use_sliding_window": False},
    )
)
