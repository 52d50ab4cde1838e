# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: written beside their final place, made real by one rename, found again on resume.

Layout of `checkpointing.checkpoint_dir`::

    step_8/                     complete by construction: it only ever appears by a rename
        training_info.json      counters and metrics at the time of saving
        config.yaml             the resolved configuration
        policy/{weights,optimizer,tokenizer}/
        train_dataloader.pt
    tmp_step_12/                being written; deleted by the next run
    latest_checkpoint_status.json
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.utils.checkpoint_config import CheckpointingConfig

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

_STEP = re.compile(r"step_(\d+)")
_TRAINING_INFO = "training_info.json"
_RUN_CONFIG = "config.yaml"
_STATUS = "latest_checkpoint_status.json"


def write_json_atomically(path: PathLike, value: Any) -> None:
    """Write `value` as JSON so that a reader sees the old file or the new one, never a part of it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def fsync_tree(root: PathLike) -> None:
    """Flush every file and directory below `root` to the disk."""
    for directory, _, files in os.walk(root):
        for name in [*files, "."]:
            descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def load_run_config(checkpoint: PathLike) -> dict[str, Any]:
    """The resolved configuration that a checkpoint was written under; empty if it holds none."""
    file = Path(checkpoint) / _RUN_CONFIG
    return yaml.safe_load(file.read_text()) if file.exists() else {}


def changed_keys(old: Any, new: Any, key: str = "") -> list[str]:
    """``key: old -> new`` for every leaf in which two configurations differ; nothing where there is no old one."""
    if old == {} and not key:
        return []
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [] if old == new else [f"{key}: {old!r} -> {new!r}"]
    names = dict.fromkeys([*old, *new])
    return [
        line
        for name in names
        for line in changed_keys(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    ]


class CheckpointManager:
    """Creates, completes, finds and retires the checkpoints of one run."""

    def __init__(self, config: CheckpointingConfig | Mapping[str, Any]):
        """Check the section; nothing is written before the first save.

        Args:
            config: the `checkpointing` section.

        Raises:
            ValueError: `metric_name` has no `train:` or `val:` prefix.
        """
        self.config = config if isinstance(config, CheckpointingConfig) else CheckpointingConfig(**config)
        self.checkpoint_dir = Path(self.config.checkpoint_dir).absolute()
        name = self.config.metric_name
        if name is not None and name.partition(":")[0] not in ("train", "val"):
            raise ValueError(
                f"checkpointing.metric_name={name!r} must be null or start with 'train:' or 'val:', "
                "for example 'val:accuracy'"
            )

    def init_tmp_checkpoint(
        self, step: int, training_info: Mapping[str, Any], run_config: Mapping[str, Any] | None = None
    ) -> PathLike:
        """Start checkpoint `step` in a temporary directory that no resume looks at.

        Args:
            step: number of finished optimizer steps.
            training_info: JSON-serialisable counters and metrics.
            run_config: the resolved configuration, kept as config.yaml.

        Returns:
            The temporary directory; components write below it, then `finalize_checkpoint` makes it real.
        """
        path = self.checkpoint_dir / f"tmp_step_{step}"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        write_json_atomically(path / _TRAINING_INFO, dict(training_info))
        if run_config is not None:
            (path / _RUN_CONFIG).write_text(yaml.safe_dump(dict(run_config), sort_keys=False))
        return str(path)

    def finalize_checkpoint(self, checkpoint_path: PathLike) -> None:
        """Turn a temporary checkpoint into `step_N` by one rename, then retire old ones.

        Args:
            checkpoint_path: what `init_tmp_checkpoint` returned, completely written.
        """
        temporary = Path(checkpoint_path)
        final = temporary.with_name(temporary.name.removeprefix("tmp_"))
        fsync_tree(temporary)
        if final.exists():  # left by a run that was rolled back further than this step
            self._delete(final)
        os.rename(temporary, final)
        step = self._step(final)
        write_json_atomically(self.checkpoint_dir / _STATUS, {"step": step, "path": final.name})
        self.remove_old_checkpoints()

    def remove_old_checkpoints(self, exclude_latest: bool = True) -> None:
        """Delete what `checkpointing.keep_top_k` does not keep.

        The best `keep_top_k` checkpoints by `metric_name` stay (newer ones win ties); without a metric, the
        newest ones.

        Args:
            exclude_latest: keep the newest checkpoint whatever its metric.
        """
        keep = self.config.keep_top_k
        checkpoints = self._checkpoints()
        if keep is None or not checkpoints:
            return
        kept = set(self._ranked(checkpoints)[:keep])
        if exclude_latest or not kept:
            kept.add(checkpoints[-1])
        for path in checkpoints:
            if path not in kept:
                self._delete(path)

    def get_best_checkpoint_path(self) -> str | None:
        """The checkpoint with the best `metric_name`, without a metric the newest; None before the first."""
        ranked = self._ranked(self._checkpoints())
        return str(ranked[0]) if ranked else None

    def get_latest_checkpoint_path(self) -> str | None:
        """The complete checkpoint with the highest step, or None."""
        checkpoints = self._checkpoints()
        return str(checkpoints[-1]) if checkpoints else None

    def load_training_info(self, checkpoint_path: PathLike | None = None) -> dict[str, Any] | None:
        """Read the counters of a checkpoint.

        Args:
            checkpoint_path: default: the latest.

        Returns:
            The mapping given to `init_tmp_checkpoint`, or None where there is no checkpoint.
        """
        path = checkpoint_path or self.get_latest_checkpoint_path()
        return None if path is None else json.loads((Path(path) / _TRAINING_INFO).read_text())

    def remove_unfinished(self) -> None:
        """Delete what an interrupted save or deletion has left; the caller owns the run directory."""
        for pattern in ("tmp_step_*", "old_step_*"):
            for path in self.checkpoint_dir.glob(pattern):
                logger.info("removing %s, left by an interrupted run", path.name)
                shutil.rmtree(path)

    def _checkpoints(self) -> list[Path]:
        found = [
            p
            for p in self.checkpoint_dir.glob("step_*")
            if _STEP.fullmatch(p.name) and (p / _TRAINING_INFO).exists()
        ]
        return sorted(found, key=self._step)

    def _ranked(self, checkpoints: list[Path]) -> list[Path]:
        """Best first; checkpoints without the metric, or with NaN for it, come last."""
        newest_first = checkpoints[::-1]
        name = self.config.metric_name
        if name is None:
            return newest_first
        sign = -1.0 if self.config.higher_is_better else 1.0
        values = {p: (self.load_training_info(p) or {}).get(name) for p in newest_first}
        for path, value in values.items():
            if value is None:
                logger.warning(
                    "%s was saved before %s was measured: it cannot be among the best", path.name, name
                )
            elif math.isnan(value):
                logger.warning("%s has %s=nan: it cannot be among the best", path.name, name)
                values[path] = None
        return sorted(newest_first, key=lambda p: (values[p] is None, sign * (values[p] or 0.0)))

    @staticmethod
    def _step(path: Path) -> int:
        match = _STEP.fullmatch(path.name)
        assert match is not None
        return int(match.group(1))

    @staticmethod
    def _delete(path: Path) -> None:
        """Delete so that a half-deleted directory never carries the name of a complete checkpoint."""
        doomed = path.with_name(f"old_{path.name}")
        if doomed.exists():
            shutil.rmtree(doomed)
        os.rename(path, doomed)
        shutil.rmtree(doomed)
