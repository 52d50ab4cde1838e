# SPDX-License-Identifier: Apache-2.0
"""What ``nemo-rl grpo`` and ``nemo-rl sft`` share: hold the run directory, build, loop, close."""

from __future__ import annotations

import logging

from nemo_rl.algorithms.batch_plan import batch_equation
from nemo_rl.algorithms.config import GRPOMasterConfig, SFTMasterConfig
from nemo_rl.algorithms.grpo import GRPO
from nemo_rl.algorithms.loop import TrainLoop
from nemo_rl.algorithms.setup import build_grpo, build_sft
from nemo_rl.algorithms.sft import SFT
from nemo_rl.utils.run_dir import exclusive_run_dir

logger = logging.getLogger(__name__)


def train(config: GRPOMasterConfig | SFTMasterConfig) -> int:
    """Run to the last step; returns the exit code."""
    logger.info("%s", batch_equation(config))
    with exclusive_run_dir(config.logger.log_dir) as run_dir:
        if isinstance(config, GRPOMasterConfig):
            context, cadence, state = build_grpo(config, run_dir)
            algorithm: GRPO | SFT = GRPO(context, config)
        else:
            context, cadence, state = build_sft(config, run_dir)
            algorithm = SFT(context, config)
        try:
            if state.step >= cadence.max_steps:
                logger.info("nothing to do: all %d steps are done in %s", cadence.max_steps, run_dir)
            TrainLoop(context, algorithm, cadence, state).run()
        finally:
            context.close()
    logger.info("done: %s", run_dir)
    return 0
