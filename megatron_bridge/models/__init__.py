# SPDX-License-Identifier: Apache-2.0
"""Model families; importing this package registers them all."""

from megatron_bridge.models import llama, qwen2, qwen3

__all__ = ["llama", "qwen2", "qwen3"]
