# SPDX-License-Identifier: Apache-2.0
"""Attention over the slots' keys and values equals attention over whole sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_bridge.layers.attention import AttentionMeta, attend
from nemo_rl.models.generation.megatron.kv_cache import SlotKVCache

SCALE = 0.3


def _meta(length: int, rows: int = 1) -> AttentionMeta:
    return AttentionMeta(position_ids=torch.arange(length).expand(rows, -1))


def _rows(
    lengths: list[int], heads: int, kv_heads: int, width: int = 8
) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [
        (
            torch.randn(n, 1, heads, width),
            torch.randn(n, 1, kv_heads, width),
            torch.randn(n, 1, kv_heads, width),
        )
        for n in lengths
    ]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (6, 1)])
def test_prefill_and_decode_equal_full_attention(heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    prompts, totals = [5, 3, 9], [12, 30, 9 + 11]
    rows = _rows(totals, heads, kv_heads)
    want = [attend(q, k, v, _meta(len(q)), softmax_scale=SCALE) for q, k, v in rows]
    cache = SlotKVCache(num_slots=4, capacity=16)
    cache.begin_prefill(torch.tensor([2, 0, 3]))
    padded = [torch.zeros(9, 3, count, 8) for count in (heads, kv_heads, kv_heads)]
    for index, (row, length) in enumerate(zip(rows, prompts, strict=True)):
        for part, values in zip(padded, row, strict=True):
            part[:length, index] = values[:length, 0]
    out = cache.attend(7, *padded, _meta(9, 3), SCALE)
    for index, length in enumerate(prompts):
        assert torch.allclose(out[:length, index], want[index][:length, 0], atol=1e-6)
    slots, positions = [2, 0, 3], list(prompts)
    for _ in range(27):
        step = [torch.randn(4, 1, count, 8) for count in (heads, kv_heads, kv_heads)]
        where = torch.zeros(4, dtype=torch.int64)
        live = [index for index in range(3) if positions[index] < totals[index]]
        for index in live:
            where[slots[index]] = positions[index]
            for part, values in zip(step, rows[index], strict=True):
                part[slots[index], 0] = values[positions[index], 0]
        # A finished row's slot keeps a position of its own and may write there; nobody reads it.
        length = max(positions[index] for index in live) + 1
        cache.reserve(length)
        cache.begin_decode(where, length)
        out = cache.attend(7, *step, _meta(4), SCALE)
        assert out.shape == (4, 1, heads * 8)
        for index in live:
            assert torch.allclose(out[slots[index], 0], want[index][positions[index], 0], atol=1e-6)
            positions[index] += 1
    assert positions == totals
    assert cache.num_bytes == 2 * 4 * cache.capacity * kv_heads * 8 * 4


def test_copied_prefix_serves_another_slot() -> None:
    torch.manual_seed(1)
    ((query, key, value),) = _rows([6], 4, 2)
    cache = SlotKVCache(num_slots=3, capacity=8)
    cache.begin_prefill(torch.tensor([1]))
    cache.attend(0, query[:5], key[:5], value[:5], _meta(5), SCALE)
    cache.copy_prefix(torch.tensor([1, 1]), torch.tensor([0, 2]), 5)
    cache.begin_decode(torch.tensor([5, 5, 5]), 6)
    out = cache.attend(0, *(x[5:].repeat(3, 1, 1, 1) for x in (query, key, value)), _meta(3), SCALE)
    want = attend(query, key, value, _meta(6), softmax_scale=SCALE)[5, 0]
    assert torch.allclose(out[:, 0], want.expand(3, -1), atol=1e-6)


def test_what_a_slot_held_before_has_no_influence() -> None:
    torch.manual_seed(2)
    ((query, key, value),) = _rows([4], 4, 2)
    outs = []
    for stale in (0.0, 1e4):
        cache = SlotKVCache(num_slots=1, capacity=16)
        cache.begin_prefill(torch.tensor([0]))
        cache.attend(0, *(torch.full((16, 1, n, 8), stale) for n in (4, 2, 2)), _meta(16), SCALE)
        cache.begin_prefill(torch.tensor([0]))
        cache.attend(0, query[:3], key[:3], value[:3], _meta(3), SCALE)
        cache.begin_decode(torch.tensor([3]), 4)
        outs.append(cache.attend(0, query[3:], key[3:], value[3:], _meta(1), SCALE))
    assert torch.equal(outs[0], outs[1])


def test_cache_stays_on_its_device() -> None:
    with FakeTensorMode(), torch.no_grad():
        cache = SlotKVCache(num_slots=2, capacity=8)
        slots = torch.zeros(2, dtype=torch.int64, device="cuda")
        parts = [torch.randn(4, 2, n, 8, device="cuda") for n in (4, 2, 2)]
        meta = AttentionMeta(position_ids=torch.zeros(2, 4, dtype=torch.int64, device="cuda"))
        cache.begin_prefill(slots)
        cache.attend(0, *parts, meta, SCALE)
        cache.begin_decode(slots, 5)
        step = [torch.randn(2, 1, n, 8, device="cuda") for n in (4, 2, 2)]
        assert cache.attend(0, *step, meta, SCALE).device.type == "cuda"
        cache.reserve(64)
        cache.copy_prefix(slots[:1], slots[1:], 4)
