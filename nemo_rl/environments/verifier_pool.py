# SPDX-License-Identifier: Apache-2.0
"""Worker processes that judge one item at a time, each under a hard time limit."""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
"""How long a worker may take to import its libraries."""

ENVIRONMENT_ALLOWED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
)
"""Variables that workers see: the driver's environment may hold secrets."""

TIMEOUT_ERROR = "VerifierTimeout"
DIED_ERROR = "VerifierDied"


@dataclass(frozen=True)
class Verdict:
    """The judgement of one item.

    Attributes:
        score: The reward; means nothing if ``error`` is set.
        answer: The answer that was found in the response.
        error: Type of what went wrong, or ``None``.
    """

    score: float
    answer: str | None
    error: str | None


class VerifierPool:
    """Runs ``command`` in ``num_workers`` processes that speak one JSON line per item.

    A worker that does not answer within ``timeout_s``, or dies, costs only its own item: it is killed and
    replaced. Processes start when they are first needed, or with :meth:`start`.

    Args:
        num_workers: Processes.
        timeout_s: Seconds per item.
        command: What to run; ``None`` is :mod:`nemo_rl.environments.math_worker` in this Python.
    """

    def __init__(self, num_workers: int, timeout_s: float, command: Sequence[str] | None = None) -> None:
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.command = (
            [sys.executable, "-m", "nemo_rl.environments.math_worker"] if command is None else list(command)
        )
        self.num_killed = 0
        self._workers: list[_Worker] = []

    def start(self) -> None:
        """Start all processes, and those anew that died in the meantime; returns before they are ready."""
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            worker.kill()
            self._workers.remove(worker)
        while len(self._workers) < self.num_workers:
            self._workers.append(_Worker(self.command))

    def verify(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
        """Judge a batch.

        Args:
            responses: n texts.
            ground_truths: n right answers.

        Returns:
            n verdicts, in order.

        Raises:
            RuntimeError: If workers cannot be started.
        """
        items = [
            {"id": index, "response": response, "ground_truth": truth}
            for index, (response, truth) in enumerate(zip(responses, ground_truths, strict=True))
        ]
        waiting, verdicts = deque(items), dict[int, Verdict]()
        self.start()
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            while len(verdicts) < len(items):
                for worker in self._workers:
                    if worker.idle and waiting:
                        worker.send(waiting.popleft(), self.timeout_s)
                deadline = min(worker.deadline(self.timeout_s) for worker in self._workers if worker.busy)
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    _collect(key.data, verdicts)
                self._replace_lost(selector, verdicts)
        return [verdicts[index] for index in range(len(items))]

    def shutdown(self) -> None:
        """Kill the processes; the pool may be used again afterwards."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _replace_lost(self, selector: selectors.BaseSelector, verdicts: dict[int, Verdict]) -> None:
        """Put new processes in the place of those that died or ran out of time, and note the items they
        had.
        """
        for place, worker in enumerate(self._workers):
            late = worker.busy and time.monotonic() >= worker.deadline(self.timeout_s)
            if not worker.dead and not late:
                continue
            if not worker.ready:
                worker.kill()
                raise RuntimeError(
                    f"a verifier process did not start (exit code {worker.process.returncode}, limit "
                    f"{START_DEADLINE_S:.0f} s): {' '.join(self.command)}"
                )
            if worker.item is not None:
                error = DIED_ERROR if worker.dead else TIMEOUT_ERROR
                verdicts[worker.item["id"]] = Verdict(0.0, None, error)
                logger.warning(
                    "%s (limit %.1f s) on an answer for %.80r; the process is replaced",
                    error,
                    self.timeout_s,
                    worker.item["ground_truth"],
                )
            selector.unregister(worker.output)
            worker.kill()
            self.num_killed += 1
            self._workers[place] = _Worker(self.command)
            selector.register(self._workers[place].output, selectors.EVENT_READ, self._workers[place])


class _Worker:
    """One process and the item it works on."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {name: os.environ[name] for name in ENVIRONMENT_ALLOWED if name in os.environ}
        environment["OMP_NUM_THREADS"] = "1"
        search_path = [entry for entry in sys.path if entry]  # the driver's, whatever made it find nemo_rl
        environment["PYTHONPATH"] = os.pathsep.join(search_path)
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.ready = False
        self.dead = False
        self.item: dict[str, Any] | None = None
        self._since = time.monotonic()  # of the start, then of the item
        self._buffer = b""

    @property
    def idle(self) -> bool:
        return self.ready and not self.dead and self.item is None

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited: to an item, or that the process is ready."""
        return not self.ready or self.item is not None

    def deadline(self, timeout_s: float) -> float:
        return self._since + (timeout_s if self.ready else START_DEADLINE_S)

    def send(self, item: dict[str, Any], limit_s: float) -> None:
        self.item, self._since = item, time.monotonic()
        rest = memoryview((json.dumps({**item, "limit_s": limit_s}) + "\n").encode())
        try:
            while rest:
                rest = rest[self.input.write(rest) :]
        except BrokenPipeError:
            self.dead = True

    def receive(self) -> list[dict[str, Any]]:
        """Whole answers that arrived; none at the end of the stream, which means that the process died."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        if not chunk:
            self.dead = True
            return []
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.input.close()
        self.output.close()


def _collect(worker: _Worker, verdicts: dict[int, Verdict]) -> None:
    for answer in worker.receive():
        if not worker.ready:
            worker.ready = True
            continue
        verdicts[answer["id"]] = Verdict(answer["score"], answer["answer"], answer["error"])
        worker.item = None
