# SPDX-License-Identifier: Apache-2.0
"""megatron-core's parallel linears, with a short way through where no gradient is recorded.

In generation and log-probability passes of small models most of the time goes into autograd functions that have nothing
to record: half of a decode step on a CPU. The arithmetic is the same, to the bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor


class ColumnLinear(ColumnParallelLinear):
    """Linear layer split by output features."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Input [s (/ tp with sequence parallelism), b, h] to ([s, b, features / tp], bias to be added later)."""
        if (
            torch.is_grad_enabled()
            or self.explicit_expert_comm
            or runtime_gather_output
            or self.gather_output
        ):
            return super().forward(input_, weight, runtime_gather_output)
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        weight = self.weight if weight is None else weight
        assert weight is not None
        output = F.linear(input_, weight)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


class RowLinear(RowParallelLinear):
    """Linear layer split by input features."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Input [s, b, features / tp] to ([s (/ tp with sequence parallelism), b, h], bias to be added later)."""
        if torch.is_grad_enabled() or self.explicit_expert_comm or not self.input_is_parallel:
            return super().forward(input_)
        output = F.linear(input_, self.weight)
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
        elif self.tp_group is not None and self.tp_group.size() > 1:
            output = reduce_from_tensor_model_parallel_region(output, group=self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None
