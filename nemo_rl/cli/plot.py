# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl plot RUN_DIR...``: curves of metrics.jsonl as one picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

DEFAULT_METRICS = (
    "validation/accuracy",
    "train/reward",
    "train/loss",
    "train/grad_norm",
    "train/kl_penalty",
    "timing/train/total_step_time",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``nemo-rl plot`` on ``parser``."""
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="run directories to compare"
    )
    parser.add_argument(
        "--metric",
        action="append",
        dest="metrics",
        help="metric to draw, repeatable (default: the main ones)",
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=None, help="PNG to write (default: RUN_DIR/curves.png)"
    )
    parser.add_argument("--title", default=None, help="title of the picture")


def run(args: argparse.Namespace) -> int:
    """Draw the picture that ``args`` describes; returns the exit code."""
    from nemo_rl.utils.logger import read_jsonl

    runs: dict[str, list[dict[str, Any]]] = {}
    for run_dir in args.run_dirs:
        records = read_jsonl(run_dir / "metrics.jsonl")
        if not records:
            print(f"nemo-rl plot: {run_dir / 'metrics.jsonl'} does not exist or is empty", file=sys.stderr)
            return 2
        runs[run_dir.name] = records
    known = {name for records in runs.values() for record in records for name in record} - {"step", "time"}
    metrics = args.metrics or [name for name in DEFAULT_METRICS if name in known]
    unknown = [name for name in metrics if name not in known]
    if unknown:
        print(
            f"nemo-rl plot: no metric {', '.join(unknown)}; there are {', '.join(sorted(known))}",
            file=sys.stderr,
        )
        return 2
    out = args.out or args.run_dirs[0] / "curves.png"
    draw(runs, metrics, out, args.title)
    print(out)
    return 0


def draw(runs: dict[str, list[dict[str, Any]]], metrics: list[str], out: Path, title: str | None) -> None:
    """Write one panel per metric with one line per run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(metrics))
    rows = -(-len(metrics) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False)
    for axis, metric in zip(axes.flat, metrics, strict=False):
        for name, records in runs.items():
            points = [(r["step"], r[metric]) for r in records if isinstance(r.get(metric), int | float)]
            axis.plot(*zip(*points, strict=True) if points else ([], []), marker=".", label=name)
        axis.set_title(metric, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(metrics) :]:
        axis.set_visible(False)
    if len(runs) > 1:
        axes.flat[0].legend(fontsize=8)
    if title:
        figure.suptitle(title)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
