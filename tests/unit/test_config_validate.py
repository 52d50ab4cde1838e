# SPDX-License-Identifier: Apache-2.0
"""Validation: every violation at once, suggestions for every misspelt key, nothing enabled is ignored."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_rl.algorithms.batch_plan import batch_equation
from nemo_rl.algorithms.config import MASTER_CONFIGS, GRPOMasterConfig, SFTMasterConfig
from nemo_rl.algorithms.loss.config import ClippedPGLossConfig
from nemo_rl.utils.config import ConfigError, apply_override, build
from nemo_rl.utils.config_model import Hint, NotYet, marker
from nemo_rl.utils.config_schema import branches, schema_keys
from nemo_rl.utils.config_validate import closest, validate

GRPO: dict[str, Any] = {
    "policy": {"model_name": "tiny", "train_global_batch_size": 8, "generation": {"max_new_tokens": 8}},
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4},
    "data": {
        "train": {"dataset_name": "arithmetic", "env_name": "math"},
        "validation": {"dataset_name": "arithmetic"},
    },
    "env": {"math": {}},
}
SFT: dict[str, Any] = {
    "policy": {"model_name": "tiny", "train_global_batch_size": 8},
    "sft": {},
    "data": {"train": {"dataset_name": "arithmetic"}, "validation": {"dataset_name": "arithmetic"}},
}
TREES = {"grpo": GRPO, "sft": SFT}


def problems(*overrides: str, tree: dict[str, Any] = GRPO, master: Any = GRPOMasterConfig) -> dict[str, str]:
    """Violations by key of a tree with overrides."""
    composed = OmegaConf.create(tree)
    for override in overrides:
        apply_override(composed, override)
    try:
        build(composed, master)
    except ConfigError as error:
        found: dict[str, str] = {}
        for violation in error.violations:
            found[violation.key] = "; ".join(filter(None, [found.get(violation.key), violation.message]))
        return found
    return {}


def test_the_base_trees_are_fine():
    assert problems() == {}
    assert problems(tree=SFT, master=SFTMasterConfig) == {}


def test_a_misspelt_section_on_the_way_to_a_leaf():
    found = problems("polcy.lr=1")
    assert list(found) == ["polcy.lr"]
    assert "did you mean policy.lr?" in found["polcy.lr"]


def test_a_key_in_the_wrong_section_is_located():
    assert "policy.megatron_cfg.optimizer.lr" in problems("policy.lr=1")["policy.lr"]


def _misspell(word: str, siblings: list[str], kind: str) -> str | None:
    """Change one letter of `word` so that it becomes no other key."""
    place = random.Random(word + kind).randrange(len(word))
    letter = "q" if word[place] != "q" else "z"
    changed = {
        "replace": word[:place] + letter + word[place + 1 :],
        "drop": word[:place] + word[place + 1 :],
        "add": word[:place] + letter + word[place:],
    }[kind]
    return changed if changed and changed not in siblings else None


def _places(cls, prefix=""):
    """Every (path of a section in a tree with env.math, its class)."""
    yield prefix, cls
    for key, (_, info) in cls.documented_fields().items():
        below = branches(info.annotation)
        if below.section:
            yield from _places(below.section, f"{prefix}{key}.")
        if below.values:
            yield from _places(below.values, f"{prefix}{key}.math.")


@pytest.mark.parametrize("kind", ["replace", "drop", "add"])
@pytest.mark.parametrize("algorithm", list(MASTER_CONFIGS))
def test_every_field_with_one_letter_changed_is_refused_with_a_suggestion(algorithm, kind):
    master = MASTER_CONFIGS[algorithm]
    tried = 0
    for prefix, section in _places(master):
        siblings = list(section.documented_fields())
        for key in siblings:
            wrong = _misspell(key, siblings, kind)
            if wrong is None:
                continue
            tried += 1
            tree = OmegaConf.to_container(OmegaConf.create(TREES[algorithm]))
            node = tree
            for part in prefix.split(".")[:-1]:
                node = node.setdefault(part, {})
            node[wrong] = 1
            config, found = validate(tree, master)
            assert config is None
            match = [violation for violation in found if violation.key == prefix + wrong]
            assert match, f"{prefix}{wrong}: {found}"
            assert "did you mean" in match[0].message, match
            assert f"{prefix}{key}" in match[0].message, match
    assert tried > 250


def test_closest_prefers_one_edit():
    assert closest("lrr", ["min_lr", "lr", "err"])[0] in ("lr", "err")
    assert closest("tp", ["pt", "pp", "zz"])[:2] == ["pt", "pp"]
    assert closest("xyz", ["abc"]) == []
    assert closest("top_p", ["top_k"]) == ["top_k"]


def test_all_violations_at_once():
    found = problems(
        "polcy.x=1",
        "policy.train_micro_batch_size=two",
        "policy.precision=fp32",
        "grpo.seed=1.5",
        "grpo.use_dynamic_sampling=true",
        "policy.megatron_cfg.sequence_parallel=true",
        "env.math.num_workers=0",
        "data.train.kwargs=3",
        "loss_fn.reference_policy_kl_type=k4",
    )
    assert set(found) == {
        "polcy.x",
        "policy.train_micro_batch_size",
        "policy.precision",
        "grpo.seed",
        "grpo.use_dynamic_sampling",
        "policy.megatron_cfg.sequence_parallel",
        "env.math.num_workers",
        "data.train.kwargs",
        "loss_fn.reference_policy_kl_type",
    }
    assert "'two'" in found["policy.train_micro_batch_size"]
    assert "bfloat16" in found["policy.precision"]


def test_missing_sections_are_reported_by_key():
    assert problems(tree={"grpo": {}}) == {"policy": "is required", "data.train": "is required"}
    assert problems(tree={**GRPO, "policy": {"train_global_batch_size": 8}}) == {
        "policy.model_name": "is required"
    }


def test_lists_of_data_sets_are_checked_inside():
    found = problems("data.train=[{dataset_name: a, env_name: math}, {dataset_name: b, sed: 1, seed: x}]")
    assert set(found) == {"data.train.1.sed", "data.train.1.seed"}
    found = problems("data.train=[{dataset_name: a, env_name: math}, {seed: 3}]")
    assert "names no data" in found["data.train.1"]
    assert "env.code" in problems("data.train.env_name=code")["data.train.env_name"]


UNSUPPORTED = [
    "policy.sequence_packing.enabled=true",
    "policy.dynamic_batching.enabled=true",
    "policy.megatron_cfg.context_parallel_size=2",
    "policy.megatron_cfg.expert_model_parallel_size=2",
    "policy.megatron_cfg.peft.enabled=true",
    "policy.megatron_cfg.fp8_cfg.enabled=true",
    "policy.draft.enabled=true",
    "grpo.async_grpo.enabled=true",
    "policy.generation.backend=vllm",
    "policy.generation.backend=sglang",
    "policy.generation.colocated.enabled=false",
    "policy.dtensor_cfg.enabled=true",
    "policy.reward_model_cfg.enabled=true",
    "policy.precision=float16",
    "logger.wandb_enabled=true",
    "checkpointing.is_async=true",
]


@pytest.mark.parametrize("override", UNSUPPORTED)
def test_documented_options_that_do_not_work_yet_are_refused_with_what_works(override):
    key = override.split("=")[0]
    assert "not supported yet; use" in problems(override)[key]


def test_disabled_blocks_load_with_all_their_keys():
    assert (
        problems(
            "policy.sequence_packing={enabled: false, train_mb_tokens: 64, algorithm: first_fit}",
            "policy.dynamic_batching={enabled: false, train_mb_tokens: 64, logprob_mb_tokens: 64}",
            "policy.dtensor_cfg={enabled: false, _v2: true, lora_cfg: {enabled: true, dim: 4}}",
            "policy.megatron_cfg.peft={enabled: false, dim: 16, lora_dtype: None}",
            "policy.megatron_cfg.fp8_cfg={enabled: false, fp8_recipe: mxfp8}",
            "policy.draft={enabled: false, num_layers: 1}",
            "grpo.async_grpo={enabled: false, max_trajectory_age_steps: 3, in_flight_weight_updates: true}",
            "grpo.reward_shaping={enabled: false, overlong_buffer_length: 128}",
            "policy.generation.vllm_cfg={tensor_parallel_size: 1, async_engine: false}",
            "policy.generation.colocated={enabled: true, resources: {gpus_per_node: null, num_nodes: null}}",
            "policy.reward_model_cfg={enabled: false, reward_model_type: regression}",
            "logger={wandb_enabled: false, wandb: {project: p, name: n}, gpu_monitoring: {flush_interval: 5}}",
        )
        == {}
    )


def test_unsupported_keys_of_a_disabled_backend_are_not_held_against_it():
    found = problems("policy.megatron_cfg={enabled: false, context_parallel_size: 4}")
    assert set(found) == {"policy.megatron_cfg.enabled"}


CROSS = [
    (
        ["cluster.gpus_per_node=3", "policy.megatron_cfg.tensor_model_parallel_size=2"],
        "cluster.gpus_per_node",
        "set it to 4",
    ),
    (["policy.train_micro_batch_size=3"], "policy.train_global_batch_size", "6 and 9 work"),
    (["cluster.gpus_per_node=16"], "policy.train_global_batch_size", "16 works"),
    (["grpo.num_prompts_per_step=3"], "policy.train_global_batch_size", "set it to 6"),
    (
        ["policy.megatron_cfg.sequence_parallel=true"],
        "policy.megatron_cfg.sequence_parallel",
        "set it to false",
    ),
    (["policy.generation.top_p=0.9"], "policy.generation.top_p", "set it to 1.0"),
    (["policy.generation.top_k=5"], "policy.generation.top_k", "set it to null"),
    (["policy.generation.temperature=0"], "policy.generation.temperature", "set it to 1.0"),
    (["policy.generation=null"], "policy.generation", "needed for GRPO"),
    (["data.validation=null"], "data.validation", "grpo.val_period=0"),
    (
        ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=4"],
        "loss_fn.force_on_policy_ratio",
        "=8",
    ),
    (
        ["grpo.skip_reference_policy_logprobs_calculation=true"],
        "grpo.skip_reference_policy_logprobs_calculation",
        "loss_fn.reference_policy_kl_penalty=0",
    ),
    (["loss_fn.use_kl_in_reward=true"], "loss_fn.use_kl_in_reward", "reinforce_plus_plus"),
    (
        ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=2"],
        "grpo.num_generations_per_prompt",
        "2 or",
    ),
    (["grpo.reward_shaping.enabled=true"], "grpo.reward_shaping.max_response_length", "is needed"),
    (["grpo.batch_multiplier=2.0"], "grpo.batch_multiplier", "1.0"),
    (["checkpointing.metric_name=accuracy"], "checkpointing.metric_name", "val:<name>"),
    (["checkpointing.checkpoint_must_save_by=3h"], "checkpointing.checkpoint_must_save_by", "00:03:45:00"),
    (["policy.optimizer={name: torch.optim.AdamW}"], "policy.optimizer", "policy.megatron_cfg.optimizer"),
    (["policy.megatron_cfg.optimizer.bf16=false"], "policy.megatron_cfg.optimizer.bf16", "true"),
    (
        ["policy.megatron_cfg.optimizer.use_distributed_optimizer=false"],
        "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
        "set it to false",
    ),
    (
        ["cluster.device=cpu", "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true"],
        "policy.megatron_cfg.optimizer.use_precision_aware_optimizer",
        "set it to false on CPU",
    ),
    (["data.max_input_seq_length=1000"], "data.max_input_seq_length", "leave it out"),
    (["cluster.master_port_range_low=5000"], "cluster.master_port_range_high", "both"),
    (
        [
            "policy.megatron_cfg.scheduler.lr_warmup_iters=10",
            "policy.megatron_cfg.scheduler.lr_decay_iters=10",
        ],
        "policy.megatron_cfg.scheduler.lr_warmup_iters",
        "set it to 1",
    ),
    (
        [
            "policy.generation.mcore_generation_config.num_slots=3",
            "policy.megatron_cfg.tensor_model_parallel_size=2",
            "cluster.gpus_per_node=2",
        ],
        "policy.generation.mcore_generation_config.num_slots",
        "4 works",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "advice"), CROSS, ids=[case[1] for case in CROSS])
def test_what_does_not_fit_together_is_refused_with_a_fix(overrides, key, advice):
    found = problems(*overrides)
    assert advice in found[key], found


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_precision_aware_optimizer_is_left_to_the_device(device):
    assert (
        problems(
            f"cluster.device={device}", "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true"
        )
        == {}
    )


def test_checks_across_keys_wait_for_the_keys_they_read():
    found = problems("policy.train_global_batch_sizes=7", "policy.train_micro_batch_size=3")
    assert set(found) == {"policy.train_global_batch_sizes"}


def test_loss_options_that_contradict_each_other():
    def keys(**options):
        return {v.key for v in ClippedPGLossConfig(**options).violations()}

    assert keys() == set()
    assert keys(use_cispo=True) == set()
    assert keys(use_cispo=True, ratio_clip_c=3.0) == {"use_cispo"}
    assert keys(sequence_level_importance_ratios=True) == {"sequence_level_importance_ratios"}
    assert keys(sequence_level_importance_ratios=True, token_level_loss=False) == set()
    assert keys(disable_ppo_ratio=True, force_on_policy_ratio=True) == {"force_on_policy_ratio"}
    assert keys(truncated_importance_sampling_ratio=2.0) == {"truncated_importance_sampling_ratio"}
    with pytest.raises(ValueError, match=r"loss_fn.use_cispo: needs ratio_clip_c=null"):
        ClippedPGLossConfig(use_cispo=True, ratio_clip_c=3.0).checked("loss_fn")


def test_a_hint_that_has_no_effect_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        assert problems("policy.generation.mcore_generation_config.num_cuda_graphs=9") == {}
    assert "mcore_generation_config.num_cuda_graphs=9 has no effect in this version" in caplog.text
    caplog.clear()
    assert problems() == {}
    assert caplog.text == ""


def test_batch_equation():
    tree = OmegaConf.create(
        {**GRPO, "cluster": {"gpus_per_node": 2, "num_nodes": 2}, "grpo": {"num_prompts_per_step": 4}}
    )
    tree.policy.megatron_cfg = {"tensor_model_parallel_size": 2}
    tree.policy.train_micro_batch_size = 2
    plan = batch_equation(build(tree, GRPOMasterConfig))
    assert (plan.world_size, plan.data_parallel, plan.accumulation) == (4, 2, 2)
    assert (plan.rows_per_step, plan.updates_per_step) == (64, 8)
    assert "4 prompts x 16 generations = 64 rows per step = 8 x global batch 8" in str(plan)
    assert "global batch 8 = DP 2 x micro-batch 2 x accumulation 2" in str(plan)


def test_batch_equation_refuses_what_does_not_divide():
    config = build(OmegaConf.create(GRPO), GRPOMasterConfig)
    broken = config.with_runtime(policy=config.policy.with_runtime(train_global_batch_size=7))
    with pytest.raises(ValueError, match=r"policy.train_global_batch_size: .* set it to 8"):
        batch_equation(broken)


def test_sft_validation_batches_divide():
    found = problems(
        "sft.val_global_batch_size=7", "cluster.gpus_per_node=2", tree=SFT, master=SFTMasterConfig
    )
    assert "8 works" in found["sft.val_global_batch_size"]


def test_every_documented_key_of_the_reference_is_known():
    """A few keys of NeMo RL's exemplars, so that a recipe's sections load."""
    keys = set(schema_keys(GRPOMasterConfig))
    for key in (
        "policy.megatron_cfg.moe_permute_fusion",
        "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp",
        "policy.generation.colocated.resources.gpus_per_node",
        "policy.dtensor_cfg._v2",
        "grpo.async_grpo.max_trajectory_age_steps",
        "checkpointing.checkpoint_must_save_by",
        "logger.gpu_monitoring.collection_interval",
        "env.*.num_workers",
    ):
        assert key in keys
    for key, (_, info) in GRPOMasterConfig.documented_fields().items():
        assert marker(info, NotYet) is None and marker(info, Hint) is None, key
