# SPDX-License-Identifier: Apache-2.0
"""Generation on Megatron chunks equals transformers, in every layout."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support import oracle
from tests.support.models import hf_token_logprobs, tiny_hf_dir, tiny_model
from tests.support.world import run_world

WORLD = "tests.integration.worlds_generation:generate"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
}
STOPS = [2, 11, 23, 40, 61]  # several, so that rows of a random model end at different times
MAX_NEW = 24


@cache
def _model(family: str) -> PreTrainedModel:
    return tiny_model(family)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("models")
    return {family: tiny_hf_dir(root / family, family) for family in ("llama", "qwen2", "qwen3")}


def prompts(num_rows: int, seed: int = 0, longest: int = 19) -> dict[str, Tensor]:
    """Random prompts of unequal lengths, 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator)
    ids = torch.randint(3, 97, (num_rows, longest), generator=generator)
    ids[torch.arange(longest) >= lengths[:, None]] = 0
    return {"input_ids": ids, "input_lengths": lengths}


@cache
def _greedy_texts(family: str) -> list[list[int]]:
    return _greedy_with(_model(family), prompts(64))


def _greedy_with(model: PreTrainedModel, data: dict[str, Tensor]) -> list[list[int]]:
    """What transformers' own generate makes of each prompt."""
    texts = []
    for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        out = model.generate(
            ids[None, :length], max_new_tokens=MAX_NEW, do_sample=False, eos_token_id=STOPS, pad_token_id=0
        )
        texts.append(out[0].tolist())
    return texts


def _engine(slots: int | None) -> dict[str, Any]:
    return {
        "max_new_tokens": MAX_NEW,
        "stop_token_ids": STOPS,
        "mcore_generation_config": {"num_slots": slots},
    }


def _policy(path: str, tp: int, pp: int, sp: bool, **generation: Any) -> dict[str, Any]:
    """A policy section with Adam, a sharded optimizer and both overlaps."""
    return {
        "model_name": path,
        "precision": "float32",
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 4,
        "max_total_sequence_length": 256,
        "generation": _engine(12) | {"_pad_token_id": 0} | generation,
        "megatron_cfg": {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "sequence_parallel": sp,
            "optimizer": {"optimizer": "adam", "lr": 0.01, "min_lr": 0.01, "use_distributed_optimizer": True},
            "distributed_data_parallel_config": {"overlap_param_gather": True, "overlap_grad_reduce": True},
        },
    }


WORKER_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2_overlapped_gather": {"dp": 2},
    "tp2_sp": {"tp": 2, "sp": True},
    "tp2_pp2": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, "dp2_overlapped_gather") for family in ("llama", "qwen2", "qwen3")]
    + [("qwen2", "tp2_sp"), pytest.param("qwen3", "tp2_pp2", marks=pytest.mark.slow)],
)
def test_worker_generates_with_the_weights_it_has_just_trained(
    paths: dict[str, str], family: str, layout: str
) -> None:
    """Training and generation in turn; with overlap the parameters are still being gathered when generation
    begins."""
    degrees = WORKER_LAYOUTS[layout]
    tp, pp, dp = (degrees.get(axis, 1) for axis in ("tp", "pp", "dp"))
    config = _policy(paths[family], tp, pp, degrees.get("sp", False))
    data = prompts(64)
    ranks = run_world(
        tp * pp * dp,
        "tests.integration.worlds_generation:train_and_generate",
        config=config,
        deadline=240,
        train_data=oracle.batch(),
        data=data,
        rounds=2,
    )
    model = tiny_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for results in zip(*ranks, strict=True):
        assert all(result["gather_open"] == (dp > 1) for result in results)
        model.load_state_dict(results[0]["weights"])
        assert any(not torch.allclose(before[n], w, atol=1e-3) for n, w in results[0]["weights"].items())
        before = results[0]["weights"]
        want = _greedy_with(model, data)
        seen = set()
        for result in results:
            for got, row in enumerate(result["rows"].tolist()):
                total = int(result["out"]["unpadded_sequence_lengths"][got])
                assert result["out"]["output_ids"][got, :total].tolist() == want[row], f"row {row}"
                seen.add(row)
        assert seen == set(range(64))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_equals_transformers_generate(paths: dict[str, str], family: str, layout: str) -> None:
    world, degrees = LAYOUTS[layout]
    call = {"data": prompts(64), "greedy": True}
    ranks = run_world(world, WORLD, path=paths[family], calls=[call], config=_engine(12), **degrees)
    want = _greedy_texts(family)
    assert len({len(text) for text in want}) > 5
    for (out,) in ranks:
        totals = out["unpadded_sequence_lengths"]
        for row, text in enumerate(want):
            assert out["output_ids"][row, : totals[row]].tolist() == text, f"row {row}"
            assert (out["output_ids"][row, totals[row] :] == 0).all()
        ended = torch.tensor([text[-1] in STOPS for text in want])
        assert torch.equal(out["truncated"], ~ended)
        assert 0 < int(ended.sum()) < 64
        assert torch.equal(out["generation_lengths"], totals - call["data"]["input_lengths"])


def _check_logprobs(
    model: PreTrainedModel, data: dict[str, Tensor], out: dict[str, Tensor], temperature: float
) -> None:
    with torch.no_grad():
        want = hf_token_logprobs(model, out["output_ids"], out["unpadded_sequence_lengths"], temperature)
    columns = torch.arange(want.shape[1])
    response = (columns >= data["input_lengths"][:, None]) & (
        columns < out["unpadded_sequence_lengths"][:, None]
    )
    assert (out["logprobs"][~response] == 0).all()
    difference = (out["logprobs"] - want)[response]
    assert float(difference.abs().max()) < 1e-5
    assert abs(float(difference.exp().mean()) - 1.0) < 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_logprobs_are_the_trainers_at_the_same_temperature(
    paths: dict[str, str], layout: str
) -> None:
    """Case 16, for drawn and for greedy tokens; the drawn tokens are the same in every layout."""
    world, degrees = LAYOUTS[layout]
    data = prompts(24) | {"seeds": torch.arange(24) * 31}
    calls = [{"data": data, "greedy": greedy} for greedy in (False, True)]
    config = _engine(8) | {"temperature": 0.6}
    ranks = run_world(world, WORLD, path=paths["qwen3"], calls=calls, config=config, **degrees)
    for outs in ranks:
        for out in outs:
            _check_logprobs(_model("qwen3"), data, out, 0.6)
        for first, own in zip(ranks[0], outs, strict=True):
            assert torch.equal(first["output_ids"], own["output_ids"])
            assert torch.equal(first["logprobs"], own["logprobs"])
    (single,) = run_world(1, WORLD, path=paths["qwen3"], calls=calls[:1], config=config)
    assert torch.equal(single[0]["output_ids"], ranks[0][0]["output_ids"])
    assert not torch.equal(ranks[0][0]["output_ids"], ranks[0][1]["output_ids"])


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("tp2_sp", "float32"), ("pp2", "float32"), ("single", "bfloat16"), ("tp2_sp", "bfloat16")],
)
def test_sampler_and_trainer_of_one_worker_agree(paths: dict[str, str], layout: str, precision: str) -> None:
    """The worker's own get_logprobs, at the sampling temperature, gives what the sampler reports."""
    world, degrees = LAYOUTS[layout]
    layout_arguments = {
        axis: degrees.get(axis, default) for axis, default in (("tp", 1), ("pp", 1), ("sp", False))
    }
    config = _policy(paths["qwen3"], **layout_arguments, temperature=0.6)
    config |= {"precision": precision}
    if precision == "bfloat16":
        config["megatron_cfg"]["pipeline_dtype"] = "bfloat16"
    data = prompts(24) | {"seeds": torch.arange(24)}
    for out in run_world(
        world, "tests.integration.worlds_generation:generate_and_score", config=config, data=data
    ):
        drawn = out["logprobs"] != 0
        assert int(drawn.sum()) > 200
        difference = (out["logprobs"] - out["recomputed"])[drawn]
        if precision == "float32":
            assert float(difference.abs().max()) < 1e-5
            assert abs(float(difference.exp().mean()) - 1.0) < 1e-3
        else:  # two bf16 passes of other shapes: noise, but no bias
            assert float(difference.abs().mean()) < 0.05
            assert abs(float(difference.mean())) < 0.01


def test_tokens_depend_on_seeds_alone(paths: dict[str, str]) -> None:
    """Case 48: other slot counts, orders and shards of the rows give the same tokens."""
    data = prompts(18) | {"seeds": torch.arange(18) * 97 - 5}
    order = torch.randperm(18, generator=torch.Generator().manual_seed(1))
    shards = [order[start::3] for start in range(3)]
    calls = [{"data": data, "greedy": False}]
    calls += [{"data": {key: value[rows] for key, value in data.items()}, "greedy": False} for rows in shards]
    whole: dict[str, Tensor] | None = None
    for slots in (None, 1, 5, 64):
        (outs,) = run_world(1, WORLD, path=paths["llama"], calls=calls, config=_engine(slots))
        whole = whole or outs[0]
        for rows, out in zip([torch.arange(18), *shards], outs, strict=True):
            for got, row in enumerate(rows.tolist()):
                length = int(whole["unpadded_sequence_lengths"][row])
                assert int(out["unpadded_sequence_lengths"][got]) == length
                assert torch.equal(out["output_ids"][got, :length], whole["output_ids"][row, :length])
                assert torch.allclose(
                    out["logprobs"][got, :length], whole["logprobs"][row, :length], atol=2e-6
                )


def test_equal_prompts_give_independent_samples(paths: dict[str, str]) -> None:
    """Groups of one prompt (GRPO), interleaved, more rows than slots: right log-probs, other tokens per
    seed."""
    few = prompts(3)
    data = {key: value.repeat(6, *[1] * (value.ndim - 1)) for key, value in few.items()}
    data["seeds"] = torch.arange(18)
    (outs,) = run_world(
        1, WORLD, path=paths["qwen2"], calls=[{"data": data, "greedy": False}], config=_engine(4)
    )
    _check_logprobs(_model("qwen2"), data, outs[0], 1.0)
    texts = {
        tuple(outs[0]["output_ids"][row, : outs[0]["unpadded_sequence_lengths"][row]].tolist())
        for row in range(18)
    }
    assert len(texts) == 18


def test_without_seeds_torchs_generator_decides(paths: dict[str, str]) -> None:
    calls = [{"data": prompts(8), "greedy": False}] * 2
    ranks = run_world(2, WORLD, path=paths["llama"], calls=calls, config=_engine(None), tp=2)
    assert torch.equal(ranks[0][0]["output_ids"], ranks[1][0]["output_ids"])
    first, second = (out["output_ids"] for out in ranks[0])
    assert first.shape != second.shape or not torch.equal(first, second)


def test_length_limits_truncate(paths: dict[str, str]) -> None:
    """max_total_sequence_length counts the prompt; a prompt that fills it gets an empty response."""
    data = prompts(12)
    config = {"max_new_tokens": 7, "stop_token_ids": []}
    (outs,) = run_world(
        1, WORLD, path=paths["llama"], calls=[{"data": data, "greedy": True}], config=config, max_total=12
    )
    lengths = data["input_lengths"]
    assert torch.equal(outs[0]["generation_lengths"], (12 - lengths).clamp(0, 7))
    assert outs[0]["truncated"].all()
    assert outs[0]["output_ids"].shape[1] == int(outs[0]["unpadded_sequence_lengths"].max())
    full = lengths > 12
    assert full.any()
    assert torch.equal(outs[0]["unpadded_sequence_lengths"][full], lengths[full])


def test_long_rows_grow_the_cache(paths: dict[str, str]) -> None:
    """The first row ends where the cache does (16 + 256 positions) and stays idle beside a row that goes on."""
    lengths = torch.tensor([16, 1, 5])
    ids = prompts(3, longest=16)["input_ids"].clamp_min(3)
    ids[torch.arange(16) >= lengths[:, None]] = 0
    data = {"input_ids": ids, "input_lengths": lengths, "seeds": torch.arange(3)}
    config = {"max_new_tokens": 300, "stop_token_ids": [], "mcore_generation_config": {"num_slots": 2}}
    call = {"data": data, "greedy": False}
    (outs,) = run_world(1, WORLD, path=paths["llama"], calls=[call], config=config, max_total=273)
    assert outs[0]["generation_lengths"].tolist() == [257, 272, 268]
    _check_logprobs(_model("llama"), data, outs[0], 1.0)


@pytest.mark.parametrize("layout", ["single", "tp2", "pp2"])
def test_stop_strings_end_rows_at_the_token_that_completes_them(paths: dict[str, str], layout: str) -> None:
    from tests.integration.worlds_generation import letters_tokenizer

    tokenizer = letters_tokenizer()
    data: dict[str, Any] = prompts(16) | {"seeds": torch.arange(16)}
    own = [None, ["b"], "ef", ["zz", "hh", "gc"]] * 4
    config = {"max_new_tokens": 40, "stop_token_ids": [], "stop_strings": ["ad"], "temperature": 1.3}
    world, degrees = LAYOUTS[layout]
    free = {"data": data, "greedy": False}
    stopped = {"data": data | {"stop_strings": own}, "greedy": False}
    without = config | {"stop_strings": None}
    (base,) = run_world(1, WORLD, path=paths["llama"], calls=[free], config=without)
    ranks = run_world(world, WORLD, path=paths["llama"], calls=[stopped], config=config, **degrees)
    ends = set()
    for (out,) in ranks:
        for row in range(16):
            start, stops = int(data["input_lengths"][row]), ["ad"]
            stops += [own[row]] if isinstance(own[row], str) else own[row] or []
            ids = base[0]["output_ids"][row, start : start + 40].tolist()
            texts = [tokenizer.decode(ids[: count + 1]) for count in range(40)]
            hits = [count + 1 for count, text in enumerate(texts) if any(stop in text for stop in stops)]
            expected = hits[0] if hits else 40
            assert int(out["generation_lengths"][row]) == expected
            assert bool(out["truncated"][row]) == (not hits)
            assert out["output_ids"][row, start : start + expected].tolist() == ids[:expected]
            ends.add(expected)
    assert len(ends) > 4


def test_filters_and_validation_parameters_apply(paths: dict[str, str]) -> None:
    """top_k=1 of the call equals greedy; the configuration's own top_k renormalises."""
    data = prompts(8) | {"seeds": torch.arange(8)}
    calls = [
        {"data": data, "greedy": True},
        {"data": data, "greedy": False, "sampling": {"temperature": 0.5, "top_k": 1}},
        {"data": data, "greedy": False},
    ]
    config = _engine(None) | {"top_k": 2}
    (outs,) = run_world(1, WORLD, path=paths["llama"], calls=calls, config=config)
    assert torch.equal(outs[0]["output_ids"], outs[1]["output_ids"])
    assert (outs[1]["logprobs"] == 0).all()
    with torch.no_grad():
        logits = _model("llama")(outs[2]["output_ids"][:1]).logits[0]
    start, end = int(data["input_lengths"][0]), int(outs[2]["unpadded_sequence_lengths"][0])
    for position in range(start, end):
        values, columns = logits[position - 1].topk(2)
        token = int(outs[2]["output_ids"][0, position])
        assert token in columns.tolist()
        want = torch.log_softmax(values, 0)[columns.tolist().index(token)]
        assert abs(float(outs[2]["logprobs"][0, position] - want)) < 1e-5


@pytest.mark.parametrize(("family", "layers"), [("llama", 4)])
def test_virtual_pipeline_walks_its_chunks(tmp_path: Path, family: str, layers: int) -> None:
    path = tiny_hf_dir(tmp_path / "model", family, layers=layers)
    call = {"data": prompts(6), "greedy": True}
    (single,) = run_world(1, WORLD, path=path, calls=[call], config=_engine(4))
    for (out,) in run_world(2, WORLD, path=path, calls=[call], config=_engine(4), pp=2, vpp=2):
        assert torch.equal(out["output_ids"], single[0]["output_ids"])


def test_layouts_are_real(paths: dict[str, str]) -> None:
    def traffic(**degrees: Any) -> dict[str, Any]:
        options = {"tp": 1, "pp": 1, "sp": False} | degrees
        function = "tests.integration.worlds_generation:count_traffic"
        return run_world(
            options["tp"] * options["pp"], function, path=paths["llama"], data=prompts(4), **options
        )[0]

    single, tensor = traffic(), traffic(tp=2)
    sequence, pipeline = traffic(tp=2, sp=True), traffic(pp=2)
    assert single["calls"] == {}
    assert tensor["qkv"][0] * 2 == single["qkv"][0] == pipeline["qkv"][0]
    assert pipeline["layers"] * 2 == single["layers"] == tensor["layers"]
    names = [{name.split(":")[-1] for name in seen["calls"]} for seen in (tensor, sequence, pipeline)]
    assert any("all_reduce" in name or "allreduce" in name for name in names[0])
    assert any("scatter" in name or "all_to_all" in name for name in names[1]), names[1]
    assert any("send" in name for name in names[2])


def test_kv_memory_is_bounded(paths: dict[str, str]) -> None:
    """2 layers x 2 KV heads x 8 x (K, V) x 4 bytes = 256 bytes a token; 48 tokens a row: room for 3 of 9 rows."""
    calls = [{"data": prompts(9), "greedy": True}]
    base = _engine(None)
    (free,) = run_world(1, WORLD, path=paths["llama"], calls=calls, config=base)
    small = base | {"mcore_generation_config": {"buffer_size_gb": 3.5 * 48 * 256 / 1e9}}
    (bounded,) = run_world(1, WORLD, path=paths["llama"], calls=calls, config=small)
    assert free[0]["cache_bytes"] == 9 * 48 * 256
    assert bounded[0]["cache_bytes"] == 3 * 48 * 256
    assert torch.equal(bounded[0]["output_ids"], free[0]["output_ids"])
    none = base | {"mcore_generation_config": {"buffer_size_gb": 1e-6}}
    message = _refusal(path=paths["llama"], calls=calls, config=none)
    assert "buffer_size_gb=1e-06 holds no 1 rows of 48 tokens; 1.23e-05 does" in message


def test_no_rows_give_no_rows(paths: dict[str, str]) -> None:
    """A data-parallel rank may have nothing to do, or only prompts without room for a token."""
    calls = [{"data": {key: value[:0] for key, value in prompts(2).items()}, "greedy": True}]
    calls += [{"data": prompts(3, longest=9), "greedy": False}]
    (outs,) = run_world(1, WORLD, path=paths["llama"], calls=calls, config=_engine(None), max_total=1)
    for out, rows in zip(outs, (0, 3), strict=True):
        assert out["output_ids"].shape[0] == len(out["truncated"]) == rows
        assert out["output_ids"].dtype == out["generation_lengths"].dtype == torch.int64
        assert int(out["generation_lengths"].sum()) == 0
        assert out["truncated"].all()


def _refusal(world: int = 1, **arguments: Any) -> str:
    return run_world(world, "tests.integration.worlds_generation:refusal", **arguments)[0]


def test_bad_input_says_what_to_do(paths: dict[str, str]) -> None:
    path, good = paths["llama"], prompts(2)
    left = {"input_ids": good["input_ids"].roll(1, 1), "input_lengths": good["input_lengths"]}
    message = _refusal(path=path, calls=[{"data": left, "greedy": True}], config=_engine(None))
    assert re.match(r"row 0 of input_ids has token \d+ at position \d+, after its length", message)
    empty = {"input_ids": torch.tensor([[5, 6, 7], [0, 0, 0]]), "input_lengths": torch.tensor([3, 0])}
    message = _refusal(path=path, calls=[{"data": empty, "greedy": True}], config=_engine(None))
    assert re.match(r"input_lengths\[1\] is 0.*BOS", message)
    message = _refusal(2, path=path, calls=[], config=_engine(3), tp=2)
    assert re.search(r"num_slots=3 is not a multiple.*4 works", message)
    message = _refusal(path=path, calls=[], config={"stop_token_ids": [97]})
    assert "stop_token_ids contains [97]" in message
