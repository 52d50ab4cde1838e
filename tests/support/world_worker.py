# SPDX-License-Identifier: Apache-2.0
"""The process behind `tests.support.world.run_world`: imports once, then serves one world after another."""

from __future__ import annotations

import ctypes
import gc
import importlib
import pickle
import random
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


def _run(
    function: str, kwargs: dict[str, Any], rank: int, world_size: int, store_path: str, deadline: float
) -> Any:
    import numpy as np
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=deadline)
    )
    try:
        module, name = function.split(":")
        return getattr(importlib.import_module(module), name)(**kwargs)
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def main() -> None:
    """Serve worlds until the parent closes the pipe."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the test process
    connection = Connection(int(sys.argv[1]))
    import megatron.core
    import torch

    from megatron_bridge.platform import prepare_platform

    torch.set_num_threads(1)
    prepare_platform()
    connection.send(megatron.core.__version__)
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())  # plain pickle: tensors by value
        except EOFError:
            return
        try:
            reply = (True, _run(*task))
        except Exception:  # noqa: BLE001 - reported to the test, which fails with it
            reply = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(reply))


if __name__ == "__main__":
    main()
