# SPDX-License-Identifier: Apache-2.0
"""The run directory (`logger.log_dir`): what a run is, where it stands, and who may write to it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.utils.checkpoint import write_json_atomically

_PACKAGES = ("torch", "megatron-core", "transformers", "ray", "nemo-rl", "numpy")


@contextmanager
def exclusive_run_dir(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Create the run directory and hold it for this process.

    Yields:
        The absolute path.

    Raises:
        ValueError: another live process runs in this directory, or it cannot be written to.
    """
    run_dir = Path(path).absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock_file = open(run_dir / ".lock", "a+")  # noqa: SIM115 - closed below, held for the whole run
    except OSError as error:
        raise ValueError(
            f"logger.log_dir={path}: {error}; choose a directory that can be written to"
        ) from error
    with lock_file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise ValueError(
                f"logger.log_dir={path}: another run (process {lock.read().strip() or 'unknown'}) is active "
                "in this directory; wait for it, or choose another logger.log_dir"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield run_dir


def describe_run(run_dir: Path, config: Mapping[str, Any], resumed_step: int | None = None) -> None:
    """Write config.resolved.yaml and env.json; a run that resumes after step N writes env.step_N.json beside it."""
    (run_dir / "config.resolved.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False))
    name = "env.json" if resumed_step is None else f"env.step_{resumed_step}.json"
    write_json_atomically(run_dir / name, environment())


def environment() -> dict[str, Any]:
    """Versions, command line and machine of this process; no environment variables: they may hold secrets."""
    return {
        "argv": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git_commit": _git_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the source tree, with `+dirty` when tracked files differ; None outside a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        diff = _git("diff", "--quiet", "HEAD")
    except (OSError, subprocess.TimeoutExpired):
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip() + ("+dirty" if diff.returncode else "")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=False, capture_output=True, text=True, timeout=10
    )
