# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens from logits: filters, log-probabilities and counter-based randomness. Pure tensor functions.

The random number of a token is a function of (row seed, index of the token in its response) alone: no
generator state, so that a row draws the same tokens whatever its slot, its neighbours, the number of workers
or the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_rl.models.generation.interfaces import GenerationSamplingParams

_BITS = 48  # of a uniform number: (k + 1/2) / 2**48 is exact in float64 and never 0 or 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# splitmix64 (Steele, Lea, Flood 2014): increment and the two multipliers of its finaliser.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """Finaliser of splitmix64, a bijection of int64; products wrap around."""
    value = (value ^ _shift_right(value, 30)) * _MULTIPLY_1
    value = (value ^ _shift_right(value, 27)) * _MULTIPLY_2
    return value ^ _shift_right(value, 31)


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """Random numbers that are a pure function of (seed, counter).

    Args:
        seeds: int64, any shape; any value.
        counters: int64, broadcastable to `seeds`; values >= 0.

    Returns:
        float64 in the open interval (0, 1), the same bits on every device.
    """
    state = _mix(seeds) + (counters + 1) * _GOLDEN
    return (_shift_right(_mix(state), 64 - _BITS).double() + 0.5) * 2.0**-_BITS


def row_seeds(base: Tensor, num_rows: int) -> Tensor:
    """Seeds of `num_rows` rows from one base seed (int64 scalar tensor), int64 [num_rows]."""
    rows = torch.arange(1, num_rows + 1, dtype=torch.int64, device=base.device)
    return _mix(_mix(base) + rows * _GOLDEN)


def filter_logits(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Set the logits outside the top-k, then outside the nucleus of what is left, to -inf.

    Both filters are thresholds on the value: columns equal to the last one kept are kept as well, so that the
    kept set depends on no sorting order.

    Args:
        logits: float [N, V], temperature applied.
        top_k: keep the `top_k` largest; None keeps all.
        top_p: keep the smallest set of largest columns whose mass is at least `top_p`; 1.0 keeps all.
    """
    num_columns = logits.shape[-1]
    ranked = None
    if top_k is not None and top_k < num_columns:
        ranked = torch.topk(logits, top_k, dim=-1).values
        logits = logits.masked_fill(logits < ranked[:, -1:], -torch.inf)
    if top_p < 1.0:
        if ranked is None:
            ranked = torch.sort(logits, dim=-1, descending=True).values
        mass = (ranked - torch.logsumexp(logits, dim=-1, keepdim=True)).exp()
        before = mass.cumsum(dim=-1) - mass
        before[:, 0] = 0.0  # rounding must not lose the largest column
        last = (before < top_p).sum(dim=-1, keepdim=True) - 1
        logits = logits.masked_fill(logits < ranked.gather(-1, last), -torch.inf)
    return logits


def sample(
    logits: Tensor, seeds: Tensor, counters: Tensor, params: GenerationSamplingParams, greedy: bool
) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: [N, V], without padded vocabulary columns.
        seeds: int64 [N], the rows' seeds.
        counters: int64 [N], index of the token in its response.
        params: temperature (0 means greedy), top-k, top-p.
        greedy: take the most likely token, whatever `params` says.

    Returns:
        tokens int64 [N] and log-probabilities float32 [N]. Sampled tokens: under the distribution they were
        drawn from (temperature applied, filtered and renormalised). Greedy tokens: under the unfiltered
        distribution at the temperature (at 1 where it is 0). So where nothing is filtered both equal what the
        trainer computes.
    """
    logits = logits.float()
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    if greedy or params.temperature == 0.0:
        tokens = logits.argmax(dim=-1)
        return tokens, _at(logits, tokens) - torch.logsumexp(logits, dim=-1)
    logits = filter_logits(logits, params.top_k, params.top_p)
    log_mass = torch.logsumexp(logits, dim=-1, keepdim=True)
    # Inverse of the cumulative distribution, in float64: a float32 sum over 1e5 columns is off by more than
    # rare tokens weigh.
    cumulative = (logits - log_mass).exp().cumsum(dim=-1, dtype=torch.float64)
    target = uniforms(seeds, counters)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    tokens = tokens.clamp_max(logits.shape[-1] - 1)  # only NaN gets there; the caller reports it
    return tokens, _at(logits, tokens) - log_mass[:, 0]


def _at(values: Tensor, columns: Tensor) -> Tensor:
    return values.gather(-1, columns[:, None])[:, 0]
