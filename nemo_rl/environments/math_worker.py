# SPDX-License-Identifier: Apache-2.0
"""The process that runs math-verify: ``python -m nemo_rl.environments.math_worker``.

It reads one JSON object per line, ``{"id", "response", "ground_truth", "limit_s"}``, and writes one,
``{"id", "score", "answer", "error"}``. Whoever started it kills it when an item takes too long: sympy can
hang in C code, where no Python signal handler runs. math-verify's own limits are such handlers, and are
switched off. If the parent is gone, SIGALRM with its default action ends the process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any, TextIO

ORPHAN_GRACE_S = 10.0
"""Seconds past the limit after which a worker ends by itself."""


class GoldAnswerError(ValueError):
    """The right answer itself cannot be read as mathematics."""


def main() -> int:
    """Serve until the input ends."""
    # Whatever a library prints must not end up between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    serve(sys.stdin, answers)
    return 0


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer each request line with one line; a first line says that the imports are done."""
    import math_verify  # noqa: F401 - takes a second; do it before the first item's clock starts

    answers.write(json.dumps({"ready": True}) + "\n")
    for line in requests:
        item = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, item["limit_s"] + ORPHAN_GRACE_S)
        verdict = judge(item["response"], item["ground_truth"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps({"id": item["id"], **verdict}) + "\n")


def judge(response: str, ground_truth: str) -> dict[str, Any]:
    """Score one response: 1.0 if an answer in it equals the right one, else 0.0.

    A response in which no answer can be found is wrong. If the right answer cannot be read, or the
    comparison itself fails, ``error`` is the type of what happened and the score means nothing.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    try:
        gold = parse(f"\\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=None)
        if not gold:
            raise GoldAnswerError(ground_truth)
        answer = parse(response, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)
        right = bool(answer) and verify(gold, answer, timeout_seconds=None, raise_on_error=True)
    except Exception as error:  # noqa: BLE001 - reported by type to the driver, which counts it
        return {"score": 0.0, "answer": None, "error": type(error).__name__}
    return {"score": float(right), "answer": str(answer[-1]) if answer else None, "error": None}


if __name__ == "__main__":
    sys.exit(main())
