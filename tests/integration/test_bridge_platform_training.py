# SPDX-License-Identifier: Apache-2.0
"""megatron-core as shipped (its RoPE, masks, MoE, DDP, optimizer, checkpoints) trains on CPU, equally in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.world import run_world

TRAIN = "tests.integration.worlds_platform:train"


@pytest.fixture(scope="module")
def reference() -> dict[bool, dict[str, Any]]:
    return {moe: run_world(1, TRAIN, moe=moe)[0] for moe in (False, True)}


@pytest.mark.parametrize(
    ("world", "moe", "layout"),
    [
        (2, False, {"tp": 2}),
        (2, False, {"pp": 2}),
        (2, False, {}),
        (2, False, {"distributed_optimizer": True}),
        (2, True, {"ep": 2}),
        (2, True, {"pp": 2}),
    ],
)
def test_losses_and_norms_do_not_depend_on_the_layout(
    reference: dict[bool, dict[str, Any]], world: int, moe: bool, layout: dict[str, Any]
) -> None:
    expected = reference[moe]
    ranks = run_world(world, TRAIN, moe=moe, **layout)
    assert any(rank["losses"] is not None for rank in ranks)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(expected["norms"], rel=2e-5)
        if rank["losses"] is not None:
            assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert expected["losses"][1] < expected["losses"][0]


def test_bf16_distributed_optimizer_and_checkpoint(
    reference: dict[bool, dict[str, Any]], tmp_path: Path
) -> None:
    ranks = run_world(
        2, TRAIN, dtype=torch.bfloat16, distributed_optimizer=True, checkpoint=str(tmp_path / "checkpoint")
    )
    for rank in ranks:
        assert rank["losses"] == pytest.approx(reference[False]["losses"], rel=0.02)
        assert rank["restored"] is True


def test_dropout_trains() -> None:
    for rank in run_world(2, TRAIN, tp=2, dropout=0.1):
        assert rank["losses"][1] != rank["losses"][0]
