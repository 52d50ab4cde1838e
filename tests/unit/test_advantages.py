# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: cases 14, 15 and 42, order independence, and the formulas."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.algorithms.advantage_estimator import (
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
    calculate_baseline_and_std_per_prompt,
    clip_advantages,
    informative_rows,
)


def per_row(rewards, groups=None, valid=None, **options):
    rewards = torch.tensor(rewards)
    groups = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else torch.tensor(groups)
    mask = torch.ones(len(rewards), 3)
    valid = None if valid is None else torch.tensor(valid)
    advantages = GRPOAdvantageEstimator(**options).compute_advantage(groups, rewards, mask, valid=valid)
    assert advantages.shape == (len(rewards), 3)
    assert torch.equal(advantages[:, 0], advantages[:, 2])
    return advantages[:, 0]


def test_one_success_in_four_leave_one_out():
    advantages = per_row([1.0, 0.0, 0.0, 0.0])
    expected = -(1 / 3) / ((1 / 3) ** 0.5)  # the others of a zero row: 1, 0, 0
    torch.testing.assert_close(
        advantages, torch.tensor([1.0, expected, expected, expected]), rtol=1e-5, atol=1e-5
    )
    assert advantages.abs().max() <= 10


@pytest.mark.parametrize(("common", "single"), [(0.35, 0.0), (0.3, -0.3), (0.7, 0.1)])
def test_constant_others_are_not_divided_by_rounding_error(common, single):
    advantages = per_row([common] * 7 + [single])
    assert advantages[-1].item() == pytest.approx(single - common, abs=1e-6)
    assert advantages.abs().max() <= 10


def test_rewards_that_differ_by_a_rounding_error_count_as_constant():
    almost = torch.tensor(0.35)
    almost = torch.nextafter(almost, torch.tensor(1.0)).item()
    # Two of them: with one, the baseline of the others would round to their reward.
    advantages = per_row([0.35, almost, 0.35, almost])
    assert advantages.abs().max() < 1e-6


def test_groups_of_unequal_size_in_any_order():
    groups = [7] * 4 + [3] * 3 + [9] * 4
    rewards = [1.0, 0.0, 2.0, 0.5, 5.0, 5.0, 5.0, 0.0, 0.0, 1.0, 1.0]
    straight = per_row(rewards, groups)
    assert torch.equal(straight[4:7], torch.zeros(3))
    order = torch.tensor([10, 3, 5, 0, 7, 1, 6, 9, 2, 8, 4])
    shuffled = per_row([rewards[i] for i in order], [groups[i] for i in order])
    assert torch.equal(shuffled, straight[order])


def test_prompt_tokens_make_the_same_groups_as_ids():
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0])
    tokens = torch.tensor([[5, 6, 0], [5, 7, 0], [5, 6, 0], [5, 7, 0]])
    ids = torch.tensor([0, 1, 0, 1])
    valid = torch.ones(4)
    for leave_one_out in (True, False):
        by_tokens = calculate_baseline_and_std_per_prompt(tokens, rewards, valid, leave_one_out)
        by_ids = calculate_baseline_and_std_per_prompt(ids, rewards, valid, leave_one_out)
        assert all(torch.equal(a, b) for a, b in zip(by_tokens, by_ids, strict=True))


def test_without_leave_one_out_the_row_itself_counts():
    advantages = per_row([1.0, 0.0, 0.0, 0.0], use_leave_one_out_baseline=False)
    torch.testing.assert_close(advantages, torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=1e-4, atol=1e-4)
    unscaled = per_row([1.0, 0.0, 0.0, 0.0], use_leave_one_out_baseline=False, normalize_rewards=False)
    torch.testing.assert_close(unscaled, torch.tensor([0.75, -0.25, -0.25, -0.25]))


def test_an_errored_row_is_as_if_it_were_not_there():
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1, 1]
    without = per_row(rewards, groups)
    for junk in (0.0, 100.0, float("nan")):
        with_error = per_row([*rewards, junk], [*groups, 0], valid=[1.0] * 7 + [0.0])
        assert torch.equal(with_error[:7], without)
        assert with_error[7] == 0


def test_one_valid_row_has_advantage_zero():
    assert torch.equal(per_row([3.0, 1.0], [0, 0], valid=[1.0, 0.0]), torch.zeros(2))


def test_advantage_is_zero_outside_the_mask():
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    advantages = GRPOAdvantageEstimator().compute_advantage(
        torch.tensor([0, 0]), torch.tensor([1.0, 0.0]), mask
    )
    torch.testing.assert_close(advantages, mask * torch.tensor([[1.0], [-1.0]]))


def test_informative_rows_keep_whole_groups():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    valid = torch.tensor([1.0] * 7 + [0.0])
    assert informative_rows(groups, rewards, valid).tolist() == [True] * 4 + [False] * 4


def test_std_of_other_rewards():
    rewards = torch.tensor([1.0, 0.0, 0.0])
    _, std = calculate_baseline_and_std_per_prompt(
        torch.zeros(3, dtype=torch.int64),
        rewards,
        torch.ones(3),
        False,
        std_rewards=torch.tensor([2.0, 2.0, 2.0]),
    )
    assert torch.equal(std, torch.zeros(3))


def test_reinforce_plus_plus_is_a_z_score_over_valid_tokens():
    rewards = torch.tensor([1.0, 0.0, 4.0, 2.0, 50.0])
    groups = torch.tensor([0, 0, 1, 1, 1])
    valid = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 1], [0, 1, 1]])
    policy, reference = torch.randn(5, 3).abs().neg(), torch.randn(5, 3).abs().neg()
    estimator = ReinforcePlusPlusAdvantageEstimator(kl_coef=0.1, kl_type="k2")
    got = estimator.compute_advantage(
        groups, rewards, mask, valid=valid, logprobs_policy=policy, logprobs_reference=reference
    )
    raw = torch.tensor([0.5, -0.5, 1.0, -1.0, 0.0]).unsqueeze(1) - 0.1 * (reference - policy) ** 2 / 2
    kept = (mask > 0) & (valid > 0).unsqueeze(1)
    expected = torch.where(kept, (raw - raw[kept].mean()) / raw[kept].std(unbiased=False), torch.zeros(()))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="skip_reference_policy_logprobs_calculation"):
        estimator.compute_advantage(groups, rewards, mask)


def test_gdpo_normalises_each_reward_on_its_own():
    groups, mask = torch.tensor([0, 0, 0, 0]), torch.ones(4, 2)
    parts = {"correct": torch.tensor([1.0, 0.0, 0.0, 1.0]), "format": torch.tensor([0.0, 100.0, 0.0, 100.0])}
    total = parts["correct"] + parts["format"]
    estimator = GDPOAdvantageEstimator(use_leave_one_out_baseline=False)
    got = estimator.compute_advantage(groups, total, mask, reward_components=parts)[:, 0]
    assert got[0].item() == pytest.approx(got[1].item(), abs=1e-5)  # the scale of a component does not matter
    assert got[3] > got[0] > got[2]
    assert got.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert got.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-5)
    weighted = GDPOAdvantageEstimator(use_leave_one_out_baseline=False, reward_weights=[2.0, 1.0])
    got = weighted.compute_advantage(groups, total, mask, reward_components=parts)[:, 0]
    assert got[0] > got[1]


def test_gdpo_refuses_one_reward_and_wrong_weights():
    groups, mask, rewards = torch.tensor([0, 0]), torch.ones(2, 2), torch.tensor([1.0, 0.0])
    with pytest.raises(ValueError, match="two or more rewards"):
        GDPOAdvantageEstimator().compute_advantage(groups, rewards, mask, reward_components={"a": rewards})
    with pytest.raises(ValueError, match="reward_weights has 3 values for 2 rewards"):
        GDPOAdvantageEstimator(reward_weights=[1, 2, 3]).compute_advantage(
            groups, rewards, mask, reward_components={"a": rewards, "b": rewards}
        )


def test_clip():
    advantages = torch.tensor([[-3.0, 0.5, 3.0]])
    assert clip_advantages(advantages, -1.0, None).tolist() == [[-1.0, 0.5, 3.0]]
    assert clip_advantages(advantages, None, 2.0).tolist() == [[-3.0, 0.5, 2.0]]
    assert clip_advantages(advantages, None, None) is advantages
