# SPDX-License-Identifier: Apache-2.0
"""Config of logging: the `logger` section. Torch-free; `utils.logger` re-exports it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, NotYet, OptionOf


class TensorboardConfig(ConfigModel):
    """`logger.tensorboard`."""

    log_dir: str | None = Field(None, description="Folder; null is `tensorboard` in the run directory.")


class GPUMonitoringConfig(ConfigModel):
    """`logger.gpu_monitoring`."""

    collection_interval: float = Field(10, gt=0, description="Seconds between readings.")
    flush_interval: float = Field(10, gt=0, description="Seconds between writes.")


class LoggerConfig(ConfigModel):
    """The `logger` section: the run directory and where metrics go."""

    log_dir: str = Field("results/run", description="The run directory.")
    tensorboard_enabled: bool = Field(True, description="Write TensorBoard events.")
    tensorboard: TensorboardConfig = Field(
        default_factory=TensorboardConfig, description="TensorBoard options."
    )
    wandb_enabled: Annotated[bool, NotYet((False,), "logger.tensorboard_enabled=true")] = Field(
        False, description="Write to Weights & Biases."
    )
    wandb: Annotated[dict[str, Any] | None, OptionOf("logger.wandb_enabled")] = Field(
        None, description="Weights & Biases options."
    )
    swanlab_enabled: Annotated[bool, NotYet((False,), "logger.tensorboard_enabled=true")] = Field(
        False, description="Write to SwanLab."
    )
    swanlab: Annotated[dict[str, Any] | None, OptionOf("logger.swanlab_enabled")] = Field(
        None, description="SwanLab options."
    )
    mlflow_enabled: Annotated[bool, NotYet((False,), "logger.tensorboard_enabled=true")] = Field(
        False, description="Write to MLflow."
    )
    mlflow: Annotated[dict[str, Any] | None, OptionOf("logger.mlflow_enabled")] = Field(
        None, description="MLflow options."
    )
    monitor_gpus: Annotated[bool, NotYet((False,), "false")] = Field(False, description="Log GPU use.")
    gpu_monitoring: Annotated[GPUMonitoringConfig, OptionOf("logger.monitor_gpus")] = Field(
        default_factory=GPUMonitoringConfig, description="Options of GPU monitoring."
    )
    num_val_samples_to_print: int = Field(0, ge=0, description="Validation samples shown on the console.")
