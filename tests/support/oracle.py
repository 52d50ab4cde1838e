# SPDX-License-Identifier: Apache-2.0
"""The oracle: a transformers model in one process with plain autograd, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.models import hf_token_logprobs

LENGTHS = (3, 5, 7, 2, 9, 4, 6, 8)  # unequal: equal ones hide means of means


def batch(
    lengths: tuple[int, ...] = LENGTHS, width: int = 11, vocab: int = 97, seed: int = 0
) -> dict[str, Any]:
    """Random rows, right-padded; the first token of each row is a prompt."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths)
    input_ids = torch.randint(3, vocab, (len(lengths), width), generator=generator)
    valid = torch.arange(width) < sizes[:, None]
    return {
        "input_ids": torch.where(valid, input_ids, 0),
        "input_lengths": sizes,
        "token_mask": valid.float(),
        "sample_mask": torch.ones(len(lengths)),
    }


@dataclass
class Oracle:
    """What one process with plain autograd says."""

    logprobs: Tensor
    loss: float
    gradients: dict[str, Tensor]
    grad_norm: float
    weights: dict[str, Tensor]  # before the update


def run(
    path: str, data: dict[str, Any], loss: Callable[[Tensor], Tensor], temperature: float = 1.0
) -> Oracle:
    """Log-probs, loss and gradients of the model in `path`; `loss` maps log-probs [B, S] to a scalar."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    logprobs = hf_token_logprobs(model, data["input_ids"], data["input_lengths"], temperature)
    value = loss(logprobs)
    value.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
    return Oracle(logprobs.detach(), float(value.detach()), gradients, norm, weights)


def assert_gradients_close(actual: dict[str, Tensor], oracle: Oracle, rtol: float = 1e-5) -> None:
    """Each parameter: ||g - g*|| <= rtol ||g*|| + 1e-7 of the whole norm."""
    assert set(oracle.gradients) <= set(actual), sorted(set(oracle.gradients) - set(actual))
    for name, expected in oracle.gradients.items():
        error = float((actual[name] - expected).norm())
        assert error <= rtol * float(expected.norm()) + 1e-7 * oracle.grad_norm, (
            name,
            error,
            float(expected.norm()),
        )


def assert_update_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor], rtol: float = 1e-5
) -> None:
    """||dw - dw*|| / ||dw*|| <= rtol over all parameters, where each weight is itself rounded to fp32."""
    error = torch.cat([(actual[n] - expected[n]).flatten() for n in expected]).norm()
    update = torch.cat([(expected[n] - before[n]).flatten() for n in expected]).norm()
    assert update > 0
    assert float(error) <= rtol * float(update), (float(error), float(update))
