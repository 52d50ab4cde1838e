# SPDX-License-Identifier: Apache-2.0
"""Gloo worlds for tests, on worker processes that are started and pre-imported once.

Importing torch and megatron-core costs 5-12 s a process, so the workers outlive a test: `run_world` hands
each of them a function by name, forms a fresh process group for it and dissolves the group afterwards. A rank that
raises, dies or outlasts the deadline fails the test with the rank's own traceback; its worker is replaced.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

_REPO = Path(__file__).resolve().parents[2]
_GRACE_S = 5.0  # how long the other ranks may go on once one rank has raised
_START_DEADLINE_S = 180.0


class WorldError(AssertionError):
    """A rank of a test world raised, died or missed its deadline."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False

    def kill(self) -> None:
        """Kill the worker with its children (dist_checkpointing starts some) and reap it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


_pool: list[_Worker] = []


def _spawn() -> _Worker:
    ours, theirs = Pipe()
    env = dict(
        os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(_REPO), PYTHONUNBUFFERED="1", TORCHDYNAMO_DISABLE="1"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.world_worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=env,
        cwd=_REPO,
        start_new_session=True,
    )
    theirs.close()
    return _Worker(process, ours)


def _ensure_workers(count: int) -> list[_Worker]:
    _pool[:] = [w for w in _pool if w.process.poll() is None]
    while len(_pool) < count:
        _pool.append(_spawn())
    workers = _pool[:count]
    for worker in workers:
        if not worker.ready:
            if not worker.connection.poll(_START_DEADLINE_S):
                raise WorldError(f"a test worker did not finish its imports within {_START_DEADLINE_S:.0f} s")
            worker.connection.recv()
            worker.ready = True
    return workers


@atexit.register
def shutdown_workers() -> None:
    """Kill every pooled worker."""
    for worker in _pool:
        worker.kill()
    _pool.clear()


def run_world(
    world_size: int, function: str, *, deadline: float = 120.0, fresh: bool = False, **kwargs: Any
) -> list[Any]:
    """Run `function` on `world_size` gloo ranks.

    Args:
        world_size: number of ranks; each is a process with one thread.
        function: "package.module:name"; called as `name(**kwargs)` with torch.distributed initialised.
        deadline: seconds for the whole call, worker start-up apart.
        fresh: replace the workers first, so that nothing of an earlier world is left in their memory.
        **kwargs: picklable arguments.

    Returns:
        What each rank returned, in rank order.

    Raises:
        WorldError: with the traceback of each rank that raised, or the ranks that were still running.
    """
    if fresh:
        shutdown_workers()
    workers = _ensure_workers(world_size)
    with tempfile.TemporaryDirectory(prefix="nrl-world-") as rendezvous:
        for rank, worker in enumerate(workers):
            task = (function, kwargs, rank, world_size, f"{rendezvous}/store", deadline)
            worker.connection.send_bytes(pickle.dumps(task))
        return _collect(workers, function, deadline)


def _collect(workers: list[_Worker], function: str, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    end = time.monotonic() + deadline
    pending = dict(enumerate(workers))
    while pending and (left := end - time.monotonic()) > 0:
        by_connection = {worker.connection: rank for rank, worker in pending.items()}
        for connection in wait(list(by_connection), timeout=left):
            rank = by_connection[connection]  # type: ignore[index]
            worker = pending.pop(rank)
            try:
                ok, value = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                failures[rank] = f"the worker process died (exit code {worker.process.wait()})"
                continue
            if ok:
                results[rank] = value
            else:
                failures[rank] = value
            if failures:
                end = min(end, time.monotonic() + _GRACE_S)
    for rank, worker in pending.items():
        failures.setdefault(
            rank, f"still running after {deadline:.0f} s, or {_GRACE_S:.0f} s after another rank failed"
        )
        worker.kill()
    if failures:
        for worker in workers:  # their process group may be broken
            if worker.process.poll() is None:
                worker.kill()
        text = "\n".join(f"--- rank {rank}: {failures[rank]}" for rank in sorted(failures))
        raise WorldError(f"{function} on {len(workers)} ranks failed:\n{text}")
    return [results[rank] for rank in range(len(workers))]


def init_megatron(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, seed: int = 1234) -> None:
    """Inside a world: initialise megatron-core's groups and RNG tracker on this rank."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron_bridge.platform import prepare_platform

    prepare_platform()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
