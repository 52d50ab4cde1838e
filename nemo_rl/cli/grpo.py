# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl grpo --config FILE [key=value ...]``: train with GRPO; run again, it resumes."""

from __future__ import annotations

import argparse

from nemo_rl.cli.config_args import add_config_arguments, load_from_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``nemo-rl grpo`` on ``parser``."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train as ``args`` say; returns the exit code."""
    from nemo_rl.algorithms.config import GRPOMasterConfig

    config = load_from_args(args, GRPOMasterConfig)
    from nemo_rl.cli.train import train

    return train(config)
