# SPDX-License-Identifier: Apache-2.0
"""Running micro-batches through Megatron's forward-backward schedules, and results from the last stage to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_bridge.layers.attention import AttentionMeta
from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.distributed.vocab_parallel import Projection
from nemo_rl.models.policy.heads import HeadOutput, OutputHead, no_loss
from nemo_rl.models.policy.microbatch import Microbatch


class HeadRunner:
    """Megatron's ``output_processor``: picks the hidden states that the head needs and calls it."""

    def __init__(self, head: OutputHead, microbatch: Microbatch, dims: ParallelDims, vocab_size: int) -> None:
        """Hold what the head needs besides the hidden states."""
        self._head = head
        self._microbatch = microbatch
        self._dims = dims
        self._vocab_size = vocab_size
        self.output: HeadOutput | None = None

    def __call__(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any
    ) -> Tensor:
        """[s(/tp), b, H] hidden states to the loss (0 for heads without one)."""
        # The head reads the weight without calling the layer; its hooks (they wait for an overlapped gather) run here.
        for hook in output_layer._forward_pre_hooks.values():
            hook(output_layer, ())
        weight = output_layer.weight if output_weight is None else output_weight
        projection = Projection(
            weight=weight,
            vocab_start=self._dims.tp_rank * weight.shape[0],
            vocab_size=self._vocab_size,
            bias=output_layer.bias,
        )
        self.output = self._head(self._select(hidden_states), projection, self._microbatch, self._dims)
        return no_loss(hidden_states) if self.output.loss is None else self.output.loss

    def _select(self, hidden: Tensor) -> Tensor:
        """[s(/tp), b, H] -> [t, H], the scored positions, whose gradient is summed over the tensor-parallel ranks."""
        scored, (batch, _) = self._microbatch.scored, self._microbatch.input_ids.shape
        if self._dims.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        selected = hidden.flatten(0, 1).index_select(0, scored.positions * batch + scored.rows)
        if self._dims.tp > 1 and not self._dims.sequence_parallel:
            selected = copy_to_tensor_model_parallel_region(selected)
        return selected


def run_schedule(
    chunks: list[MegatronModule],
    microbatches: Sequence[Microbatch],
    head: OutputHead,
    dims: ParallelDims,
    *,
    vocab_size: int,
    forward_only: bool,
) -> list[HeadOutput]:
    """One pass of Megatron's schedule over the micro-batches.

    A loss is divided by a global count already, so nothing may scale it again: the three-tuple with zero tokens, in
    ``calculate_per_token_loss`` mode, makes schedule and finalisation sum.

    Returns:
        One output per micro-batch on the last stage, in order; an empty list elsewhere.
    """
    num_tokens = torch.zeros((), dtype=torch.int, device=dims.device)

    def forward_step(batches: Any, model: MegatronModule) -> tuple[Tensor, Any]:
        microbatch: Microbatch = next(batches)
        runner = HeadRunner(head, microbatch, dims, vocab_size)
        output = model(
            microbatch.input_ids,
            microbatch.position_ids,
            None,
            packed_seq_params=AttentionMeta(microbatch.position_ids, cu_seqlens=microbatch.cu_seqlens),
            output_processor=runner,
        )

        def loss(value: Tensor) -> tuple[Tensor, Tensor, HeadOutput | None]:
            return value, num_tokens, runner.output

        return output, loss

    first = microbatches[0]
    rows, length = first.input_ids.shape
    iterators = [iter(microbatches) for _ in chunks]
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=length,
        micro_batch_size=rows,
        decoder_seq_length=length,
        forward_only=forward_only,
    )
    return outputs if dims.is_last_stage else []


def broadcast_from_last_stage(tensors: dict[str, Tensor] | None, dims: ParallelDims) -> dict[str, Tensor]:
    """Tensors of the last pipeline stage on every stage: names and shapes once, then one broadcast per tensor.

    Args:
        tensors: on the last stage; ignored elsewhere.
        dims: the layout.
    """
    if dims.pp_group is None:
        assert tensors is not None
        return tensors
    source = dims.last_stage_rank
    payload: list[Any] = [None]
    if dims.is_last_stage:
        assert tensors is not None
        payload = [{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}]
    dist.broadcast_object_list(payload, src=source, group=dims.pp_group)
    out = {}
    for name, (shape, dtype) in payload[0].items():
        if dims.is_last_stage and tensors is not None:
            tensor = tensors[name].to(dims.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=dims.device)
        dist.broadcast(tensor, src=source, group=dims.pp_group)
        out[name] = tensor
    return out
