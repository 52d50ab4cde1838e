# SPDX-License-Identifier: Apache-2.0
"""Save, load in fresh processes, go on: bit-equal to an uninterrupted run (case 28), and across layouts (case 29)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.loss.nll import NLLLoss
from tests.integration.test_megatron_oracle import make_config
from tests.support import oracle
from tests.support.models import tiny_hf_dir
from tests.support.world import run_world

ADAM = {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0}
SCHEDULE = {"lr_decay_style": "cosine", "lr_decay_iters": 10, "lr_warmup_iters": 2, "start_weight_decay": 0.0}
SCHEDULE |= {"end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}

LAYOUTS = {
    "single": ({}, 1, False),
    "single_bf16": ({"precision": "bfloat16"}, 1, False),
    "tp2_bf16": ({"tp": 2, "precision": "bfloat16"}, 2, False),
    "pp2": ({"pp": 2}, 2, False),
    "dp2_distributed": ({"dp": 2}, 2, True),
    "dp2_distributed_bf16": ({"dp": 2, "precision": "bfloat16"}, 2, True),
}


def config_of(path: str, layout: dict[str, Any], distributed: bool) -> dict[str, Any]:
    return make_config(
        path,
        **layout,
        optimizer=ADAM | {"use_distributed_optimizer": distributed},
        scheduler=SCHEDULE,
        train_iters=10,
    )


def run(
    world: int, config: dict[str, Any], data: dict[str, Any], fresh: bool = True, **kwargs: Any
) -> list[Any]:
    return run_world(
        world,
        "tests.integration.worlds_policy:train_and_save",
        fresh=fresh,
        config=config,
        data=data,
        loss_fn=NLLLoss(),
        **kwargs,
    )


def assert_bit_equal(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), (where, a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_bit_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_bit_equal(x, y, f"{where}[{i}]")
    else:
        assert a == b, (where, a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_is_bit_exact(name: str, tmp_path: Path) -> None:
    layout, world, distributed = LAYOUTS[name]
    path = tiny_hf_dir(tmp_path / "model", "qwen3")
    config, data = config_of(path, layout, distributed), oracle.batch()
    whole = run(
        world, config, data, directory=str(tmp_path), steps_before=3, steps_after=4, save=True, load=False
    )
    resumed = run(
        world, config, data, directory=str(tmp_path), steps_before=0, steps_after=4, save=False, load=True
    )
    assert len(whole[0]["results"]) == 4
    for one, other in zip(whole, resumed, strict=True):
        steps = [value for key, value in one["restored"].items() if key.endswith(".step")]
        assert steps
        assert all(float(step) == 3 for step in steps)
        assert_bit_equal(one, other)


RESHAPES = {
    "dp2_to_dp1": (({"dp": 2}, 2, True), ({}, 1, True)),
    "dp1_to_dp2": (({}, 1, True), ({"dp": 2}, 2, True)),
    "distributed_to_plain_tp2": (({"dp": 2}, 2, True), ({"tp": 2}, 2, False)),
    "pp2_to_dp2": (({"pp": 2}, 2, False), ({"dp": 2}, 2, True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESHAPES)
def test_another_layout_goes_on_from_the_checkpoint(name: str, tmp_path: Path) -> None:
    (layout, world, distributed), (other_layout, other_world, other_distributed) = RESHAPES[name]
    path = tiny_hf_dir(tmp_path / "model", "qwen3")
    data = oracle.batch()
    common = {"directory": str(tmp_path), "fresh": False}
    before = run(
        world,
        config_of(path, layout, distributed),
        data,
        steps_before=3,
        steps_after=4,
        save=True,
        load=False,
        **common,
    )
    after = run(
        other_world,
        config_of(path, other_layout, other_distributed),
        data,
        steps_before=0,
        steps_after=4,
        save=False,
        load=True,
        **common,
    )
    for name, tensor in before[0]["weights"].items():
        assert torch.allclose(tensor, after[0]["weights"][name], atol=2e-5), name
    for one, other in zip(before[0]["results"], after[0]["results"], strict=True):
        assert torch.allclose(one["loss"], other["loss"], rtol=1e-5)
        assert torch.allclose(one["grad_norm"], other["grad_norm"], rtol=1e-4)
        assert one["lr"] == other["lr"]
        assert one["wd"] == other["wd"]
    assert before[0]["num_samples"] == after[0]["num_samples"] == 7 * 8


@pytest.fixture(scope="module")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a tied model of 2 layers, hidden size 32 and 97 tokens has been saved by two tensor-parallel ranks."""
    directory = tmp_path_factory.mktemp("tied")
    path = tiny_hf_dir(directory / "model", "qwen3", tied=True)
    common = {"steps_before": 0, "steps_after": 0, "save": True, "load": False, "fresh": False}
    run(2, config_of(path, {"tp": 2}, False), oracle.batch(), directory=str(directory), **common)
    return str(directory)


OTHER_MODELS = {
    "untied": (
        {"tied": False},
        r"output_layer\.weight is missing \(the model has it with shape \(98, 32\)\)",
    ),
    "wider": (
        {"hidden": 64},
        r"\w+ has shape \(98, 32\), but the model asks for \(98, 64\); .*; and \d+ more",
    ),
    "deeper": ({"layers": 3}, r"decoder\.layers\."),
    "shallower": ({"layers": 1}, r"decoder\.layers\."),
    "more_tokens": (
        {"vocab": 113},
        r"has shape \(98, 32\), but the model has a vocabulary of 113: \(114, 32\)",
    ),
    "fewer_tokens": (
        {"vocab": 95},
        r"has shape \(98, 32\), but the model has a vocabulary of 95: \(96, 32\)",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_the_checkpoint_of_another_model_is_refused(tied_checkpoint: str, tmp_path: Path, name: str) -> None:
    other, words = OTHER_MODELS[name]
    path = tiny_hf_dir(tmp_path / "model", "qwen3", **({"tied": True} | other))
    advice = r"Resume with the policy\.model_name .* logger\.log_dir"
    expected = rf"CheckpointError: {tied_checkpoint}/weights does not hold this model: .*{words}.*\. {advice}"
    common = {"steps_before": 0, "steps_after": 0, "save": False, "load": True, "fresh": False}
    with pytest.raises(AssertionError, match=expected):
        run(2, config_of(path, {"tp": 2}, False), oracle.batch(), directory=tied_checkpoint, **common)


def test_an_untied_checkpoint_does_not_load_into_a_tied_model(tmp_path: Path) -> None:
    """Each of two stages sees a half of the model: the checkpoint is compared with the whole."""
    path = tiny_hf_dir(tmp_path / "model", "qwen3", tied=False)
    common = {"steps_before": 0, "steps_after": 0, "fresh": False, "directory": str(tmp_path)}
    for load in (False, True):
        run(2, config_of(path, {"pp": 2}, False), oracle.batch(), save=not load, load=load, **common)
    tied = tiny_hf_dir(tmp_path / "tied", "qwen3", tied=True)
    with pytest.raises(
        AssertionError, match=r"output_layer\.weight with shape \(97, 32\) is not part of the"
    ):
        run(2, config_of(tied, {"pp": 2}, False), oracle.batch(), save=False, load=True, **common)


def test_a_path_without_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tiny_hf_dir(tmp_path / "model", "qwen3")
    with pytest.raises(AssertionError, match="is not a checkpoint of this project"):
        run(
            1,
            config_of(path, {}, False),
            oracle.batch(),
            directory=str(tmp_path),
            steps_before=0,
            steps_after=1,
            save=False,
            load=True,
            fresh=False,
        )
