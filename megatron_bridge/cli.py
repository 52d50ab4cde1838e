# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge``: convert checkpoints on the command line. Exit code 2 means the message says what to change."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_DTYPES = ("bfloat16", "float16", "float32")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-bridge",
        description="Convert between HuggingFace and megatron-core checkpoints, on a CPU.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "import", help="HuggingFace directory -> distributed checkpoint for any TP x PP"
    )
    command.add_argument("hf_dir", help="HuggingFace directory (config.json, *.safetensors)")
    command.add_argument("out", help="new directory for the megatron-core checkpoint")
    command.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of the checkpoint (default: as in the files)"
    )

    command = commands.add_parser("export", help="distributed checkpoint -> HuggingFace directory")
    command.add_argument("checkpoint", help="megatron-core checkpoint, or the directory of a training step")
    command.add_argument("out", help="new HuggingFace directory")
    command.add_argument(
        "--hf", required=True, metavar="HF_DIR", help="directory with the config and tokenizer"
    )
    command.add_argument("--dtype", choices=_DTYPES, help="dtype of the export (default: as in config.json)")
    command.add_argument("--max-shard-size", default="5GB", help="upper bound of one file (default: 5GB)")

    commands.add_parser("models", help="list the architectures that can be converted")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    args = _parser().parse_args(argv)
    # Imported after the arguments are parsed, so that --help and mistakes answer at once.
    from megatron_bridge.errors import CheckpointError, UnsupportedModelError
    from megatron_bridge.notices import quiet_known_messages

    quiet_known_messages(cpu=True)
    try:
        _COMMANDS[args.command](args)
    except (CheckpointError, UnsupportedModelError, ValueError, OSError) as error:
        print(f"megatron-bridge: error: {error}", file=sys.stderr)
        return 2
    return 0


def _import(args: argparse.Namespace) -> None:
    from megatron_bridge.convert import import_checkpoint

    with _progress() as track:
        import_checkpoint(args.hf_dir, args.out, _dtype(args.dtype), track)
    print(f"wrote {args.out}")


def _export(args: argparse.Namespace) -> None:
    from megatron_bridge.convert import export_checkpoint

    with _progress() as track:
        export_checkpoint(args.checkpoint, args.out, args.hf, _dtype(args.dtype), args.max_shard_size, track)
    print(f"wrote {args.out}")


def _models(args: argparse.Namespace) -> None:
    del args
    from megatron_bridge.auto_bridge import AutoBridge

    print("\n".join(AutoBridge.list_supported_models()))


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "import": _import,
    "export": _export,
    "models": _models,
}


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)


class _progress:  # noqa: N801  (used like a function)
    """A rich progress bar on a terminal, nothing elsewhere; its value wraps iterables."""

    def __enter__(self) -> Callable[[Iterable[Any], str, int], Iterable[Any]]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.bar.start()
        return lambda items, description, total: self.bar.track(items, total=total, description=description)

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()


if __name__ == "__main__":
    sys.exit(main())
