# SPDX-License-Identifier: Apache-2.0
"""Every layout of the Megatron engine against the oracle, and that the layout is real (cases 1, 2, 24)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl.algorithms.loss.nll import NLLLoss
from tests.support import oracle
from tests.support.models import tiny_hf_dir
from tests.support.world import run_world

LAYOUTS = {
    "single": {"tp": 1, "pp": 1, "dp": 1},
    "tp2": {"tp": 2, "pp": 1, "dp": 1},
    "pp2": {"tp": 1, "pp": 2, "dp": 1},
    "dp2": {"tp": 1, "pp": 1, "dp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2, "dp": 1},
    "tp2_sp": {"tp": 2, "pp": 1, "dp": 1, "sp": True},
}


def make_config(
    path: str, *, tp: int = 1, pp: int = 1, dp: int = 1, sp: bool = False, **extra: Any
) -> dict[str, Any]:
    """A policy config with plain SGD at 0.1, no clipping, micro-batches of 2 in a global batch of 8."""
    del dp
    optimizer = {"optimizer": "sgd", "lr": 0.1, "min_lr": 0.0, "sgd_momentum": 0.0, "weight_decay": 0.0}
    optimizer |= {"use_distributed_optimizer": False, "clip_grad": None}
    return {
        "model_name": path,
        "precision": extra.pop("precision", "float32"),
        "train_global_batch_size": 8,
        "train_micro_batch_size": extra.pop("mbs", 2),
        "logprob_batch_size": 4,
        "max_grad_norm": None,
        "megatron_cfg": {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "sequence_parallel": sp,
            "optimizer": optimizer | extra.pop("optimizer", {}),
            **extra,
        },
    }


def token_mean(data: dict[str, Any]) -> Any:
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    return lambda logprobs: -(logprobs[:, 1:] * mask).sum() / mask.sum()


def world_size(layout: dict[str, Any]) -> int:
    return layout["tp"] * layout["pp"] * layout["dp"]


def gathered_logprobs(results: list[dict[str, Any]]) -> torch.Tensor:
    by_dp = {r["coordinates"][2]: r["logprobs"] for r in results}
    return torch.cat([by_dp[rank] for rank in sorted(by_dp)])


def assert_matches(results: list[dict[str, Any]], expected: oracle.Oracle) -> None:
    assert (gathered_logprobs(results) - expected.logprobs).abs().max() <= 1e-5
    for result in results:
        train = result["train"][0]
        assert abs(float(train["loss"][0]) - expected.loss) <= 1e-5 * max(1.0, abs(expected.loss))
        assert float(train["grad_norm"][0]) == pytest.approx(expected.grad_norm, rel=1e-5)
        oracle.assert_gradients_close(result["gradients"], expected)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_hf_dir(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_oracle(name: str, qwen3: str) -> None:
    layout = LAYOUTS[name]
    data = oracle.batch()
    expected = oracle.run(qwen3, data, token_mean(data))
    results = run_world(
        world_size(layout),
        "tests.integration.worlds_policy:train_step",
        config=make_config(qwen3, **layout),
        data=data,
        loss_fn=NLLLoss(),
    )
    assert_matches(results, expected)
    after = {name: w - 0.1 * expected.gradients[name] for name, w in expected.weights.items()}
    oracle.assert_update_close(results[0]["weights"], after, expected.weights)
    assert_layout_is_real(results, layout)


def assert_layout_is_real(results: list[dict[str, Any]], layout: dict[str, Any]) -> None:
    tp, pp, dp = layout["tp"], layout["pp"], layout["dp"]
    assert {r["coordinates"] for r in results} == {
        (t, p, d) for t in range(tp) for p in range(pp) for d in range(dp)
    }
    for result in results:
        shapes, traffic = result["shapes"], result["communication"]
        assert sum(name.endswith("linear_qkv.weight") for name in shapes) == 4 // pp
        assert (
            next(s for n, s in shapes.items() if n.endswith("linear_qkv.weight"))[0] == (4 + 2 + 2) * 8 // tp
        )
        p2p = sum(count for name, count in traffic.items() if name in ("send", "recv_", "recv_any_source_"))
        assert (p2p > 0) == (pp > 1), traffic
        if layout.get("sp"):
            assert traffic["_allgather_base_"] > 0, traffic
            assert traffic["_reduce_scatter_base_"] > 0, traffic
        elif tp > 1:
            assert traffic["allreduce_"] >= 2 * 4 // pp, traffic
        if dp > 1:
            assert traffic["allreduce_"] + traffic["allreduce_coalesced_"] >= 3, traffic
    if tp > 1:  # case 24: replicated parameters have one gradient
        for a in results:
            for b in results:
                if a["coordinates"][1:] == b["coordinates"][1:]:
                    for name, grad in a["replicated_grads"].items():
                        assert torch.equal(grad, b["replicated_grads"][name]), name


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [("llama", True, "pp2"), ("qwen2", True, "tp2"), ("llama", False, "tp2_pp2")],
)
def test_families_and_tied_heads(family: str, tied: bool, layout: str, tmp_path: Any) -> None:
    path = tiny_hf_dir(tmp_path, family, tied=tied)
    data = oracle.batch()
    expected = oracle.run(path, data, token_mean(data))
    results = run_world(
        world_size(LAYOUTS[layout]),
        "tests.integration.worlds_policy:train_step",
        config=make_config(path, **LAYOUTS[layout]),
        data=data,
        loss_fn=NLLLoss(),
    )
    assert_matches(results, expected)
    after = {
        n: w - 0.1 * expected.gradients[n] for n, w in expected.weights.items() if n in expected.gradients
    }
    oracle.assert_update_close(results[0]["weights"], after, expected.weights)


@pytest.mark.parametrize("mbs", [8, 4, 2, 1])
def test_number_of_microbatches_does_not_matter(mbs: int, qwen3: str) -> None:
    """Case 1: eight rows as 1, 2, 4 and 8 micro-batches."""
    data = oracle.batch()
    expected = oracle.run(qwen3, data, token_mean(data))
    (result,) = run_world(
        1,
        "tests.integration.worlds_policy:train_step",
        config=make_config(qwen3, mbs=mbs),
        data=data,
        loss_fn=NLLLoss(),
    )
    oracle.assert_gradients_close(result["gradients"], expected, rtol=2e-6)
    assert float(result["train"][0]["grad_norm"][0]) == pytest.approx(expected.grad_norm, rel=1e-6)
    assert float(result["train"][0]["loss"][0]) == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
def test_distributed_optimizer(overlap: bool, qwen3: str) -> None:
    """DP=2 with masters and moments sharded: gradients strictly, the AdamW update to 1e-3."""
    data = oracle.batch()
    expected = oracle.run(qwen3, data, token_mean(data))
    adam = {
        "optimizer": "adam",
        "lr": 1e-2,
        "min_lr": 0.0,
        "weight_decay": 0.0,
        "use_distributed_optimizer": True,
    }
    ddp = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    results = run_world(
        2,
        "tests.integration.worlds_policy:train_step",
        config=make_config(qwen3, optimizer=adam, distributed_data_parallel_config=ddp),
        data=data,
        loss_fn=NLLLoss(),
        steps=3,
    )
    assert_matches(results, expected)
    after = adam_steps(qwen3, data, steps=3, lr=1e-2)
    for result in results:
        oracle.assert_update_close(result["weights"], after, expected.weights, rtol=1e-3)
        assert (
            result["communication"]["_reduce_scatter_base_"]
            + result["communication"]["reduce_scatter_tensor_coalesced_"]
            > 0
        )
    for name, tensor in results[0]["weights"].items():
        assert torch.equal(tensor, results[1]["weights"][name]), name


def adam_steps(path: str, data: dict[str, Any], steps: int, lr: float) -> dict[str, torch.Tensor]:
    """The oracle's weights after `steps` of AdamW without decay."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        logprobs = oracle.hf_token_logprobs(model, data["input_ids"], data["input_lengths"])
        token_mean(data)(logprobs).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
