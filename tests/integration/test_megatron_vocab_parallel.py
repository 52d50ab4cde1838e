# SPDX-License-Identifier: Apache-2.0
"""Vocabulary split over two ranks against whole logits (cases 20 and 23)."""

from __future__ import annotations

import pytest
import torch

from tests.support.world import run_world


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("vocab", [10, 17])
def test_two_ranks_equal_one(chunk: int | None, vocab: int) -> None:
    """Case 23: V=10 over two ranks, targets in both shards: the shards' gradients are softmax - onehot."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(7, 6, generator=generator)
    weight = torch.randn(vocab, 6, generator=generator)
    targets = torch.tensor([0, 4, 5, 9, vocab - 1, 2, 8])
    results = run_world(
        2,
        "tests.integration.worlds_policy:vocab_parallel",
        hidden=hidden,
        weight=weight,
        targets=targets,
        chunk=chunk,
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight.T / 0.7
    whole = torch.log_softmax(logits, -1)
    logprobs = whole.gather(-1, targets[:, None])[:, 0]
    entropies = -(whole.exp() * whole).sum(-1)
    scale = torch.linspace(0.5, 2.0, 7)
    grad_hidden, grad_weight = torch.autograd.grad((logprobs * scale + entropies).sum(), (hidden, weight))
    for result in results:
        assert torch.allclose(result["logprobs"], logprobs, atol=1e-6)
        assert torch.allclose(result["entropies"], entropies, atol=1e-6)
        assert torch.allclose(result["from_logits"], logprobs, atol=1e-6)
        assert result["top_indices"].tolist() == logits.topk(4, dim=-1).indices.tolist()
        assert torch.allclose(result["gathered"], hidden @ weight.T, atol=1e-6)
    summed = results[0]["grad_hidden"] + results[1]["grad_hidden"]
    assert float((summed - grad_hidden).norm()) <= 1e-5 * float(grad_hidden.norm())
    joined = torch.cat([result["grad_weight"] for result in results])[:vocab]
    assert float((joined - grad_weight).norm()) <= 1e-5 * float(grad_weight.norm())
    softmax = torch.softmax((hidden @ weight.T / 0.7).detach(), -1)
    onehot = torch.nn.functional.one_hot(targets, vocab)
    shards = torch.cat([result["grad_logits"] for result in results], dim=-1)[:, :vocab]
    assert torch.allclose(-shards, softmax - onehot, atol=1e-6)


def test_chunks_bound_memory_at_tp2() -> None:
    """Case 20: S=4096, V=32768: forward and backward hold a few chunks of logits, never all."""
    tokens, vocab, chunk = 4096, 32768, 128
    for world in (1, 2):
        for entropy in (False, True):
            results = run_world(
                world,
                "tests.integration.worlds_policy:vocab_parallel_memory",
                tokens=tokens,
                vocab=vocab,
                chunk=chunk,
                entropy=entropy,
            )
            for result in results:
                assert result["peak_bytes"] <= 6 * chunk * (vocab // world) * 4 + result["fixed_bytes"], (
                    result
                )
