# SPDX-License-Identifier: Apache-2.0
"""The arguments that every command with a configuration takes: ``--config FILE [key=value ...]``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_rl.utils.config_model import ConfigModel


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--config`` and the overrides."""
    parser.add_argument("--config", metavar="FILE", help="YAML file; may also be the first word")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="a.b=c sets, ++a.b=c sets, ~a.b deletes; applied in order",
    )


def compose_from_args(args: argparse.Namespace) -> tuple[DictConfig, str]:
    """Give the composed tree and its file name.

    Raises:
        ConfigError: no file is given, or it cannot be composed.
    """
    from nemo_rl.utils.config import ConfigError, compose
    from nemo_rl.utils.config_model import Violation

    path, overrides = args.config, list(args.overrides)
    if path is None and overrides and overrides[0].endswith((".yaml", ".yml")):
        path = overrides.pop(0)
    if path is None:
        raise ConfigError([Violation("--config", "give a YAML file, such as --config configs/grpo.yaml")])
    return compose(path, overrides), path


def load_from_args[T: ConfigModel](args: argparse.Namespace, master: type[T]) -> T:
    """Give the validated tree.

    Raises:
        ConfigError: with all violations at once.
    """
    from nemo_rl.utils.config import build

    tree, path = compose_from_args(args)
    return build(tree, master, source=path)
