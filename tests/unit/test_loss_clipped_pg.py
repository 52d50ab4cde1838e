# SPDX-License-Identifier: Apache-2.0
"""ClippedPGLossFn against formulas written out, one option at a time; every option must change something."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl.algorithms.interfaces import LossFunction, LossType, Metric
from nemo_rl.algorithms.loss.functional import kl_estimate
from nemo_rl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss

ROWS, WIDTH = 3, 6


@pytest.fixture
def data() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def logprobs() -> Tensor:
        return -torch.rand(ROWS, WIDTH, generator=generator) * 3 - 0.1

    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]]).float()
    return {
        "input_ids": torch.randint(0, 10, (ROWS, WIDTH), generator=generator),
        "token_mask": mask,
        "sample_mask": torch.ones(ROWS),
        "advantages": torch.randn(ROWS, WIDTH, generator=generator),
        "prev_logprobs": logprobs(),
        "generation_logprobs": logprobs(),
        "reference_policy_logprobs": logprobs(),
        "current": logprobs().requires_grad_(),
    }


def call(data: dict[str, Any], **options: Any) -> tuple[Tensor, dict[str, Metric]]:
    options = {"reference_policy_kl_penalty": 0.0, **options}
    mask = data["token_mask"] * data["sample_mask"][:, None]
    return ClippedPGLossFn(options)(
        data, data["sample_mask"].sum(), mask[:, 1:].sum(), token_logprobs=data["current"]
    )


def token_mean(data: dict[str, Any], terms: Tensor) -> Tensor:
    mask = data["token_mask"] * data["sample_mask"][:, None]
    return (terms * mask)[:, 1:].sum() / mask[:, 1:].sum()


def row_mean(data: dict[str, Any], terms: Tensor) -> Tensor:
    return torch.stack([terms[i][data["token_mask"][i] > 0].mean() for i in range(ROWS)]).mean()


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value, leaf, retain_graph=True)[0]


def assert_same(data: dict[str, Any], actual: Tensor, expected: Tensor) -> None:
    assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-7), (actual, expected)
    assert torch.allclose(
        gradient(actual, data["current"]), gradient(expected, data["current"]), rtol=1e-5, atol=1e-7
    )


def test_is_a_loss_function() -> None:
    assert isinstance(ClippedPGLossFn({}), LossFunction)
    assert isinstance(NLLLoss(), LossFunction)


def test_asymmetric_clipping(data: dict[str, Any]) -> None:
    loss, metrics = call(data, ratio_clip_min=0.1, ratio_clip_max=0.3)
    ratio = (data["current"] - data["prev_logprobs"]).exp()
    a = data["advantages"]
    assert_same(data, loss, token_mean(data, torch.maximum(-a * ratio, -a * ratio.clamp(0.9, 1.3))))
    inside = ratio[data["token_mask"] > 0]
    assert float(metrics["probs_ratio_min"].value) == pytest.approx(float(inside.min().detach()))
    assert float(metrics["probs_ratio_max"].value) == pytest.approx(float(inside.max().detach()))
    assert metrics["probs_ratio_min"].reduction == "min"
    assert float(metrics["probs_ratio_clamped_max"].value) <= 1.3 + 1e-6


def test_dual_clip_bounds_negative_advantages(data: dict[str, Any]) -> None:
    data["advantages"] = -data["advantages"].abs()
    data["prev_logprobs"] = data["current"].detach() - 2.0  # ratio 7.4
    loss, _ = call(data, ratio_clip_c=3.0)
    assert_same(data, loss, token_mean(data, -data["advantages"] * 3.0 + 0.0 * data["current"]))
    unbounded, _ = call(data)
    assert unbounded > loss


def test_sequence_level_ratio(data: dict[str, Any]) -> None:
    loss, _ = call(
        data,
        sequence_level_importance_ratios=True,
        token_level_loss=False,
        ratio_clip_min=0.2,
        ratio_clip_max=0.2,
    )
    log_ratio = data["current"] - data["prev_logprobs"]
    mask = data["token_mask"]
    per_row = ((log_ratio * mask).sum(-1) / mask.sum(-1)).exp()[:, None].expand_as(mask)
    a = data["advantages"]
    assert_same(data, loss, row_mean(data, torch.maximum(-a * per_row, -a * per_row.clamp(0.8, 1.2))))


def test_sequence_mean_is_not_token_mean(data: dict[str, Any]) -> None:
    by_token, _ = call(data)
    by_row, _ = call(data, token_level_loss=False)
    ratio = (data["current"] - data["prev_logprobs"]).exp()
    a = data["advantages"]
    assert_same(data, by_row, row_mean(data, torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))))
    assert not torch.isclose(by_token, by_row)
    assert ClippedPGLossFn({"token_level_loss": False}).loss_type is LossType.SEQUENCE_LEVEL


def test_reinforce(data: dict[str, Any]) -> None:
    loss, _ = call(data, disable_ppo_ratio=True)
    assert_same(data, loss, token_mean(data, -data["advantages"] * data["current"]))


def test_forced_on_policy_ratio_has_the_policy_gradient(data: dict[str, Any]) -> None:
    loss, metrics = call(data, force_on_policy_ratio=True)
    assert float(loss.detach()) == pytest.approx(float(token_mean(data, -data["advantages"])), rel=1e-6)
    assert torch.allclose(
        gradient(loss, data["current"]),
        gradient(token_mean(data, -data["advantages"] * data["current"]), data["current"]),
    )
    assert float(metrics["probs_ratio"].value) == pytest.approx(1.0)


def test_cispo_weights_are_constants(data: dict[str, Any]) -> None:
    loss, _ = call(data, use_cispo=True)
    weight = (data["current"] - data["prev_logprobs"]).exp().clamp(0.8, 1.2).detach()
    assert_same(data, loss, token_mean(data, -data["advantages"] * weight * data["current"]))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalty(kind: str, data: dict[str, Any]) -> None:
    data["advantages"] = torch.zeros(ROWS, WIDTH)
    loss, metrics = call(data, reference_policy_kl_penalty=0.3, reference_policy_kl_type=kind)
    current = data["current"]
    log_ratio = data["reference_policy_logprobs"] - current
    estimate = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}[kind]
    expected = token_mean(data, (current - current.detach()).exp() * estimate)
    assert_same(data, loss, 0.3 * expected)
    assert float(metrics["kl_penalty"].value) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_on_policy_kl_approximation_weights_by_the_sampler(data: dict[str, Any]) -> None:
    data["advantages"] = torch.zeros(ROWS, WIDTH)
    loss, _ = call(data, reference_policy_kl_penalty=0.3, use_on_policy_kl_approximation=True)
    log_ratio = data["reference_policy_logprobs"] - data["current"]
    weight = (data["current"] - data["generation_logprobs"]).exp()
    assert_same(data, loss, 0.3 * token_mean(data, weight * (log_ratio.exp() - 1 - log_ratio)))


def test_kl_in_reward_leaves_the_loss_alone(data: dict[str, Any]) -> None:
    plain, _ = call(data)
    moved, _ = call(data, reference_policy_kl_penalty=0.3, use_kl_in_reward=True)
    assert torch.equal(plain, moved)


def test_kl_clamps_have_an_effect(data: dict[str, Any]) -> None:
    data["reference_policy_logprobs"] = data["current"].detach() + 3.0
    free, _ = call(data, reference_policy_kl_penalty=1.0, kl_output_clamp_value=None)
    bounded, _ = call(data, reference_policy_kl_penalty=1.0, kl_output_clamp_value=5.0)
    narrow, _ = call(data, reference_policy_kl_penalty=1.0, kl_input_clamp_value=1.0)
    assert float((free - bounded).detach()) == pytest.approx(math.exp(3) - 4 - 5, rel=1e-4)
    assert float((free - narrow).detach()) == pytest.approx(math.exp(3) - 4 - (math.e - 2), rel=1e-4)


@pytest.mark.parametrize(("logprob", "reference"), [(-100.0, -1.0), (-1.0, -100.0)])
def test_extreme_kl_is_finite_with_finite_gradient(logprob: float, reference: float) -> None:
    """Case 22."""
    value = torch.tensor(logprob, requires_grad=True)
    estimate = kl_estimate(value, torch.tensor(reference), "k3")
    (grad,) = torch.autograd.grad(estimate, value)
    assert torch.isfinite(estimate)
    assert torch.isfinite(grad)
    assert float(estimate.detach()) == 10.0
    near = kl_estimate(torch.tensor(-1.0), torch.tensor(-1.5), "k3")
    assert float(near) == pytest.approx(math.exp(-0.5) - 1 + 0.5, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"ratio_clip_c": 3.0}, {"token_level_loss": False, "sequence_level_importance_ratios": True}],
)
def test_extreme_ratios_and_masked_garbage_stay_finite(options: dict[str, Any], data: dict[str, Any]) -> None:
    outside = data["token_mask"] == 0
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages"):
        data[name] = data[name].masked_fill(outside, float("nan"))
    data["prev_logprobs"] = torch.where(outside, data["prev_logprobs"], torch.tensor(-500.0))
    loss, metrics = call(
        data, reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True, **options
    )
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient(loss, data["current"])).all()
    assert all(torch.isfinite(metric.value) for metric in metrics.values())


class TestSamplerCorrection:
    """Importance weights exp(prev - generation), truncated three ways."""

    def weights(self, data: dict[str, Any]) -> Tensor:
        return (data["prev_logprobs"] - data["generation_logprobs"]).exp()

    def expected(self, data: dict[str, Any], weights: Tensor) -> Tensor:
        ratio = (data["current"] - data["prev_logprobs"]).exp()
        a = data["advantages"]
        return token_mean(data, weights * torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)))

    def test_untruncated(self, data: dict[str, Any]) -> None:
        loss, metrics = call(data, use_importance_sampling_correction=True)
        assert_same(data, loss, self.expected(data, self.weights(data)))
        assert float(metrics["sampling_importance_ratio"].value) == pytest.approx(
            float(token_mean(data, self.weights(data)))
        )

    def test_tis_clamps(self, data: dict[str, Any]) -> None:
        loss, _ = call(
            data,
            use_importance_sampling_correction=True,
            truncated_importance_sampling_ratio=1.2,
            truncated_importance_sampling_ratio_min=0.6,
        )
        assert_same(data, loss, self.expected(data, self.weights(data).clamp(0.6, 1.2)))

    def test_icepop_drops_tokens(self, data: dict[str, Any]) -> None:
        loss, metrics = call(
            data,
            use_importance_sampling_correction=True,
            truncated_importance_sampling_ratio=1.2,
            truncated_importance_sampling_ratio_min=0.6,
            truncated_importance_sampling_type="icepop",
        )
        weights = self.weights(data)
        outside = (weights < 0.6) | (weights > 1.2)
        assert_same(data, loss, self.expected(data, weights.masked_fill(outside, 0.0)))
        assert float(metrics["is_oob_ratio"].value) == pytest.approx(float(token_mean(data, outside.float())))

    def test_seq_mask_tis_drops_rows(self, data: dict[str, Any]) -> None:
        data["generation_logprobs"] = data["prev_logprobs"].clone()
        data["generation_logprobs"][1] -= 2.0  # geometric mean of row 1: e^2
        loss, _ = call(
            data,
            use_importance_sampling_correction=True,
            truncated_importance_sampling_ratio=2.0,
            truncated_importance_sampling_type="seq-mask-tis",
        )
        weights = self.weights(data)
        weights[1] = 0.0
        assert_same(data, loss, self.expected(data, weights))

    def test_sequence_level_weight_is_the_product(self, data: dict[str, Any]) -> None:
        options = {"sequence_level_importance_ratios": True, "token_level_loss": False}
        loss, _ = call(data, use_importance_sampling_correction=True, **options)
        mask = data["token_mask"]
        weight = ((data["prev_logprobs"] - data["generation_logprobs"]) * mask).sum(-1).exp()[:, None]
        per_row = (((data["current"] - data["prev_logprobs"]) * mask).sum(-1) / mask.sum(-1)).exp()[:, None]
        a = data["advantages"]
        terms = weight * torch.maximum(-a * per_row, -a * per_row.clamp(0.8, 1.2))
        assert_same(data, loss, row_mean(data, terms))


def test_masked_rows_do_not_dilute(data: dict[str, Any]) -> None:
    """Case 3: one row fully masked, per-token loss 1: the loss is 1, not 2/3."""
    data["sample_mask"] = torch.tensor([1.0, 0.0, 1.0])
    data["advantages"] = -torch.ones(ROWS, WIDTH)
    data["prev_logprobs"] = data["current"].detach()
    for options in ({}, {"token_level_loss": False}):
        loss, metrics = call(data, **options)
        assert float(loss.detach()) == pytest.approx(1.0)
        assert float(metrics["num_valid_samples"].value) == 2


def test_all_rows_masked(data: dict[str, Any]) -> None:
    data["sample_mask"] = torch.zeros(ROWS)
    for options in ({}, {"token_level_loss": False}):
        loss, _ = call(data, reference_policy_kl_penalty=0.1, **options)
        assert float(loss.detach()) == 0.0
        assert torch.equal(gradient(loss, data["current"]), torch.zeros(ROWS, WIDTH))


def test_sum_over_microbatches_is_the_whole(data: dict[str, Any]) -> None:
    counts = (torch.tensor(float(ROWS)), data["token_mask"][:, 1:].sum())
    for options in ({}, {"token_level_loss": False}):
        loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.1, **options})
        whole, _ = loss_fn(data, *counts, token_logprobs=data["current"])
        parts = []
        for row in range(ROWS):
            rows = {key: value[row : row + 1] for key, value in data.items()}
            parts.append(loss_fn(rows, *counts, token_logprobs=rows["current"])[0])
        assert torch.isclose(whole, sum(parts[1:], parts[0]), rtol=1e-5)


def test_older_call_form_with_logits(data: dict[str, Any]) -> None:
    logits = torch.randn(ROWS, WIDTH, 10, generator=torch.Generator().manual_seed(3), requires_grad=True)
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.1})
    counts = (data["sample_mask"].sum(), data["token_mask"][:, 1:].sum())
    loss, _ = loss_fn(logits, data, *counts)
    by_hand = torch.log_softmax(logits, -1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    expected, _ = loss_fn(data, *counts, token_logprobs=torch.nn.functional.pad(by_hand, (1, 0)))
    assert torch.isclose(loss, expected)
    named, _ = loss_fn(
        next_token_logits=logits, data=data, global_valid_seqs=counts[0], global_valid_toks=counts[1]
    )
    assert torch.equal(named, loss)
    assert torch.allclose(gradient(loss, logits), gradient(expected, logits), atol=1e-7)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"use_cispo": True, "token_level_loss": False}, "token_level_loss=true"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "force_on_policy_ratio"),
        ({"sequence_level_importance_ratios": True}, "token_level_loss=false"),
        ({"disable_ppo_ratio": True, "force_on_policy_ratio": True}, "force_on_policy_ratio=false"),
        ({"truncated_importance_sampling_ratio": 2.0}, "use_importance_sampling_correction=true"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        ClippedPGLossFn(options)
