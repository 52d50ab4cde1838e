# SPDX-License-Identifier: Apache-2.0
"""Runs one local Ray for one driver and takes all of it down when the driver ends, however it ends.

A program of its own (``python _ray_supervisor.py '<json>'``), started by :mod:`nemo_rl.distributed._ray_runtime`.
It adopts every process that Ray starts (Linux: child subreaper), so it can name exactly what it started; it never
calls ``ray stop``, which stops every Ray of the host. It prints one JSON line, ``{"address": ...}`` or
``{"error": ...}``, and then waits until its standard input closes: a driver killed with -9 closes it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 1.0
_KILL_DEADLINE_S = 10.0


def main() -> None:
    """Start Ray as told on the command line, wait for the driver to end, stop what was started."""
    spec = json.loads(sys.argv[1])
    temp_dir, log_dir, driver = Path(spec["temp_dir"]), spec["log_dir"], os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _leave)
    try:
        _report(_start(spec["command"], temp_dir, float(spec["deadline"])))
        while os.getppid() == driver and not _closed():
            _reap()
    finally:
        _kill_started(temp_dir)
        if log_dir is not None:
            _keep_logs(temp_dir, Path(log_dir))
        shutil.rmtree(temp_dir, ignore_errors=True)


def _leave(_signum: int, _frame: object) -> None:
    raise SystemExit(0)


def _start(command: list[str], temp_dir: Path, deadline: float) -> dict[str, str]:
    with open(temp_dir / "start.log", "w+") as log:
        try:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=deadline, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"none within {deadline:.0f} s"
        log.seek(0)
        output = log.read()
    address = temp_dir / "ray_current_cluster"
    if status != 0 or not address.exists():
        return {"error": f"`ray start` failed (exit status {status}):\n{output[-4000:]}"}
    return {"address": address.read_text().strip()}


def _report(message: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
    if "error" in message:
        raise SystemExit(1)


def _closed() -> bool:
    """Wait one tick for the end of standard input."""
    readable, _, _ = select.select([sys.stdin], [], [], _TICK_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill_started(temp_dir: Path) -> None:
    """Kill all descendants, and Ray daemons of this temp dir where the platform has no subreaper."""
    end = time.monotonic() + _KILL_DEADLINE_S
    while (alive := _started(temp_dir)) and time.monotonic() < end:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=0.5)
        _reap()


def _started(temp_dir: Path) -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    if sys.platform != "linux":
        marker = str(temp_dir)
        children += [
            p for p in psutil.process_iter(["cmdline"]) if marker in " ".join(p.info["cmdline"] or [])
        ]
    return [p for p in children if p.pid != os.getpid() and p.status() != psutil.STATUS_ZOMBIE]


def _keep_logs(temp_dir: Path, log_dir: Path) -> None:
    """Copy Ray's logs; a full disk must not keep the temporary directory, with its token, from being deleted."""
    session = temp_dir / "session_latest"
    if not session.exists():
        return
    try:
        shutil.copytree(
            session.resolve() / "logs", log_dir, dirs_exist_ok=True, ignore_dangling_symlinks=True
        )
    except OSError as error:  # shutil.Error is one
        reason = str(error)[:300]
        sys.stderr.write(f"nemo-rl: Ray's logs could not all be copied to {log_dir}: {reason}\n")


if __name__ == "__main__":
    main()
