# SPDX-License-Identifier: Apache-2.0
"""Config sections: strict, frozen, mapping-like, with derived defaults."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from pydantic import ValidationError

from nemo_rl.algorithms.config import GRPOMasterConfig
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.policy import (
    DTensorConfig,
    DTensorConfigDisabled,
    MegatronConfig,
    MegatronConfigDisabled,
    PolicyConfig,
    TokenizerConfig,
)
from nemo_rl.utils.config_model import Hint, NotYet
from nemo_rl.utils.config_schema import branches


def test_reads_like_a_mapping_by_documented_key():
    config = GenerationConfig(temperature=0.5)
    assert config["temperature"] == 0.5
    assert config["_pad_token_id"] is None and "_pad_token_id" in config and "pad_token_id" not in config
    assert config.get("temperature") == 0.5 and config.get("no_such_key", 7) == 7
    assert dict(config)["temperature"] == 0.5 and dict(config.items()) == dict(config)
    assert list(config) == config.keys() and len(config) == len(config.values())
    assert config["mcore_generation_config"]["max_tokens"] == config.mcore_generation_config.max_tokens
    with pytest.raises(KeyError, match="GenerationConfig has no key 'pad_token_id'"):
        config["pad_token_id"]
    assert bool(DTensorConfigDisabled())


def test_is_frozen_and_with_runtime_gives_a_validated_copy():
    config = GenerationConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.temperature = 0.1
    copy = config.with_runtime(_pad_token_id=3, stop_token_ids=[1])
    assert (copy.pad_token_id, copy.stop_token_ids) == (3, [1])
    assert config.pad_token_id is None
    assert config.with_runtime(pad_token_id=4).pad_token_id == 4
    with pytest.raises(ValidationError):
        config.with_runtime(max_new_tokens="many")
    with pytest.raises(ValidationError):
        config.with_runtime(no_such_key=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_global_batch_size", "8"),
        ("train_global_batch_size", 8.0),
        ("train_global_batch_size", True),
        ("train_global_batch_size", 0),
        ("is_vlm", 0),
        ("max_grad_norm", "1.0"),
        ("model_name", 3),
        ("precision", "fp32"),
    ],
)
def test_does_not_guess_types(key, value):
    with pytest.raises(ValidationError):
        PolicyConfig.model_validate({"model_name": "m", key: value})


def test_derived_defaults_follow_their_source_and_yield_to_the_user():
    config = PolicyConfig.model_validate(
        {
            "model_name": "m",
            "precision": "float32",
            "train_micro_batch_size": 3,
            "max_grad_norm": 0.5,
            "megatron_cfg": {"tensor_model_parallel_size": 2, "optimizer": {"weight_decay": 0.25}},
            "generation": {"temperature": 0.6, "val_temperature": 0.0},
        }
    )
    assert config.tokenizer.name == "m"
    assert config.logprob_batch_size == 3
    assert config.make_sequence_length_divisible_by == 2
    megatron = config.megatron_cfg
    assert megatron.pipeline_dtype == "float32" and megatron.optimizer.bf16 is False
    assert megatron.optimizer.clip_grad == 0.5
    assert (megatron.scheduler.start_weight_decay, megatron.scheduler.end_weight_decay) == (0.25, 0.25)
    assert (config.generation.val_temperature, config.generation.val_top_p) == (0.0, 1.0)
    given = PolicyConfig(
        model_name="m", tokenizer=TokenizerConfig(name="t"), train_micro_batch_size=3, logprob_batch_size=1
    )
    assert (given.tokenizer.name, given.logprob_batch_size) == ("t", 1)


def test_constructors_take_models_and_mappings_alike():
    nested = PolicyConfig(model_name="m", megatron_cfg=MegatronConfig(tensor_model_parallel_size=2))
    plain = PolicyConfig.coerce({"model_name": "m", "megatron_cfg": {"tensor_model_parallel_size": 2}})
    assert nested == plain
    assert PolicyConfig.coerce(plain) is plain
    assert PolicyConfig.coerce(plain.to_dict()) == plain
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_disabled_forms_take_the_same_keys():
    config = PolicyConfig.model_validate(
        {"model_name": "m", "dtensor_cfg": {"enabled": False, "tensor_parallel_size": 4, "_v2": True}}
    )
    assert config.dtensor_cfg["_v2"] is True
    assert PolicyConfig(model_name="m", dtensor_cfg=DTensorConfigDisabled()).dtensor_cfg.enabled is False
    assert set(MegatronConfigDisabled.model_fields) == set(MegatronConfig.model_fields)
    assert set(DTensorConfigDisabled.model_fields) == set(DTensorConfig.model_fields)


def test_not_yet_tells_true_from_one():
    limit = NotYet((1,), "1")
    assert limit.accepts(1) and not limit.accepts(True) and not limit.accepts(2)
    assert NotYet(([],), "[]").accepts([]) and not NotYet((None,), "null").accepts([])


def _sections(cls, seen=None):
    seen = {} if seen is None else seen
    if cls in seen:
        return seen
    seen[cls] = True
    for _, info in cls.documented_fields().values():
        below = branches(info.annotation)
        for inner in (below.section, below.values, *below.items):
            if inner is not None:
                _sections(inner, seen)
    return seen


def test_every_field_says_what_it_means_and_defaults_are_usable():
    for section in _sections(GRPOMasterConfig):
        for key, (name, info) in section.documented_fields().items():
            assert info.description and info.description.endswith("."), f"{section.__name__}.{key}"
            assert info.alias in (None, f"_{name}"), f"{section.__name__}.{key}"
            marks = [mark for mark in info.metadata if isinstance(mark, (NotYet, Hint))]
            assert len(marks) <= 1
            if marks and isinstance(marks[0], NotYet):
                default = info.get_default(call_default_factory=True, validated_data={})
                assert marks[0].accepts(default), f"{section.__name__}.{key}: its default is not supported"


def test_config_modules_import_neither_torch_nor_megatron_nor_ray():
    modules = (
        "nemo_rl.algorithms.config, nemo_rl.utils.config, nemo_rl.utils.config_explain, nemo_rl.cli.main"
    )
    heavy = ("torch", "megatron", "ray", "transformers", "numpy")
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
