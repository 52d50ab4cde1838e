# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, entropy and top-k of a vocabulary whose logits are split over the tensor-parallel ranks.

Everything starts from hidden states [t, H] and this rank's rows of the output weight [v, H], and works in chunks of
tokens, so that neither the logits [t, V] nor their gradient exist whole: the backward pass computes the logits of a
chunk again. Padded columns (vocabulary rounded up to a multiple of tp) are -inf before every softmax and top-k.

The gradient of the hidden states that comes back is this rank's part; whoever produced them sums it over the
tensor-parallel group (mcore's ``copy_to`` / ``gather_from`` regions do).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

DEFAULT_CHUNK_ELEMENTS = 2**25
"""Logits of one chunk that are held at a time, if the chunk size is not given: 128 MiB of float32."""

KEPT_ELEMENTS = 2**27
"""Logits that the forward pass may keep for the backward pass, if the chunk size is not given: 512 MiB of float32."""


@dataclass(frozen=True)
class Projection:
    """This rank's part of the output layer.

    Attributes:
        weight: [v, H], rows ``vocab_start`` to ``vocab_start + v`` of the padded vocabulary.
        vocab_start: global id of the first row.
        vocab_size: real vocabulary; ids from here on are padding.
        bias: [v] or None.
    """

    weight: Tensor
    vocab_start: int
    vocab_size: int
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Float32 logits [t, v] of hidden states [t, H], padded columns -inf."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        logits = logits.float()
        num_real = self.num_real
        if num_real < logits.shape[-1]:
            logits[..., num_real:] = float("-inf")
        return logits

    @property
    def num_real(self) -> int:
        """Columns of this rank that are not padding."""
        return max(0, min(self.weight.shape[0], self.vocab_size - self.vocab_start))

    def chunk_size(self, requested: int | None) -> int:
        """Tokens per chunk: as requested, or as many as :data:`DEFAULT_CHUNK_ELEMENTS` allows."""
        return requested or max(1, DEFAULT_CHUNK_ELEMENTS // self.weight.shape[0])


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _log_normalizer(logits: Tensor, group: ProcessGroup | None) -> Tensor:
    """Log sum exp over the whole vocabulary, [t]; all-reduces max and sum over the group."""
    if group is None:
        return torch.logsumexp(logits, dim=-1)
    largest = _all_reduce(logits.amax(dim=-1), dist.ReduceOp.MAX, group)
    total = (logits - largest.unsqueeze(-1)).exp_().sum(dim=-1)
    return _all_reduce(total, dist.ReduceOp.SUM, group).log_().add_(largest)


def _own_target(targets: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
    """Local column of each target (0 where another rank owns it), and whether it is ours."""
    local = targets - projection.vocab_start
    ours = (local >= 0) & (local < projection.weight.shape[0])
    return local.masked_fill(~ours, 0), ours


@dataclass(frozen=True)
class _Softmax:
    """How this rank gets its columns of log p from hidden states, a chunk of tokens at a time.

    Attributes:
        projection: this rank's rows of the output layer.
        temperature: logits are divided by it.
        group: ranks over which the vocabulary is split, or None.
        chunk: tokens per chunk.
        keep: keep the log p of all chunks for the backward pass, instead of computing them again.
    """

    projection: Projection
    temperature: float
    group: ProcessGroup | None
    chunk: int
    keep: bool

    def parts(self, num_tokens: int) -> list[slice]:
        """The chunks of ``num_tokens`` tokens."""
        return [slice(start, start + self.chunk) for start in range(0, num_tokens, self.chunk)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[c, H] -> float32 [c, v]."""
        logits = self.projection(hidden)
        return logits.div_(self.temperature) if self.temperature != 1.0 else logits

    def logprobs(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[c, H] -> float32 [c, v] log p, and the log normaliser [c] where the vocabulary is split.

        Collective over the group. torch's log_softmax is the fastest pass over a row on any device, so ranks use it on
        their columns and then shift by what the other columns add.
        """
        logits = self.logits(hidden)
        if self.group is None:
            return torch.log_softmax(logits, dim=-1), None
        if self.projection.num_real == 0:  # nothing but padding on this rank
            logprobs, own = logits, logits.new_full(logits.shape[:1], float("-inf"))
        else:
            logprobs = torch.log_softmax(logits, dim=-1)
            own = logits.amax(dim=-1) - logprobs.amax(dim=-1)
        largest = _all_reduce(own.clone(), dist.ReduceOp.MAX, self.group)
        total = _all_reduce((own - largest).exp_(), dist.ReduceOp.SUM, self.group)
        normalizer = total.log_().add_(largest)
        return logprobs.add_((own - normalizer).clamp_(max=0.0).unsqueeze(-1)), normalizer

    def logprobs_again(self, hidden: Tensor, normalizer: Tensor | None) -> Tensor:
        """The same without communication, given the normaliser of the first time."""
        logits = self.logits(hidden)
        return (
            torch.log_softmax(logits, dim=-1) if normalizer is None else logits.sub_(normalizer.unsqueeze(-1))
        )


class _TokenLogprobs(torch.autograd.Function):
    """(hidden, weight, bias) -> log-probs of targets and, if asked, entropies; see :func:`token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softmax: _Softmax,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens, group = hidden.shape[0], softmax.group
        chosen = hidden.new_empty(num_tokens, dtype=torch.float32)
        normalizer = torch.empty_like(chosen) if group is not None else None
        entropy = torch.empty_like(chosen) if with_entropy else None
        column, ours = _own_target(targets, softmax.projection)
        kept = []
        for part in softmax.parts(num_tokens):
            logprobs, part_normalizer = softmax.logprobs(hidden[part])
            if normalizer is not None and part_normalizer is not None:
                normalizer[part] = part_normalizer
            chosen[part] = logprobs.gather(-1, column[part].unsqueeze(-1)).squeeze(-1)
            if entropy is not None:
                probs = logprobs.exp()
                entropy[part] = probs.mul_(logprobs.clamp(min=_LOWEST)).sum(dim=-1).neg_()
            if softmax.keep:
                kept.append(logprobs)
        chosen = _all_reduce(chosen.masked_fill_(~ours, 0.0), dist.ReduceOp.SUM, group)
        if entropy is not None:
            _all_reduce(entropy, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(hidden, weight, bias, column, ours, normalizer, entropy, *kept)
        ctx.softmax = softmax
        return chosen, entropy

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, column, ours, normalizer, entropy, *kept = ctx.saved_tensors
        softmax: _Softmax = ctx.softmax
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        parts = softmax.parts(hidden.shape[0])
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Over several chunks the sum is kept in float32.
        sum_dtype = weight.dtype if len(parts) <= 1 else torch.float32
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for index, part in enumerate(parts):
            if kept:
                logprobs = kept[index]
            else:
                logprobs = softmax.logprobs_again(
                    hidden[part], None if normalizer is None else normalizer[part]
                )
            grad_logits = _grad_logits(
                logprobs,
                column[part],
                ours[part],
                None if entropy is None else entropy[part],
                None if grad_logprobs is None else grad_logprobs[part] / softmax.temperature,
                None if grad_entropy is None else grad_entropy[part] / softmax.temperature,
            ).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if grad_weight.dtype == grad_logits.dtype:
                    grad_weight.addmm_(grad_logits.t(), hidden[part])
                else:
                    grad_weight.add_(grad_logits.t() @ hidden[part])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


_LOWEST = -1e30  # stands in for log 0 = -inf where it is multiplied by a probability of 0


def _grad_logits(
    logprobs: Tensor,
    column: Tensor,
    ours: Tensor,
    entropy: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of this rank's logits [c, v]: g (onehot - p) for log-probs, -h p (log p + H) for entropies."""
    probs = logprobs.exp()
    grad = None
    if entropy is not None and grad_entropy is not None:
        grad = logprobs.clamp(min=_LOWEST).add_(entropy.unsqueeze(-1))
        grad.mul_(probs).mul_(-grad_entropy.unsqueeze(-1))
    if grad_logprobs is not None:
        part = probs.mul_(-grad_logprobs.unsqueeze(-1))
        part.scatter_add_(-1, column.unsqueeze(-1), (grad_logprobs * ours).unsqueeze(-1))
        grad = part if grad is None else grad.add_(part)
    return torch.zeros_like(probs) if grad is None else grad


def token_logprobs(
    hidden: Tensor,
    projection: Projection,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of given tokens from the hidden states that predict them.

    Args:
        hidden: [t, H], the same on every tensor-parallel rank.
        projection: this rank's rows of the output layer.
        targets: int64 [t], global token ids.
        temperature: logits are divided by it first.
        tp_group: ranks over which the vocabulary is split; None if it is not.
        chunk_size: tokens whose logits exist at a time; None for a default that bounds memory.
        with_entropy: also return entropies (with gradient).

    Returns:
        float32 [t] log-probs, and float32 [t] entropies or None; the same on every tensor-parallel rank.
    """
    chunk = projection.chunk_size(chunk_size)
    elements = hidden.shape[0] * projection.weight.shape[0]
    keep = torch.is_grad_enabled() and (
        hidden.shape[0] <= chunk or (chunk_size is None and elements <= KEPT_ELEMENTS)
    )
    softmax = _Softmax(projection, temperature, tp_group, chunk, keep)
    return _TokenLogprobs.apply(hidden, projection.weight, projection.bias, targets, softmax, with_entropy)


@torch.no_grad()
def top_k_logits(
    hidden: Tensor,
    projection: Projection,
    k: int,
    *,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest logits of each position over the whole vocabulary.

    Returns:
        float32 [t, k] logits in descending order, and int64 [t, k] global token ids.

    Raises:
        ValueError: ``k`` is larger than the vocabulary.
    """
    if not 0 < k <= projection.vocab_size:
        raise ValueError(f"k is {k}; it must be between 1 and the vocabulary size, {projection.vocab_size}")
    values, indices = [], []
    chunk = projection.chunk_size(chunk_size)
    for start in range(0, hidden.shape[0], chunk):
        logits = projection(hidden[start : start + chunk])
        best, column = logits.topk(min(k, logits.shape[-1]), dim=-1)
        column = column + projection.vocab_start
        if tp_group is not None:
            best, column = _merge_candidates(best, column, k, tp_group)
        values.append(best)
        indices.append(column)
    if not values:
        return hidden.new_empty((0, k), dtype=torch.float32), hidden.new_empty((0, k), dtype=torch.int64)
    return torch.cat(values), torch.cat(indices)


def _merge_candidates(best: Tensor, column: Tensor, k: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The k best of every rank's candidates; ranks hold equally many, and padded columns are -inf."""
    world = dist.get_world_size(group)
    all_best = [torch.empty_like(best) for _ in range(world)]
    all_column = [torch.empty_like(column) for _ in range(world)]
    dist.all_gather(all_best, best.contiguous(), group=group)
    dist.all_gather(all_column, column.contiguous(), group=group)
    merged, position = torch.cat(all_best, dim=-1).topk(k, dim=-1)
    return merged, torch.cat(all_column, dim=-1).gather(-1, position)


def gather_logits(vocab_parallel_logits: Tensor, vocab_size: int, tp_group: ProcessGroup | None) -> Tensor:
    """Whole logits [..., V] from shards [..., v], without padded columns; differentiable in the own shard."""
    if tp_group is None:
        return vocab_parallel_logits[..., :vocab_size]
    return _GatherVocab.apply(vocab_parallel_logits, tp_group)[..., :vocab_size]


class _GatherVocab(torch.autograd.Function):
    """Concatenate shards of the last dimension; backward takes the own slice (every rank computes the same loss)."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: ProcessGroup) -> Tensor:
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, shard.contiguous(), group=group)
        ctx.own = (dist.get_rank(group), shard.shape[-1])
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        rank, width = ctx.own
        return grad[..., rank * width : (rank + 1) * width].contiguous(), None


class _LogitsLogprobs(torch.autograd.Function):
    """Log-probs of targets from vocabulary shards of logits; see :func:`logprobs_from_logits`."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        targets: Tensor,
        start: int,
        group: ProcessGroup | None,
    ) -> Tensor:
        logits = shard.float()
        local = targets - start
        ours = (local >= 0) & (local < shard.shape[-1])
        column = local.masked_fill(~ours, 0)
        normalizer = _log_normalizer(logits, group)
        chosen = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~ours, 0.0)
        _all_reduce(chosen, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(shard, column, ours, normalizer)
        return chosen - normalizer

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        shard, column, ours, normalizer = ctx.saved_tensors
        logprobs = shard.float() - normalizer.unsqueeze(-1)
        grad_logits = _grad_logits(logprobs, column, ours, None, grad, None)
        return grad_logits.to(shard.dtype), None, None, None


def logprobs_from_logits(
    vocab_parallel_logits: Tensor, targets: Tensor, *, tp_rank: int = 0, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Log-probabilities of given tokens from logits [..., v] split over the vocabulary.

    Args:
        vocab_parallel_logits: [..., v]; rank r holds columns r*v to (r+1)*v. Padded columns must be -inf.
        targets: int64 [...], global token ids.
        tp_rank: this rank's place in the group.
        tp_group: ranks over which the vocabulary is split; None if it is not.

    Returns:
        float32 [...], the same on every rank; the gradient of a shard is ``g (onehot - softmax)`` on it.
    """
    start = tp_rank * vocab_parallel_logits.shape[-1]
    return _LogitsLogprobs.apply(vocab_parallel_logits, targets, start, tp_group)
