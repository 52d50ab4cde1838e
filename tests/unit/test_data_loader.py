# SPDX-License-Identifier: Apache-2.0
"""The loader: epochs roll over, a resumed run sees the same batches, a swapped data set is noticed (cases 30, 35)."""

from __future__ import annotations

import itertools
import pickle

import pytest

from nemo_rl.data.dataloader import StatefulDataLoader


def loader(rows=10, batch_size=2, **options):
    return StatefulDataLoader(list(range(rows)), batch_size, collate_fn=list, **options)


def take(source, count):
    return [next(source) for _ in range(count)]


def test_an_epoch_holds_every_row_once():
    batches = list(loader(seed=3))
    assert sorted(itertools.chain(*batches)) == list(range(10))
    assert len(batches) == len(loader()) == 5


def test_epochs_roll_over_and_differ():
    source = loader(rows=4, batch_size=4)
    batches = take(source, 10)  # four prompts, ten steps
    assert all(sorted(batch) == [0, 1, 2, 3] for batch in batches)
    assert len({tuple(batch) for batch in batches}) > 1
    assert (source.epoch, source.position) == (9, 1)


def test_order_is_a_function_of_seed_and_epoch():
    assert take(loader(seed=1), 12) == take(loader(seed=1), 12)
    assert take(loader(seed=1), 12) != take(loader(seed=2), 12)
    assert take(loader(shuffle=False), 6) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1]]


@pytest.mark.parametrize("stop", range(12))
def test_resume_at_any_step(stop):
    straight = take(loader(), 12)
    first = loader()
    assert take(first, stop) == straight[:stop]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = loader()
    take(second, 3)  # what it did before does not matter
    second.load_state_dict(state)
    assert take(second, 12 - stop) == straight[stop:]


def test_for_loops_give_the_rest_of_an_epoch():
    source = loader()
    straight = take(loader(), 10)
    assert take(source, 2) == straight[:2]
    assert list(source) == straight[2:5]
    assert list(source) == straight[5:10]


def test_drop_last():
    assert [len(batch) for batch in loader(rows=5, batch_size=2, drop_last=False)] == [2, 2, 1]
    assert [len(batch) for batch in loader(rows=5, batch_size=2)] == [2, 2]


def test_too_few_rows():
    with pytest.raises(ValueError, match=r"data\.train has 3 rows"):
        loader(rows=3, batch_size=4)
    with pytest.raises(ValueError, match="0 rows"):
        loader(rows=0, batch_size=4, drop_last=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 11}, "num_rows"),
        ({"batch_size": 5}, "batch_size"),
        ({"seed": 7}, "seed"),
        ({"shuffle": False}, "shuffle"),
    ],
)
def test_another_loader_is_refused(change, message):
    state = loader().state_dict()
    with pytest.raises(ValueError, match=message):
        loader(**change).load_state_dict(state)


def test_another_data_set_of_the_same_size_is_refused():
    state = StatefulDataLoader([{"text": str(i)} for i in range(8)], 2, collate_fn=list).state_dict()
    other = StatefulDataLoader([{"text": str(i + 1)} for i in range(8)], 2, collate_fn=list)
    with pytest.raises(ValueError, match="fingerprint"):
        other.load_state_dict(state)


def test_worker_processes_give_the_same_batches():
    source = loader(num_workers=2)
    assert take(source, 7) == take(loader(), 7)
    assert source.state_dict() == {**loader().state_dict(), "epoch": 1, "position": 2}
