# SPDX-License-Identifier: Apache-2.0
"""A Ray of this driver's own on this host: started, supervised, and stopped with the driver."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl.distributed._ray_environment import host_environment

logger = logging.getLogger(__name__)

# Ray replaces 127.0.0.1 by the host's outward address before it connects; any other loopback address stays.
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
_MAX_TEMP_DIR = 40  # characters; Ray puts Unix sockets (at most 107) some 60 below
_START_DEADLINE_S = 90.0
_STOP_DEADLINE_S = 20.0
_REPO = Path(__file__).resolve().parents[2]


@dataclass
class LocalRay:
    """A running local Ray.

    Attributes:
        address: ``host:port`` of its head.
        supervisor: the process that stops Ray when its standard input closes.
        replaced: environment variables of this process that were set for it, with their former values.
    """

    address: str
    supervisor: subprocess.Popen[bytes]
    replaced: dict[str, str | None] = field(default_factory=dict)

    def stop(self) -> None:
        """Stop every process of this Ray, and nothing else; may be called more than once."""
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.close()
        try:
            self.supervisor.wait(timeout=_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "Ray's supervisor (pid %d) did not stop Ray within %.0f s",
                self.supervisor.pid,
                _STOP_DEADLINE_S,
            )
            self.supervisor.terminate()
        if self.replaced:
            _use_credentials(self.replaced)
            self.replaced = {}


def package_path() -> str:
    """PYTHONPATH of workers: where this package lies, then the driver's own entries."""
    entries = [str(_REPO), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(entries))


def start_local_ray(log_dir: str | None = None, *options: str) -> LocalRay:
    """Start a Ray on a loopback address with an allow-listed environment, its own token and temporary directory.

    Args:
        log_dir: where Ray's logs are copied when it stops; None discards them.
        *options: more options of ``ray start``.

    Raises:
        RuntimeError: Ray did not start; the message ends with what it printed.
    """
    temp_dir = _short_temp_dir()
    token = temp_dir / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    env = host_environment() | ours
    env |= {
        "PYTHONPATH": package_path(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",  # workers have an environment each: idle ones would never serve
        "RAY_enable_worker_prestart": "0",
        "RAY_process_group_cleanup_enabled": "1",  # what a worker started dies with it
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves training beside any other work
    }
    command = [
        sys.executable,
        "-c",
        "from ray.scripts.scripts import main; main()",
        "start",
        "--head",
        "--port=0",
    ]
    command += [f"--node-ip-address={_LOOPBACK}", f"--temp-dir={temp_dir}", "--include-dashboard=false"]
    command += ["--disable-usage-stats", "--log-style=record", "--dashboard-agent-listen-port=0", *options]
    spec = {"command": command, "temp_dir": str(temp_dir), "log_dir": log_dir, "deadline": _START_DEADLINE_S}
    supervisor = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name("_ray_supervisor.py")), json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        cwd=temp_dir,
        start_new_session=True,  # Ctrl-C is for the driver, which then stops Ray
    )
    try:
        address = _wait_for_address(supervisor)
    except BaseException:
        supervisor.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.wait(timeout=_STOP_DEADLINE_S)
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise
    replaced = {name: os.environ.get(name) for name in ours}
    _use_credentials(ours)
    return LocalRay(address, supervisor, replaced)


def _wait_for_address(supervisor: subprocess.Popen[bytes]) -> str:
    assert supervisor.stdout is not None
    end = time.monotonic() + _START_DEADLINE_S + 10
    readable, _, _ = select.select([supervisor.stdout], [], [], max(0.0, end - time.monotonic()))
    line = supervisor.stdout.readline() if readable else b""
    if not line:
        raise RuntimeError(
            f"no word from Ray's supervisor (exit status {supervisor.poll()}) while starting a local Ray"
        )
    message = json.loads(line)
    if "error" in message:
        raise RuntimeError(f"could not start a local Ray: {message['error']}")
    return message["address"]


def _use_credentials(variables: Mapping[str, str | None]) -> None:
    """Set (or, with None, unset) Ray's authentication variables, which it reads once when it is imported."""
    from ray._raylet import AuthenticationTokenLoader, Config

    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _short_temp_dir() -> Path:
    """A fresh private directory whose path leaves room for Ray's sockets."""
    parent = tempfile.gettempdir()
    if len(parent) > _MAX_TEMP_DIR - len("/nrl-ray-12345678"):
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="nrl-ray-", dir=parent))
