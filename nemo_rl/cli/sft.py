# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl sft --config FILE [key=value ...]``: supervised fine-tuning; run again, it resumes."""

from __future__ import annotations

import argparse

from nemo_rl.cli.config_args import add_config_arguments, load_from_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``nemo-rl sft`` on ``parser``."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train as ``args`` say; returns the exit code."""
    from nemo_rl.algorithms.config import SFTMasterConfig

    config = load_from_args(args, SFTMasterConfig)
    from nemo_rl.cli.train import train

    return train(config)
