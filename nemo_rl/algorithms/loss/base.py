# SPDX-License-Identifier: Apache-2.0
"""The base of this project's losses, and the adapter for the older documented call form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl.algorithms.interfaces import LossInputType, LossType, Metric
from nemo_rl.distributed.vocab_parallel import logprobs_from_logits


class TokenLogprobLoss:
    """A loss of per-token log-probabilities.

    Called as ``loss(data, global_valid_seqs, global_valid_toks, token_logprobs=[B, S])``. The older documented form
    ``loss(next_token_logits, data, global_valid_seqs, global_valid_toks)`` works too: the logits [B, S, V] are turned
    into log-probs of ``data["input_ids"]`` first.

    Attributes:
        loss_type: which global count divides the loss.
        input_type: ``TOKEN_LOGPROBS``.
        rows_per_unit: rows that must share shard and micro-batch.
        only_masked_tokens: the loss reads ``token_logprobs`` only where ``token_mask`` is not 0, so the others need
            not be computed.
    """

    loss_type: LossType = LossType.TOKEN_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.TOKEN_LOGPROBS
    rows_per_unit: int = 1
    only_masked_tokens: ClassVar[bool] = True

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss of one micro-batch; see the class for the two forms."""
        if "next_token_logits" in kwargs:
            args = (kwargs.pop("next_token_logits"), *args)
        if not (args and isinstance(args[0], Tensor)):
            return self.compute(kwargs.pop("token_logprobs"), *args, **kwargs)
        logits, *rest = args
        rank, group, cp_group = (kwargs.pop(name, None) for name in _PARALLEL_ARGUMENTS)
        if cp_group is not None and cp_group.size() > 1:
            raise NotImplementedError(
                "logits split over context parallelism; pass token_logprobs [B, S] instead"
            )
        data = rest[0] if rest else kwargs["data"]
        logprobs = logits_to_token_logprobs(logits, data["input_ids"], rank or 0, group)
        return self.compute(logprobs, *rest, **kwargs)

    @abstractmethod
    def compute(
        self,
        token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the loss from ``token_logprobs`` [B, S]."""


_PARALLEL_ARGUMENTS = ("vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group")


def logits_to_token_logprobs(
    next_token_logits: Tensor, input_ids: Tensor, tp_rank: int = 0, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Log-probs of given tokens from logits.

    Args:
        next_token_logits: [B, S, V], or this rank's columns of it; position i predicts token i + 1.
        input_ids: int64 [B, S].
        tp_rank: this rank's place in ``tp_group``.
        tp_group: ranks over which the vocabulary is split; None if it is not.

    Returns:
        float32 [B, S]: position i is the log-prob of token i, position 0 is 0.
    """
    logprobs = logprobs_from_logits(
        next_token_logits[:, :-1], input_ids[:, 1:], tp_rank=tp_rank, tp_group=tp_group
    )
    return torch.nn.functional.pad(logprobs, (1, 0))
