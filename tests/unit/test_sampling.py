# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens: counter-based randomness, filters, log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import TopKLogitsWarper, TopPLogitsWarper

from nemo_rl.models.generation.interfaces import GenerationSamplingParams
from nemo_rl.models.generation.megatron.sampling import filter_logits, row_seeds, sample, uniforms

PLAIN = GenerationSamplingParams()


def _splitmix64_stream(seed: int, index: int) -> float:
    """The same number in plain Python integers."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    state = (mix(seed & mask) + (index + 1) * 0x9E3779B97F4A7C15) & mask
    return ((mix(state) >> 16) + 0.5) / 2**48


def test_uniforms_are_splitmix64_of_seed_and_counter() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    counters = torch.tensor([0, 1, 2, 1000])
    got = uniforms(seeds[:, None], counters[None])
    want = [[_splitmix64_stream(int(seed), int(counter)) for counter in counters] for seed in seeds]
    assert got.tolist() == want


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    numbers = uniforms(torch.arange(500)[:, None], torch.arange(400)[None])
    assert float(numbers.min()) > 0.0
    assert float(numbers.max()) < 1.0
    counts = torch.histc(numbers.float(), bins=100, min=0.0, max=1.0)
    expected = numbers.numel() / 100
    assert float(((counts - expected) ** 2 / expected).sum()) < 160  # 99 degrees of freedom, p about 1e-4
    for lagged in (numbers[1:] * numbers[:-1], numbers[:, 1:] * numbers[:, :-1]):
        assert abs(float(lagged.mean()) - 0.25) < 4 * math.sqrt(7 / 144 / lagged.numel())


def test_row_seeds_differ_and_depend_on_the_base() -> None:
    one, other = row_seeds(torch.tensor(1), 1000), row_seeds(torch.tensor(2), 1000)
    assert len(set(one.tolist()) | set(other.tolist())) == 2000


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_frequencies_match_the_distribution(temperature: float) -> None:
    logits = torch.randn(11, generator=torch.Generator().manual_seed(0)) * 2
    draws = 40_000
    params = GenerationSamplingParams(temperature=temperature)
    tokens, _ = sample(
        logits.expand(draws, -1), torch.arange(draws), torch.full((draws,), 3), params, greedy=False
    )
    expected = torch.softmax(logits.double() / temperature, -1) * draws
    observed = torch.bincount(tokens, minlength=11)
    assert float(((observed - expected) ** 2 / expected).sum()) < 29.6  # 10 degrees of freedom, p = 1e-3


def test_filtered_sampling_draws_from_the_renormalised_kept_set() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 2
    params = GenerationSamplingParams(temperature=0.8, top_k=20, top_p=0.9)
    draws = 40_000
    tokens, logprobs = sample(
        logits.expand(draws, -1), torch.arange(draws), torch.zeros(draws).long(), params, greedy=False
    )
    scores = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(20)(None, logits / 0.8))
    reference = torch.log_softmax(scores[0].double(), -1)
    assert float((logprobs - reference[tokens]).abs().max()) < 1e-6
    kept = reference > -torch.inf
    assert 2 < int(kept.sum()) < 20
    expected = reference.exp()[kept] * draws
    observed = torch.bincount(tokens, minlength=50)
    assert int(observed[~kept].sum()) == 0
    chi2 = float(((observed[kept] - expected) ** 2 / expected).sum())
    assert chi2 < 2 * len(expected) + 25


@pytest.mark.parametrize("top_k", [None, 1, 5, 97, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.3, 1e-6])
def test_filters_equal_transformers_warpers(top_k: int | None, top_p: float) -> None:
    logits = torch.randn(64, 97, generator=torch.Generator().manual_seed(2)) * 3
    want = logits
    if top_k is not None:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1.0:
        want = TopPLogitsWarper(top_p)(None, want)
    assert torch.equal(filter_logits(logits, top_k, top_p), want)


def test_filters_keep_all_of_equal_columns() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0, 0.0]])
    kept = filter_logits(logits, 2, 1.0) > -torch.inf
    assert kept.tolist() == [[False, True, False, True, True, False]]
    kept = filter_logits(logits, None, 0.3) > -torch.inf
    assert kept.tolist() == [[False, True, False, True, True, False]]


def test_unfiltered_logprobs_equal_log_softmax_at_the_temperature() -> None:
    logits = torch.randn(32, 97) * 4
    seeds, counters = torch.arange(32), torch.zeros(32).long()
    params = GenerationSamplingParams(temperature=0.6)
    want = torch.log_softmax(logits / 0.6, -1)
    for greedy in (False, True):
        tokens, logprobs = sample(logits, seeds, counters, params, greedy)
        assert float((logprobs - want.gather(-1, tokens[:, None])[:, 0]).abs().max()) < 1e-5
    assert torch.equal(tokens, logits.argmax(-1))


def test_temperature_zero_is_greedy_with_logprobs_at_one() -> None:
    logits = torch.randn(8, 97)
    params = GenerationSamplingParams(temperature=0.0, top_p=0.5, top_k=3)
    tokens, logprobs = sample(logits, torch.arange(8), torch.zeros(8).long(), params, greedy=False)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).amax(-1), atol=1e-6)


def test_a_row_is_drawn_alike_in_any_company() -> None:
    logits = torch.randn(16, 97)
    seeds, counters = torch.arange(16) * 7919, torch.arange(16)
    params = GenerationSamplingParams(temperature=0.9, top_p=0.95)
    tokens, logprobs = sample(logits, seeds, counters, params, greedy=False)
    order = torch.randperm(16)
    again, again_logprobs = sample(logits[order], seeds[order], counters[order], params, greedy=False)
    assert torch.equal(again, tokens[order])
    assert torch.equal(again_logprobs, logprobs[order])
    for row in range(16):
        pick = slice(row, row + 1)
        alone, _ = sample(logits[pick], seeds[pick], counters[pick], params, greedy=False)
        assert int(alone) == int(tokens[row])


def test_columns_of_no_mass_are_never_drawn() -> None:
    logits = torch.full((20_000, 5), -torch.inf)
    logits[:, 1], logits[:, 3] = 0.0, -30.0
    tokens, _ = sample(logits, torch.arange(20_000), torch.zeros(20_000).long(), PLAIN, greedy=False)
    assert set(tokens.tolist()) <= {1, 3}


def test_large_vocabulary_keeps_its_tail() -> None:
    """Half of the mass in 100,000 equal rare columns behind a common one: float32 sums would stall."""
    columns, draws = 100_001, 200
    logits = torch.zeros(1, columns)
    logits[0, 0] = math.log(columns - 1)
    tokens, _ = sample(
        logits.expand(draws, -1), torch.arange(draws), torch.zeros(draws).long(), PLAIN, greedy=False
    )
    rare = tokens[tokens > 0].double()
    assert 70 < len(rare) < 130
    assert abs(float(rare.mean()) / columns - 0.5) < 4 / math.sqrt(12 * len(rare))


def test_parameters_out_of_range_name_their_key() -> None:
    for arguments, key in (
        ({"temperature": -0.1}, "generation.temperature"),
        ({"top_p": 0.0}, "generation.top_p"),
        ({"top_k": 0}, "generation.top_k"),
    ):
        with pytest.raises(ValueError, match=key):
            GenerationSamplingParams(**arguments)


def test_sampling_stays_on_its_device() -> None:
    with FakeTensorMode():
        logits = torch.randn(4, 97, device="cuda")
        seeds = row_seeds(torch.zeros((), dtype=torch.int64, device="cuda"), 4)
        counters = torch.zeros(4, dtype=torch.int64, device="cuda")
        params = GenerationSamplingParams(temperature=0.7, top_p=0.9, top_k=5)
        tokens, logprobs = sample(logits, seeds, counters, params, greedy=False)
        assert tokens.device.type == logprobs.device.type == "cuda"
