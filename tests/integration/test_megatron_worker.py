# SPDX-License-Identifier: Apache-2.0
"""The worker around the engine: empty and broken batches, reference weights, evaluation, metrics on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.loss.nll import NLLLoss
from nemo_rl.algorithms.loss_functions import ClippedPGLossFn
from tests.integration.test_megatron_oracle import adam_steps, gathered_logprobs, make_config, token_mean
from tests.support import oracle
from tests.support.models import hf_token_logprobs, tiny_hf_dir
from tests.support.world import run_world

ADAM = {"optimizer": "adam", "lr": 1e-2, "min_lr": 0.0, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_hf_dir(tmp_path_factory.mktemp("qwen3"), "qwen3")


def masked(data: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    sample_mask = data["sample_mask"].clone()
    sample_mask[rows] = 0.0
    return data | {"sample_mask": sample_mask}


@pytest.mark.parametrize(("layout", "world"), [({}, 1), ({"dp": 2}, 2), ({"tp": 2}, 2), ({"pp": 2}, 2)])
def test_masked_rows_and_empty_batches(layout: dict[str, int], world: int, qwen3: str) -> None:
    """Case 3: masked rows count for nothing; a batch without any weight skips the step and says so."""
    data = oracle.batch()
    some = masked(data, [0, 1, 2, 3, 6])  # with DP=2, the first rank has no weight at all
    none = masked(data, list(range(8)))
    expected = oracle.run(qwen3, some, token_mean(some))
    config = make_config(qwen3, **layout, optimizer=ADAM | {"use_distributed_optimizer": "dp" in layout})
    results = run_world(
        world,
        "tests.integration.worlds_policy:edge_steps",
        config=config,
        batches=[some, none, some],
        loss_fn=NLLLoss(),
    )
    for partly, empty, _ in results:
        assert float(partly["result"]["loss"][0]) == pytest.approx(expected.loss, rel=1e-5)
        oracle.assert_gradients_close(partly["gradients"], expected)
        assert partly["result"]["num_skipped_steps"] == 0
        result = empty["result"]
        assert result["loss"].tolist() == [0.0]
        assert result["grad_norm"].tolist() == [0.0]
        assert result["num_skipped_steps"] == 1
        assert "weight" in result["skip_reasons"][0]
        assert all(not gradient.any() for gradient in empty["gradients"].values())
        for name in empty["before"]:
            assert torch.equal(empty["before"][name], empty["after"][name]), name
        for name in empty["moments_before"]:
            assert torch.equal(empty["moments_before"][name], empty["moments_after"][name]), name
        assert empty["skipped_total"] == 1


class BrokenLoss(NLLLoss):
    """NaN in the gradient where the first token of a row is `poison`."""

    def compute(self, token_logprobs: torch.Tensor, data: Any, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = super().compute(token_logprobs, data, *args, **kwargs)
        poisoned = (data["input_ids"][:, 0] == 1).any()
        return loss * torch.where(poisoned, float("nan"), 1.0), metrics


@pytest.mark.parametrize(("layout", "world"), [({}, 1), ({"dp": 2}, 2), ({"pp": 2}, 2)])
def test_a_gradient_that_is_not_finite_is_never_applied(
    layout: dict[str, int], world: int, qwen3: str
) -> None:
    good = oracle.batch()
    bad = good | {"input_ids": good["input_ids"].clone()}
    bad["input_ids"][7, 0] = 1  # on one data-parallel rank only
    config = make_config(qwen3, **layout, optimizer=ADAM | {"use_distributed_optimizer": "dp" in layout})
    results = run_world(
        world,
        "tests.integration.worlds_policy:edge_steps",
        config=config,
        batches=[good, bad, good],
        loss_fn=BrokenLoss(),
    )
    for _, broken, again in results:
        assert broken["result"]["num_skipped_steps"] == 1
        assert "nan" in broken["result"]["skip_reasons"][0]
        for name in broken["before"]:
            assert torch.equal(broken["before"][name], broken["after"][name]), name
        assert again["result"]["num_skipped_steps"] == 0
        assert torch.isfinite(again["result"]["grad_norm"]).all()
        assert any(not torch.equal(again["before"][n], again["after"][n]) for n in again["before"])


@pytest.mark.parametrize(
    ("layout", "world"),
    [({}, 1), ({"tp": 2, "sp": True}, 2), ({"pp": 2}, 2), ({"dp": 2}, 2), ({"tp": 2, "pp": 2}, 4)],
)
def test_inference_and_reference(layout: dict[str, Any], world: int, qwen3: str) -> None:
    data = oracle.batch()
    config = make_config(qwen3, **layout)
    results = run_world(
        world,
        "tests.integration.worlds_policy:inference",
        config=config,
        data=data,
        loss_fn=NLLLoss(),
        steps=2,
    )
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).eval()
    expected = hf_token_logprobs(model, data["input_ids"], data["input_lengths"]).detach()
    assert (gathered_logprobs(results) - expected).abs().max() <= 1e-5
    first = results[0]
    for result in results:
        assert torch.equal(result["logprobs"], result["unchanged"])  # evaluation changes nothing
        assert torch.allclose(result["evaluated"]["loss"], result["trained"][0]["loss"], rtol=1e-6)
        assert result["evaluated"]["grad_norm"].numel() == 0
        assert torch.equal(result["reference"], result["logprobs"])  # the initial weights, bit for bit
        assert torch.allclose(
            result["reference_by_3"], result["logprobs"], atol=2e-6
        )  # 3 does not divide the rows
        assert not torch.equal(result["final"], result["logprobs"])
        assert result["restored"]
        assert result["free"] > 0
        for one, other in zip(result["trained"], first["trained"], strict=True):  # the same on every rank
            assert torch.equal(one["loss"], other["loss"])
            assert torch.equal(one["grad_norm"], other["grad_norm"])
            assert one["all_mb_metrics"] == other["all_mb_metrics"]
            assert one["all_mb_metrics"]["num_valid_samples"] == [8.0]
            assert one["global_valid_toks"] == [36.0]
        assert result["refit_info"].keys() == model.state_dict().keys()
    shapes = {name: tuple(shape) for name, (shape, _) in first["refit_info"].items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    by_dp = {r["coordinates"][2]: r for r in results}
    indices = torch.cat([by_dp[rank]["topk_indices"] for rank in sorted(by_dp)])
    assert indices.shape == (8, 11, 5)
    assert int(indices.max()) < 97


def test_top_k_equals_transformers(qwen3: str) -> None:
    data = oracle.batch()
    (result,) = run_world(
        1,
        "tests.integration.worlds_policy:inference",
        config=make_config(qwen3),
        data=data,
        loss_fn=NLLLoss(),
        steps=0,
    )
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).eval()
    for row, length in enumerate(data["input_lengths"].tolist()):
        logits = model(data["input_ids"][row : row + 1, :length]).logits[0]
        assert torch.allclose(result["topk_logits"][row, :length], logits.topk(5).values, atol=1e-5)
        assert result["topk_indices"][row, :length].tolist() == logits.topk(5).indices.tolist()
        assert not result["topk_logits"][row, length:].any()


@pytest.mark.parametrize(("layout", "world"), [({"tp": 2}, 2), ({"dp": 2}, 2)])
def test_clipped_pg_through_the_engine(layout: dict[str, int], world: int, qwen3: str) -> None:
    """The GRPO loss with KL at temperature 0.6, several global batches per call, against the oracle's gradient."""
    data = oracle.batch() | {}
    generator = torch.Generator().manual_seed(9)
    shape = data["input_ids"].shape
    data["advantages"] = torch.randn(shape, generator=generator)
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).eval()
    base = hf_token_logprobs(model, data["input_ids"], data["input_lengths"], 0.6).detach()
    for name, noise in (
        ("prev_logprobs", 0.3),
        ("generation_logprobs", 0.3),
        ("reference_policy_logprobs", 0.5),
    ):
        data[name] = base + noise * torch.randn(shape, generator=generator)
    loss_fn = ClippedPGLossFn(
        {"reference_policy_kl_penalty": 0.1, "ratio_clip_max": 0.28, "ratio_clip_c": 3.0}
    )
    counts = (data["sample_mask"].sum(), data["token_mask"][:, 1:].sum())
    metrics: dict[str, Any] = {}

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        value, found = loss_fn(data, *counts, token_logprobs=logprobs)
        metrics.update({name: float(metric.value) for name, metric in found.items()})
        return value

    expected = oracle.run(qwen3, data, loss, temperature=0.6)
    config = make_config(qwen3, **layout)
    config["generation"] = {"temperature": 0.6}
    results = run_world(
        world, "tests.integration.worlds_policy:train_step", config=config, data=data, loss_fn=loss_fn
    )
    for result in results:
        oracle.assert_gradients_close(result["gradients"], expected)
        got = result["train"][0]["all_mb_metrics"]
        assert got.keys() == metrics.keys()
        for name, value in metrics.items():
            assert got[name] == [pytest.approx(value, rel=1e-4, abs=1e-6)], name


def test_several_global_batches_in_one_call(qwen3: str) -> None:
    """Two optimizer steps in one train() call equal the oracle's two SGD steps; the schedule advances once."""
    data = oracle.batch()
    config = make_config(qwen3) | {"train_global_batch_size": 4}
    (result,) = run_world(
        1, "tests.integration.worlds_policy:train_step", config=config, data=data, loss_fn=NLLLoss()
    )
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).eval()
    losses = []
    for start in (0, 4):
        rows = {key: value[start : start + 4] for key, value in data.items()}
        model.zero_grad()
        loss = token_mean(rows)(hf_token_logprobs(model, rows["input_ids"], rows["input_lengths"]))
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    train = result["train"][0]
    assert train["loss"].tolist() == pytest.approx(losses, rel=1e-5)
    assert train["global_valid_toks"] == [13.0, 23.0]
    assert train["lr"] == [0.1, 0.1]
    for name, tensor in model.state_dict().items():
        assert torch.allclose(result["weights"][name], tensor, atol=1e-5), name


@pytest.mark.parametrize(
    ("layout", "world"), [({}, 1), ({"tp": 2, "sp": True}, 2), ({"pp": 2}, 2), ({"dp": 2}, 2)]
)
def test_generation_uses_the_trained_weights(layout: dict[str, Any], world: int, qwen3: str) -> None:
    """Case 16: what is sampled at T=0.6 after two updates is scored the same by the trainer; ratio 1 within 0.1%."""
    prompts = {key: value for key, value in oracle.batch().items() if key.startswith("input")}
    prompts["seeds"] = torch.arange(8)
    config = make_config(qwen3, **layout, optimizer=ADAM | {"use_distributed_optimizer": "dp" in layout})
    config["generation"] = {
        "temperature": 0.6,
        "max_new_tokens": 12,
        "_pad_token_id": 0,
        "stop_token_ids": [2],
    }
    results = run_world(
        world,
        "tests.integration.worlds_policy:generate_after_training",
        config=config,
        prompts=prompts,
        data=oracle.batch(),
        loss_fn=NLLLoss(),
        steps=2,
    )
    for result in results:
        sampled, scored = result["sampled"], result["scored"]
        positions = torch.arange(scored.shape[1])
        ends = sampled["unpadded_sequence_lengths"][:, None]
        response = (positions >= result["prompt_lengths"][:, None]) & (positions < ends)
        assert response.sum() > 40
        difference = (scored - sampled["logprobs"])[response]
        assert difference.abs().max() <= 1e-5
        assert abs(float(difference.exp().mean()) - 1) <= 1e-3
        assert torch.isfinite(result["after"]).all()


@pytest.mark.parametrize(("layout", "world"), [({"dp": 2}, 2), ({"tp": 2, "pp": 2}, 4)])
def test_exported_directory_is_the_trained_model(
    layout: dict[str, Any], world: int, qwen3: str, tmp_path: Path
) -> None:
    data = oracle.batch()
    config = make_config(
        qwen3, **layout, optimizer=ADAM | {"use_distributed_optimizer": "dp" in layout, "weight_decay": 0.0}
    )
    config["megatron_cfg"]["scheduler"] = {"start_weight_decay": 0.0, "end_weight_decay": 0.0}
    path = str(tmp_path / "exported")
    results = run_world(
        world,
        "tests.integration.worlds_policy:export",
        config=config,
        data=data,
        loss_fn=NLLLoss(),
        path=path,
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logprobs = hf_token_logprobs(model, data["input_ids"], data["input_lengths"]).detach()
    assert (gathered_logprobs(results) - logprobs).abs().max() <= 1e-5
    after = adam_steps(qwen3, data, steps=4, lr=1e-2)
    before = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).state_dict()
    oracle.assert_update_close(dict(model.state_dict()), after, before, rtol=1e-3)


@pytest.mark.parametrize(
    ("layout", "world", "precision", "tolerance"),
    [({}, 1, "bfloat16", 0.15), ({"pp": 2}, 2, "float32", 1e-5), ({"tp": 2, "sp": True}, 2, "float32", 1e-5)],
)
def test_without_optimizer(
    layout: dict[str, Any], world: int, precision: str, tolerance: float, qwen3: str
) -> None:
    data = oracle.batch()
    config = make_config(qwen3, **layout, precision=precision)
    results = run_world(world, "tests.integration.worlds_policy:inference_only", config=config, data=data)
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).eval()
    expected = hf_token_logprobs(model, data["input_ids"], data["input_lengths"]).detach()
    assert (gathered_logprobs(results) - expected).abs().max() <= tolerance
    for result in results:
        assert [
            "init_reference_model=True" in result["refused"][0],
            "optimizer_path" in result["refused"][1],
        ] == [True] * 2


def test_users_mistakes_name_the_key(qwen3: str) -> None:
    adam = {"use_distributed_optimizer": False} | ADAM
    mistakes = {
        "multiple of policy.train_global_batch_size=16": make_config(qwen3) | {"train_global_batch_size": 16},
        "policy.precision": make_config(qwen3, precision="bfloat16", optimizer={"bf16": False}),
        "use_distributed_optimizer=false": make_config(qwen3, optimizer={"use_distributed_optimizer": True}),
        "lr_decay_iters=6": make_config(qwen3, scheduler={"lr_warmup_iters": 5, "lr_decay_iters": 5}),
        "policy.precision=float16": make_config(qwen3, precision="float16", optimizer={"bf16": False}),
        "optimizer.params_dtype": make_config(qwen3, optimizer={"params_dtype": "bfloat16"}),
        "lr_warmup_init": make_config(qwen3, scheduler={"lr_warmup_init": 1.0}),
        "weight_decay_incr_style": make_config(qwen3, optimizer=adam, scheduler={"end_weight_decay": 0.2}),
        "tensor_model_parallel_size": make_config(qwen3, tp=3),
        "model_overrides": make_config(qwen3, model_overrides={"sequence_parallel": True}),
        "hf_config_overrides.rope": make_config(qwen3) | {"hf_config_overrides": {"rope": 1}},
        "policy.model_name": make_config(qwen3 + "/nowhere"),
    }
    (messages,) = run_world(
        1,
        "tests.integration.worlds_policy:failures",
        configs=list(mistakes.values()),
        data=oracle.batch(),
        loss_fn=NLLLoss(),
    )
    for expected, message in zip(mistakes, messages, strict=True):
        assert message is not None, expected
        assert expected in message
