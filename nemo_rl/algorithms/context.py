# SPDX-License-Identifier: Apache-2.0
"""Everything a run consists of, built once by `algorithms.setup` and read by loop and algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.utils.checkpoint_config import CheckpointingConfig

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from nemo_rl.algorithms.config import GRPOMasterConfig, SFTMasterConfig
    from nemo_rl.data.dataloader import StatefulDataLoader
    from nemo_rl.data.interfaces import TokenizerType
    from nemo_rl.environments.interfaces import EnvironmentInterface
    from nemo_rl.models.generation.interfaces import GenerationInterface
    from nemo_rl.models.policy.lm_policy import Policy
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger
    from nemo_rl.weight_sync import WeightSync


@dataclass(frozen=True)
class Context:
    """The parts of one run.

    Attributes:
        config: the resolved configuration.
        run_dir: `logger.log_dir`, absolute.
        tokenizer: with chat template and padding token.
        policy: the trained policy.
        generation: what samples; the policy itself for the Megatron backend.
        weight_sync: brings the policy's weights to `generation`.
        environments: task name -> environment; empty without reinforcement learning.
        train_loader: endless, resumable.
        val_loaders: name -> loader of held-out rows, which iterates from the first row every time.
        logger: metrics.
        checkpointer: checkpoints.
        pad_token_id: fills rows.
        cleanup: closes everything, last built first.
    """

    config: GRPOMasterConfig | SFTMasterConfig
    run_dir: Path
    tokenizer: TokenizerType
    policy: Policy
    generation: GenerationInterface
    weight_sync: WeightSync
    environments: Mapping[str, EnvironmentInterface[Any]]
    train_loader: StatefulDataLoader
    val_loaders: Mapping[str, DataLoader[Any]]
    logger: Logger
    checkpointer: CheckpointManager
    pad_token_id: int
    cleanup: ExitStack = field(repr=False)

    @property
    def checkpointing(self) -> CheckpointingConfig:
        """The `checkpointing` section."""
        return self.config.checkpointing

    def close(self) -> None:
        """Release workers, processes and files."""
        self.cleanup.close()
