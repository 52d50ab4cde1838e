# SPDX-License-Identifier: Apache-2.0
"""Architecture and layout: what is translated, what is refused, and with which words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from megatron_bridge import AutoBridge
from megatron_bridge.errors import CheckpointError, UnsupportedModelError
from megatron_bridge.provider import ModelProvider


def smollm2() -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=30,
        vocab_size=49152,
        tie_word_embeddings=True,
    )


def provider(config: Any = None, **layout: Any) -> ModelProvider:
    result = AutoBridge.from_hf_config(config or smollm2()).to_megatron_provider()
    for name, value in layout.items():
        assert hasattr(result, name)
        setattr(result, name, value)
    return result


def test_tensor_parallel_size_that_does_not_fit_says_why_and_what_fits() -> None:
    with pytest.raises(ValueError, match="cannot be split") as caught:
        provider(tensor_model_parallel_size=2).finalize()
    message = str(caught.value)
    assert "policy.megatron_cfg.tensor_model_parallel_size=2" in message
    assert "9 attention heads do not divide by 2" in message
    assert message.endswith("Sizes that work: 1, 3")
    provider(tensor_model_parallel_size=3).finalize()


def test_key_value_heads_and_ranks_must_divide_each_other() -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_attention_heads=12,
        hidden_size=96,
        num_key_value_heads=4,
        intermediate_size=1200,
    )
    with pytest.raises(ValueError, match=r"4 key/value heads and 6 ranks.*Sizes that work: 1, 2, 4, 12"):
        provider(config, tensor_model_parallel_size=6).finalize()


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            {"pipeline_model_parallel_size": 4},
            "pipeline_model_parallel_size=4.*divide evenly: 1, 2, 3, 5, 6, 10, 15, 30",
        ),
        ({"pipeline_model_parallel_size": 31}, "30 layers"),
        ({"num_layers_in_first_pipeline_stage": 3}, "leave them unset"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4}, "8 equal pieces"),
        ({"sequence_parallel": True}, "set sequence_parallel to false"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        ({"expert_model_parallel_size": 2}, "has no experts"),
        ({"overrides": {"recompute_granularty": "full"}}, "did you mean 'recompute_granularity'"),
    ],
)
def test_layouts_that_are_refused(layout: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        provider(**layout).finalize()


def test_uneven_pipeline_split() -> None:
    provider(pipeline_model_parallel_size=4, num_layers_in_first_pipeline_stage=6).finalize()
    provider(
        pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=6,
        num_layers_in_last_pipeline_stage=24,
    ).finalize()


def test_padded_vocabulary_is_readable() -> None:
    config = smollm2()
    config.vocab_size = 97
    assert provider(config).padded_vocab_size == 97
    assert provider(config, tensor_model_parallel_size=3).padded_vocab_size == 99


def test_config_is_translated() -> None:
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        num_hidden_layers=3,
        rms_norm_eps=1e-6,
        initializer_range=0.05,
    )
    result = provider(config, params_dtype=torch.bfloat16, overrides={"calculate_per_token_loss": True})
    core = result.transformer_config()
    assert (core.num_layers, core.hidden_size, core.ffn_hidden_size) == (3, 64, 96)
    assert (core.num_attention_heads, core.num_query_groups, core.kv_channels) == (4, 2, 32)
    assert core.layernorm_epsilon == 1e-6
    assert core.init_method_std == 0.05
    assert core.qk_layernorm
    assert core.gated_linear_unit
    assert not core.add_bias_linear
    assert not core.add_qkv_bias
    assert core.bf16
    assert core.pipeline_dtype == torch.bfloat16
    assert core.calculate_per_token_loss
    qwen2 = Qwen2Config(architectures=["Qwen2ForCausalLM"], hidden_size=64, num_attention_heads=4)
    assert provider(qwen2).transformer_config().add_qkv_bias


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LlamaConfig(architectures=["LlamaForCausalLM"], attention_bias=True), "attention_bias=True"),
        (LlamaConfig(architectures=["LlamaForCausalLM"], mlp_bias=True), "mlp_bias=True"),
        (LlamaConfig(architectures=["LlamaForCausalLM"], hidden_act="gelu"), "hidden_act='gelu'.*silu"),
        (Qwen2Config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True), "use_sliding_window=True"),
        (
            LlamaConfig(
                architectures=["LlamaForCausalLM"],
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            "rope_type 'dynamic'",
        ),
    ],
)
def test_options_that_cannot_be_expressed_are_named(config: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        AutoBridge.from_hf_config(config)


def test_unknown_architecture_lists_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        AutoBridge.from_hf_config(GPT2Config(architectures=["GPT2LMHeadModel"]))
    for name in ("GPT2LMHeadModel", *AutoBridge.list_supported_models()):
        assert name in str(caught.value)
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(
        AutoBridge.list_supported_models()
    )
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    assert not AutoBridge.can_handle(tmp_path)
    assert not AutoBridge.can_handle(tmp_path / "nowhere")
    smollm2().save_pretrained(tmp_path / "s")
    assert AutoBridge.can_handle(tmp_path / "s")


def test_a_directory_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        AutoBridge.from_hf_pretrained(tmp_path)


def test_older_rope_scaling_form_is_understood(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    config = json.loads(smollm2().to_json_string(use_diff=False))
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "rope_theta": 1234.0, "rope_scaling": scaling})
    )
    old = AutoBridge.from_hf_pretrained(tmp_path).to_megatron_provider()
    new = smollm2()
    new.rope_parameters = {**scaling, "rope_theta": 1234.0}
    assert torch.equal(old.rotary.inv_freq, provider(new).rotary.inv_freq)
    assert not torch.equal(old.rotary.inv_freq, provider().rotary.inv_freq)


def test_arguments_are_parsed_without_torch() -> None:
    code = "import sys, megatron_bridge.cli as c; c._parser().parse_args(['models']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
