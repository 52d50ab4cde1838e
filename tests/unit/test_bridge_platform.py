# SPDX-License-Identifier: Apache-2.0
"""megatron-core on CPU: what the platform module changes, and that nobody else sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_bridge.platform import on_cpu, prepare_platform

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the platform module does nothing where CUDA is"
)


@pytest.fixture(autouse=True)
def _prepared() -> None:
    prepare_platform()


def test_megatron_sees_a_cpu_and_we_do_not() -> None:
    from megatron.core.pipeline_parallel import schedules

    assert on_cpu()
    assert schedules.torch is not torch
    assert schedules.torch.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"
    assert schedules.torch.empty(2, device=0).device.type == "cpu"
    assert schedules.torch.cuda.current_device() == torch.device("cpu")
    assert not schedules.torch.cuda.is_available()
    assert schedules.torch.device("cuda", 1) == torch.device("cpu")
    assert isinstance(torch.device("cpu"), schedules.torch.device)
    assert schedules.torch.nn is torch.nn
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_tensor_methods_are_changed_for_megatron_only() -> None:
    code = "def cuda(t): return t.cuda()\ndef kind(t): return t.type()\ndef cast(t): return t.type(DOUBLE)\n"
    inside, outside = (
        {"__name__": "megatron.core.optimizer.x", "DOUBLE": "torch.DoubleTensor"},
        {"__name__": "elsewhere"},
    )
    for scope in (inside, outside):
        exec(code, scope)
    tensor = torch.ones(2)
    assert inside["cuda"](tensor) is tensor
    assert inside["kind"](tensor) == "torch.cuda.FloatTensor"
    assert inside["cast"](tensor).dtype == torch.float64
    assert outside["kind"](tensor) == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        outside["cuda"](tensor)


def test_it_is_idempotent() -> None:
    from megatron.core.tensor_parallel import random

    before = (
        random.torch,
        random._set_cuda_rng_state,
        torch.Tensor.cuda,
        torch.Tensor.type,
        list(sys.meta_path),
    )
    prepare_platform()
    after = (
        random.torch,
        random._set_cuda_rng_state,
        torch.Tensor.cuda,
        torch.Tensor.type,
        list(sys.meta_path),
    )
    assert before == after


def test_rng_tracker_drives_the_cpu_generator() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    untouched = torch.get_rng_state()
    tracker.add("a", 7)
    assert torch.equal(torch.get_rng_state(), untouched)
    with tracker.fork("a"):
        first = torch.rand(3)
    with tracker.fork("a"):
        second = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), untouched)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)


def test_nothing_is_compiled() -> None:
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.moe import moe_utils

    for module in (fused_bias_swiglu, moe_utils):
        for name, value in vars(module).items():
            assert "_torchdynamo_orig_callable" not in getattr(value, "__dict__", {}), (
                f"{module.__name__}.{name}"
            )


LATE = """
import megatron_bridge
from megatron_bridge.platform import prepare_platform
prepare_platform()
import sys, torch
import megatron.core.inference.contexts.static_context as late
import megatron.core.datasets.utils, megatron.core.timers as timers
assert timers.torch is not torch
mods = [m for n, m in sys.modules.items() if n.startswith("megatron.core") and getattr(m, "torch", None) is torch]
assert not mods, mods
assert "transformer_engine" not in sys.modules
print("fine")
"""


def test_modules_imported_later_are_covered_and_nothing_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, check=False, cwd="."
    )
    assert done.stdout.strip() == "fine", done.stderr
    assert done.stderr == ""
