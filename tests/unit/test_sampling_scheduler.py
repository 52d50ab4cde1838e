# SPDX-License-Identifier: Apache-2.0
"""Rows, slots, and where their prompts come from."""

from __future__ import annotations

import random

from nemo_rl.models.generation.megatron.scheduler import SlotScheduler


def _scheduler(
    prompts: str, slots: int, *, lengths: list[int] | None = None, tokens: int = 10_000
) -> SlotScheduler:
    scheduler = SlotScheduler(list(prompts), lengths or [4] * len(prompts), slots, tokens)
    for row in range(len(prompts)):
        scheduler.submit(row)
    return scheduler


def test_equal_prompts_are_prefilled_once_and_copied() -> None:
    admission = _scheduler("aabbab", 6).admit()
    assert admission is not None
    assert admission.rows == [0, 1, 2, 3, 4, 5]
    assert sorted(slot for batch in admission.prefills for slot in batch) == [0, 2]
    assert admission.copies == [(0, 1), (2, 3), (0, 4), (2, 5)]


def test_waiting_row_copies_from_a_slot_that_still_holds_its_prompt() -> None:
    scheduler = _scheduler("aab", 2)
    first = scheduler.admit()
    assert first is not None
    assert first.rows == [0, 1]
    assert scheduler.admit() is None
    scheduler.release(1)
    second = scheduler.admit()
    assert second is not None
    assert (second.rows, second.slots, second.prefills, second.copies) == ([2], [1], [[1]], [])


def test_released_slot_goes_to_a_row_with_the_same_prompt_without_any_copy() -> None:
    scheduler = _scheduler("aaa", 1)
    assert scheduler.admit() is not None
    scheduler.release(0)
    again = scheduler.admit()
    assert again is not None
    assert (again.rows, again.slots, again.prefills, again.copies) == ([1], [0], [], [])
    assert scheduler.is_awaited("a")
    scheduler.release(0)
    assert scheduler.admit() is not None
    assert not scheduler.is_awaited("a")


def test_prefill_batches_hold_similar_lengths_within_the_token_budget() -> None:
    lengths = [100, 10, 90, 95, 300, 12]
    admission = _scheduler("abcdef", 6, lengths=lengths, tokens=200).admit()
    assert admission is not None
    batches = [[lengths[slot] for slot in batch] for batch in admission.prefills]
    assert batches == [[300], [100, 95], [90], [12, 10]]


def test_admission_waits_for_an_eighth_of_the_slots_while_rows_are_live() -> None:
    scheduler = _scheduler("abcdefghijklmnopqrstuvwxyz", 16)
    assert scheduler.admit() is not None
    scheduler.release(3)
    assert scheduler.admit() is None
    scheduler.release(5)
    admission = scheduler.admit()
    assert admission is not None
    assert admission.slots == [3, 5]


def test_random_runs_serve_every_row_from_a_valid_source() -> None:
    """A model of the slots' contents: a row's prompt must be in its slot after prefills, then copies."""
    rng = random.Random(0)
    for _ in range(200):
        prompts = [rng.choice("abcde") for _ in range(rng.randint(1, 30))]
        num_slots = rng.randint(1, 9)
        scheduler = _scheduler("".join(prompts), num_slots)
        content: list[str | None] = [None] * num_slots
        logits: set[str] = set()
        live: dict[int, int] = {}
        served, prefilled = [], 0
        while scheduler.num_live or scheduler.num_waiting:
            admission = scheduler.admit()
            if admission is not None:
                for slot in (slot for batch in admission.prefills for slot in batch):
                    content[slot] = prompts[scheduler.row_of_slot[slot]]  # type: ignore[index]
                    logits.add(content[slot])  # type: ignore[arg-type]
                    prefilled += 1
                for source, target in admission.copies:
                    content[target] = content[source]
                for row, slot in zip(admission.rows, admission.slots, strict=True):
                    assert slot not in live
                    assert content[slot] == prompts[row]
                    assert prompts[row] in logits
                    live[slot] = row
                logits = {prompt for prompt in logits if scheduler.is_awaited(prompt)}
            assert live
            for slot in rng.sample(sorted(live), rng.randint(1, len(live))):
                served.append(live.pop(slot))
                scheduler.release(slot)
        assert sorted(served) == list(range(len(prompts)))
        assert prefilled <= len(prompts)
