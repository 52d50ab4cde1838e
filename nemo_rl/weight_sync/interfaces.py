# SPDX-License-Identifier: Apache-2.0
"""The interface between a training step and the engine that samples from its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class SyncLedger:
    """What one synchronisation moved.

    Attributes:
        version: weight version that the engine holds afterwards.
        num_tensors: tensors that were received, each exactly once.
        num_bytes: their size.
    """

    version: int
    num_tensors: int
    num_bytes: int


class WeightSync(ABC):
    """Owns the weight version: the number of optimizer steps behind the weights that sample."""

    def __init__(self, version: int = 0):
        """Start at `version`, the number of optimizer steps done before this run began."""
        self.trainer_version = version
        self.engine_version: int | None = None

    @property
    def version(self) -> int:
        """Version of the weights in the engine, for stamping rows."""
        if self.engine_version is None:
            raise RuntimeError(
                "the generation engine holds no weights yet: call ensure_fresh() before sampling"
            )
        return self.engine_version

    def mark_updated(self) -> None:
        """The trainer's weights have changed by one `train()`."""
        self.trainer_version += 1

    def ensure_fresh(self) -> SyncLedger | None:
        """Synchronise if the trainer is ahead of the engine; returns the ledger if anything was done."""
        if self.engine_version == self.trainer_version:
            return None
        ledger = self.sync()
        self.engine_version = ledger.version
        return ledger

    @abstractmethod
    def connect(self) -> None:
        """Set up the transport."""

    @abstractmethod
    def sync(self) -> SyncLedger:
        """Bring the engine to `trainer_version`."""
