# SPDX-License-Identifier: Apache-2.0
"""Named stop-watches for the stages of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Adds up the seconds spent under each label; labels nest with `/`."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Add the duration of the block to `label`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[label] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Seconds per label since the last `reset`."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Forget all labels."""
        self._seconds.clear()
