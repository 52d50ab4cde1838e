# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl``: the dispatcher. A subcommand's module is imported only when it is asked for.

A subcommand module has ``add_arguments(parser)`` and ``run(args) -> int``; ``run`` may raise ``ConfigError``, which
ends the program with exit code 2 and the list of violations.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from typing import NamedTuple

from nemo_rl import __version__


class Command(NamedTuple):
    """A subcommand: the module behind it and its line in the help."""

    module: str
    help: str


COMMANDS = {
    "grpo": Command("nemo_rl.cli.grpo", "train with GRPO: --config FILE [key=value ...]"),
    "sft": Command("nemo_rl.cli.sft", "supervised fine-tuning: --config FILE [key=value ...]"),
    "config": Command("nemo_rl.cli.config", "show, check or explain a configuration"),
    "tiny-model": Command("nemo_rl.cli.tiny_model", "write a small random HuggingFace checkpoint"),
    "plot": Command("nemo_rl.cli.plot", "draw the metrics of run directories"),
}

_RESUMABLE = ("grpo", "sft")
INTERRUPTED = 130  # what a shell gives a program that Ctrl-C has ended


def main(argv: list[str] | None = None) -> int:
    """Run ``nemo-rl`` and give its exit code.

    0 done, 1 failed, 2 wrong usage or configuration, 3 stopped before the last step, 130 interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"nemo-rl {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"nemo-rl: there is no command {name!r}{_suggestion(name)}\n\n{_usage()}", file=sys.stderr)
        return 2
    return _run(name, argv[1:])


def _run(name: str, argv: list[str]) -> int:
    module = importlib.import_module(COMMANDS[name].module)
    parser = argparse.ArgumentParser(
        prog=f"nemo-rl {name}",
        description=(module.__doc__ or "").replace("``", "`"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    for library in ("megatron", "matplotlib"):  # they narrate at INFO what our own lines say
        logging.getLogger(library).setLevel(logging.WARNING)
    from nemo_rl.utils.config import ConfigError

    try:
        return module.run(args)
    except ConfigError as error:
        print(f"nemo-rl {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = "; the same command goes on from the last checkpoint" if name in _RESUMABLE else ""
        print(f"nemo-rl {name}: interrupted{goes_on}", file=sys.stderr)
        return INTERRUPTED


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: nemo-rl COMMAND ...",
            "",
            "Post-training of language models with reinforcement learning.",
            "",
            "commands:",
            *lines,
            "",
            "`nemo-rl COMMAND --help` describes a command; `nemo-rl --version` gives the version.",
        ]
    )


def _suggestion(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, 1)
    return f"; did you mean {near[0]}?" if near else ""


if __name__ == "__main__":
    sys.exit(main())
