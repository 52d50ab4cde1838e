# SPDX-License-Identifier: Apache-2.0
"""Which modules a decoder is built from: megatron-core's parallel linears, our norm and attention."""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_bridge.layers.core_attention import CoreAttention
from megatron_bridge.layers.decoder import DecoderLayer, DecoderSelfAttention
from megatron_bridge.layers.linear import ColumnLinear, RowLinear
from megatron_bridge.layers.mlp import GatedMLP
from megatron_bridge.layers.norm import RMSNorm

# Keys of Transformer Engine's layout, so that checkpoints of both layouts are interchangeable (as megatron-core does).
_TE_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def decoder_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One dense decoder layer."""
    qk_norm = RMSNorm if config.qk_layernorm else None
    attention = ModuleSpec(
        module=DecoderSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=CoreAttention,  # type: ignore[arg-type]
            linear_proj=RowLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    mlp = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    return ModuleSpec(
        module=DecoderLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            pre_mlp_layernorm=RMSNorm,
            mlp=partial(GatedMLP.as_mlp_submodule, submodules=mlp),
            mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            sharded_state_dict_keys_map=dict(_TE_KEYS),
        ),
    )


def decoder_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and virtual stage) plus the final norm."""
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[decoder_layer_spec(config)] * count, layer_norm=RMSNorm)
