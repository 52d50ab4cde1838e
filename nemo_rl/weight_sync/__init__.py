# SPDX-License-Identifier: Apache-2.0
"""How the generation engine gets the trainer's weights, one strategy object per transport."""

from nemo_rl.weight_sync.interfaces import SyncLedger, WeightSync
from nemo_rl.weight_sync.local import LocalWeightSync

__all__ = ["LocalWeightSync", "SyncLedger", "WeightSync"]
