# SPDX-License-Identifier: Apache-2.0
"""NLLLoss, PreferenceLoss and DPOLossFn against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.algorithms.loss_functions import DPOLossFn, NLLLoss, PreferenceLoss, SequencePackingLossWrapper


def test_nll_is_a_mean_over_global_tokens() -> None:
    """Not a mean of means: 1.0 over 2 tokens and 3.0 over 6 is 2.5 (case 1), and masked rows count for nothing."""
    logprobs = torch.zeros(3, 7)
    logprobs[0, 1:3] = -1.0
    logprobs[1, 1:7] = -3.0
    logprobs[2] = float("nan")
    mask = torch.zeros(3, 7)
    mask[0, :3] = 1  # position 0 is never predicted
    mask[1, 1:7] = 1
    mask[2] = 1
    data = {"token_mask": mask, "sample_mask": torch.tensor([1.0, 1.0, 0.0])}
    loss, metrics = NLLLoss()(data, torch.tensor(2.0), torch.tensor(8.0), token_logprobs=logprobs)
    assert float(loss) == pytest.approx(2.5)
    assert float(metrics["num_unmasked_tokens"].value) == 8
    assert float(metrics["num_valid_samples"].value) == 2


def test_nll_per_row() -> None:
    logprobs = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]])
    data = {"token_mask": torch.tensor([[0.0, 1, 1], [0, 1, 0]]), "sample_mask": torch.ones(2)}
    counts = (torch.tensor(2.0), torch.tensor(3.0))
    sums, _ = NLLLoss()(data, *counts, token_logprobs=logprobs, dpo_loss=True)
    means, _ = NLLLoss()(data, *counts, token_logprobs=logprobs, dpo_loss=True, dpo_average_log_probs=True)
    assert sums.tolist() == [3.0, 3.0]
    assert means.tolist() == [1.5, 3.0]


def test_preference_loss() -> None:
    data = {"sample_mask": torch.tensor([1.0, 1, 1, 1, 0, 0])}
    rewards = torch.tensor([2.0, 1.0, 0.0, 0.5, 9.0, -9.0])
    loss, metrics = PreferenceLoss()(rewards, data, torch.tensor(4.0), torch.tensor(0.0))
    expected = (math.log1p(math.exp(-1.0)) + math.log1p(math.exp(0.5))) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert float(metrics["accuracy"].value) == 0.5


def dpo_data() -> dict[str, torch.Tensor]:
    return {
        "token_mask": torch.tensor([[0.0, 1, 1, 1], [0, 1, 1, 0]]),
        "sample_mask": torch.ones(2),
        "reference_policy_logprobs": torch.zeros(2, 4),
    }


def test_dpo_sigmoid_value() -> None:
    """Case 26: margin 6, beta 0.1: 0.437488."""
    logprobs = torch.tensor([[0.0, -1, -1, -1], [0, -4, -5, -99]], requires_grad=True)
    loss, metrics = DPOLossFn({"reference_policy_kl_penalty": 0.1})(
        dpo_data(), torch.tensor(2.0), torch.tensor(5.0), token_logprobs=logprobs
    )
    assert float(loss.detach()) == pytest.approx(0.437488, abs=1e-6)
    assert float(metrics["rewards_chosen_mean"].value) == -3
    assert float(metrics["rewards_rejected_mean"].value) == -9
    loss.backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad != 0, dpo_data()["token_mask"] > 0)


def test_dpo_options_change_the_loss() -> None:
    logprobs = torch.tensor([[0.0, -1, -1, -1], [0, -4, -5, -99]])
    counts = (torch.tensor(2.0), torch.tensor(5.0))

    def value(**options: float | bool) -> float:
        loss_fn = DPOLossFn({"reference_policy_kl_penalty": 0.1, **options})
        return float(loss_fn(dpo_data(), *counts, token_logprobs=logprobs)[0])

    base = value()
    assert value(preference_average_log_probs=True) == pytest.approx(math.log1p(math.exp(-0.35)), rel=1e-6)
    assert value(sft_loss_weight=0.5) == pytest.approx(base + 0.5 * 3, rel=1e-6)
    assert value(sft_loss_weight=0.5, sft_average_log_probs=True) == pytest.approx(base + 0.5, rel=1e-6)
    assert value(preference_loss_weight=2.0) == pytest.approx(2 * base, rel=1e-6)
    assert DPOLossFn({}).rows_per_unit == 2


def test_packing_wrapper_names_its_replacement() -> None:
    with pytest.raises(NotImplementedError, match="microbatch"):
        SequencePackingLossWrapper(NLLLoss(), torch.tensor([0, 3]))
