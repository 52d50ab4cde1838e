# SPDX-License-Identifier: Apache-2.0
"""Environment of all tests: few threads, no downloads, no reports home; GPU tests skip where there is no GPU."""

from __future__ import annotations

import os

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}.items():
    os.environ.setdefault(_name, _value)

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where CUDA is not available."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
