# SPDX-License-Identifier: Apache-2.0
"""The bridge against transformers, over layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.models import hf_token_logprobs, tiny_hf_dir, tiny_model
from tests.support.world import run_world

WORLDS = "tests.integration.worlds_bridge:"
MODELS = [(family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)]
LAYOUTS = [  # tp, pp, sequence parallel
    (1, 1, False),
    (2, 1, False),
    (2, 1, True),
    (1, 2, False),
    (2, 2, True),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("hf")
    return [tiny_hf_dir(root / f"{family}-{tied}", family, tied=tied) for family, tied in MODELS]


@pytest.fixture(scope="module")
def input_ids() -> Tensor:
    return torch.randint(0, 97, (4, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def oracle(paths: list[str], input_ids: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [
            hf_token_logprobs(AutoModelForCausalLM.from_pretrained(path), input_ids, torch.tensor([12] * 4))
            for path in paths
        ]


@pytest.mark.parametrize(("tp", "pp", "sp"), LAYOUTS)
def test_logprobs_equal_transformers_and_the_export_is_bit_equal(
    paths: list[str], input_ids: Tensor, oracle: list[Tensor], tp: int, pp: int, sp: bool
) -> None:
    ranks = run_world(
        tp * pp, WORLDS + "logprobs_and_round_trip", paths=paths, input_ids=input_ids, tp=tp, pp=pp, sp=sp
    )
    for index, (family, tied) in enumerate(MODELS):
        results = [rank[index] for rank in ranks]
        expected_names = set(load_file(Path(paths[index]) / "model.safetensors"))
        for result in results:
            assert result["wrong"] == [], (family, tied)
            assert set(result["names"]) == expected_names
            assert result["names"] == results[0]["names"] == list(result["specs"])
        seen = [result["logprobs"] for result in results if result["logprobs"] is not None]
        assert len(seen) == tp, "the last stage's ranks have log-probs"
        for logprobs in seen:
            assert (logprobs - oracle[index]).abs().max() < 1e-5, (family, tied)
        _assert_layout_is_real(results, tp, pp, tied)


def _assert_layout_is_real(results: list[dict[str, Any]], tp: int, pp: int, tied: bool) -> None:
    shapes = [result["shapes"] for result in results]
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert shapes[0][qkv][0] == 64 // tp
    assert shapes[0]["embedding.word_embeddings.weight"][0] == (97 + tp - 1) // tp
    first, last = shapes[0], shapes[-1]
    if pp == 1:
        assert first.keys() == last.keys()
        assert ("output_layer.weight" in first) == (not tied)
    else:
        assert not first.keys() & last.keys()
        assert "output_layer.weight" in last, "with PP > 1 the last stage has a copy even when tied"


def test_fewer_key_value_heads_than_ranks(tmp_path: Path, input_ids: Tensor) -> None:
    path = tiny_hf_dir(tmp_path / "m", "qwen2", heads=8, kv_heads=2, hidden=64)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path)
        expected = hf_token_logprobs(model, input_ids, torch.tensor([12] * 4))
    ranks = run_world(
        4, WORLDS + "logprobs_and_round_trip", paths=[path], input_ids=input_ids, tp=4, pp=1, sp=False
    )
    for (result,) in ranks:
        assert result["wrong"] == []
        assert result["shapes"]["decoder.layers.0.self_attention.linear_qkv.weight"] == (24, 64)
        assert (result["logprobs"] - expected).abs().max() < 1e-5


def test_virtual_pipeline_stages(tmp_path: Path, input_ids: Tensor) -> None:
    path = tiny_hf_dir(tmp_path / "m", "qwen3", layers=4, tied=True)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path)
        expected = hf_token_logprobs(model, input_ids, torch.tensor([12] * 4))
    ranks = run_world(
        2, WORLDS + "logprobs_and_round_trip", paths=[path], input_ids=input_ids, tp=1, pp=2, sp=False, vpp=2
    )
    assert all(result["wrong"] == [] for (result,) in ranks)
    assert "decoder.layers.2.input_layernorm.weight" in ranks[0][0]["shapes"]
    assert (ranks[1][0]["logprobs"] - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("tp", "sp", "recompute"), [(1, False, None), (2, False, None), (2, True, None), (2, True, "full")]
)
def test_gradients_equal_transformers(
    paths: list[str], input_ids: Tensor, tp: int, sp: bool, recompute: str | None
) -> None:
    weights = torch.rand(2, 12, generator=torch.Generator().manual_seed(6)) - 0.3
    overrides: dict[str, Any] = {}
    if recompute:
        overrides = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    ranks = run_world(
        tp,
        WORLDS + "gradients",
        paths=paths,
        input_ids=input_ids[:2],
        weights=weights,
        tp=tp,
        sp=sp,
        calculate_per_token_loss=True,
        **overrides,
    )
    for index, path in enumerate(paths):
        model = AutoModelForCausalLM.from_pretrained(path)
        (hf_token_logprobs(model, input_ids[:2], torch.tensor([12, 12])) * weights).sum().backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        total = torch.stack([g.norm() for g in expected.values()]).norm()
        for rank in ranks:
            for name, gradient in rank[index].items():
                error = (gradient - expected[name]).norm()
                assert error <= max(1e-5 * expected[name].norm(), 1e-7 * total), (path, name, error)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_bf16_round_trip_is_bit_equal(tmp_path: Path, tp: int, pp: int) -> None:
    model = tiny_model("qwen3", tied=True).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    for changed in run_world(tp * pp, WORLDS + "bf16_round_trip", path=str(tmp_path / "m"), tp=tp, pp=pp):
        assert changed == []


@pytest.mark.parametrize(("pp", "vpp", "first"), [(2, None, None), (2, 2, None), (2, None, 1)])
def test_layer_i_arrives_as_layer_i(tmp_path: Path, pp: int, vpp: int | None, first: int | None) -> None:
    path = tiny_hf_dir(tmp_path / "m", "qwen3", layers=4)
    expected = set(load_file(Path(path) / "model.safetensors"))
    for arrived in run_world(pp, WORLDS + "fill_layers", path=path, tp=1, pp=pp, vpp=vpp, first=first):
        assert arrived.keys() == expected
        for name, value in arrived.items():
            if ".layers." in name:
                assert value == float(name.split(".layers.")[1].split(".")[0]), name


@pytest.mark.parametrize("load_weights", [True, False])
def test_vocabulary_padding_is_zero_and_its_size_is_readable(paths: list[str], load_weights: bool) -> None:
    ranks = run_world(2, WORLDS + "padding_rows", path=paths[0], tp=2, load_weights=load_weights)
    assert [padding for _, padding, _, _ in ranks] == [0, 1]
    for total, _, padded_vocab_size, real in ranks:
        assert total == 0.0
        assert padded_vocab_size == 98
        assert real > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_dropout_is_reproducible_and_recompute_draws_the_same(
    paths: list[str], input_ids: Tensor, tp: int
) -> None:
    plain, full, selective = (
        run_world(
            tp, WORLDS + "dropout_smoke", path=paths[0], input_ids=input_ids[:2], tp=tp, recompute=recompute
        )
        for recompute in (None, "full", "selective")
    )
    for a, b, c in zip(plain, full, selective, strict=True):
        for result in (a, b, c):
            assert result["same"]
            assert result["differs"]
            assert result["finite"]
        for name, gradient in a["gradients"].items():
            torch.testing.assert_close(b["gradients"][name], gradient, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(c["gradients"][name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)])
def test_packed_rows_equal_rows_alone_and_are_isolated(paths: list[str], tp: int, sp: bool) -> None:
    generator = torch.Generator().manual_seed(8)
    rows = [torch.randint(0, 97, (n,), generator=generator) for n in (3, 7, 1, 6, 4)]
    poisoned = [*rows[:1], torch.randint(0, 97, (7,), generator=generator), *rows[2:]]
    path = paths[4]
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected = [hf_token_logprobs(model, row[None], torch.tensor([len(row)]))[0] for row in rows]
    call = {"path": path, "tp": tp, "sp": sp}
    before, after = (run_world(tp, WORLDS + "packed_logprobs", rows=r, **call)[0] for r in (rows, poisoned))
    position = 0
    for index, row in enumerate(rows):
        inside = slice(position + 1, position + len(row))  # a row's first token has nothing before it
        assert (before[inside] - expected[index][1:]).abs().max() < 1e-5 if len(row) > 1 else True
        if index != 1:
            assert torch.equal(before[inside], after[inside])
        position += len(row)


@pytest.mark.parametrize(("family", "tolerance"), [("llama", 0.0), ("qwen3", 0.0), ("qwen2", 0.1)])
def test_bf16_rounds_like_transformers(
    tmp_path: Path, input_ids: Tensor, family: str, tolerance: float
) -> None:
    # megatron-core rounds before it adds a bias, transformers after: only Qwen2 has biases.
    tiny_model(family).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)(
            input_ids
        ).logits
    (logits,) = run_world(1, WORLDS + "bf16_logits", path=str(tmp_path / "m"), input_ids=input_ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)])
def test_layers_give_the_same_bits_by_the_short_way(
    paths: list[str], input_ids: Tensor, tp: int, sp: bool
) -> None:
    for rank in run_world(tp, WORLDS + "short_and_long_way", paths=paths, input_ids=input_ids, tp=tp, sp=sp):
        for (short, long), (family, _) in zip(rank, MODELS, strict=True):
            assert short.abs().sum() > 0
            assert short.equal(long), family
