# SPDX-License-Identifier: Apache-2.0
"""One generation call: rows enter slots, get one token a step, and leave.

Every rank of a model copy runs the same loop on the same tokens, so the only traffic besides the forward
passes is the tokens of a step, and the log-probabilities at the end. A step reads from the device once (which
slots are finished).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.models.generation.interfaces import GenerationSamplingParams
from nemo_rl.models.generation.megatron.kv_cache import SlotKVCache
from nemo_rl.models.generation.megatron.sampling import sample
from nemo_rl.models.generation.megatron.scheduler import Admission, SlotScheduler
from nemo_rl.models.generation.megatron.stages import StageRunner
from nemo_rl.models.generation.megatron.stopping import StopStringMatcher, TokenDecoder


@dataclass(frozen=True)
class GenerationRequest:
    """The rows of one call. Tensors are on the model's device.

    Attributes:
        input_ids: int64 [B, S], right-padded.
        lengths: prompt tokens of each row.
        limits: most new tokens of each row; a row with 0 is not run.
        seeds: int64 [B].
        stop_strings: texts that end each row.
        params: how tokens are drawn.
        greedy: whether the most likely token is taken instead.
        prefill_multiple: padded prompt lengths are multiples of it (TP with sequence parallelism).
        max_prefill_tokens: padded tokens of one prefill pass.
    """

    input_ids: Tensor
    lengths: list[int]
    limits: list[int]
    seeds: Tensor
    stop_strings: Sequence[tuple[str, ...]]
    params: GenerationSamplingParams
    greedy: bool
    prefill_multiple: int
    max_prefill_tokens: int


@dataclass(frozen=True)
class Responses:
    """What the rows of a call got; L is the longest response.

    Attributes:
        tokens: int64 [B, L], anything behind a row's length.
        logprobs: float32 [B, L], 0 behind a row's length.
        lengths: int64 [B].
        truncated: bool [B], ended by the length limit alone.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    truncated: Tensor


class DecodeLoop:
    """Runs one :class:`GenerationRequest` on a cache that it may fill as it likes.

    Args:
        stages: the model.
        cache: keys and values; its slots are the loop's.
        request: the rows.
        stop_table: bool [V], True for the tokens that end a row.
        decoder: decodes tokens for stop strings; None if no row has any.
    """

    def __init__(
        self,
        stages: StageRunner,
        cache: SlotKVCache,
        request: GenerationRequest,
        stop_table: Tensor,
        decoder: TokenDecoder | None,
    ) -> None:
        self._stages = stages
        self._cache = cache
        self._request = request
        self._stop_table = stop_table
        self._decoder = decoder
        self._host_ids = request.input_ids.cpu()
        self._prompts: list[Hashable] = [
            row[:length].numpy().tobytes()
            for row, length in zip(self._host_ids, request.lengths, strict=True)
        ]
        self._scheduler = SlotScheduler(
            self._prompts, request.lengths, cache.num_slots, request.max_prefill_tokens
        )
        self._prompt_logits: dict[
            Hashable, Tensor
        ] = {}  # [V], on the sampler, while rows wait for the prompt
        self._matchers: dict[int, StopStringMatcher] = {}  # by slot
        device, num_slots = request.input_ids.device, cache.num_slots
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)  # last drawn
        self._positions = torch.zeros_like(self._tokens)  # where the last drawn token belongs
        self._live = torch.zeros_like(self._tokens)  # 1 or 0
        self._first_step = torch.zeros_like(self._tokens)
        self._last_step = torch.zeros_like(self._tokens)
        self._seeds = torch.zeros_like(self._tokens)
        self._offsets: dict[int, int] = {}  # live slot -> prompt length minus first step
        self._max_offset = 0
        self._token_steps: list[Tensor] = []  # per step [slots]
        self._logprob_steps: list[Tensor] = []
        num_rows = len(request.lengths)
        self._slot_of_row = [0] * num_rows
        self._start_of_row = [0] * num_rows
        self._length_of_row = [0] * num_rows
        self._matched_rows: list[int] = []

    def run(self) -> Responses:
        """Generate until every row is finished."""
        for row, limit in enumerate(self._request.limits):
            if limit > 0:
                self._scheduler.submit(row)
        step = 0
        while self._scheduler.num_live or self._scheduler.num_waiting:
            logits = self._decode(step) if self._scheduler.num_live else None
            admission = self._scheduler.admit()
            if admission is not None:
                logits = self._admit(admission, logits, step)
            self._draw(logits, step)
            self._release_finished(step)
            step += 1
        return self._responses()

    def _decode(self, step: int) -> Tensor | None:
        """Logits after the last drawn tokens, [slots, V] on the sampler; those of free slots mean nothing."""
        length = self._max_offset + step
        if length > self._cache.capacity:
            self._cache.reserve(min(2 * self._cache.capacity, self._max_length()))
        self._cache.begin_decode(self._positions, length)
        logits = self._stages.decode(self._tokens, self._positions, self._cache)
        self._positions.add_(self._live)
        return logits

    def _max_length(self) -> int:
        return max(
            length + limit for length, limit in zip(self._request.lengths, self._request.limits, strict=True)
        )

    def _admit(self, admission: Admission, logits: Tensor | None, step: int) -> Tensor | None:
        """Bring prompts into slots and put the logits after them into `logits`."""
        request, device = self._request, self._tokens.device
        rows = torch.tensor(admission.rows, device=device)
        slots = torch.tensor(admission.slots, device=device)
        lengths = [request.lengths[row] for row in admission.rows]
        limits = [request.limits[row] for row in admission.rows]
        self._seeds[slots] = request.seeds[rows]
        self._first_step[slots] = step
        self._last_step[slots] = torch.tensor(limits, device=device) + (step - 1)
        self._positions[slots] = torch.tensor(lengths, device=device)
        self._live[slots] = 1
        for row, slot, length in zip(admission.rows, admission.slots, lengths, strict=True):
            self._slot_of_row[row], self._start_of_row[row] = slot, step
            self._offsets[slot] = length - step
            if request.stop_strings[row]:
                assert self._decoder is not None
                prompt = self._host_ids[row, :length].tolist()
                self._matchers[slot] = StopStringMatcher(self._decoder, request.stop_strings[row], prompt)
        self._max_offset = max(self._offsets.values())
        for batch in admission.prefills:
            self._prefill(batch)
        if admission.copies:
            sources, targets = torch.tensor(admission.copies, device=device).unbind(1)
            self._cache.copy_prefix(sources, targets, max(lengths))
        return self._with_prompt_logits(logits, admission, slots)

    def _prefill(self, slots: list[int]) -> None:
        rows = [self._scheduler.row_of_slot[slot] for slot in slots]
        lengths = [self._request.lengths[row] for row in rows if row is not None]
        multiple = self._request.prefill_multiple
        width = -(-max(lengths) // multiple) * multiple
        device = self._tokens.device
        input_ids = self._request.input_ids[torch.tensor(rows, device=device), :width]
        if input_ids.shape[1] < width:
            input_ids = torch.nn.functional.pad(input_ids, (0, width - input_ids.shape[1]))
        self._cache.reserve(width)
        self._cache.begin_prefill(torch.tensor(slots, device=device))
        logits = self._stages.prefill(input_ids, torch.tensor(lengths, device=device), self._cache)
        if logits is not None:
            for row, row_logits in zip(rows, logits, strict=True):
                assert row is not None
                self._prompt_logits[self._prompts[row]] = row_logits

    def _with_prompt_logits(
        self, logits: Tensor | None, admission: Admission, slots: Tensor
    ) -> Tensor | None:
        if not self._stages.is_sampler:
            return None
        fresh = torch.stack([self._prompt_logits[self._prompts[row]] for row in admission.rows])
        for prompt in [p for p in self._prompt_logits if not self._scheduler.is_awaited(p)]:
            del self._prompt_logits[prompt]
        if logits is None:
            logits = fresh.new_zeros(self._cache.num_slots, fresh.shape[1])
        return logits.index_copy(0, slots, fresh)

    def _draw(self, logits: Tensor | None, step: int) -> None:
        """Draw the step's tokens on the sampler and tell them to all ranks."""
        if logits is not None:
            counters = step - self._first_step
            drawn, logprobs = sample(
                logits, self._seeds, counters, self._request.params, self._request.greedy
            )
            self._logprob_steps.append(logprobs)
        else:
            drawn = torch.empty_like(self._tokens)
        self._tokens = self._stages.share(drawn)
        self._token_steps.append(self._tokens)

    def _release_finished(self, step: int) -> None:
        ended = self._stop_table[self._tokens] | (self._last_step <= step)
        finished = ended.logical_and_(self._live).nonzero()[:, 0].tolist()
        if self._matchers:
            drawn = self._tokens.tolist()
            matched = [slot for slot, matcher in self._matchers.items() if matcher.push(drawn[slot])]
            for slot in matched:
                row = self._scheduler.row_of_slot[slot]
                assert row is not None
                self._matched_rows.append(row)
            finished = list(dict.fromkeys(finished + matched))
        if not finished:
            return
        for slot in finished:
            row = self._scheduler.row_of_slot[slot]
            assert row is not None
            self._length_of_row[row] = step + 1 - self._start_of_row[row]
            self._scheduler.release(slot)
            self._matchers.pop(slot, None)
            del self._offsets[slot]
        self._max_offset = max(self._offsets.values(), default=0)
        idle = torch.tensor(finished, device=self._live.device)
        self._live[idle] = 0
        # A free slot goes on writing at its last position, behind its prompt, which other rows may copy.
        self._positions[idle] = self._positions[idle].clamp_max(self._cache.capacity - 1)

    def _responses(self) -> Responses:
        device = self._tokens.device
        lengths = torch.tensor(self._length_of_row, dtype=torch.int64, device=device)
        longest = max(self._length_of_row, default=0)
        if longest == 0:
            empty = self._tokens.new_zeros(len(lengths), 0)
            return Responses(empty, empty.float(), lengths, torch.ones_like(lengths, dtype=torch.bool))
        columns = torch.arange(longest, device=device)
        inside = columns < lengths[:, None]
        steps = (torch.tensor(self._start_of_row, device=device)[:, None] + columns) * inside
        slots = torch.tensor(self._slot_of_row, device=device)[:, None]
        tokens = torch.stack(self._token_steps)[steps, slots]
        if self._stages.is_sampler:
            logprobs = torch.stack(self._logprob_steps)[steps, slots] * inside
        else:
            logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=device)
        logprobs = self._stages.share(logprobs)
        last = tokens.gather(1, (lengths - 1).clamp_min(0)[:, None])[:, 0]
        stopped = self._stop_table[last] & (lengths > 0)
        stopped[torch.tensor(self._matched_rows, dtype=torch.int64, device=device)] = True
        return Responses(tokens, logprobs, lengths, ~stopped)
