# SPDX-License-Identifier: Apache-2.0
"""Options of the Megatron engine: each has its effect, and none changes the mathematics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.loss.nll import NLLLoss
from tests.integration.test_megatron_oracle import assert_matches, make_config, token_mean
from tests.support import oracle
from tests.support.models import tiny_hf_dir
from tests.support.world import run_world
from tests.unit.test_heads_microbatch import LogitForm, LogprobForm, VocabParallelForm

ADAM = {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_hf_dir(tmp_path_factory.mktemp("qwen3"), "qwen3")


def step(config: dict[str, Any], world: int = 1, steps: int = 1, loss_fn: Any = None) -> list[dict[str, Any]]:
    return run_world(
        world,
        "tests.integration.worlds_policy:train_step",
        config=config,
        data=oracle.batch(),
        loss_fn=loss_fn or NLLLoss(),
        steps=steps,
    )


@pytest.fixture(scope="module")
def expected(qwen3: str) -> oracle.Oracle:
    data = oracle.batch()
    return oracle.run(qwen3, data, token_mean(data))


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": True},
        {
            "activation_checkpointing": True,
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp"],
        },
    ],
)
@pytest.mark.parametrize(("layout", "world"), [({}, 1), ({"tp": 2, "sp": True}, 2)])
def test_recompute_changes_nothing(
    options: dict[str, Any], layout: dict[str, Any], world: int, qwen3: str, expected: oracle.Oracle
) -> None:
    results = step(make_config(qwen3, **layout, **options), world)
    assert_matches(results, expected)
    if layout:  # the forward pass of each layer runs twice, with its collectives
        plain = step(make_config(qwen3, **layout), world)
        assert sum(results[0]["communication"].values()) > sum(plain[0]["communication"].values())


@pytest.mark.parametrize("loss_fn", [LogitForm(), LogprobForm(), VocabParallelForm()])
def test_documented_loss_forms_at_tp2(loss_fn: Any, qwen3: str, expected: oracle.Oracle) -> None:
    assert_matches(step(make_config(qwen3, tp=2), 2, loss_fn=loss_fn), expected)


def test_logprob_chunk_size_reaches_training(qwen3: str, expected: oracle.Oracle) -> None:
    """Case 20: with chunks of 3 tokens the head all-reduces once more per chunk, and the gradient is the same."""
    whole, chunked = make_config(qwen3, tp=2), make_config(qwen3, tp=2) | {"logprob_chunk_size": 3}
    plain, results = step(whole, 2), step(chunked, 2)
    assert_matches(results, expected)
    assert results[0]["communication"]["allreduce_"] > plain[0]["communication"]["allreduce_"]


def test_clipping_scales_the_update(qwen3: str, expected: oracle.Oracle) -> None:
    config = make_config(qwen3, optimizer={"clip_grad": 0.5})
    (result,) = step(config)
    assert float(result["train"][0]["grad_norm"][0]) == pytest.approx(expected.grad_norm, rel=1e-5)
    scale = 0.5 / (expected.grad_norm + 1e-6)
    after = {n: w - 0.1 * scale * expected.gradients[n] for n, w in expected.weights.items()}
    oracle.assert_update_close(result["weights"], after, expected.weights)


def test_learning_rate_and_weight_decay_schedule(qwen3: str) -> None:
    schedule = {"lr_decay_style": "cosine", "lr_decay_iters": 6, "lr_warmup_iters": 2, "lr_warmup_init": 1e-4}
    schedule |= {"start_weight_decay": 0.0, "end_weight_decay": 0.3, "weight_decay_incr_style": "linear"}
    config = make_config(qwen3, optimizer=ADAM, scheduler=schedule, train_iters=6)
    (result,) = step(config, steps=8)
    lr = [train["lr"][0] for train in result["train"]]
    warmup = [1e-4, 1e-4 + (1e-2 - 1e-4) / 2]
    decay = [1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    assert lr == pytest.approx([*warmup, *decay, 1e-3], rel=1e-6)
    wd = [train["wd"][0] for train in result["train"]]
    assert wd == pytest.approx([0.05 * i for i in range(7)] + [0.3], rel=1e-6)


def test_decay_skips_vectors_and_shrinks_matrices(qwen3: str) -> None:
    """Megatron's rule: weight decay on matrices only; torch's AdamW formula on them."""
    data = oracle.batch()
    data["sample_mask"] = data["sample_mask"] * 1e-30  # practically no gradient, but some weight in the batch
    decayed = make_config(qwen3, optimizer=ADAM | {"weight_decay": 0.5, "adam_eps": 1.0})
    (result,) = run_world(
        1, "tests.integration.worlds_policy:edge_steps", config=decayed, batches=[data], loss_fn=SumLoss()
    )[:1]
    before, after = result[0]["before"], result[0]["after"]
    for name, tensor in before.items():
        factor = 1 - 1e-2 * 0.5 if tensor.ndim > 1 else 1.0
        assert torch.allclose(after[name], tensor * factor, rtol=1e-5, atol=1e-7), name


class SumLoss(NLLLoss):
    """Not divided by the global count."""

    def compute(self, token_logprobs: torch.Tensor, data: Any, *counts: Any, **kwargs: Any) -> Any:
        one = torch.ones(())
        return super().compute(token_logprobs, data, one, one, **kwargs)


@pytest.mark.parametrize(
    ("layout", "world", "distributed"),
    [({}, 1, False), ({"tp": 2, "sp": True}, 2, False), ({"pp": 2}, 2, False), ({"dp": 2}, 2, True)],
)
def test_bf16(
    layout: dict[str, Any], world: int, distributed: bool, qwen3: str, expected: oracle.Oracle
) -> None:
    config = make_config(
        qwen3, **layout, precision="bfloat16", optimizer=ADAM | {"use_distributed_optimizer": distributed}
    )
    results = step(config, world, steps=3)
    for result in results:
        first = result["train"][0]
        assert float(first["loss"][0]) == pytest.approx(expected.loss, rel=1e-2)
        assert float(first["grad_norm"][0]) == pytest.approx(expected.grad_norm, rel=5e-2)
        assert float(result["train"][2]["loss"][0]) < float(first["loss"][0])
        assert all(tensor.dtype == torch.bfloat16 for tensor in result["weights"].values())


def test_bf16_masters_keep_what_bf16_cannot(qwen3: str) -> None:
    """Sixteen updates of 1e-5 leave most bf16 weights alone at first, but not their fp32 masters."""
    optimizer = ADAM | {"lr": 1e-5, "min_lr": 0.0}
    (result,) = run_world(
        1,
        "tests.integration.worlds_policy:edge_steps",
        config=make_config(qwen3, precision="bfloat16", optimizer=optimizer),
        batches=[oracle.batch()] * 16,
        loss_fn=NLLLoss(),
    )
    first, last = result[0], result[-1]
    masters = [name for name in first["moments_before"] if name.endswith(".main")]
    assert all(last["moments_after"][name].dtype == torch.float32 for name in masters)
    moved = torch.cat(
        [(last["moments_after"][n] - first["moments_before"][n]).abs().flatten() for n in masters]
    )
    assert float((moved > 1e-4).float().mean()) > 0.5
    stuck = torch.cat([(first["after"][n] == first["before"][n]).flatten() for n in first["before"]])
    assert float(stuck.float().mean()) > 0.9


@pytest.mark.parametrize("in_fp32", [False, True])
def test_dtype_of_the_gradient_reduction(in_fp32: bool, qwen3: str) -> None:
    ddp = {"grad_reduce_in_fp32": in_fp32}
    config = make_config(qwen3, precision="bfloat16", optimizer=ADAM, distributed_data_parallel_config=ddp)
    (result,) = step(config)
    assert result["grad_dtype"] == (torch.float32 if in_fp32 else torch.bfloat16)


def test_uneven_pipeline_stages(tmp_path: Any) -> None:
    path = tiny_hf_dir(tmp_path, "llama", layers=3)
    data = oracle.batch()
    config = make_config(path, pp=2, num_layers_in_first_pipeline_stage=1)
    results = step(config, 2)
    assert_matches(results, oracle.run(path, data, token_mean(data)))
    assert sum(n.endswith("linear_qkv.weight") for n in results[0]["shapes"]) == 1
    assert sum(n.endswith("linear_qkv.weight") for n in results[1]["shapes"]) == 2


def test_hf_config_overrides_and_norm_epsilon_have_an_effect(qwen3: str) -> None:
    base = step(make_config(qwen3))[0]["logprobs"]
    theta = step(make_config(qwen3) | {"hf_config_overrides": {"rms_norm_eps": 0.1}})[0]["logprobs"]
    epsilon = step(make_config(qwen3, layernorm_epsilon=0.1))[0]["logprobs"]
    assert not torch.allclose(base, theta, atol=1e-3)
    assert torch.allclose(theta, epsilon, atol=1e-6)


def test_padding_multiple_changes_no_number(qwen3: str, expected: oracle.Oracle) -> None:
    config = make_config(qwen3) | {"make_sequence_length_divisible_by": 16}
    assert_matches(step(config), expected)
