# SPDX-License-Identifier: Apache-2.0
"""What a policy worker does with its engine, the same for all backends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.interfaces import LossFunction, Metric
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.models.policy import microbatch
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.engine import OptimStep, TrainEngine
from nemo_rl.models.policy.heads import HeadOutput, LogprobHead, LossHead, OutputHead, TopKHead
from nemo_rl.models.policy.microbatch import MicrobatchSpec, num_rows, take_rows
from nemo_rl.models.policy.results import MetricAccumulator, global_counts

logger = logging.getLogger(__name__)

_INFERENCE_KEYS = ("input_ids", "input_lengths")


class PolicyWorkerBase:
    """One rank of a policy.

    ``data`` of every method is this rank's data-parallel shard: the rows of global batch 0 first, then of 1, and so on.
    All ranks of a model-parallel group get the same rows and call the same methods in the same order.
    """

    config: PolicyConfig
    reference_state: dict[str, Tensor] | None = None

    @property
    def engine(self) -> TrainEngine:
        """The backend."""
        raise NotImplementedError

    @property
    def dims(self) -> ParallelDims:
        """The parallel layout."""
        return self.engine.dims

    @property
    def temperature(self) -> float:
        """Temperature of log-probs: that of sampling, so that trainer and sampler speak of one distribution."""
        generation = self.config.generation
        return generation.temperature if generation is not None and generation.temperature > 0 else 1.0

    # -- training ------------------------------------------------------------------------------------------

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for each global batch in ``data``; with ``eval_mode`` only losses and metrics.

        Args:
            data: this rank's shard; ``input_ids``, ``input_lengths``, ``token_mask``, ``sample_mask`` and what the loss
                reads.
            loss_fn: the loss.
            eval_mode: no gradients, no update.
            gbs: rows of a global batch over all ranks; default ``train_global_batch_size``.
            mbs: rows of a micro-batch; default ``train_micro_batch_size``.

        Returns:
            The same on every rank: ``loss`` and ``grad_norm`` float32[num_global_batches]; ``lr``, ``wd``,
            ``global_valid_seqs``, ``global_valid_toks`` (lists, one value per global batch); ``num_skipped_steps``;
            ``all_mb_metrics``: metric -> list with one globally reduced value per global batch.

        Raises:
            ValueError: rows do not divide into global batches, or a unit of rows would be split.
        """
        started = time.perf_counter()
        gbs = gbs or self.config.train_global_batch_size
        mbs = mbs or self.config.train_micro_batch_size
        batches = self._global_batches(data, gbs, mbs, loss_fn)
        counts = global_counts(batches, self.dims)
        metrics = MetricAccumulator(len(batches))
        steps: list[OptimStep] = []
        with self.engine.mode(training=not eval_mode):
            for index, (batch, norm) in enumerate(zip(batches, counts, strict=True)):
                head = LossHead(
                    loss_fn,
                    norm,
                    temperature=self.temperature,
                    chunk_size=self.config.logprob_chunk_size,
                )
                outputs = self._run(batch, head, mbs, forward_only=eval_mode)
                for output in outputs:
                    assert output.loss is not None
                    metrics.add(index, {**output.metrics, _LOSS: Metric(output.loss.detach())})
                if not eval_mode:
                    steps.append(self.engine.optimizer_step(skip=norm.is_empty))
        if not eval_mode:
            self.engine.lr_step(gbs)
        reduced = metrics.reduce(self.dims)
        results = _training_results(reduced, steps)
        results["global_valid_seqs"] = [float(norm.valid_seqs) for norm in counts]
        results["global_valid_toks"] = [float(norm.valid_toks) for norm in counts]
        results["rank"] = self.dims.rank
        results["model_dtype"] = self.config.precision
        results["train_elapsed_seconds"] = time.perf_counter() - started
        return results

    def _global_batches(
        self, data: Mapping[str, Any], gbs: int, mbs: int, loss_fn: LossFunction
    ) -> list[dict[str, Any]]:
        dp = self.dims.dp
        rows = num_rows(data)
        unit = getattr(loss_fn, "rows_per_unit", 1)
        if gbs % (dp * unit):
            raise ValueError(
                f"a global batch of {gbs} rows does not divide over {dp} data-parallel ranks in units of {unit}; set "
                f"policy.train_global_batch_size to a multiple of {dp * unit}"
            )
        if mbs % unit:
            raise ValueError(
                f"a micro-batch of {mbs} rows splits units of {unit} rows, which {type(loss_fn).__name__} needs "
                f"together; set policy.train_micro_batch_size to a multiple of {unit}"
            )
        local = gbs // dp
        if rows == 0 or rows % local:
            raise ValueError(
                f"rank {self.dims.rank} got {rows} rows, which are not whole shards of {local} rows; send a "
                f"multiple of policy.train_global_batch_size={gbs} rows in all"
            )
        return [take_rows(data, start, start + local) for start in range(0, rows, local)]

    def _run(
        self, batch: Mapping[str, Any], head: OutputHead, size: int, *, forward_only: bool
    ) -> list[HeadOutput]:
        spec = MicrobatchSpec(
            size=min(size, num_rows(batch)),
            selection=head.selection,
            length_multiple=self.engine.length_multiple,
            uniform=self.engine.uniform_microbatches,
        )
        batches = microbatch.build(batch, spec, self.dims.device)
        return self.engine.forward_backward(batches, head, forward_only=forward_only)

    # -- inference -----------------------------------------------------------------------------------------

    def get_logprobs(
        self, *, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """Log-probs of the rows' tokens: ``logprobs`` float32 [b, S] on the CPU, 0 at position 0 and padding."""
        head = LogprobHead(self.temperature, self.config.logprob_chunk_size)
        return self._infer(data, head, micro_batch_size)

    def get_reference_policy_logprobs(
        self, *, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """The same under the reference weights, as ``reference_logprobs``."""
        with self.use_reference_model():
            logprobs = self.get_logprobs(data=data, micro_batch_size=micro_batch_size)
        return BatchedDataDict({"reference_logprobs": logprobs["logprobs"]})

    def get_topk_logits(
        self, *, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """The k largest logits of each position: ``topk_logits`` and ``topk_indices`` [b, S, k] on the CPU."""
        head = TopKHead(k, self.temperature, self.config.logprob_chunk_size)
        return self._infer(data, head, micro_batch_size)

    def _infer(
        self, data: Mapping[str, Any], head: OutputHead, micro_batch_size: int | None
    ) -> BatchedDataDict[Any]:
        columns = {key: data[key] for key in _INFERENCE_KEYS if key in data}
        with self.engine.mode(training=False):
            outputs = self._run(
                columns, head, micro_batch_size or self.config.logprob_batch_size, forward_only=True
            )
        joined = None
        if self.dims.is_last_stage:
            names = outputs[0].tensors
            joined = {name: torch.cat([output.tensors[name] for output in outputs]) for name in names}
        tensors = self.engine.broadcast_from_last_stage(joined)
        return BatchedDataDict({name: tensor.cpu() for name, tensor in tensors.items()})

    # -- reference weights ---------------------------------------------------------------------------------

    def snapshot_reference(self) -> None:
        """Keep a copy of the current weights, on the CPU, as the reference."""
        self.reference_state = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self.engine.named_local_state().items()
        }

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Run a block with the reference weights; the policy's come back bit for bit, also after an exception.

        Nothing may train or gather parameters inside the block.

        Raises:
            ValueError: the worker was built without a reference model.
        """
        if self.reference_state is None:
            raise ValueError(
                "this worker has no reference weights; build the policy with init_reference_model=True"
            )
        live = self.engine.named_local_state()
        policy = {name: tensor.data for name, tensor in live.items()}
        _point_at(live, self.reference_state)
        try:
            yield
        finally:
            _point_at(live, policy)


_LOSS = "\0loss"  # cannot collide with the name of a loss's own metric


def _point_at(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Let parameters and buffers use the storage of other tensors: nothing is copied where those are on the device."""
    for name, tensor in live.items():
        tensor.data = values[name].to(tensor.device)


def _training_results(reduced: list[dict[str, float]], steps: list[OptimStep]) -> dict[str, Any]:
    losses = [batch.pop(_LOSS) for batch in reduced]
    names = dict.fromkeys(name for batch in reduced for name in batch)
    return {
        "loss": torch.tensor(losses, dtype=torch.float32),
        "grad_norm": torch.tensor([step.grad_norm for step in steps], dtype=torch.float32),
        "lr": [step.lr for step in steps],
        "wd": [step.weight_decay for step in steps],
        "num_skipped_steps": sum(step.skipped is not None for step in steps),
        "skip_reasons": [step.skipped for step in steps if step.skipped is not None],
        "all_mb_metrics": {name: [batch[name] for batch in reduced if name in batch] for name in names},
    }
