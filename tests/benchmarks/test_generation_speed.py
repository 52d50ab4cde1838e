# SPDX-License-Identifier: Apache-2.0
"""Generation takes at most 1.5 times as long as transformers' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_generation_is_at_most_half_slower_than_transformers() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.generation_speed", "6", "1"],
        env=dict(os.environ, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1"),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    result = json.loads(out.stdout.splitlines()[-1])
    assert result["ratio"] <= 1.5, result
