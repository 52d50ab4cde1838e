# SPDX-License-Identifier: Apache-2.0
"""The engine samples from the trainer's own tensors, so nothing moves."""

from __future__ import annotations

from nemo_rl.weight_sync.interfaces import SyncLedger, WeightSync


class LocalWeightSync(WeightSync):
    """For `policy.generation.backend: megatron`, colocated: one copy of the weights."""

    def connect(self) -> None:
        """Nothing to set up."""

    def sync(self) -> SyncLedger:
        """Nothing to move; the ledger says so."""
        return SyncLedger(version=self.trainer_version, num_tensors=0, num_bytes=0)
