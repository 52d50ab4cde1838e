# SPDX-License-Identifier: Apache-2.0
"""Mappings as pure functions: every shard, put together again, gives the HuggingFace tensors back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge.mapping import patterns
from megatron_bridge.mapping.attention import QKV, fuse
from megatron_bridge.mapping.base import Geometry, ParamMapping, Shard
from megatron_bridge.mapping.dense import Column, Replicated, Row, Vocabulary
from megatron_bridge.mapping.mlp import GatedMLP


def geometry(heads: int = 4, groups: int = 2, head_dim: int = 3, vocab: int = 97, tp: int = 1) -> Geometry:
    return Geometry(heads, groups, head_dim, vocab, -(-vocab // tp) * tp)


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) + start).reshape(shape).float()


def round_trip(
    mapping: ParamMapping, tensors: dict[str, torch.Tensor], g: Geometry, tp: int
) -> list[torch.Tensor]:
    shards = [mapping.hf_to_local(tensors, Shard(g, rank, tp)) for rank in range(tp)]
    assert len({shard.shape for shard in shards}) == 1
    back = mapping.local_to_hf(shards, g)
    assert list(back) == list(mapping.hf)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name
    return shards


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3, 4]),
    per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 3, 8]),
    tp=st.sampled_from([1, 2, 3, 4, 6, 8]),
    bias=st.booleans(),
)
def test_qkv_round_trip(groups: int, per_group: int, head_dim: int, tp: int, bias: bool) -> None:
    heads = groups * per_group
    rows = (heads + 2 * groups) * head_dim
    if rows % tp:
        return
    g, width = geometry(heads, groups, head_dim), () if bias else (5,)
    sizes = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
    tensors = {name: numbered(n, *width, start=1000 * i) for i, (name, n) in enumerate(sizes.items())}
    shards = round_trip(QKV("m", ("q", "k", "v")), tensors, g, tp)
    whole = fuse(*tensors.values(), groups=groups, head_dim=head_dim)
    assert torch.equal(torch.cat(shards), whole), "ranks hold contiguous rows of the whole"


def test_qkv_rows_are_where_megatron_looks_for_them() -> None:
    d, n = 3, 2  # 4 heads, 2 groups
    q, k, v = numbered(12), numbered(6, start=100), numbered(6, start=200)
    fused = fuse(q, k, v, groups=2, head_dim=d)
    for head in range(4):
        start = ((head // n) * (n + 2) + head % n) * d
        assert torch.equal(fused[start : start + d], q[head * d : (head + 1) * d])
    for group in range(2):
        start = (group * (n + 2) + n) * d
        assert torch.equal(fused[start : start + d], k[group * d : (group + 1) * d])
        assert torch.equal(fused[start + d : start + 2 * d], v[group * d : (group + 1) * d])


@settings(max_examples=30, deadline=None)
@given(tp=st.sampled_from([1, 2, 3, 4]), per_rank=st.integers(1, 5), width=st.integers(1, 6))
def test_gated_mlp_holds_gate_then_up_on_each_rank(tp: int, per_rank: int, width: int) -> None:
    gate, up = numbered(tp * per_rank, width), numbered(tp * per_rank, width, start=1000)
    shards = round_trip(GatedMLP("m", ("gate", "up")), {"gate": gate, "up": up}, geometry(), tp)
    for rank, shard in enumerate(shards):
        rows = slice(rank * per_rank, (rank + 1) * per_rank)
        assert torch.equal(shard, torch.cat([gate[rows], up[rows]]))


@settings(max_examples=40, deadline=None)
@given(vocab=st.integers(1, 40), tp=st.sampled_from([1, 2, 3, 4, 8]))
def test_vocabulary_padding_is_zero_and_never_leaves(vocab: int, tp: int) -> None:
    g = geometry(vocab=vocab, tp=tp)
    shards = round_trip(Vocabulary("m", ("e",)), {"e": numbered(vocab, 3, start=1)}, g, tp)
    whole = torch.cat(shards)
    assert len(whole) == g.padded_vocab_size
    assert len(whole) - vocab < tp
    assert not whole[vocab:].any()


@settings(max_examples=20, deadline=None)
@given(tp=st.sampled_from([1, 2, 4]), n=st.integers(1, 4))
def test_column_row_replicated(tp: int, n: int) -> None:
    tensor = numbered(tp * n, tp * 3)
    column = round_trip(Column("m", ("w",)), {"w": tensor}, geometry(), tp)
    row = round_trip(Row("m", ("w",)), {"w": tensor}, geometry(), tp)
    assert column[-1].shape == (n, tp * 3)
    assert row[-1].shape == (tp * n, 3)
    for shard in round_trip(Replicated("m", ("w",)), {"w": tensor}, geometry(), tp):
        assert torch.equal(shard, tensor)


def test_meta_tensors_give_the_expected_shapes() -> None:
    shards = [torch.empty(12, 5, device="meta")] * 2
    shapes = {n: tuple(t.shape) for n, t in QKV("m", ("q", "k", "v")).local_to_hf(shards, geometry()).items()}
    assert shapes == {"q": (12, 5), "k": (6, 5), "v": (6, 5)}


def test_patterns() -> None:
    assert patterns.match("a.*.b", "a.12.b") == ("12",)
    assert patterns.match("a.*.b", "a.x.b") is None
    assert patterns.match("a.*.b", "a.1.bc") is None
    assert patterns.match("axb", "a.b") is None
    assert patterns.fill("h.*.x.*", ("3", "7")) == "h.3.x.7"
    mapping = Replicated("decoder.layers.*.n", ("model.layers.*.norm",)).resolve("decoder.layers.11.n")
    assert mapping is not None
    assert mapping.hf == ("model.layers.11.norm",)


def test_names_of_the_te_layout_are_known() -> None:
    name = "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
    assert patterns.local_layout(name) == "decoder.layers.3.input_layernorm.weight"
    name = "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"
    assert patterns.local_layout(name) == "decoder.layers.3.pre_mlp_layernorm.weight"
