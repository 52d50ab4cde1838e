# SPDX-License-Identifier: Apache-2.0
"""YAML composition: inheritance, interpolation, resolvers, overrides."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from nemo_rl.algorithms.config import GRPOMasterConfig, SFTMasterConfig
from nemo_rl.utils.config import ConfigError, OverridesError, compose, load

BASE = """
policy:
  model_name: tiny
  train_global_batch_size: 8
  megatron_cfg: {tensor_model_parallel_size: 2, optimizer: {lr: 1.0e-3}}
  generation: {temperature: 0.6}
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4, val_period: 0}
data: {train: {dataset_name: arithmetic, env_name: math}}
env: {math: {num_workers: 3}}
cluster: {gpus_per_node: 2}
logger: {log_dir: runs/a}
"""


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def base(tmp_path):
    return write(tmp_path, "base.yaml", BASE)


def grpo(path, *overrides):
    return load(path, overrides, GRPOMasterConfig)


def test_loads_and_fills_derived_keys(base):
    config = grpo(base)
    assert config.policy.megatron_cfg.optimizer.lr == 1e-3
    assert config.env["math"].num_workers == 3
    assert config.checkpointing.checkpoint_dir == "runs/a/checkpoints"
    assert config.policy.generation.val_temperature == 0.6
    assert GRPOMasterConfig.model_validate(config.to_dict(), by_alias=True, by_name=False) == config


def test_defaults_inherit_depth_first_and_the_last_wins(tmp_path):
    write(tmp_path, "base.yaml", BASE)
    write(
        tmp_path,
        "parts/a.yaml",
        "defaults: ../base.yaml\npolicy: {train_global_batch_size: 4, precision: float32}\n",
    )
    write(tmp_path, "parts/b.yaml", "policy: {precision: bfloat16}\ngrpo: {seed: 5}\n")
    leaf = write(tmp_path, "leaf.yaml", "defaults: [parts/a.yaml, parts/b.yaml]\ngrpo: {seed: 6}\n")
    config = grpo(leaf)
    assert config.policy.train_global_batch_size == 4
    assert config.policy.precision == "bfloat16"
    assert config.grpo.seed == 6
    assert config.policy.model_name == "tiny"


def test_override_marker_replaces_a_mapping_instead_of_merging(tmp_path):
    write(tmp_path, "base.yaml", BASE)
    leaf = write(
        tmp_path,
        "leaf.yaml",
        """
        defaults: base.yaml
        env: {_override_: true, other: {num_workers: 1}}
        policy: {generation: {_override_: true, max_new_tokens: 7}}
        data: {train: {env_name: other}}
        """,
    )
    config = grpo(leaf)
    assert list(config.env) == ["other"]
    assert config.policy.generation.temperature == 1.0 and config.policy.generation.max_new_tokens == 7
    assert config.policy.train_global_batch_size == 8


def test_interpolation_sees_class_defaults_and_derived_defaults(base):
    config = grpo(
        base,
        "policy.precision=${policy.megatron_cfg.pipeline_dtype}",
        "policy.megatron_cfg.pipeline_dtype=float32",
        "policy.max_total_sequence_length=${mul:${policy.refit_units},64}".replace(
            "refit_units", "train_micro_batch_size"
        ),
        "policy.generation.max_new_tokens=${div:${policy.max_total_sequence_length},2}",
        "policy.generation.val_temperature=${.temperature}",
        "grpo.max_num_steps=${add:${grpo.num_prompts_per_step},3}",
        "grpo.val_batch_size=${max:${grpo.max_val_samples},300}",
        "checkpointing.checkpoint_dir=${logger.log_dir}/ckpt",
        "logger.tensorboard.log_dir=${checkpointing.checkpoint_dir}/tb",
        "policy.tokenizer.name=${policy.model_name}",
    )
    assert config.policy.precision == "float32"
    assert config.policy.max_total_sequence_length == 64
    assert config.policy.generation.max_new_tokens == 32
    assert config.policy.generation.val_temperature == 0.6
    assert config.grpo.max_num_steps == 5
    assert config.grpo.val_batch_size == 300
    assert config.logger.tensorboard.log_dir == "runs/a/ckpt/tb"


def test_derived_key_may_be_interpolated_without_being_written(base):
    assert grpo(
        base, "logger.tensorboard.log_dir=${checkpointing.checkpoint_dir}/tb"
    ).logger.tensorboard.log_dir == ("runs/a/checkpoints/tb")


def test_a_mapping_may_be_interpolated(base):
    config = grpo(base, "data.validation=${data.train}", "grpo.val_period=5")
    assert config.data.validation == config.data.train


def test_overrides_set_force_and_delete(base):
    config = grpo(
        base,
        "grpo.seed=7",
        "++policy.megatron_cfg.optimizer.lr=1e-5",
        "+grpo.val_batch_size=4",
        "~policy.generation.temperature",
        "policy.generation.stop_strings=['a b', \"c:d\"]",
        "env.math={num_workers: 1}",
        "policy.generation.stop_token_ids=null",
        "logger.log_dir=runs/x=y",
    )
    assert config.grpo.seed == 7 and config.grpo.val_batch_size == 4
    assert config.policy.megatron_cfg.optimizer.lr == 1e-5
    assert config.policy.generation.temperature == 1.0
    assert config.policy.generation.stop_strings == ["a b", "c:d"]
    assert config.env["math"].num_workers == 1
    assert config.logger.log_dir == "runs/x=y"


def test_a_mapping_as_override_merges_unless_it_is_marked(base):
    assert grpo(base, "env.math={timeout_s: 3.0}").env["math"].timeout_s == 3.0
    config = grpo(base, "env={_override_: true, other: {num_workers: 1}}", "data.train.env_name=other")
    assert list(config.env) == ["other"]
    nested = grpo(base, "policy={generation: {_override_: true, max_new_tokens: 7}}")
    assert nested.policy.generation.max_new_tokens == 7
    assert nested.policy.generation.temperature == 1.0
    assert nested.policy.train_global_batch_size == config.policy.train_global_batch_size


def test_overrides_reach_into_lists(tmp_path):
    path = write(tmp_path, "a.yaml", BASE.replace("train: {", "train: [{").replace("math}}", "math}]}"))
    assert grpo(path, "data.train.0.seed=9").data.train[0].seed == 9


@pytest.mark.parametrize(
    "text", ["grpo.seed", "=3", "~grpo.no_such_key", "~nothing.here", "grpo..x=1", "grpo.seed=[1"]
)
def test_bad_overrides_are_refused(base, text):
    with pytest.raises(OverridesError) as error:
        compose(base, [text])
    assert text.lstrip("~").split("=")[0] in str(error.value)


def test_data_default_is_merged_into_every_data_set(base):
    config = grpo(
        base,
        "data.default={prompt_file: p.txt, env_name: math, seed: 5}",
        "data.train=[{dataset_name: arithmetic}, {dataset_name: arithmetic, seed: 1}]",
        "data.validation={dataset_name: arithmetic, prompt_file: null}",
    )
    assert [(c.prompt_file, c.seed, c.env_name) for c in config.data.train] == [
        ("p.txt", 5, "math"),
        ("p.txt", 1, "math"),
    ]
    assert config.data.validation.prompt_file is None
    again = GRPOMasterConfig.model_validate(config.to_dict(), by_alias=True, by_name=False)
    assert again == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: nowhere.yaml\n", "no such file"),
        ("defaults: leaf.yaml\n", "inherits from itself"),
        ("- a\n", "must be a mapping"),
        ("a: [1\n", "not valid YAML"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path, text, message):
    leaf = write(tmp_path, "leaf.yaml", text)
    with pytest.raises(ConfigError, match=message) as error:
        grpo(leaf)
    assert "leaf.yaml" in str(error.value)


def test_unresolvable_values_are_reported_together_with_the_rest(base):
    with pytest.raises(ConfigError) as error:
        grpo(
            base,
            "grpo.seed=${grpo.no_such_key}",
            "grpo.max_num_steps=???",
            "policy.train_micro_batch_size=${div:1,0}",
            "policy.max_total_sequence_length=${nonsense:1}",
            "logger.log_dr=x",
        )
    assert {v.key for v in error.value.violations} == {
        "grpo.seed",
        "grpo.max_num_steps",
        "policy.train_micro_batch_size",
        "policy.max_total_sequence_length",
        "logger.log_dr",
    }
    assert "mandatory" in str(error.value)


def test_sft_tree(tmp_path):
    path = write(
        tmp_path,
        "sft.yaml",
        """
        policy: {model_name: tiny, train_global_batch_size: 4}
        sft: {val_global_batch_size: 4}
        data:
          train: {dataset_name: arithmetic}
          validation: {dataset_name: arithmetic}
        """,
    )
    assert load(path, [], SFTMasterConfig).policy.generation is None


RECIPE = Path(__file__).parents[1] / "data" / "recipe_nemo_rl.yaml"


def test_a_recipe_of_nemo_rl_loads_where_its_features_are_supported(caplog):
    config = load(RECIPE, [], GRPOMasterConfig)
    assert config.policy.megatron_cfg.fp8_cfg.enabled is False
    assert config.policy.dynamic_batching.train_mb_tokens == 2048
    assert config.data.train_sets()[0].processor == "math_hf_data_processor"
    assert config.policy.megatron_cfg.optimizer.use_precision_aware_optimizer is True
    assert "policy.scheduler" in caplog.text and "has no effect in this version" in caplog.text


def test_what_a_recipe_of_nemo_rl_asks_for_in_vain_is_said_at_once():
    asked = {
        "policy.sequence_packing.enabled": "true",
        "policy.dtensor_cfg.enabled": "true",
        "policy.generation.backend": "vllm",
        "logger.monitor_gpus": "true",
        "policy.megatron_cfg.converter_type": "Qwen2ForCausalLM",
        "policy.megatron_recipe": "a.b",
        "data.prompt_file": "p.txt",
        "cluster.device": "cpu",
    }
    with pytest.raises(ConfigError) as error:
        load(RECIPE, [f"++{key}={value}" for key, value in asked.items()], GRPOMasterConfig)
    found = {violation.key: violation.message for violation in error.value.violations}
    precise = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer"
    assert set(found) == {*asked, precise} - {"cluster.device"}
    assert "the bridge finds the model family" in found["policy.megatron_cfg.converter_type"]
    assert "data.default.prompt_file" in found["data.prompt_file"]


def test_null_stands_for_a_section_that_is_off(base):
    config = grpo(
        base, "policy.megatron_cfg.peft=null", "policy.sequence_packing=null", "grpo.async_grpo=null"
    )
    assert config.policy.sequence_packing.enabled is False
    with pytest.raises(ConfigError, match="cluster"):
        grpo(base, "cluster=null")
