# SPDX-License-Identifier: Apache-2.0
"""Small Ray worker classes for the tests of worker groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import ray


@ray.remote
class EchoWorker:
    """Says what it got."""

    def __init__(
        self, *args: Any, fail_rank: int | None = None, die_rank: int | None = None, **kwargs: Any
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self.rank = int(os.environ["RANK"])
        if self.rank == fail_rank:
            raise ValueError("hidden_size 9 does not divide: set policy.x to 3")
        if self.rank == die_rank:
            os._exit(7)
        if fail_rank is not None or die_rank is not None:
            time.sleep(300)  # the others wait for the one that failed

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def pid(self) -> int:
        return os.getpid()

    def gpu_ids(self) -> list[Any]:
        return ray.get_gpu_ids()

    def constructor_arguments(self) -> tuple[Any, Any]:
        return self.args, self.kwargs

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        return self.rank, args, kwargs

    def add(self, data: Any, bias: int = 0) -> Any:
        return data + bias

    def fill(self, data: Any, gate: str) -> bytes:
        """A result of the size of the data, once the file `gate` exists."""
        while not os.path.exists(gate):
            time.sleep(0.05)
        return b"x" * data["input_ids"].nbytes

    def count(self, n: int) -> Any:
        i = 0
        while i < n:  # Ray cannot drive `yield from` an iterator without send()
            yield i
            i += 1

    def scale_in_place(self, data: Any) -> int:
        data["input_ids"].mul_(2)
        return int(data["input_ids"].sum())

    def raise_value_error(self) -> None:
        raise ValueError("bad argument on every rank")

    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid

    def shutdown(self) -> bool:
        return True


@ray.remote
class GlooWorker:
    """One rank of a gloo world."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(int(os.environ["NRL_NUM_THREADS"]))
        dist.init_process_group("gloo")  # from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT

    def total(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(value)
        dist.all_reduce(tensor)
        return float(tensor)

    def fail(self, rank: int, how: str) -> float:
        if int(os.environ["RANK"]) != rank:
            return self.total(1.0)
        if how == "raise":
            raise KeyError("only here")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0
