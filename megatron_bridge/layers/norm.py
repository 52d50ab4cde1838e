# SPDX-License-Identifier: Apache-2.0
"""RMSNorm for megatron-core layer specs: sequence parallel, zero-centred gamma, transformers' rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight, the statistics in fp32, as transformers rounds it.

    Megatron's builder signature. With sequence parallelism the weight's gradient is partial on each tensor-parallel
    rank; the ``sequence_parallel`` attribute makes megatron sum it.

    Args:
        config: transformer config; ``layernorm_zero_centered_gamma`` stores gamma - 1.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        del unused
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        fill = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        if self.zero_centered:  # Gemma multiplies before it rounds
            normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps)
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        if x.device.type == "cpu" and torch.is_grad_enabled():
            return _CpuRMSNorm.apply(x, self.weight, self.eps)
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return self.weight * F.rms_norm(x, (x.shape[-1],), None, self.eps)  # rounds before it multiplies


class _CpuRMSNorm(torch.autograd.Function):
    """The norm with its gradient written out: a third of the memory passes that autograd makes on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyrefly: ignore[bad-override]
        x, weight, scale = ctx.saved_tensors
        hidden = x.shape[-1]
        wide_grad, wide_weight = grad.float(), weight.float()
        normed = x.float() * scale
        product = (wide_grad * normed).reshape(-1, hidden)
        grad_weight = product.sum(0).to(weight.dtype)
        # dx = scale * (g w - normed * mean(g w normed))
        mean = torch.mv(product, wide_weight).mul_(-1.0 / hidden).view(scale.shape)
        grad_x = (wide_grad * wide_weight).addcmul_(normed, mean).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None
