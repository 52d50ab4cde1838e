# SPDX-License-Identifier: Apache-2.0
"""The verifiers that run in the driver: neither takes a restated problem for its answer."""

from __future__ import annotations

import pytest

from nemo_rl.environments.math_environment import exact_verdict, last_number_verdict


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("3 + 4 = 7", "7", 1.0),
        ("The answer is 7.", "7", 1.0),
        ("7.0", "7", 1.0),
        ("1,024 apples", "1024", 1.0),
        ("it is -3", "-3", 1.0),
        ("10-7", "7", 1.0),
        ("7, because 3 + 4", "7", 0.0),
        ("3+4", "7", 0.0),
        ("", "7", 0.0),
        ("seven", "7", 0.0),
    ],
)
def test_last_number(response: str, truth: str, score: float) -> None:
    assert last_number_verdict(response, truth).score == score


@pytest.mark.parametrize(("response", "score"), [(" 7\n", 1.0), ("3+4", 0.0), ("7.0", 0.0), ("", 0.0)])
def test_exact(response: str, score: float) -> None:
    assert exact_verdict(response, "7").score == score
