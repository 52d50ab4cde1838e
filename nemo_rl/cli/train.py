# SPDX-License-Identifier: Apache-2.0
"""What ``nemo-rl grpo`` and ``nemo-rl sft`` share: hold the run directory, build, loop, close."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path

from nemo_rl.algorithms.batch_plan import batch_equation
from nemo_rl.algorithms.config import GRPOMasterConfig, SFTMasterConfig
from nemo_rl.algorithms.context import Context
from nemo_rl.algorithms.grpo import GRPO
from nemo_rl.algorithms.loop import Cadence, LoopState, TrainLoop
from nemo_rl.algorithms.setup import build_grpo, build_sft
from nemo_rl.algorithms.sft import SFT
from nemo_rl.distributed.virtual_cluster import ResourceInsufficientError
from nemo_rl.utils.run_dir import exclusive_run_dir

logger = logging.getLogger(__name__)

ERROR_FILE = "error.log"
STOPPED_EARLY = 3


def train(config: GRPOMasterConfig | SFTMasterConfig) -> int:
    """Run to the last step.

    Returns:
        0; 2 where something that the user can change keeps the run from starting; 3 where it stopped before its last
        step.
    """
    logger.info("%s", batch_equation(config))
    with ExitStack() as stack:
        try:
            run_dir = stack.enter_context(exclusive_run_dir(config.logger.log_dir))
            context, cadence, state = _build(config, run_dir)
        except (ValueError, ResourceInsufficientError) as error:
            return _refuse(error, Path(config.logger.log_dir))
        stack.callback(context.close)
        algorithm = GRPO(context, config) if isinstance(config, GRPOMasterConfig) else SFT(context, config)
        if state.step >= cadence.max_steps:
            logger.info("nothing to do: all %d steps are done in %s", cadence.max_steps, run_dir)
        final = TrainLoop(context, algorithm, cadence, state).run()
    if final.step < cadence.max_steps:
        logger.warning(
            "stopped after step %d of %d; the same command goes on: %s",
            final.step,
            cadence.max_steps,
            run_dir,
        )
        return STOPPED_EARLY
    logger.info("done: %s", run_dir)
    return 0


def _build(config: GRPOMasterConfig | SFTMasterConfig, run_dir: Path) -> tuple[Context, Cadence, LoopState]:
    if isinstance(config, GRPOMasterConfig):
        return build_grpo(config, run_dir)
    return build_sft(config, run_dir)


def _refuse(error: Exception, run_dir: Path) -> int:
    """Say in one line what to change; the whole story goes into the run directory, if it can be written to."""
    print(f"nemo-rl: {str(error).splitlines()[0]}", file=sys.stderr)
    with suppress(OSError):
        (run_dir / ERROR_FILE).write_text("".join(traceback.format_exception(error)))
        print(f"nemo-rl: details in {run_dir / ERROR_FILE}", file=sys.stderr)
    return 2
