# SPDX-License-Identifier: Apache-2.0
"""Attention, RoPE and norm against transformers' own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_bridge.errors import UnsupportedModelError
from megatron_bridge.layers.attention import AttentionMeta, RotaryTable, apply_rotary, attend
from megatron_bridge.layers.mlp import swiglu
from megatron_bridge.layers.norm import RMSNorm
from megatron_bridge.rope import rotary_table


def qkv(
    s: int, b: int = 1, heads: int = 4, groups: int = 2, d: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(s, b, h, d, generator=generator) for h in (heads, groups, groups))
    return q, k, v


def positions(s: int, b: int = 1) -> Tensor:
    return torch.arange(s).expand(b, s)


def naive(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """[s, b, h, d] with a bool mask [s, s]; softmax written out."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale
    probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", probabilities, v).flatten(2)


def test_causal_equals_the_formula() -> None:
    q, k, v = qkv(9, b=3)
    out = attend(q, k, v, AttentionMeta(positions(9, 3)), softmax_scale=0.3)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(out, naive(q, k, v, causal, 0.3), rtol=1e-5, atol=1e-6)
    assert out.shape == (9, 3, 32)


@pytest.mark.parametrize("tail", [0, 3])
def test_packed_rows_equal_single_rows(tail: int) -> None:
    lengths = [3, 5, 1, 7]
    total = sum(lengths) + tail
    q, k, v = qkv(total)
    cu = torch.tensor([0, 3, 8, 9, 16])
    out = attend(q, k, v, AttentionMeta(positions(total), cu), softmax_scale=0.35)
    assert out.shape == (total, 1, 32)
    start = 0
    for n in lengths:
        rows = slice(start, start + n)
        alone = attend(q[rows], k[rows], v[rows], AttentionMeta(positions(n)), softmax_scale=0.35)
        assert torch.equal(out[rows], alone)
        start += n


def test_poisoned_row_leaves_the_others_bit_identical() -> None:
    q, k, v = qkv(16)
    cu = torch.tensor([0, 3, 8, 9, 16])
    before = attend(q, k, v, AttentionMeta(positions(16), cu), softmax_scale=0.35)
    poisoned = [x.clone() for x in (q, k, v)]
    for x in poisoned:
        x[3:8] = torch.randn(5, *x.shape[1:]) * 50
    after = attend(*poisoned, AttentionMeta(positions(16), cu), softmax_scale=0.35)
    others = [*range(3), *range(8, 16)]
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[3:8], before[3:8])


def test_packed_gradients_equal_a_block_diagonal_mask() -> None:
    cu, total = torch.tensor([0, 4, 6, 11]), 11
    rows = torch.repeat_interleave(torch.arange(3), torch.diff(cu))
    allowed = (rows[:, None] == rows[None]) & torch.ones(total, total, dtype=torch.bool).tril()
    inputs = [x.requires_grad_() for x in qkv(total)]
    seed = torch.randn(total, 1, 32, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(naive(*inputs, allowed, 0.4), inputs, seed)
    out = attend(*inputs, AttentionMeta(positions(total), cu), softmax_scale=0.4)
    for got, want in zip(torch.autograd.grad(out, inputs, seed), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_packed_needs_one_batch_row_and_a_fitting_cu_seqlens() -> None:
    q, k, v = qkv(4, b=2)
    with pytest.raises(ValueError, match="batch of one"):
        attend(q, k, v, AttentionMeta(positions(4, 2), torch.tensor([0, 4])), softmax_scale=1.0)
    q, k, v = qkv(4)
    with pytest.raises(ValueError, match="ends at 6"):
        attend(q, k, v, AttentionMeta(positions(4), torch.tensor([0, 2, 6])), softmax_scale=1.0)


def llama_config(**rope: Any) -> LlamaConfig:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters=parameters,
    )


ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
]


@pytest.mark.parametrize("rope", ROPES)
def test_rope_equals_transformers_beyond_the_original_context(rope: dict[str, Any]) -> None:
    config = llama_config(**rope)
    reference = LlamaRotaryEmbedding(config)
    table = rotary_table(config)
    assert torch.equal(table.inv_freq, reference.inv_freq)
    position_ids = torch.stack([torch.arange(200), torch.arange(200) * 7 + 3])
    q = torch.randn(200, 2, 4, 16)
    cos, sin = reference(q, position_ids)
    ours_cos, ours_sin = table.cos_sin(position_ids, torch.float32)
    assert torch.equal(ours_cos[:, :, 0].transpose(0, 1), cos)
    assert torch.equal(ours_sin[:, :, 0, 8:].transpose(0, 1), sin[..., 8:])
    assert torch.equal(ours_sin[:, :, 0, :8].transpose(0, 1), -sin[..., :8])
    expected, _ = apply_rotary_pos_emb(q.permute(1, 2, 0, 3), q.permute(1, 2, 0, 3), cos, sin)
    ours = apply_rotary(q, ours_cos, ours_sin)
    torch.testing.assert_close(ours.permute(1, 2, 0, 3), expected, rtol=0, atol=1e-6)
    few = apply_rotary(q[7:8], ours_cos[7:8], ours_sin[7:8])
    torch.testing.assert_close(few.permute(1, 2, 0, 3), expected[:, :, 7:8], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_rope_types_that_depend_on_the_row_are_refused_by_name(kind: str) -> None:
    config = llama_config()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=f"'{kind}'.*supported: default, linear, llama3, yarn"):
        rotary_table(config)


def test_rotary_gradient_and_partial_rotation() -> None:
    table = RotaryTable(torch.tensor([1.0, 0.1]))  # 4 of 6 channels
    cos, sin = table.cos_sin(positions(5), torch.float64)
    x = torch.randn(5, 1, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.equal(apply_rotary(x, cos, sin)[..., 4:], x[..., 4:])
    assert torch.autograd.gradcheck(lambda y: apply_rotary(y, cos, sin), (x,))


def norm_config(**options: Any) -> SimpleNamespace:
    defaults: dict[str, Any] = {
        "layernorm_zero_centered_gamma": False,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**{**defaults, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = LlamaRMSNorm(48, eps=1e-6).to(dtype)
    ours = RMSNorm(norm_config(params_dtype=dtype), 48, 1e-6)
    with torch.no_grad():
        reference.weight.normal_()
        ours.weight.copy_(reference.weight)
    x = (torch.randn(7, 3, 48) * 3).to(dtype)
    seed = torch.randn(7, 3, 48).to(dtype)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outs = [reference(inputs[0]), ours(inputs[1])]
    for out in outs:
        out.backward(seed)
    exact = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(outs[1], outs[0], **exact)
    loose = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **loose)
    torch.testing.assert_close(ours.weight.grad, reference.weight.grad, rtol=loose["rtol"], atol=0.1)


def test_zero_centred_norm_and_the_sequence_parallel_mark() -> None:
    ours = RMSNorm(norm_config(layernorm_zero_centered_gamma=True, sequence_parallel=True), 16, 1e-6)
    x = torch.randn(4, 16)
    assert not ours.weight.any()
    torch.testing.assert_close(ours(x), torch.nn.functional.rms_norm(x, (16,), None, 1e-6))
    assert ours.weight.sequence_parallel


def test_nothing_here_lives_on_the_cpu_by_accident() -> None:
    table = RotaryTable(torch.tensor([1.0, 0.1, 0.01, 0.001]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(16, 1, h, 8, device="cuda") for h in (4, 2, 2))
        meta = AttentionMeta(
            torch.arange(16, device="cuda")[None], torch.tensor([0, 16], device="cuda"), lengths=[16]
        )
        cos, sin = meta.rope(table, torch.float32)
        out = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, meta, softmax_scale=1.0)
        assert out.device.type == "cuda"


def test_swiglu_equals_the_formula() -> None:
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(swiglu(x), torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(swiglu(x.detach()), swiglu(x).detach(), rtol=0, atol=0)
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_norm_gradient() -> None:
    ours = RMSNorm(norm_config(params_dtype=torch.float64), 6, 1e-6)
    reference = torch.nn.RMSNorm(6, 1e-6, dtype=torch.float64)
    with torch.no_grad():
        ours.weight.normal_()
        reference.weight.copy_(ours.weight)
    x = torch.randn(5, 2, 6)
    inputs = [x.double().requires_grad_(), x.double().requires_grad_()]
    seed = torch.randn(5, 2, 6, dtype=torch.float64)
    ours(inputs[0]).backward(seed)
    reference(inputs[1]).backward(seed)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.weight.grad, reference.weight.grad, rtol=1e-5, atol=1e-6)
