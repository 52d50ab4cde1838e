# SPDX-License-Identifier: Apache-2.0
"""Parameter tables that several families share."""

from __future__ import annotations

from megatron_bridge.mapping.attention import QKV
from megatron_bridge.mapping.base import ParamMapping
from megatron_bridge.mapping.dense import Replicated, Row, Vocabulary
from megatron_bridge.mapping.mlp import GatedMLP

HF_EMBEDDING = "model.embed_tokens.weight"
MEGATRON_OUTPUT = "output_layer.weight"

EMBEDDING = Vocabulary("embedding.word_embeddings.weight", (HF_EMBEDDING,))
FINAL = (
    Replicated("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Vocabulary(MEGATRON_OUTPUT, ("lm_head.weight",)),
)

_M = "decoder.layers.*."
_H = "model.layers.*."

QKV_WEIGHT = QKV(
    _M + "self_attention.linear_qkv.weight", tuple(f"{_H}self_attn.{x}_proj.weight" for x in "qkv")
)
QKV_BIAS = QKV(_M + "self_attention.linear_qkv.bias", tuple(f"{_H}self_attn.{x}_proj.bias" for x in "qkv"))
QK_NORM = (
    Replicated(_M + "self_attention.q_layernorm.weight", (_H + "self_attn.q_norm.weight",)),
    Replicated(_M + "self_attention.k_layernorm.weight", (_H + "self_attn.k_norm.weight",)),
)
DENSE_MLP = (
    GatedMLP(_M + "mlp.linear_fc1.weight", (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight")),
    Row(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",)),
)


def llama_like(*extra: ParamMapping) -> tuple[ParamMapping, ...]:
    """Llama's table, with the attention's extra parameters in it."""
    return (
        EMBEDDING,
        Replicated(_M + "input_layernorm.weight", (_H + "input_layernorm.weight",)),
        QKV_WEIGHT,
        *extra,
        Row(_M + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",)),
        Replicated(_M + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",)),
        *DENSE_MLP,
        *FINAL,
    )
