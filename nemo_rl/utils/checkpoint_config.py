# SPDX-License-Identifier: Apache-2.0
"""Config of checkpoints: the `checkpointing` section. Torch-free; `utils.checkpoint` re-exports it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, Hint, NotYet, Violation


class CheckpointingConfig(ConfigModel):
    """The `checkpointing` section: when to save, what to keep."""

    enabled: bool = Field(True, description="Save checkpoints.")
    checkpoint_dir: str = Field(
        "results/run/checkpoints", description="Folder of the checkpoints; follows logger.log_dir."
    )
    metric_name: str | None = Field(
        None, description="Metric that ranks checkpoints, `val:<name>` or `train:<name>`; null ranks by age."
    )
    higher_is_better: bool = Field(True, description="Keep the highest values of the metric.")
    save_period: int = Field(10, ge=1, description="Steps between checkpoints.")
    keep_top_k: int | None = Field(
        None, ge=1, description="Checkpoints to keep beside the latest; null keeps all."
    )
    save_optimizer: bool = Field(True, description="Save optimizer state, which an exact resume needs.")
    checkpoint_must_save_by: str | None = Field(
        None, description="Save and stop after this run time, DD:HH:MM:SS."
    )
    ft_save_period: Annotated[int | None, NotYet((None,), "null")] = Field(
        None, ge=1, description="Steps between extra checkpoints for restarts."
    )
    ft_keep_latest_k: Annotated[int | None, NotYet((None,), "null")] = Field(
        None, ge=1, description="Extra checkpoints to keep."
    )
    model_save_format: Annotated[str | None, NotYet((None,), "null: Megatron writes torch_dist")] = Field(
        None, description="Format of the weights, for the DTensor backend."
    )
    save_consolidated: Annotated[bool, NotYet((False,), "false, and `megatron-bridge export`")] = Field(
        False, description="Also write one HuggingFace folder."
    )
    is_async: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="Write in the background."
    )
    pretrained_checkpoint: Annotated[dict[str, Any] | None, NotYet((None,), "null")] = Field(
        None, description="Megatron checkpoint to start from."
    )
    model_cache_dir: Annotated[str | None, Hint("the DTensor backend's")] = Field(
        None, description="Model cache."
    )
    model_repo_id: Annotated[str | None, Hint("the DTensor backend's")] = Field(
        None, description="Model name."
    )
    is_peft: Annotated[bool, NotYet((False,), "false")] = Field(
        False, description="The weights are adapters."
    )
    peft_config: Annotated[Any, NotYet((None,), "null")] = Field(None, description="Config of the adapters.")

    def violations(self) -> Iterator[Violation]:
        """A metric or a time in the wrong form."""
        if self.metric_name is not None and not re.fullmatch(r"(val|train):.+", self.metric_name):
            yield Violation(
                "metric_name",
                f"{self.metric_name!r} must be val:<name> or train:<name>, such as val:accuracy",
            )
        limit = self.checkpoint_must_save_by
        if limit is not None and not re.fullmatch(r"\d+:\d{2}:\d{2}:\d{2}", limit):
            yield Violation("checkpoint_must_save_by", f"{limit!r} must be DD:HH:MM:SS, such as 00:03:45:00")
