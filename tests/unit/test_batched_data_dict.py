# SPDX-License-Identifier: Apache-2.0
"""Batches: rows survive cutting, joining, sharding and pickling, and nothing is cut that does not fit."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict


def batch(rows, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return BatchedDataDict(
        {
            "input_ids": torch.arange(rows * width).reshape(rows, width),
            "input_lengths": torch.randint(1, width + 1, (rows,), generator=generator),
            "reward": torch.rand(rows, generator=generator, dtype=torch.float64),
            "text": [f"row {i}" for i in range(rows)],
        }
    )


def same(a, b):
    assert list(a) == list(b)
    for key in a:
        if isinstance(a[key], torch.Tensor):
            assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key
        else:
            assert a[key] == b[key], key
    return True


# -- joining and cutting ----------------------------------------------------------------------------------


def test_from_batches_pads_on_the_right():
    joined = BatchedDataDict.from_batches(
        [
            {"ids": torch.ones(1, 2), "image": torch.ones(1, 1, 3), "n": torch.tensor([1]), "text": ["a"]},
            {
                "ids": torch.ones(2, 3),
                "image": torch.ones(2, 2, 3),
                "n": torch.tensor([2, 3]),
                "text": ["b", "c"],
            },
            {},
        ],
        pad_value_dict={"ids": 9},
    )
    assert joined["ids"].tolist() == [[1, 1, 9], [1, 1, 1], [1, 1, 1]]
    assert joined["image"][0].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert joined["n"].tolist() == [1, 2, 3]
    assert joined["text"] == ["a", "b", "c"]
    assert joined["ids"].dtype == torch.float32


def test_from_batches_refuses_what_does_not_join():
    with pytest.raises(KeyError, match="'b' is missing in batch 1"):
        BatchedDataDict.from_batches([{"a": [1], "b": [2]}, {"a": [1]}])
    with pytest.raises(NotImplementedError, match=r"column 'a'.*dict"):
        BatchedDataDict.from_batches([{"a": {"x": 1}}])
    with pytest.raises(ValueError, match="column 'a': cannot join tensors of shapes"):
        BatchedDataDict.from_batches([{"a": torch.ones(1, 2)}, {"a": torch.ones(1)}])
    with pytest.raises(ValueError, match="column 'a': cannot join"):
        BatchedDataDict.from_batches([{"a": torch.ones(1, 2, 3)}, {"a": torch.ones(1, 2, 4)}])


def test_from_no_batches_is_empty():
    assert BatchedDataDict.from_batches([]).size == 0


@given(st.integers(1, 6), st.integers(1, 5))
def test_chunks_join_to_the_whole(chunks, per_chunk):
    whole = batch(chunks * per_chunk)
    parts = [whole.chunk(i, chunks) for i in range(chunks)]
    assert all(isinstance(part, SlicedDataDict) and part.size == per_chunk for part in parts)
    assert same(BatchedDataDict.from_batches(parts), whole)
    assert same(BatchedDataDict.from_batches(list(whole.make_microbatch_iterator(per_chunk))), whole)


@given(st.permutations(range(7)))
def test_reorder_undoes_select(order):
    whole = batch(7)
    shuffled = whole.select_indices(list(order))
    assert [int(text.split()[1]) for text in shuffled["text"]] == list(order)
    shuffled.reorder_data(list(order))
    assert same(shuffled, whole)


def test_select_by_mask_and_by_tensor():
    whole = batch(4)
    mask = torch.tensor([True, False, False, True])
    assert same(whole.select_indices(mask), whole.select_indices(torch.tensor([0, 3])))
    assert whole.select_indices([2, 2])["text"] == ["row 2", "row 2"]
    with pytest.raises(ValueError, match="mask of 2 rows for a batch of 4"):
        whole.select_indices(torch.tensor([True, False]))


def test_repeat_interleave_copies_list_items():
    data = BatchedDataDict({"x": torch.tensor([1, 2]), "log": [[{"content": "a"}], [{"content": "b"}]]})
    repeated = data.repeat_interleave(2)
    assert repeated["x"].tolist() == [1, 1, 2, 2]
    repeated["log"][0][0]["content"] = "changed"
    assert repeated["log"][1][0]["content"] == data["log"][0][0]["content"] == "a"


def test_truncate_and_get_dict_and_to():
    data = batch(2)
    data.truncate_tensors(dim=1, truncated_len=3)
    assert data["input_ids"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert data["reward"].shape == (2,)
    assert data.get_dict() is data.data
    assert data.to("meta") is data
    assert data["input_ids"].device.type == "meta" and data["text"] == ["row 0", "row 1"]


def test_multimodal_columns():
    data = BatchedDataDict({"token_type_ids": [[0, 1]], "input_ids": torch.ones(1, 2)})
    assert data.get_multimodal_dict() == {"token_type_ids": [[0, 1]]}
    moved = data.get_multimodal_dict(as_tensors=True, device=torch.device("meta"))
    assert moved["token_type_ids"].device.type == "meta"


@pytest.mark.parametrize(
    "cut",
    [
        lambda d: d.slice(0, 1),
        lambda d: d.chunk(0, 1),
        lambda d: d.select_indices([0]),
        lambda d: d.reorder_data([0, 1]),
        lambda d: d.shard_by_batch_size(1),
        lambda d: d.make_microbatch_iterator(1),
    ],
)
def test_unequal_columns_are_named(cut):
    data = BatchedDataDict({"ids": torch.ones(2, 3), "rewards": torch.ones(3)})
    with pytest.raises(ValueError, match="ids: 2, rewards: 3"):
        cut(data)
    with pytest.raises(AssertionError):  # what the documented interface raises
        cut(data)


def test_scalars_are_no_columns():
    with pytest.raises(ValueError, match="column 'n' is a scalar tensor"):
        BatchedDataDict({"n": torch.tensor(1)}).slice(0, 1)
    with pytest.raises(ValueError, match="column 'n' is a int"):
        BatchedDataDict({"n": 1}).slice(0, 1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda d: d.chunk(0, 4), r"\(6\) is not a multiple of chunks \(4\)"),
        (lambda d: d.chunk(3, 3), "chunk 3 of 3"),
        (
            lambda d: d.make_microbatch_iterator(4),
            r"\(6\) is not a multiple of the provided microbatch size \(4\)",
        ),
        (lambda d: d.shard_by_batch_size(4), r"\(6\) is not a multiple of shards \(4\)"),
        (lambda d: d.shard_by_batch_size(2, 4), r"\(6\) is not a multiple of batch_size \(4\)"),
        (lambda d: d.shard_by_batch_size(2, 3), r"\(3\) is not a multiple of shards \(2\)"),
        (lambda d: d.shard_by_batch_size(0), "at least 1"),
        (lambda d: d.shard_by_batch_size(2, 6, allow_uneven_shards=True), "neither batch_size"),
        (lambda d: d.shard_by_batch_size(2, dynamic_batching_args={}, sequence_packing_args={}), "exclude"),
        (lambda d: d.get_batch(0), "needs batch_size"),
        (lambda d: d.get_batch(2, 3), "rows 6 to 9, but there are 6"),
        (lambda d: d.reorder_data([0, 0, 1, 2, 3, 4]), "permutation"),
        (lambda d: d.get_microbatch_iterator_dynamic_shapes_len(), "no micro-batches"),
    ],
)
def test_what_does_not_fit_is_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(batch(6))


# -- sharding ---------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_plain_shards(shards, per_shard, num_batches):
    gbs = shards * per_shard
    whole = batch(gbs * num_batches)
    parts = whole.shard_by_batch_size(shards, batch_size=gbs)
    for g in range(num_batches):
        joined = BatchedDataDict.from_batches([part.get_batch(g, per_shard) for part in parts])
        assert same(joined, whole.slice(g * gbs, (g + 1) * gbs))


@given(st.integers(1, 9), st.integers(1, 5))
def test_uneven_shards(rows, shards):
    parts = batch(rows).shard_by_batch_size(shards, allow_uneven_shards=True)
    assert len(parts) == shards
    assert [part.size for part in parts] == sorted((part.size for part in parts), reverse=True)
    assert parts[0].size == -(-rows // shards)
    assert [text for part in parts for text in part["text"]] == batch(rows)["text"]


dynamic = {
    "sequence_length_round": 2,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
}


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(8, 40), st.integers(0, 99))
def test_dynamic_shards(shards, per_shard, num_batches, max_tokens, seed):
    gbs, width = shards * per_shard, 7
    whole = batch(gbs * num_batches, width, seed)
    parts, order = whole.shard_by_batch_size(
        shards, batch_size=gbs, dynamic_batching_args={**dynamic, "max_tokens_per_microbatch": max_tokens}
    )
    joined = BatchedDataDict.from_batches(parts)
    joined.reorder_data(order)
    assert same(joined, whole)
    assert all(part.micro_batch_lengths == parts[0].micro_batch_lengths for part in parts)
    for part in parts:
        for g in range(num_batches):
            global_batch = part.get_batch(g, per_shard)
            assert {int(text.split()[1]) // gbs for text in global_batch["text"]} == {g}
            micro = list(global_batch.make_microbatch_iterator_with_dynamic_shapes())
            assert len(micro) == global_batch.get_microbatch_iterator_dynamic_shapes_len()
            assert sum(mb.size for mb in micro) == per_shard
            for mb in micro:
                length = mb["input_ids"].shape[1]
                assert mb.size * length <= max_tokens
                assert length >= int(mb["input_lengths"].max())
                assert length == width or length % 2 == 0


def test_dynamic_row_above_the_limit():
    """Case 13: the message has row, length and cap."""
    data = batch(2)
    data["input_lengths"] = torch.tensor([2, 6])
    with pytest.raises(ValueError, match=r"row 1 has 6 tokens.*max_tokens_per_microbatch \(5\).*at least 6"):
        data.shard_by_batch_size(1, dynamic_batching_args={**dynamic, "max_tokens_per_microbatch": 5})


def test_several_global_batches_have_no_single_plan():
    parts, _ = batch(4).shard_by_batch_size(
        1, batch_size=2, dynamic_batching_args={**dynamic, "max_tokens_per_microbatch": 99}
    )
    with pytest.raises(ValueError, match="spans 2 global batches"):
        next(parts[0].make_microbatch_iterator_with_dynamic_shapes())


def test_packing_metadata_drive_the_iterators():
    data = SlicedDataDict(batch(5).data)
    data.elem_counts_per_gb = [2, 3]
    data.micro_batch_indices = [[[0, 2]], [[0, 1], [1, 3]]]
    data.micro_batch_lengths = [[7], [4, 9]]
    second = data.get_batch(1)
    assert second.get_microbatch_iterator_for_packable_sequences_len() == (2, 9)
    packed = list(second.make_microbatch_iterator_for_packable_sequences())
    assert [mb["text"] for mb in packed] == [["row 2"], ["row 3", "row 4"]]
    with pytest.raises(ValueError, match="global batch 2 of 2"):
        data.get_batch(2)
    with pytest.raises(NotImplementedError, match=r"policy\.sequence_packing\.enabled=false"):
        data.shard_by_batch_size(1, sequence_packing_args={})


# -- pickling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 4).bfloat16(),
        torch.rand(3, 4).to(torch.float8_e4m3fn),
        torch.tensor([True, False, True]),
        torch.rand(3, 4, dtype=torch.float64).t().contiguous().t(),
        torch.arange(6).reshape(3, 2)[:, 1],
        torch.empty(3, 0),
        torch.rand(3, dtype=torch.complex64),
    ],
    ids=str,
)
def test_pickle_keeps_values_types_and_plans(tensor):
    data = SlicedDataDict({"x": tensor, "text": ["a", "b", "c"], "array": np.arange(3)})
    data.micro_batch_indices, data.micro_batch_lengths = [[[0, 3]]], [[4]]
    again = pickle.loads(pickle.dumps(data, protocol=5))
    assert type(again) is SlicedDataDict
    assert again["x"].dtype == tensor.dtype
    assert torch.equal(again["x"].to(torch.complex64), tensor.to(torch.complex64))
    assert again["text"] == ["a", "b", "c"]
    assert again.micro_batch_indices == [[[0, 3]]]
    assert again.micro_batch_lengths == [[4]]
    older = pickle.loads(pickle.dumps(SlicedDataDict({"text": ["a"]}), protocol=2))
    assert type(older) is SlicedDataDict
    assert older["text"] == ["a"]


def test_pickle_ships_a_shard_without_the_rest_of_its_storage():
    whole = BatchedDataDict({"x": torch.zeros(64, 4096)})
    buffers = []
    head = pickle.dumps(whole.chunk(0, 64), protocol=5, buffer_callback=buffers.append)
    shipped = len(head) + sum(buffer.raw().nbytes for buffer in buffers)
    assert 4 * 4096 <= shipped < 1.1 * 4 * 4096


def test_read_only_buffers_give_writable_tensors():
    buffers = []
    head = pickle.dumps(BatchedDataDict({"x": torch.zeros(4)}), protocol=5, buffer_callback=buffers.append)
    shared = bytes(buffers[0].raw())  # as Ray's shared memory: read-only
    again = pickle.loads(head, buffers=[shared])
    again["x"].add_(1)
    assert again["x"].tolist() == [1, 1, 1, 1]
    assert shared == bytes(16)


def test_deepcopy_is_independent_and_differentiable_columns_stay():
    data = BatchedDataDict({"x": torch.zeros(2, requires_grad=True), "log": [[1], [2]]})
    twin = copy.deepcopy(data)
    twin["log"][0].append(3)
    assert data["log"][0] == [1]
    assert twin["x"].requires_grad
