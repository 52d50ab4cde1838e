# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5, dense: biases on query, key and value."""

from megatron_bridge.models.common import QKV_BIAS, llama_like
from megatron_bridge.registry import Family, register

QWEN2 = register(
    Family(
        architecture="Qwen2ForCausalLM",
        params=llama_like(QKV_BIAS),
        fixed={"add_qkv_bias": True},
        only={"use_sliding_window": False},
    )
)
