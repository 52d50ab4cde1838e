# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3 and 3.x, and everything that publishes itself as Llama (SmolLM2, ...)."""

from megatron_bridge.models.common import llama_like
from megatron_bridge.registry import Family, register

LLAMA = register(
    Family(
        architecture="LlamaForCausalLM",
        params=llama_like(),
        only={"attention_bias": False, "mlp_bias": False},
    )
)
