# SPDX-License-Identifier: Apache-2.0
"""Case 49 at the level of `Policy`: what a call sends and what comes back, with two tensor-parallel workers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import ray
import torch

from nemo_rl.algorithms.loss.nll import NLLLoss
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.lm_policy import Policy
from tests.integration.test_policy_ray import make_config, make_data
from tests.integration.test_worker_groups import object_store_bytes, wait_until
from tests.support.models import tiny_hf_dir

WIDTH = 2**17  # columns; rows are short, so only the transport notices
ROWS = 2


class Traffic:
    """Holds on to all that a policy's driver stores and all references that its calls give, so that both stay."""

    def __init__(self, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[ray.ObjectRef] = []
        self.returned: list[ray.ObjectRef] = []
        put, call = ray.put, policy.worker_group.run_all_workers_sharded_data

        def keep_put(value: Any) -> ray.ObjectRef:
            self.sent.append(put(value))
            return self.sent[-1]

        def keep_call(*args: Any, **kwargs: Any) -> Any:
            future = call(*args, **kwargs)
            self.returned += future.futures
            return future

        monkeypatch.setattr(ray, "put", keep_put)
        monkeypatch.setattr(policy.worker_group, "run_all_workers_sharded_data", keep_call)

    def returned_bytes(self) -> int:
        return sum(len(pickle.dumps(ray.get(ref), protocol=5)) for ref in self.returned)

    def forget(self) -> None:
        self.sent.clear()
        self.returned.clear()


def wide_batch() -> BatchedDataDict[Any]:
    data = make_data(rows=ROWS)
    wide = {}
    for key in ("input_ids", "token_mask"):
        wide[key] = torch.nn.functional.pad(data[key], (0, WIDTH - data[key].shape[1]))
    return BatchedDataDict({**data, **wide})


def test_bytes_of_a_call_do_not_depend_on_tensor_parallelism(cpu_cluster, tmp_path, monkeypatch):
    model = tiny_hf_dir(tmp_path / "model", "qwen3", layers=1)
    config = make_config(model, tp=2) | {"train_global_batch_size": ROWS}
    policy = Policy(cpu_cluster(2), config, tokenizer=None, name_prefix="bytes")
    data = wide_batch()
    traffic = Traffic(policy, monkeypatch)
    forward = data["input_ids"].nbytes
    calls = {
        "train": (lambda: policy.train(data, NLLLoss()), forward + data["token_mask"].nbytes),
        "get_logprobs": (lambda: policy.get_logprobs(data), forward),
        "generate": (lambda: policy.generate(data), forward),
    }
    for name, (call, size) in calls.items():
        traffic.forget()
        assert wait_until(lambda size=size: object_store_bytes() < 0.01 * size), (
            f"{name}: earlier objects are still there"
        )
        result = call()
        assert len(traffic.returned) == 2, "both ranks are called"
        # all that a rank gives, and the little that the driver adds, such as the metrics of Policy.train
        received = traffic.returned_bytes()
        whole = len(pickle.dumps(result, protocol=5))
        assert 0.5 * whole < received <= 1.1 * whole, f"{name}: {received} bytes came back for {whole}"
        traffic.returned.clear()  # what is left in the store is what was sent
        assert wait_until(lambda size=size: size <= object_store_bytes() <= 1.1 * size), (
            f"{name}: {object_store_bytes()} bytes sent for a batch of {size}"
        )
    assert policy.shutdown()
