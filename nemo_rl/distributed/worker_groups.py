# SPDX-License-Identifier: Apache-2.0
"""Groups of Ray workers: start them in the bundles of a cluster, call them together, notice when one fails."""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle

from nemo_rl.distributed._worker_builder import RayWorkerBuilder, load_actor_class, share
from nemo_rl.distributed._worker_calls import Call, WorkerError, WorkerInputError, collect
from nemo_rl.distributed._worker_env import WorkerSeat, plan_seats, worker_environment
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, ray_nodes

__all__ = ["MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup", "WorkerError", "WorkerInputError"]

logger = logging.getLogger(__name__)

DP_AXIS = "data_parallel"
_START_TIMEOUT = ("NRL_WORKER_START_TIMEOUT_S", 1800.0)  # building a large model and reading its weights
_CALL_TIMEOUT = ("NRL_WORKER_CALL_TIMEOUT_S", 7200.0)
_GONE_DEADLINE_S = 10.0
_group_numbers: Counter[str] = Counter()


@dataclass
class MultiWorkerFuture:
    """Calls in flight on several workers.

    Attributes:
        futures: one reference for each called worker.
        return_from_workers: ranks whose results count; None for all called ones.
        called_workers: the called ranks, in the order of ``futures``; None for 0, 1, 2, ...
        method: the called method, for messages.
    """

    futures: list[ray.ObjectRef]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None
    method: str = "call"

    def get_results(
        self, worker_group: RayWorkerGroup, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Wait for all calls; the results of ``return_from_workers``, in the order of ``called_workers``.

        Args:
            worker_group: the group that was called; it is taken down if one of its workers fails.
            return_generators_as_proxies: give streaming results as Ray's generators instead of lists.

        Raises:
            WorkerError: a worker raised, died, or did not answer in time.
        """
        return worker_group.get_all_worker_results(self, return_generators_as_proxies)


@dataclass
class _Worker:
    seat: WorkerSeat
    name: str
    actor: ActorHandle = field(repr=False)


class RayWorkerGroup:
    """Workers of one class, one per bundle of a cluster (or per entry of ``bundle_indices_list``).

    The constructor returns when all workers are constructed, and raises as soon as one fails. Its environment
    tells every worker RANK, WORLD_SIZE, LOCAL_RANK, NODE_RANK, MASTER_ADDR, MASTER_PORT, NRL_DEVICE, NRL_NUM_THREADS.

    Args:
        cluster: where the workers go.
        remote_worker_builder: creates them.
        workers_per_node: workers in each placement group, one number or one for each; default: all its bundles.
        name_prefix: the workers are called ``<name_prefix>-<rank>``.
        bundle_indices_list: one (node, bundles) for each worker, for workers that drive several bundles.
        sharding_annotations: names the axes of the ranks, for sharded calls.
        env_vars: more environment variables of the workers.

    Raises:
        ValueError: more workers than bundles, or annotations of another size.
        WorkerError: a worker died or raised while it started; its message has the worker's traceback.
        WorkerInputError: the same where it raised ValueError.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | list[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: list[tuple[int, list[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: dict[str, str] = {},  # noqa: B006  (documented default, never changed)
    ) -> None:
        self.cluster = cluster
        self.name_prefix = name_prefix or remote_worker_builder.ray_actor_class_fqn.rsplit(".", 1)[-1]
        self.sharding_annotations = sharding_annotations
        self._builder = remote_worker_builder
        self._workers: list[_Worker] = []
        self._down: str | None = None
        load_actor_class(remote_worker_builder.ray_actor_class_fqn)
        cores = {node.node_id: node.cpus for node in ray_nodes()}
        seats = plan_seats(cluster.bundle_locations(), cores, workers_per_node, bundle_indices_list)
        if sharding_annotations is not None and sharding_annotations.size != len(seats):
            raise ValueError(
                f"{sharding_annotations!r} describes {sharding_annotations.size} workers, not {len(seats)}"
            )
        self._start(seats, env_vars)

    # -- starting -----------------------------------------------------------------------------------------

    def _start(self, seats: list[WorkerSeat], env_vars: dict[str, str]) -> None:
        groups = self.cluster.get_placement_groups()
        master = self.cluster.get_master_address_and_port()
        resources = self.cluster.worker_resources()
        _group_numbers[self.name_prefix] += 1
        number = _group_numbers[self.name_prefix]
        prefix = self.name_prefix if number == 1 else f"{self.name_prefix}.{number}"
        stored = RayWorkerBuilder(
            self._builder.ray_actor_class_fqn,
            *(share(value, len(seats)) for value in self._builder.args),
            **{key: share(value, len(seats)) for key, value in self._builder.kwargs.items()},
        )
        ready = []
        for seat in seats:
            env = worker_environment(
                seat, len(seats), master, use_gpus=self.cluster.use_gpus, env_vars=env_vars
            )
            is_tied = len(seat.bundle_indices) > 1
            name = f"{prefix}-{seat.rank}"
            ref, actor = stored.create_worker_async(
                groups[seat.node_index],
                seat.bundle_indices[0],
                resources.get("GPU", 0),
                (seat.node_index, seat.bundle_indices) if is_tied else None,
                num_cpus=resources["CPU"],
                num_gpus_per_node=self.cluster.num_gpus_per_node,
                name=name,
                runtime_env={"env_vars": env},
            )
            self._workers.append(_Worker(seat, name, actor))
            ready.append(Call(seat.rank, name, "__init__", ref))
        try:
            collect(ready, _seconds(_START_TIMEOUT))
        except BaseException as error:
            self._take_down(f"it did not start: {_first_line(error)}")
            raise

    # -- properties ---------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[ActorHandle]:
        """Handles, by rank."""
        return [worker.actor for worker in self._workers]

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """Per rank: name, node and bundles, ranks, and the data-parallel shard that it serves."""
        return [
            {
                "name": worker.name,
                "global_rank": worker.seat.rank,
                "local_rank": worker.seat.local_rank,
                "node_rank": worker.seat.node_rank,
                "node_idx": worker.seat.node_index,
                "node_id": worker.seat.node_id,
                "bundle_indices": list(worker.seat.bundle_indices),
                "dp_shard_idx": self._dp_shard(worker.seat.rank),
            }
            for worker in self._workers
        ]

    @property
    def dp_size(self) -> int:
        """Number of data-parallel shards: the size of that axis, or one for each worker without annotations."""
        if self.sharding_annotations is None or DP_AXIS not in self.sharding_annotations.names:
            return len(self._workers)
        return self.sharding_annotations.get_axis_size(DP_AXIS)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Rank of the first worker of a data-parallel shard; IndexError for a shard that does not exist."""
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(f"data-parallel shard {dp_shard_idx} of {self.dp_size} does not exist")
        return next(w.seat.rank for w in self._workers if self._dp_shard(w.seat.rank) == dp_shard_idx)

    def _dp_shard(self, rank: int) -> int:
        if self.sharding_annotations is None or DP_AXIS not in self.sharding_annotations.names:
            return rank
        return self.sharding_annotations.get_worker_coords(rank)[DP_AXIS]

    # -- calling ------------------------------------------------------------------------------------------

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> ray.ObjectRef:
        """Call one worker; returns the reference at once."""
        return self._submit(worker_idx, method_name, args, kwargs)

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: list[str] | None = None,
        common_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[ray.ObjectRef]:
        """Call all workers, the i-th called one with the i-th entry of each argument.

        Args:
            method_name: method of the worker class.
            *args: lists with one entry for each called worker.
            run_rank_0_only_axes: call only workers with coordinate 0 along these axes.
            common_kwargs: the same for all workers.
            **kwargs: lists with one entry for each called worker.

        Raises:
            ValueError: a list has another length.
        """
        ranks = self._called_ranks(run_rank_0_only_axes)
        for label, value in [*enumerate(args), *kwargs.items()]:
            if len(value) != len(ranks):
                raise ValueError(
                    f"{method_name}: argument {label} has {len(value)} entries for {len(ranks)} workers"
                )
        common = {key: share(value, len(ranks)) for key, value in (common_kwargs or {}).items()}
        return [
            self._submit(
                rank,
                method_name,
                tuple(value[i] for value in args),
                {**common, **{key: value[i] for key, value in kwargs.items()}},
            )
            for i, rank in enumerate(ranks)
        ]

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: list[str] | None = None, **kwargs: Any
    ) -> list[ray.ObjectRef]:
        """Call all workers (or those with coordinate 0 along ``run_rank_0_only_axes``) with the same arguments."""
        ranks = self._called_ranks(run_rank_0_only_axes)
        shared = tuple(share(value, len(ranks)) for value in args)
        shared_kwargs = {key: share(value, len(ranks)) for key, value in kwargs.items()}
        return [self._submit(rank, method_name, shared, shared_kwargs) for rank in ranks]

    def call_all_workers(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all workers with the same arguments and wait: their results by rank.

        Raises:
            WorkerError: a worker raised, died, or did not answer in time; see :meth:`get_all_worker_results`.
        """
        refs = self.run_all_workers_single_data(method_name, *args, **kwargs)
        return self.get_all_worker_results(MultiWorkerFuture(refs, method=method_name))

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: list[str] | None = None,
        replicate_on_axes: list[str] | None = None,
        output_is_replicated: list[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call workers, each with its part of the data; a part is stored once, whatever its number of readers.

        Args:
            method_name: method of the worker class.
            *args: none; data goes by name.
            in_sharded_axes: ``kwargs`` are nested lists, one level for each of these axes.
            replicate_on_axes: workers along these axes get the same part. Along axes that are in neither list only
                coordinate 0 is called.
            output_is_replicated: results along these axes are equal: only that of coordinate 0 comes back (the others
                are dropped by the worker, not sent).
            make_dummy_calls_to_free_axes: call the others too, with None for each of ``kwargs``.
            common_kwargs: the same for all workers.
            **kwargs: the data.

        Raises:
            ValueError: positional data, no sharding annotations, unknown axes, axes in both lists, or lists whose
                lengths are not the sizes of the axes.
        """
        if args:
            raise ValueError(
                f"{method_name}: sharded data is passed by name, got {len(args)} positional arguments"
            )
        self._require_up()
        grid = self.sharding_annotations
        if grid is None:
            raise ValueError(f"{method_name}: this worker group has no sharding annotations")
        sharded, replicated = in_sharded_axes or [], replicate_on_axes or []
        for axis in [*sharded, *replicated, *(output_is_replicated or [])]:
            grid.get_axis_index(axis)
        if set(sharded) & set(replicated):
            raise ValueError(
                f"{method_name}: axes {set(sharded) & set(replicated)} are both sharded and replicated"
            )
        free = [axis for axis in grid.names if axis not in (*sharded, *replicated)]
        for key, value in kwargs.items():
            _check_nesting(f"{method_name}: {key}", value, [grid.get_axis_size(axis) for axis in sharded])
        readers = len(self._workers)
        common = {key: share(value, readers) for key, value in (common_kwargs or {}).items()}
        parts: dict[tuple[int, ...], dict[str, Any]] = {}
        futures, called, returning = [], [], []
        for rank in range(len(self._workers)):
            at = grid.get_worker_coords(rank)
            if all(at[axis] == 0 for axis in free):
                index = tuple(at[axis] for axis in sharded)
                if index not in parts:
                    parts[index] = {key: share(_pick(value, index), readers) for key, value in kwargs.items()}
                part = parts[index]
            elif make_dummy_calls_to_free_axes:
                part = dict.fromkeys(kwargs)
            else:
                continue
            keep = all(at[axis] == 0 for axis in output_is_replicated or [])
            futures.append(self._submit(rank, method_name, (), {**common, **part}, keep_result=keep))
            called.append(rank)
            if keep:
                returning.append(rank)
        return MultiWorkerFuture(futures, returning, called, method_name)

    def get_all_worker_results(
        self, future_bundle: MultiWorkerFuture, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Wait for the calls of a bundle.

        If a worker dies, or some raise while others may wait for them, the whole group is taken down.

        Returns:
            The results of ``return_from_workers``, in the order of ``called_workers``.

        Raises:
            WorkerError: a worker raised, died, or did not answer in time.
        """
        ranks = future_bundle.called_workers
        ranks = list(range(len(future_bundle.futures))) if ranks is None else ranks
        streams = [isinstance(future, ray.ObjectRefGenerator) for future in future_bundle.futures]
        calls = [
            Call(rank, self._workers[rank].name, future_bundle.method, ref)
            for rank, ref, is_stream in zip(ranks, future_bundle.futures, streams, strict=True)
            if not is_stream
        ]
        try:
            values = iter(collect(calls, _seconds(_CALL_TIMEOUT)))
            results = {
                rank: _stream(ref, return_generators_as_proxies) if is_stream else next(values)
                for rank, ref, is_stream in zip(ranks, future_bundle.futures, streams, strict=True)
            }
        except WorkerError as error:
            if not error.group_usable:
                self._take_down(_first_line(error))
            raise
        wanted = future_bundle.return_from_workers
        return [results[rank] for rank in ranks if wanted is None or rank in wanted]

    def _require_up(self) -> None:
        if self._down is not None:
            raise WorkerError(f"worker group {self.name_prefix} is down: {self._down}")

    def _called_ranks(self, zero_axes: list[str] | None) -> list[int]:
        self._require_up()
        ranks = range(len(self._workers))
        if not zero_axes:
            return list(ranks)
        if self.sharding_annotations is None:
            raise ValueError("run_rank_0_only_axes needs a worker group with sharding annotations")
        grid = self.sharding_annotations
        return [rank for rank in ranks if all(grid.is_axis_zero(rank, axis) for axis in zero_axes)]

    def _submit(
        self,
        rank: int,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        keep_result: bool = True,
    ) -> Any:
        self._require_up()
        actor = self._workers[rank].actor
        if keep_result:
            return getattr(actor, method).remote(*args, **kwargs)
        return actor.__ray_call__.remote(_call_and_drop, method, *args, **kwargs)

    # -- ending -------------------------------------------------------------------------------------------

    def shutdown(
        self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False
    ) -> bool:
        """End all workers and wait until they are gone; may be called more than once.

        Args:
            cleanup_method: method that each worker runs first.
            timeout: seconds for it.
            force: skip it.

        Returns:
            Whether the clean-up worked everywhere and all workers are gone.
        """
        clean = True
        if self._workers and self._down is None and cleanup_method is not None and not force:
            try:
                refs = self.run_all_workers_single_data(cleanup_method)
                calls = [
                    Call(w.seat.rank, w.name, cleanup_method, ref)
                    for w, ref in zip(self._workers, refs, strict=True)
                ]
                collect(calls, timeout if timeout is not None else _seconds(_CALL_TIMEOUT))
            except WorkerError as error:
                logger.warning("clean-up of worker group %s: %s", self.name_prefix, error)
                clean = False
        gone = self._take_down("it was shut down")
        self._workers = []
        return clean and gone

    def _take_down(self, reason: str) -> bool:
        """Kill all workers; True once Ray confirms that they are dead."""
        if self._down is None:
            self._down = reason
        if not ray.is_initialized():
            return True
        for worker in self._workers:
            ray.kill(worker.actor)
        probes = [worker.actor.__ray_ready__.remote() for worker in self._workers]
        if not probes:
            return True
        _, alive = ray.wait(probes, num_returns=len(probes), timeout=_GONE_DEADLINE_S)
        if alive:
            logger.warning("%d workers of %s outlived the kill by 10 s", len(alive), self.name_prefix)
        return not alive


def _call_and_drop(worker: Any, method: str, *args: Any, **kwargs: Any) -> None:
    """On the worker: run the method and drop its result, which equals another worker's."""
    getattr(worker, method)(*args, **kwargs)


def _pick(nested: Any, index: tuple[int, ...]) -> Any:
    for i in index:
        nested = nested[i]
    return nested


def _check_nesting(label: str, nested: Any, sizes: list[int]) -> None:
    if not sizes:
        return
    if not isinstance(nested, (list, tuple)) or len(nested) != sizes[0]:
        got = len(nested) if isinstance(nested, (list, tuple)) else type(nested).__name__
        raise ValueError(f"{label} must be a list with one entry for each of {sizes[0]} shards, got {got}")
    for entry in nested:
        _check_nesting(label, entry, sizes[1:])


def _stream(generator: Any, as_proxy: bool) -> Any:
    return generator if as_proxy else [ray.get(ref) for ref in generator]


def _seconds(setting: tuple[str, float]) -> float:
    name, default = setting
    return float(os.environ[name]) if name in os.environ else default


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
