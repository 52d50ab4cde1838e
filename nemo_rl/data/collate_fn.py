# SPDX-License-Identifier: Apache-2.0
"""From processed rows to one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_rl.data.interfaces import DatumSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

DEFAULT_TASK_NAME = "default"


def rl_collate_fn(data_batch: Sequence[DatumSpec]) -> BatchedDataDict[Any]:
    """Put B rows into columns.

    Returns:
        ``message_log``, ``extra_env_info``, ``task_name``, ``stop_strings`` (lists of B; ``None`` where a
        row has no stop strings), ``length`` int64 [B], ``loss_multiplier`` float [B], ``idx`` list of int.
        Message logs are new lists of new dicts: a rollout may append to them.
    """
    return BatchedDataDict(
        message_log=[[dict(message) for message in row["message_log"]] for row in data_batch],
        length=torch.tensor([row["length"] for row in data_batch], dtype=torch.int64),
        loss_multiplier=torch.tensor([row["loss_multiplier"] for row in data_batch], dtype=torch.float32),
        extra_env_info=[row["extra_env_info"] for row in data_batch],
        task_name=[row.get("task_name", DEFAULT_TASK_NAME) for row in data_batch],
        idx=[row["idx"] for row in data_batch],
        stop_strings=[row.get("stop_strings", None) for row in data_batch],
    )
