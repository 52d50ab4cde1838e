# SPDX-License-Identifier: Apache-2.0
"""What the driver makes of a worker's failure."""

from __future__ import annotations

import pytest
from ray.exceptions import RayError

from nemo_rl.distributed._worker_calls import Call, WorkerInputError, _Failure, _failure_error


@pytest.mark.parametrize(
    ("last_line", "expected"),
    [
        ("ValueError: set policy.x to 3", True),
        ("megatron_bridge.errors.CheckpointError: /m lacks 1 tensors of the model: x", True),
        ("RuntimeError: out of memory", False),
        ("no_such_module.OddError: x", False),
        ("json.decoder.NoSuchError: x", False),
    ],
)
def test_subclasses_of_value_error_from_a_constructor_are_input_errors(last_line, expected):
    call = Call(rank=0, name="w-0", method="__init__", ref=None)
    failure = _Failure(call, RayError(f"The actor died: Traceback\n  File x\n{last_line}"))
    error = _failure_error([failure], [], 0)
    assert isinstance(error, WorkerInputError) == expected
    assert str(error).splitlines()[0] == f"worker w-0 (rank 0) failed in __init__: {last_line}"
