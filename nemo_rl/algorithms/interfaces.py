# SPDX-License-Identifier: Apache-2.0
"""What a loss function is, and what it returns.

A loss is a pure function of tensors. It knows no process group and no device; the engine hands it whole rows and the
counts of the *global* batch, and sums what it returns over micro-batches and data-parallel ranks. Therefore every loss
is ``sum(local terms) / global count``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

Reduction = Literal["sum", "mean", "max", "min", "last"]
"""How values of one metric from several micro-batches and data-parallel ranks become one value.

``sum`` is right for everything that is already divided by a global count; ``mean`` is the mean over the micro-batches
that carried weight.
"""


class LossType(enum.Enum):
    """Which global count normalises the loss."""

    TOKEN_LEVEL = "token_level"  # global_valid_toks
    SEQUENCE_LEVEL = "sequence_level"  # global_valid_seqs


class LossInputType(enum.Enum):
    """Which model output a loss wants, and under which keyword it gets it."""

    TOKEN_LOGPROBS = "token_logprobs"  # token_logprobs [B, S]: position i belongs to token i, position 0 is 0
    LOGPROB = "logprob"  # next_token_logprobs [B, S-1]: position i is the log-prob of token i+1
    LOGIT = "logit"  # logits [B, S, V] (older documented form: next_token_logits, first positional)
    DISTILLATION = "distillation"  # top-k log-probs of student and teacher
    DRAFT = "draft"  # logits of a draft head


@dataclass(frozen=True)
class Metric:
    """One metric of one micro-batch.

    Attributes:
        value: scalar tensor on the loss's device, detached. Metrics stay tensors until the end of the step.
        reduction: how values of several micro-batches and ranks become one.
    """

    value: torch.Tensor
    reduction: Reduction = "sum"


@runtime_checkable
class LossFunction(Protocol):
    """A loss over a micro-batch, normalised by counts of the global batch.

    ``loss_type`` says which count divides the loss. Optional attributes: ``input_type`` (:class:`LossInputType`,
    default the older logits form) and ``rows_per_unit`` (rows that belong together, such as 2 for pairs: they share a
    shard and a micro-batch, in order).

    ``__call__(data, global_valid_seqs, global_valid_toks, **inputs)`` returns ``(scalar loss, metrics)``; a metric is a
    :class:`Metric`, or a scalar tensor, which means ``Metric(value, "sum")``.
    """

    loss_type: LossType

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the loss of one micro-batch."""
        ...


def as_metrics(
    metrics: Mapping[str, Metric | torch.Tensor | float], device: torch.device
) -> dict[str, Metric]:
    """Metrics of a loss as :class:`Metric`; a bare number or tensor is summed, as the documented form means it."""
    out: dict[str, Metric] = {}
    for name, value in metrics.items():
        if isinstance(value, Metric):
            out[name] = value
        else:
            out[name] = Metric(torch.as_tensor(value, device=device, dtype=torch.float32).detach())
    return out
