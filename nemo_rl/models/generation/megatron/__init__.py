# SPDX-License-Identifier: Apache-2.0
"""Generation on the policy's own Megatron model: KV cache, continuous batching, TP, SP and PP."""

from nemo_rl.models.generation.megatron.engine import MegatronGenerator

__all__ = ["MegatronGenerator"]
