# SPDX-License-Identifier: Apache-2.0
"""`Policy` through Ray: every layout gives what one worker gives, whatever the number of rows."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.loss.nll import NLLLoss
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import WorkerError, WorkerInputError
from nemo_rl.models.generation.interfaces import GenerationSamplingParams
from nemo_rl.models.policy.lm_policy import Policy
from tests.support.models import hf_token_logprobs, tiny_hf_dir

LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {"dp": 2}, "dp3": {"dp": 3}}
VOCAB = 97


def make_config(path, tp=1, pp=1, **_dp):
    optimizer = {"optimizer": "sgd", "lr": 0.1, "min_lr": 0.0, "sgd_momentum": 0.0, "weight_decay": 0.0}
    return {
        "model_name": path,
        "precision": "float32",
        "train_global_batch_size": 6,
        "train_micro_batch_size": 1,
        "logprob_batch_size": 2,
        "max_total_sequence_length": 32,
        "megatron_cfg": {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "optimizer": {**optimizer, "use_distributed_optimizer": False},
        },
        "generation": {
            "backend": "megatron",
            "max_new_tokens": 6,
            "temperature": 1.0,
            "stop_token_ids": [],
            "_pad_token_id": 0,
        },
    }


def make_data(rows=12, length=12):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([12, 5, 9, 7, 3, 12, 8, 10, 4, 11, 6, 7])[:rows]
    positions = torch.arange(length)
    ids = torch.randint(1, VOCAB, (12, length), generator=generator)[:rows]
    mask = (positions < lengths[:, None]).float()
    return BatchedDataDict(
        {
            "input_ids": ids * mask.long(),
            "input_lengths": lengths,
            "token_mask": mask * (positions >= 2),
            "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1])[:rows],
            "seeds": torch.arange(100, 100 + rows),
        }
    )


def use(policy, export_dir):
    """What a caller sees of a policy: scores, samples, two training steps, scores, the exported weights."""
    data, five = make_data(), make_data(5)
    out = {
        "logprobs": policy.get_logprobs(data)["logprobs"],
        "logprobs_5": policy.get_logprobs(five)["logprobs"],
        "topk": policy.get_topk_logits(five, k=3)["topk_logits"],
        "samples": policy.generate(five),
        "greedy": policy.generate(five, greedy=True),
        "sampling": policy.generate(five, sampling=GenerationSamplingParams(temperature=0.0)),
        "evaluated": policy.train(data, NLLLoss(), eval_mode=True),
        "trained": policy.train(data, NLLLoss()),
        "after": policy.get_logprobs(data)["logprobs"],
        "reference": policy.get_reference_policy_logprobs(data)["reference_logprobs"],
        "refit": policy.prepare_refit_info(),
    }
    policy.export_hf(export_dir)
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_hf_dir(tmp_path_factory.mktemp("model"), "qwen3", layers=2)


@pytest.fixture(scope="module")
def single(ray_session, model, tmp_path_factory):
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

    cluster = RayVirtualCluster([1], use_gpus=False)
    policy = Policy(cluster, make_config(model), tokenizer=None)
    out = use(policy, tmp_path_factory.mktemp("export"))
    assert policy.shutdown()
    cluster.shutdown()
    return out


def test_one_worker_equals_transformers(single, model):
    data = make_data()
    expected = hf_token_logprobs(
        AutoModelForCausalLM.from_pretrained(model), data["input_ids"], data["input_lengths"]
    )
    assert (single["logprobs"] - expected).abs().max() < 1e-5
    assert torch.equal(single["reference"], single["logprobs"])
    assert (single["after"] - single["logprobs"]).abs().max() > 1e-3
    assert single["trained"]["loss"].shape == (2,)


@pytest.mark.parametrize("name", ["tp2", "pp2", "dp2", pytest.param("dp3", marks=pytest.mark.slow)])
def test_layout_equals_one_worker(cpu_cluster, single, model, tmp_path, name):
    layout = LAYOUTS[name]
    workers = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)
    policy = Policy(cpu_cluster(workers), make_config(model, **layout), tokenizer=None, name_prefix=name)
    assert policy.data_parallel_size == layout.get("dp", 1)
    got = use(policy, tmp_path)
    for key in ("logprobs", "logprobs_5", "after", "reference", "topk"):
        assert got[key].shape == single[key].shape
        assert (got[key] - single[key]).abs().max() < 1e-5, key
    for phase in ("evaluated", "trained"):
        torch.testing.assert_close(got[phase]["loss"], single[phase]["loss"], rtol=1e-5, atol=0)
        for metric in ("global_valid_seqs", "global_valid_toks"):
            assert got[phase][metric] == single[phase][metric] == got[phase]["all_mb_metrics"][metric]
    torch.testing.assert_close(got["trained"]["grad_norm"], single["trained"]["grad_norm"], rtol=1e-5, atol=0)
    for kind in ("samples", "greedy"):  # case 48: seeds, not the number of workers, decide
        for key in ("output_ids", "generation_lengths", "unpadded_sequence_lengths"):
            assert torch.equal(got[kind][key], single[kind][key]), (kind, key)
        assert (got[kind]["logprobs"] - single[kind]["logprobs"]).abs().max() < 1e-5
    assert torch.equal(got["sampling"]["output_ids"], got["greedy"]["output_ids"])
    assert got["refit"] == single["refit"]
    data = make_data()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = hf_token_logprobs(exported, data["input_ids"], data["input_lengths"])
    assert (again - got["after"]).abs().max() < 1e-5
    assert policy.shutdown()
    assert policy.shutdown()


def test_checkpoint_goes_on_where_it_was(cpu_cluster, model, tmp_path):
    data = make_data()
    config = make_config(model)
    os.chdir(tmp_path)  # a relative path means the driver's directory
    first = Policy(cpu_cluster(1), config, tokenizer=None)
    first.train(data, NLLLoss())
    first.save_checkpoint("weights", "optimizer")
    scores, step = first.get_logprobs(data)["logprobs"], first.train(data, NLLLoss())
    first.shutdown()
    second = Policy(
        cpu_cluster(1), config, tokenizer=None, weights_path="weights", optimizer_path=tmp_path / "optimizer"
    )
    assert torch.equal(second.get_logprobs(data)["logprobs"], scores)
    again = second.train(data, NLLLoss())
    assert torch.equal(again["loss"], step["loss"])
    assert torch.equal(again["grad_norm"], step["grad_norm"])

    # misuse of a living policy: the messages say what to change, and the policy goes on
    with pytest.raises(ValueError, match=r"train_global_batch_size to a divisor of 5"):
        second.train(make_data(5), NLLLoss())
    with pytest.raises(ValueError, match=r"column 'wide' has shape \(12, 3\)"):
        second.train(BatchedDataDict({**data, "wide": torch.zeros(12, 3)}), NLLLoss())
    with pytest.raises(ValueError, match=r"lacks \['input_lengths'\]"):
        second.get_logprobs(BatchedDataDict({"input_ids": data["input_ids"]}))
    with pytest.raises(ValueError, match=r"reward_model_cfg\.enabled=true"):
        second.score(data)
    assert torch.equal(
        second.train(data, NLLLoss(), eval_mode=True)["loss"].isnan(), torch.tensor([False, False])
    )
    second.shutdown()
    with pytest.raises(WorkerError, match="is down: it was shut down"):
        second.get_logprobs(data)


def test_what_a_worker_refuses_reaches_the_caller(cpu_cluster, model):
    """Four attention heads do not divide over three ranks."""
    with pytest.raises(WorkerInputError, match=r"tensor_model_parallel_size") as caught:
        Policy(cpu_cluster(3), make_config(model, tp=3), tokenizer=None)
    assert "Traceback" in str(caught.value) or "File " in str(caught.value)
