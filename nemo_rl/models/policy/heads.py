# SPDX-License-Identifier: Apache-2.0
"""What happens to hidden states: the part of a forward pass that no backend needs to know.

A head gets the hidden states of the positions it asked for and this rank's part of the output layer, and returns a
loss, tensors, or both. A backend runs it on the last pipeline stage, inside the model's forward pass.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl.algorithms.interfaces import LossFunction, LossInputType, Metric, as_metrics
from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.distributed.vocab_parallel import Projection, gather_logits, token_logprobs, top_k_logits
from nemo_rl.models.policy.microbatch import Microbatch, Selection
from nemo_rl.models.policy.results import GlobalCounts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadOutput:
    """What a head made of one micro-batch.

    Attributes:
        loss: scalar with gradient, already divided by the global count; None for inference heads.
        tensors: results by name, [b', S, ...], detached.
        metrics: metrics of the loss.
    """

    loss: Tensor | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)


class OutputHead(Protocol):
    """Hidden states to results."""

    @property
    def selection(self) -> Selection:
        """Which positions' hidden states the head needs."""
        ...

    def __call__(
        self, hidden: Tensor, projection: Projection, microbatch: Microbatch, dims: ParallelDims
    ) -> HeadOutput:
        """Turn ``hidden`` [t, H], one for each of ``microbatch.scored``, into results."""
        ...


@dataclass(frozen=True)
class LogprobHead:
    """Log-probabilities of the rows' own tokens: ``logprobs`` [b', S].

    Attributes:
        temperature: logits are divided by it, so that log-probs are those of the sampler.
        chunk_size: tokens whose logits exist at a time; None for a bound on memory.
    """

    temperature: float = 1.0
    chunk_size: int | None = None
    selection: Selection = "next_tokens"

    def __call__(
        self, hidden: Tensor, projection: Projection, microbatch: Microbatch, dims: ParallelDims
    ) -> HeadOutput:
        """Compute the log-probs."""
        logprobs = self.logprobs(hidden, projection, microbatch, dims)
        return HeadOutput(tensors={"logprobs": logprobs.detach()})

    def logprobs(
        self, hidden: Tensor, projection: Projection, microbatch: Microbatch, dims: ParallelDims
    ) -> Tensor:
        """float32 [b', S] log-probs with gradient; 0 at position 0 and at positions that were not asked for."""
        values, _ = token_logprobs(
            hidden,
            projection,
            microbatch.scored.targets,
            temperature=self.temperature,
            tp_group=dims.tp_group,
            chunk_size=self.chunk_size,
        )
        return microbatch.unpack(values, shift=1)


@dataclass(frozen=True)
class TopKHead:
    """The k largest logits of each position: ``topk_logits`` and ``topk_indices`` [b', S, k]."""

    k: int
    temperature: float = 1.0
    chunk_size: int | None = None
    selection: Selection = "positions"

    def __call__(
        self, hidden: Tensor, projection: Projection, microbatch: Microbatch, dims: ParallelDims
    ) -> HeadOutput:
        """Compute the candidates."""
        values, indices = top_k_logits(
            hidden, projection, self.k, tp_group=dims.tp_group, chunk_size=self.chunk_size
        )
        return HeadOutput(
            tensors={
                "topk_logits": microbatch.unpack(values / self.temperature, shift=0),
                "topk_indices": microbatch.unpack(indices, shift=0),
            }
        )


class LossHead:
    """A loss over a micro-batch, whatever input the loss wants (``loss_fn.input_type``)."""

    def __init__(
        self,
        loss_fn: LossFunction,
        counts: GlobalCounts,
        *,
        temperature: float = 1.0,
        chunk_size: int | None = None,
    ) -> None:
        """Prepare a head for one global batch.

        Args:
            loss_fn: the loss.
            counts: counts of the global batch, the loss's normalisers.
            temperature: logits are divided by it first.
            chunk_size: tokens whose logits exist at a time.

        Raises:
            NotImplementedError: the loss wants an input that no head produces yet.
        """
        self.loss_fn = loss_fn
        self.counts = counts
        self.input_type: LossInputType = getattr(loss_fn, "input_type", LossInputType.LOGIT)
        self._logprob_head = LogprobHead(temperature, chunk_size)
        self._vocab_parallel = False
        if self.input_type is LossInputType.LOGIT:
            self._vocab_parallel = _takes_vocab_parallel_logits(loss_fn)
            self.selection: Selection = "positions"
        elif self.input_type in (LossInputType.TOKEN_LOGPROBS, LossInputType.LOGPROB):
            self.selection = "masked" if getattr(loss_fn, "only_masked_tokens", False) else "next_tokens"
        else:
            raise NotImplementedError(
                f"losses with input_type {self.input_type} are not supported yet; use TOKEN_LOGPROBS, LOGPROB or LOGIT"
            )

    def __call__(
        self, hidden: Tensor, projection: Projection, microbatch: Microbatch, dims: ParallelDims
    ) -> HeadOutput:
        """Compute loss and metrics."""
        norms = (_divisor(self.counts.valid_seqs, hidden), _divisor(self.counts.valid_toks, hidden))
        data = _as_batch(microbatch.rows)
        if self.input_type is LossInputType.LOGIT:
            loss, metrics = self._call_with_logits(hidden, projection, microbatch, dims, data, norms)
        else:
            logprobs = self._logprob_head.logprobs(hidden, projection, microbatch, dims)
            if self.input_type is LossInputType.TOKEN_LOGPROBS:
                loss, metrics = self.loss_fn(data, *norms, token_logprobs=logprobs)
            else:
                loss, metrics = self.loss_fn(
                    next_token_logprobs=logprobs[:, 1:],
                    data=data,
                    global_valid_seqs=norms[0],
                    global_valid_toks=norms[1],
                )
        return HeadOutput(loss=loss, metrics=as_metrics(metrics, hidden.device))

    def _call_with_logits(
        self,
        hidden: Tensor,
        projection: Projection,
        microbatch: Microbatch,
        dims: ParallelDims,
        data: Any,
        norms: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, dict[str, Any]]:
        """The documented older form: whole logits, or this rank's shard for a loss that takes ``vocab_parallel_*``."""
        shard = projection(hidden) / self._logprob_head.temperature
        if self._vocab_parallel:
            # Padded columns are -inf, which a scatter into zeros keeps.
            return self.loss_fn(
                microbatch.unpack(shard, shift=0),
                data,
                *norms,
                vocab_parallel_rank=dims.tp_rank,
                vocab_parallel_group=dims.tp_group,
                context_parallel_group=None,
            )
        if dims.cp > 1:
            raise ValueError(
                f"{type(self.loss_fn).__name__} takes whole logits, which context parallelism does not have; set "
                "policy.megatron_cfg.context_parallel_size=1, or give the loss input_type TOKEN_LOGPROBS"
            )
        if dims.tp > 1:
            _warn_gathered(type(self.loss_fn).__name__)
        logits = gather_logits(shard, projection.vocab_size, dims.tp_group)
        return self.loss_fn(microbatch.unpack(logits, shift=0), data, *norms)


def _divisor(count: Tensor, like: Tensor) -> Tensor:
    """A global count as a loss divides by it: on its device, and 1 where nothing counts (the sum is 0 then)."""
    count = count.to(like.device)
    return torch.where(count > 0, count, torch.ones_like(count))


def _as_batch(rows: Mapping[str, Any]) -> Any:
    """The columns as a BatchedDataDict, which the documented losses expect."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    return BatchedDataDict(rows)


def _takes_vocab_parallel_logits(loss_fn: LossFunction) -> bool:
    return "vocab_parallel_group" in inspect.signature(loss_fn.__call__).parameters


_warned: set[str] = set()


def _warn_gathered(loss_name: str) -> None:
    if loss_name not in _warned:
        _warned.add(loss_name)
        logger.warning(
            "%s takes whole logits: they are gathered over the tensor-parallel ranks, which costs memory; "
            "input_type TOKEN_LOGPROBS does not need that",
            loss_name,
        )


def no_loss(hidden: Tensor) -> Tensor:
    """The scalar that a pipeline schedule gets from a head without a loss."""
    return hidden.new_zeros((), dtype=torch.float32)
