# SPDX-License-Identifier: Apache-2.0
"""Chunked log-probs, entropies and top-k on one rank against whole logits; padded columns; device discipline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_rl.distributed.vocab_parallel import (
    Projection,
    logprobs_from_logits,
    token_logprobs,
    top_k_logits,
)

TOKENS, HIDDEN, VOCAB = 11, 8, 17


def inputs(padded: int = VOCAB, bias: bool = False) -> tuple[Tensor, Projection, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(padded, HIDDEN, generator=generator, requires_grad=True)
    offset = torch.randn(padded, generator=generator, requires_grad=True) if bias else None
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden, Projection(weight, 0, VOCAB, offset), targets


def naive(
    hidden: Tensor, projection: Projection, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, projection.weight[:VOCAB])
    if projection.bias is not None:
        logits = logits + projection.bias[:VOCAB]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk", [None, 1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("padded", [VOCAB, VOCAB + 3])
def test_values_and_gradients_equal_whole_logits(
    chunk: int | None, temperature: float, entropy: bool, padded: int
) -> None:
    hidden, projection, targets = inputs(padded, bias=True)
    assert projection.bias is not None
    leaves = (hidden, projection.weight, projection.bias)
    weights = torch.linspace(-1, 2, TOKENS)
    logprobs, entropies = token_logprobs(
        hidden, projection, targets, temperature=temperature, chunk_size=chunk, with_entropy=entropy
    )
    expected, expected_entropies = naive(hidden, projection, targets, temperature)
    assert torch.allclose(logprobs, expected, atol=1e-6)
    value, reference = (logprobs * weights).sum(), (expected * weights).sum()
    if entropy:
        assert entropies is not None
        assert torch.allclose(entropies, expected_entropies, atol=1e-6)
        value, reference = (
            value + (entropies * weights.flip(0)).sum(),
            reference + (expected_entropies * weights.flip(0)).sum(),
        )
    else:
        assert entropies is None
    actual = torch.autograd.grad(value, leaves)
    for mine, theirs in zip(actual, torch.autograd.grad(reference, leaves), strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())
    assert not actual[1][VOCAB:].any()  # padded rows of the weight get no gradient


def test_no_tokens_at_all() -> None:
    hidden, projection, targets = inputs()
    logprobs, _ = token_logprobs(hidden[:0], projection, targets[:0])
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert projection.weight.grad is not None
    assert not projection.weight.grad.any()


def test_bf16_gradient_of_the_weight_accumulates_in_fp32() -> None:
    hidden, projection, targets = inputs()
    half = Projection(projection.weight.detach().bfloat16().requires_grad_(), 0, VOCAB)
    logprobs, _ = token_logprobs(hidden.detach().bfloat16(), half, targets, chunk_size=1)
    whole, _ = token_logprobs(hidden.detach().bfloat16(), half, targets)
    (by_chunk,) = torch.autograd.grad(logprobs.sum(), half.weight)
    (at_once,) = torch.autograd.grad(whole.sum(), half.weight)
    assert by_chunk.dtype == torch.bfloat16
    assert torch.allclose(by_chunk.float(), at_once.float(), rtol=2e-2, atol=2e-2)


def test_chunks_bound_memory() -> None:
    """Case 20 on one rank: nothing of size tokens x vocabulary is ever allocated."""
    tokens, hidden_size, vocab, chunk = 512, 16, 4096, 32
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    projection = Projection(torch.randn(vocab, hidden_size, requires_grad=True), 0, vocab)
    targets = torch.randint(0, vocab, (tokens,))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        logprobs, _ = token_logprobs(hidden, projection, targets, chunk_size=chunk)
        logprobs.sum().backward()
    largest = max(event.cpu_memory_usage for event in profiler.events() if event.name == "[memory]")
    assert largest <= 2 * chunk * vocab * 4
    assert largest < tokens * vocab * 4 / 4


def test_top_k_never_offers_padding() -> None:
    hidden, projection, _ = inputs(VOCAB + 3)
    values, indices = top_k_logits(hidden, projection, VOCAB, chunk_size=4)
    logits = hidden @ projection.weight[:VOCAB].T
    assert torch.allclose(values, logits.sort(dim=-1, descending=True).values, atol=1e-6)
    assert int(indices.max()) < VOCAB
    with pytest.raises(ValueError, match="17"):
        top_k_logits(hidden, projection, VOCAB + 1)


def test_logprobs_from_whole_logits() -> None:
    logits = torch.randn(3, 5, VOCAB, requires_grad=True)
    targets = torch.randint(0, VOCAB, (3, 5))
    mine = logprobs_from_logits(logits, targets)
    theirs = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(mine, theirs, atol=1e-6)
    weights = torch.randn(3, 5)
    (a,) = torch.autograd.grad((mine * weights).sum(), logits)
    (b,) = torch.autograd.grad((theirs * weights).sum(), logits)
    assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("entropy", [False, True])
def test_no_mixed_devices(entropy: bool) -> None:
    """Under FakeTensorMode on "cuda" an operation over two devices fails."""
    with FakeTensorMode():
        hidden = torch.randn(TOKENS, HIDDEN, device="cuda", requires_grad=True)
        weight = torch.randn(VOCAB + 1, HIDDEN, device="cuda", requires_grad=True)
        targets = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
        logprobs, entropies = token_logprobs(
            hidden, Projection(weight, 0, VOCAB), targets, temperature=0.5, chunk_size=4, with_entropy=entropy
        )
        assert logprobs.device.type == "cuda"
        assert (entropies is None) == (not entropy)
        assert top_k_logits(hidden, Projection(weight, 0, VOCAB), 3)[0].device.type == "cuda"
