# SPDX-License-Identifier: Apache-2.0
"""Ranks and coordinates are inverse to each other, and wrong questions are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.distributed.named_sharding import NamedSharding

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(shapes, st.randoms(use_true_random=False))
def test_coordinates_and_ranks_are_inverse(shape, random):
    ranks = list(range(int(np.prod(shape))))
    random.shuffle(ranks)
    names = [f"axis{i}" for i in range(len(shape))]
    grid = NamedSharding(np.array(ranks).reshape(shape), names)
    assert grid.size == len(ranks)
    assert grid.shape == dict(zip(names, shape, strict=True))
    for rank in ranks:
        coords = grid.get_worker_coords(rank)
        assert grid.get_ranks_by_coord(**coords) == [rank]
        assert grid.get_ranks(**coords) == rank
        for axis in names:
            assert grid.is_axis_zero(rank, axis) == (coords[axis] == 0)


@given(shapes, st.data())
def test_fixing_an_axis_partitions_the_ranks(shape, data):
    names = [f"axis{i}" for i in range(len(shape))]
    grid = NamedSharding(np.arange(int(np.prod(shape))).reshape(shape), names)
    axis = data.draw(st.sampled_from(names))
    parts = [grid.get_ranks_by_coord(**{axis: i}) for i in range(grid.get_axis_size(axis))]
    assert sorted(rank for part in parts for rank in part) == list(range(grid.size))
    for i, part in enumerate(parts):
        rest = grid.get_ranks(**{axis: i})
        if grid.ndim == 1:
            assert [rest] == part
        else:
            assert rest.names == [name for name in names if name != axis]
            assert sorted(rest.layout.ravel().tolist()) == part


def test_the_policy_layout():
    grid = NamedSharding(np.arange(8).reshape(2, 2, 1, 2), ["pp", "dp", "cp", "tp"])
    assert grid.get_worker_coords(6) == {"pp": 1, "dp": 1, "cp": 0, "tp": 0}
    assert grid.get_ranks_by_coord(dp=1) == [2, 3, 6, 7]
    assert grid.get_axis_index("cp") == 2
    assert "'pp'" in repr(grid)


def test_properties_are_copies():
    grid = NamedSharding([[0, 1]], ["a", "b"])
    grid.layout[0, 0] = 9
    grid.names.append("c")
    assert grid.layout.tolist() == [[0, 1]]
    assert grid.names == ["a", "b"]


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([0, 1, 1], ["a"], r"more than once: \[1\]"),
        ([[0, 1]], ["a"], "2 dimensions but 1 names"),
        ([[0, 1]], ["a", "a"], "names must be distinct"),
        ([[0, 1], [2]], ["a", "b"], "regular grid"),
        ([0.5, 1], ["a"], "must be integers"),
        (["x"], ["a"], "integer ranks"),
        ([], ["a"], "non-empty"),
    ],
)
def test_bad_layouts(layout, names, message):
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


def test_wrong_questions():
    grid = NamedSharding([[0, 1], [2, 3]], ["a", "b"])
    for ask in (
        lambda: grid.get_axis_size("c"),
        lambda: grid.get_ranks_by_coord(c=0),
        lambda: grid.get_ranks(c=0),
        lambda: grid.is_axis_zero(0, "c"),
    ):
        with pytest.raises(ValueError, match=r"unknown axis 'c', the axes are \['a', 'b'\]"):
            ask()
    with pytest.raises(ValueError, match="rank 7 is not in"):
        grid.get_worker_coords(7)
    with pytest.raises(ValueError, match="rank 7 is not in"):
        grid.is_axis_zero(7, "a")
    with pytest.raises(IndexError, match="beyond axis 'a' of size 2"):
        grid.get_ranks(a=2)
    assert grid.get_ranks_by_coord(a=2) == []
