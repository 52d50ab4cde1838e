# SPDX-License-Identifier: Apache-2.0
"""Which row enters which slot when, and where its prompt's keys and values come from. No tensors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Admission:
    """Rows that enter slots before the next token, and how their prompts get there.

    Attributes:
        rows: row numbers.
        slots: the slot of each of `rows`.
        prefills: batches of slots whose prompt must be run through the model; each slot holds one of `rows`.
        copies: (source, target) slots: the prompt's keys and values lie in `source` (after the prefills) and
            are copied to `target`.
    """

    rows: list[int]
    slots: list[int]
    prefills: list[list[int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class SlotScheduler:
    """Continuous batching over a fixed number of slots.

    Equal prompts are prefilled once as long as some slot still holds one: a live slot only appends to its
    prompt, and a slot that was released keeps what it held until another row takes it.

    Args:
        prompts: per row a key of its prompt: equal keys, equal prompts.
        lengths: per row the tokens of its prompt.
        num_slots: number of slots.
        max_prefill_tokens: padded tokens of one prefill batch (a batch of one prompt may be larger).
    """

    def __init__(
        self, prompts: Sequence[Hashable], lengths: Sequence[int], num_slots: int, max_prefill_tokens: int
    ) -> None:
        self._prompts = prompts
        self._lengths = lengths
        self._num_slots = num_slots
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: deque[int] = deque()
        self._waiting_prompts: Counter[Hashable] = Counter()
        self._free = set(range(num_slots))
        self._held: list[Hashable | None] = [None] * num_slots
        self.row_of_slot: list[int | None] = [None] * num_slots

    def submit(self, row: int) -> None:
        """Queue a row."""
        self._waiting.append(row)
        self._waiting_prompts[self._prompts[row]] += 1

    @property
    def num_live(self) -> int:
        """Slots that hold an unfinished row."""
        return self._num_slots - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Rows without a slot so far."""
        return len(self._waiting)

    def is_awaited(self, prompt: Hashable) -> bool:
        """Whether a waiting row has this prompt."""
        return self._waiting_prompts[prompt] > 0

    def release(self, slot: int) -> None:
        """The row in `slot` is finished."""
        assert self.row_of_slot[slot] is not None, f"slot {slot} is free already"
        self.row_of_slot[slot] = None
        self._free.add(slot)

    def admit(self) -> Admission | None:
        """Move waiting rows to free slots, in order; None if it is not (yet) worth a prefill.

        A prefill is a forward pass of its own, so while rows are live it waits until an eighth of the slots,
        or one for each waiting row, is free.
        """
        enough = min(self.num_waiting, max(1, self._num_slots // 8))
        if not self._waiting or len(self._free) < (enough if self.num_live else 1):
            return None
        rows = [self._waiting.popleft() for _ in range(min(len(self._free), len(self._waiting)))]
        slots = [self._take_slot(self._prompts[row]) for row in rows]
        for row in rows:
            self._waiting_prompts[self._prompts[row]] -= 1
        kept = {slot for row, slot in zip(rows, slots, strict=True) if self._held[slot] == self._prompts[row]}
        for row, slot in zip(rows, slots, strict=True):
            self.row_of_slot[slot] = row
            if slot not in kept:
                self._held[slot] = None
        sources = {prompt: slot for slot, prompt in enumerate(self._held) if prompt is not None}
        prefill, copies = [], []
        for row, slot in zip(rows, slots, strict=True):
            prompt = self._prompts[row]
            if slot in kept:
                continue
            if prompt in sources:
                copies.append((sources[prompt], slot))
            else:
                sources[prompt] = slot
                prefill.append(slot)
            self._held[slot] = prompt
        return Admission(rows, slots, self._batches(prefill), copies)

    def _take_slot(self, prompt: Hashable) -> int:
        """A free slot: one that holds `prompt`, else one with an unwanted prompt, else any; lowest first."""
        free = sorted(self._free)
        same = [slot for slot in free if self._held[slot] == prompt]
        idle = [slot for slot in free if self._held[slot] is None or not self.is_awaited(self._held[slot])]
        slot = (same or idle or free)[0]
        self._free.remove(slot)
        return slot

    def _batches(self, slots: list[int]) -> list[list[int]]:
        """Batches of similar lengths within the token budget."""

        def length(slot: int) -> int:
            row = self.row_of_slot[slot]
            assert row is not None
            return self._lengths[row]

        batches: list[list[int]] = []
        for slot in sorted(slots, key=length, reverse=True):
            longest = length(batches[-1][0]) if batches else 0
            # A prompt of less than half the batch's longest one would be mostly padding.
            fits = batches and (len(batches[-1]) + 1) * longest <= self._max_prefill_tokens
            if fits and (2 * length(slot) >= longest or longest <= 32):
                batches[-1].append(slot)
            else:
                batches.append([slot])
        return batches
