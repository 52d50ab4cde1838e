# SPDX-License-Identifier: Apache-2.0
"""The `megatron` generation backend: continuous batching on the policy's own model, in its own processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.models.generation.interfaces import (
    GenerationConfig,
    GenerationDatumSpec,
    GenerationOutputSpec,
    GenerationSamplingParams,
    sampling_params,
    verify_right_padding,
)
from nemo_rl.models.generation.megatron.decode_loop import DecodeLoop, GenerationRequest, Responses
from nemo_rl.models.generation.megatron.kv_cache import SlotKVCache
from nemo_rl.models.generation.megatron.sampling import row_seeds
from nemo_rl.models.generation.megatron.stages import StageRunner
from nemo_rl.models.generation.megatron.stopping import TokenDecoder, stop_strings_of_rows

_logger = logging.getLogger(__name__)

_DEFAULT_MAX_SLOTS = 256
_FIRST_CAPACITY = 256  # positions a slot beyond the prompts; doubled when a row gets longer


class MegatronGenerator:
    """Generates with the model chunks that the policy trains: no second copy of the weights, no refit.

    The chunks' parameters must be current: with an overlapped parameter gather the owner finishes it (and
    removes the forward pre-hooks) before it calls :meth:`generate`.

    Args:
        chunks: this rank's model chunks without DDP and mixed-precision wrappers.
        dims: the layout.
        config: `policy.generation`, with pad and stop tokens filled in (`configure_generation_config`).
        vocab_size: the model's real vocabulary.
        tokenizer: decodes responses where there are stop strings; None if there never are.
        max_total_sequence_length: prompt plus response of a row never exceed it.

    Attributes:
        last_cache_bytes: memory that the KV cache of the last call took on this rank. A cache lives as long as its
            call: weights change between calls, and training needs the memory.

    Raises:
        ValueError: a configuration that cannot run, with its key and a value that works.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        dims: ParallelDims,
        config: GenerationConfig,
        *,
        vocab_size: int,
        tokenizer: Any,
        max_total_sequence_length: int,
    ) -> None:
        self._chunks = list(chunks)
        self._dims = dims
        self._config = config = GenerationConfig.coerce(config)
        self._vocab_size = vocab_size
        engine = config.mcore_generation_config
        if engine.num_slots is not None and engine.num_slots % dims.tp:
            raise ValueError(
                f"policy.generation.mcore_generation_config.num_slots={engine.num_slots} is not a "
                f"multiple of the tensor-parallel size {dims.tp}; {_round_up(engine.num_slots, dims.tp)} "
                "works"
            )
        if config.pad_token_id is None:
            raise ValueError(
                "policy.generation has no pad token; pass the section through "
                "configure_generation_config(config, tokenizer)"
            )
        self._pad_token_id = config.pad_token_id
        self._stop_table = self._make_stop_table(config.stop_token_ids or [])
        self._decoder = TokenDecoder(tokenizer) if tokenizer is not None else None
        self._max_length = max_total_sequence_length
        if engine.max_model_len is not None:
            self._max_length = min(self._max_length, engine.max_model_len)
        self._stages = StageRunner(self._chunks, dims, vocab_size)
        self.last_cache_bytes = 0

    def _make_stop_table(self, stop_token_ids: Sequence[int]) -> Tensor:
        wrong = [token for token in stop_token_ids if not 0 <= token < self._vocab_size]
        if wrong:
            raise ValueError(
                f"policy.generation.stop_token_ids contains {wrong}, outside the vocabulary of "
                f"{self._vocab_size}; use ids from 0 to one less than that"
            )
        table = torch.zeros(self._vocab_size, dtype=torch.bool)
        table[list(stop_token_ids)] = True
        return table.to(self._dims.device)

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        sampling: GenerationSamplingParams | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate one response to each prompt. Collective over the ranks of one model copy (tp x pp).

        Args:
            data: prompts, on any device, the same on all ranks of the model copy.
            greedy: take the most likely token instead of drawing one.
            sampling: overrides the configuration's temperature, top-p and top-k (validation has its own).

        Returns:
            GenerationOutputSpec with `truncated`, on the CPU, rows in the order of `data`. Log-probabilities
            are those of the distribution that was drawn from; see :func:`sampling.sample`. A prompt that
            leaves no room for a token gets an empty response and is marked truncated.

        Raises:
            ValueError: an empty prompt, padding that is not on the right or not the pad token, or stop strings
                that are malformed.
            RuntimeError: the model gave non-finite log-probabilities.
        """
        with _evaluating(self._chunks), torch.inference_mode():
            request = self._request(data, greedy, sampling or sampling_params(self._config))
            responses = self._run(request)
        return self._output(request, responses)

    def _request(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool, params: GenerationSamplingParams
    ) -> GenerationRequest:
        verify_right_padding(data, pad_value=self._pad_token_id)
        input_ids, device = data["input_ids"], self._dims.device
        lengths: list[int] = data["input_lengths"].tolist()
        for row, length in enumerate(lengths):
            if not 1 <= length <= input_ids.shape[1]:
                raise ValueError(
                    f"input_lengths[{row}] is {length}; a prompt has 1 to {input_ids.shape[1]} tokens "
                    f"(input_ids is {list(input_ids.shape)}); start an empty prompt with the "
                    "tokenizer's BOS token"
                )
        stop_strings = stop_strings_of_rows(data.get("stop_strings"), self._config.stop_strings, len(lengths))
        if any(stop_strings) and self._decoder is None:
            raise ValueError(
                "stop_strings need a tokenizer; pass one to MegatronGenerator, or use stop_token_ids"
            )
        seeds = data["seeds"].to(device, torch.int64) if "seeds" in data else self._draw_seeds(len(lengths))
        return GenerationRequest(
            input_ids=input_ids.to(device),
            lengths=lengths,
            limits=[
                max(0, min(self._config.max_new_tokens, self._max_length - length)) for length in lengths
            ],
            seeds=seeds,
            stop_strings=stop_strings,
            params=params,
            greedy=greedy,
            prefill_multiple=self._dims.tp,
            max_prefill_tokens=self._config.mcore_generation_config.max_tokens,
        )

    def _draw_seeds(self, num_rows: int) -> Tensor:
        """Seeds from torch's global generator (the sampler's, so that all ranks agree)."""
        base = torch.randint(torch.iinfo(torch.int64).max, (1,), dtype=torch.int64).to(self._dims.device)
        replica = self._dims.dp_rank * self._dims.cp + self._dims.cp_rank
        return row_seeds(self._stages.share(base)[0] + replica, num_rows)

    def _run(self, request: GenerationRequest) -> Responses:
        active = [(n, limit) for n, limit in zip(request.lengths, request.limits, strict=True) if limit > 0]
        unit = 16 * self._dims.tp  # a padded prompt fits, whatever sequence parallelism rounds it up to
        slots = self._num_slots(
            len(active), _round_up(max((n + limit for n, limit in active), default=1), unit)
        )
        capacity = _round_up(max((n + min(limit, _FIRST_CAPACITY) for n, limit in active), default=1), unit)
        cache = SlotKVCache(slots, capacity)
        decoder = self._decoder if any(request.stop_strings) else None
        responses = DecodeLoop(self._stages, cache, request, self._stop_table, decoder).run()
        self.last_cache_bytes = cache.num_bytes
        return responses

    def _num_slots(self, num_rows: int, positions: int) -> int:
        """Rows decoded at a time: as configured, no more than there are, and than `buffer_size_gb` holds.

        Args:
            num_rows: rows of the call.
            positions: positions that the longest of them can take.
        """
        engine, tp = self._config.mcore_generation_config, self._dims.tp
        slots = min(engine.num_slots or _round_up(_DEFAULT_MAX_SLOTS, tp), _round_up(max(num_rows, 1), tp))
        row_bytes = positions * self._position_bytes()
        fitting = int(engine.buffer_size_gb * 1e9 / row_bytes) // tp * tp
        if fitting == 0:
            raise ValueError(
                f"policy.generation.mcore_generation_config.buffer_size_gb={engine.buffer_size_gb} holds no {tp} "
                f"rows of {positions} tokens; {tp * row_bytes / 1e9:.3g} does, or lower "
                "policy.generation.max_new_tokens or policy.max_total_sequence_length"
            )
        if fitting < slots:
            _logger.info(
                "decoding %d rows at a time instead of %d: buffer_size_gb=%s holds no more rows of %d tokens",
                fitting, slots, engine.buffer_size_gb, positions,
            )  # fmt: skip
        return min(slots, fitting)

    def _position_bytes(self) -> int:
        """Keys and values of one token on the rank with the most layers."""
        config = self._chunks[0].config
        layers = -(-config.num_layers // self._dims.pp)
        heads = -(-config.num_query_groups // self._dims.tp)
        return 2 * layers * heads * config.kv_channels * config.params_dtype.itemsize

    def _output(
        self, request: GenerationRequest, responses: Responses
    ) -> BatchedDataDict[GenerationOutputSpec]:
        prompt_lengths = torch.tensor(request.lengths, dtype=torch.int64)
        # Copies: what was made in inference mode could never take part in training.
        generated, truncated = (x.cpu().clone() for x in (responses.lengths, responses.truncated))
        tokens, logprobs = responses.tokens.cpu(), responses.logprobs.cpu()
        if not bool(torch.isfinite(logprobs).all()):
            rows = (~torch.isfinite(logprobs)).any(dim=1).nonzero()[:, 0].tolist()
            raise RuntimeError(
                f"the model gives non-finite log-probabilities in rows {rows[:8]}: its weights have diverged"
            )
        totals = prompt_lengths + generated
        width = int(totals.max()) if len(totals) else 0
        output_ids = torch.full((len(totals), width), self._pad_token_id, dtype=torch.int64)
        output_logprobs = torch.zeros(len(totals), width)
        columns = torch.arange(width)
        prompt = columns < prompt_lengths[:, None]
        response = (columns < totals[:, None]) & ~prompt
        inside = torch.arange(tokens.shape[1]) < generated[:, None]
        prompts = request.input_ids.cpu()
        output_ids[prompt] = prompts[torch.arange(prompts.shape[1]) < prompt_lengths[:, None]]
        output_ids[response] = tokens[inside]
        output_logprobs[response] = logprobs[inside]
        return BatchedDataDict[GenerationOutputSpec](
            {
                "output_ids": output_ids,
                "generation_lengths": generated,
                "unpadded_sequence_lengths": totals,
                "logprobs": output_logprobs,
                "truncated": truncated,
            }
        )


@contextmanager
def _evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Evaluation mode (no dropout, no recompute) inside; afterwards the mode that was."""
    training = [chunk for chunk in chunks if chunk.training]
    for chunk in training:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in training:
            chunk.train()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
