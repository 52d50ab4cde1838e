# SPDX-License-Identifier: Apache-2.0
"""The policy as an algorithm sees it: one object in the driver that calls a group of workers.

It splits rows over data-parallel shards and joins results; it knows no process group, no device and no backend.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import ray
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import MultiWorkerFuture, RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    GenerationSamplingParams,
)
from nemo_rl.models.policy.backend import CP_AXIS, DP_AXIS, PP_AXIS, TP_AXIS, backend_for, worker_grid
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.interfaces import (
    ColocatablePolicyInterface,
    LogprobOutputSpec,
    ReferenceLogprobOutputSpec,
    ScoreOutputSpec,
    TopkLogitsOutputSpec,
)
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    from nemo_rl.algorithms.interfaces import LossFunction
    from nemo_rl.utils.checkpoint_config import CheckpointingConfig

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[Any]

_REPLICATED = [CP_AXIS, TP_AXIS, PP_AXIS]
_FORWARD_COLUMNS = ("input_ids", "input_lengths")
_GENERATION_COLUMNS = (*_FORWARD_COLUMNS, "stop_strings", "seeds")
# Reported for each global batch; the documented metrics dict carries them too.
_STEP_METRICS = ("lr", "wd", "global_valid_seqs", "global_valid_toks")


class Policy(ColocatablePolicyInterface, GenerationInterface):
    """A language model that trains, scores tokens and generates, spread over the workers of a cluster.

    Args:
        cluster: where the workers go; its size over the model-parallel degrees is the data-parallel size.
        config: the ``policy`` section, as a model or a plain mapping.
        tokenizer: goes to the workers.
        name_prefix: the workers are called ``<name_prefix>-<rank>``.
        workers_per_node: workers in each of the cluster's nodes; default: all bundles.
        init_optimizer: without it the policy cannot train.
        weights_path: checkpoint to take the weights from.
        optimizer_path: checkpoint to take optimizer, schedules and random state from.
        init_reference_model: keep the initial weights for :meth:`get_reference_policy_logprobs`.
        processor: of a multimodal model; goes to the workers.
        worker_extension_cls_fqn: "package.module.Class" to use in place of the backend's worker class.
        skip_weight_load: leave the weights undefined, for a policy that will receive them.

    Raises:
        ValueError: no or two backends, or a cluster whose size does not fit the degrees.
        ResourceInsufficientError: the cluster's devices do not exist.
        WorkerError: a worker failed while it started; WorkerInputError (a ValueError) if it refused its input.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        name_prefix: str = "lm_policy",
        workers_per_node: int | list[int] | None = None,
        init_optimizer: bool = True,
        weights_path: PathLike | None = None,
        optimizer_path: PathLike | None = None,
        init_reference_model: bool = True,
        processor: AutoProcessor | None = None,
        worker_extension_cls_fqn: str | None = None,
        skip_weight_load: bool = False,
    ) -> None:
        self.config = PolicyConfig.coerce(config)
        self.cluster = cluster
        self.tokenizer = tokenizer
        backend = backend_for(self.config)
        self.sharding_annotations = worker_grid(backend, _world_size(cluster, workers_per_node))
        optional = {"processor": processor} if processor is not None else {}
        if skip_weight_load:
            optional["skip_weight_load"] = True
        builder = RayWorkerBuilder(
            worker_extension_cls_fqn or backend.worker_class_fqn,
            self.config,
            tokenizer=tokenizer,
            weights_path=_absolute(weights_path),
            optimizer_path=_absolute(optimizer_path),
            init_optimizer=init_optimizer,
            init_reference_model=init_reference_model,
            worker_sharding_annotations=self.sharding_annotations,
            pre_init_communication_queue=None,
            **optional,
        )
        self.worker_group = RayWorkerGroup(
            cluster,
            builder,
            workers_per_node=workers_per_node,
            name_prefix=name_prefix,
            sharding_annotations=self.sharding_annotations,
            env_vars=backend.env_vars,
        )

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel shards."""
        return self.sharding_annotations.get_axis_size(DP_AXIS)

    # -- token scores -------------------------------------------------------------------------------------

    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], timer: Timer | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """``logprobs`` float32[B, S] of the rows' tokens, in the order of ``data``; any number of rows."""
        return self._score_tokens("get_logprobs", data, timer, {})

    def get_reference_policy_logprobs(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """``reference_logprobs`` float32[B, S] under the initial weights."""
        return self._score_tokens(
            "get_reference_policy_logprobs", data, timer, {"micro_batch_size": micro_batch_size}
        )

    def get_topk_logits(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        k: int,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """``topk_logits`` and ``topk_indices`` [B, S, k]."""
        return self._score_tokens(
            "get_topk_logits", data, timer, {"k": k, "micro_batch_size": micro_batch_size}
        )

    def score(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ScoreOutputSpec]:
        """``scores`` float32[B] of a reward model.

        Raises:
            ValueError: the policy is not a reward model.
        """
        if not self.config.reward_model_cfg.enabled:
            raise ValueError("score() needs a reward model: set policy.reward_model_cfg.enabled=true")
        return self._score_tokens("score", data, None, {})

    def _score_tokens(
        self, method: str, data: BatchedDataDict[Any], timer: Timer | None, common: dict[str, Any]
    ) -> BatchedDataDict[Any]:
        columns = _pick_columns(data, _FORWARD_COLUMNS, _FORWARD_COLUMNS)
        with _timed(timer, f"{method}/shard_data"):
            shards = self._row_shards(columns)
        with _timed(timer, f"{method}/submit_logprob_futures"):
            future = self._call_shards(method, shards, common)
        joined = BatchedDataDict.from_batches(future.get_results(self.worker_group))
        return _first_rows(joined, columns.size)

    # -- training -----------------------------------------------------------------------------------------

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
        check_dim_skip_keys: list[str] | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for each ``gbs`` rows of ``data``, in order.

        Args:
            data: ``input_ids`` int64[B, S] (right padding), ``input_lengths`` int[B], ``token_mask`` [B, S],
                ``sample_mask`` [B] and what the loss reads.
            loss_fn: the loss.
            eval_mode: losses and metrics only, no step.
            gbs: rows of a global batch; default ``policy.train_global_batch_size``.
            mbs: rows of a micro-batch of one worker; default ``policy.train_micro_batch_size``.
            timer: gets the time to split and to submit.
            check_dim_skip_keys: columns whose second dimension may be another than S.

        Returns:
            ``loss`` float32[number of global batches], ``grad_norm``, ``all_mb_metrics`` (metric -> one value for each
            global batch, reduced over all its rows), ``lr``, ``wd``, ``global_valid_seqs``, ``global_valid_toks``,
            ``num_skipped_steps``, ``num_ranks``, ``train_elapsed_seconds``.

        Raises:
            ValueError: rows, batch sizes and workers do not fit each other, or a column has another length.
        """
        data = _batched(data)
        gbs = gbs or self.config.train_global_batch_size
        _check_sequence_dims(data, check_dim_skip_keys or [])
        with _timed(timer, "policy_training/sharding_data"):
            shards = self._shard_for_train(data, gbs)
        with _timed(timer, "policy_training/submit_training_futures"):
            future = self._call_shards(
                "train",
                shards,
                {"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": gbs, "mbs": mbs},
                equal_over=[DP_AXIS, *_REPLICATED],
            )
        [results] = future.get_results(self.worker_group)
        metrics = {
            **results["all_mb_metrics"],
            **{name: results[name] for name in _STEP_METRICS if results[name]},
        }
        return {**results, "all_mb_metrics": metrics, "num_ranks": self.sharding_annotations.size}

    def _shard_for_train(self, data: BatchedDataDict[Any], gbs: int) -> list[SlicedDataDict]:
        dp = self.data_parallel_size
        if gbs % dp:
            raise ValueError(
                f"a global batch of {gbs} rows does not divide over {dp} data-parallel workers: set "
                f"policy.train_global_batch_size to a multiple of {dp}, such as {-(-gbs // dp) * dp}"
            )
        if data.size == 0 or data.size % gbs:
            raise ValueError(
                f"{data.size} rows are not whole global batches of {gbs}: set policy.train_global_batch_size to a "
                f"divisor of {data.size}, or send a multiple of {gbs} rows"
            )
        return data.shard_by_batch_size(dp, batch_size=gbs)

    # -- generation ---------------------------------------------------------------------------------------

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        sampling: GenerationSamplingParams | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """One response to each prompt, with the policy's current weights, in the order of ``data``.

        Args:
            data: ``input_ids`` int64[B, S] (right padding), ``input_lengths`` int[B], optionally ``stop_strings`` and
                ``seeds`` int64[B]; any number of rows.
            greedy: take the likeliest token instead of sampling.
            sampling: other temperature, top-p and top-k than the configuration's (validation has its own).

        Raises:
            ValueError: ``policy.generation`` is null, or a column is missing.
        """
        if self.config.generation is None:
            raise ValueError("policy.generation is null: set policy.generation.backend=megatron to generate")
        columns = _pick_columns(data, _GENERATION_COLUMNS, _FORWARD_COLUMNS)
        future = self._call_shards(
            "generate", self._row_shards(columns), {"greedy": greedy, "sampling": sampling}
        )
        pad = self.config.generation.pad_token_id
        joined = BatchedDataDict.from_batches(
            future.get_results(self.worker_group), {"output_ids": 0 if pad is None else pad}
        )
        return _first_rows(joined, columns.size)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """True: the policy generates with the weights that it trains, nothing has to be loaded."""
        del args, kwargs
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """True: KV caches live within one :meth:`generate` call."""
        del args, kwargs
        return True

    def invalidate_kv_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forget cached keys and values of older weights; True if all workers did."""
        return all(self.worker_group.call_all_workers("invalidate_kv_cache", *args, **kwargs))

    # -- phases and memory --------------------------------------------------------------------------------

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring weights, gradient buffers and optimizer state to the device."""
        self.worker_group.call_all_workers("prepare_for_training", *args, **kwargs)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Tell the workers that a training phase is over."""
        self.worker_group.call_all_workers("finish_training", *args, **kwargs)

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Bring the weights to the device; ``keep_train_buffers`` leaves gradients and optimizer state alone."""
        self.worker_group.call_all_workers("prepare_for_lp_inference", *args, **kwargs)

    def finish_inference(self) -> None:
        """Tell the workers that an inference phase is over."""
        self.worker_group.call_all_workers("finish_inference")

    def offload_before_refit(self) -> None:
        """Free gradients and optimizer state."""
        self.worker_group.call_all_workers("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Free the weights too, where generation has its own copy."""
        self.worker_group.call_all_workers("offload_after_refit")

    def offload_to_cpu(self) -> None:
        """Move everything to the CPU."""
        self.worker_group.call_all_workers("offload_to_cpu")

    def get_free_memory_bytes(self) -> int:
        """Free device memory, the least over all workers."""
        return min(self.worker_group.call_all_workers("get_free_memory_bytes"))

    # -- weights to others --------------------------------------------------------------------------------

    def init_collective(  # type: ignore[override]  (documented twice)
        self, ip: str, port: int, world_size: int, *, train_world_size: int
    ) -> list[ray.ObjectRef]:
        """Start joining the process group of training and generation workers; the caller waits for the references."""
        return self.worker_group.run_all_workers_single_data(
            "init_collective", ip, port, world_size, train_world_size=train_world_size
        )

    def prepare_refit_info(self) -> dict[str, Any] | None:  # type: ignore[override]  (documented twice)
        """``{HuggingFace name: (shape, dtype)}`` of all weights."""
        return self.worker_group.call_all_workers("prepare_refit_info")[0]

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int) -> list[ray.ObjectRef]:
        """Start sending weights to workers on the same devices; the caller waits for the references."""
        return self.worker_group.run_all_workers_single_data(
            "stream_weights_via_ipc_zmq", buffer_size_bytes=buffer_size_bytes
        )

    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef]:
        """Start sending weights through the group of :meth:`init_collective`; the caller waits for the references."""
        return self.worker_group.run_all_workers_single_data("broadcast_weights_for_collective")

    # -- checkpoints --------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        checkpointing_cfg: CheckpointingConfig | None = None,
    ) -> None:
        """Write the weights, and optimizer state and tokenizer where a path is given.

        Args:
            weights_path: directory of the weights.
            optimizer_path: directory of optimizer, schedules and random state.
            tokenizer_path: directory of the tokenizer.
            checkpointing_cfg: the ``checkpointing`` section; its format options are those of another backend.

        Raises:
            ValueError: ``checkpointing.model_save_format`` is set: this backend has one format.
        """
        if checkpointing_cfg is not None and checkpointing_cfg["model_save_format"] is not None:
            raise ValueError("checkpointing.model_save_format belongs to the DTensor backend: set it to null")
        self.worker_group.call_all_workers(
            "save_checkpoint",
            weights_path=_absolute(weights_path),
            optimizer_path=_absolute(optimizer_path),
            tokenizer_path=_absolute(tokenizer_path),
        )

    def finalize_async_save(self) -> None:
        """Wait until a save in the background is complete."""
        self.worker_group.call_all_workers("finalize_async_save")

    def export_hf(self, path: PathLike) -> None:
        """Write weights, config and tokenizer as a HuggingFace model directory, which transformers loads."""
        self.worker_group.call_all_workers("export_hf", _absolute(path))

    # -- workers ------------------------------------------------------------------------------------------

    def run_all_workers_single_data(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all workers with the same arguments and wait: their results by rank."""
        return self.worker_group.call_all_workers(method_name, *args, **kwargs)

    def run_all_workers_multiple_data(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all workers, each with its entry of every argument, and wait: their results by rank."""
        refs = self.worker_group.run_all_workers_multiple_data(method_name, *args, **kwargs)
        return self.worker_group.get_all_worker_results(MultiWorkerFuture(refs, method=method_name))

    def start_gpu_profiling(self) -> None:
        """Start the profiler of every worker's device."""
        self.worker_group.call_all_workers("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """Stop the profilers."""
        self.worker_group.call_all_workers("stop_gpu_profiling")

    def print_node_ip_and_gpu_id(self) -> list[tuple[str, int]]:
        """Log which worker sits on which device; returns (address, device index) by rank."""
        places = [
            place
            for worker in self.worker_group.call_all_workers("report_node_ip_and_gpu_id")
            for place in worker
        ]
        for rank, (address, device) in enumerate(places):
            logger.info("rank %d: node %s, device %d", rank, address, device)
        return places

    def shutdown(self) -> bool:
        """End the workers; True if they went in good order. May be called more than once."""
        return self.worker_group.shutdown(cleanup_method="shutdown")

    # -- splitting rows -----------------------------------------------------------------------------------

    def _row_shards(self, columns: BatchedDataDict[Any]) -> list[SlicedDataDict]:
        """Equal shards of any number of rows: the shortest row fills up, and :func:`_first_rows` drops it again."""
        missing = -columns.size % self.data_parallel_size
        if missing:
            shortest = int(columns["input_lengths"].argmin())
            columns = columns.select_indices([*range(columns.size), *[shortest] * missing])
        return columns.shard_by_batch_size(self.data_parallel_size)

    def _call_shards(
        self,
        method: str,
        shards: list[SlicedDataDict],
        common: dict[str, Any],
        equal_over: list[str] | None = None,
    ) -> MultiWorkerFuture:
        """Call all workers, each with the shard of its data-parallel rank; one result for each shard."""
        return self.worker_group.run_all_workers_sharded_data(
            method,
            data=shards,
            in_sharded_axes=[DP_AXIS],
            replicate_on_axes=_REPLICATED,
            output_is_replicated=_REPLICATED if equal_over is None else equal_over,
            common_kwargs={key: value for key, value in common.items() if value is not None},
        )


def _world_size(cluster: RayVirtualCluster, workers_per_node: int | list[int] | None) -> int:
    if workers_per_node is None:
        return cluster.world_size()
    if isinstance(workers_per_node, int):
        return workers_per_node * cluster.node_count()
    return sum(workers_per_node)


def _absolute(path: PathLike | None) -> str | None:
    """Workers have another working directory."""
    return None if path is None else os.path.abspath(path)


def _timed(timer: Timer | None, label: str) -> Any:
    return nullcontext() if timer is None else timer.time(label)


def _batched(data: Mapping[str, Any]) -> BatchedDataDict[Any]:
    return data if isinstance(data, BatchedDataDict) else BatchedDataDict(data)


def _pick_columns(
    data: Mapping[str, Any], wanted: tuple[str, ...], required: tuple[str, ...]
) -> BatchedDataDict[Any]:
    """The columns that the workers read: nothing else is sent."""
    missing = [key for key in required if key not in data]
    if missing:
        raise ValueError(f"the batch lacks {missing}; it has {sorted(map(str, data))}")
    columns: BatchedDataDict[Any] = BatchedDataDict({key: data[key] for key in wanted if key in data})
    if columns.size == 0:
        raise ValueError("the batch has no rows")
    return columns.to("cpu")


def _first_rows(joined: BatchedDataDict[Any], size: int) -> BatchedDataDict[Any]:
    """Without the rows that filled up the last shards."""
    return joined if joined.size == size else BatchedDataDict(joined.slice(0, size).data)


def _check_sequence_dims(data: Mapping[str, Any], skip: list[str]) -> None:
    """Every tensor of two or more dimensions is [B, S, ...]: a column of another length would silently misalign."""
    length = data["input_ids"].shape[1]
    for key, value in data.items():
        is_wrong = isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] != length
        if is_wrong and key not in skip:
            raise ValueError(
                f"column {key!r} has shape {tuple(value.shape)}, but input_ids has S={length}: pad it to "
                f"[B, {length}, ...], or name it in check_dim_skip_keys"
            )
