# SPDX-License-Identifier: Apache-2.0
"""The math environment with its real verifier processes; answers that hang it; and the same behind a Ray actor."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from nemo_rl.environments.math_environment import MathEnvironment
from nemo_rl.environments.registry import create_env, create_envs, register_env
from nemo_rl.environments.verifier_pool import DIED_ERROR, TIMEOUT_ERROR, VerifierPool

HANGS_SYMPY = r"\boxed{10^{10^{10^{10}}}}"


def conversation(response):
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": response}]


def step(environment, pairs):
    logs = [conversation(response) for response, _ in pairs]
    return environment.step(logs, [{"ground_truth": truth} for _, truth in pairs])


@pytest.fixture(scope="module")
def math():
    environment = MathEnvironment({"num_workers": 2, "timeout_s": 2.0})
    yield environment
    environment.shutdown()


def test_equal_mathematics_is_right(math):
    pairs = [
        ("46", "46"),
        ("so the answer is \\boxed{46}", "46"),
        ("$\\frac{1}{2}$", "0.5"),
        ("It is 1/2.", "\\frac{1}{2}"),
        ("47", "46"),
        ("I do not know", "46"),
        ("", "46"),
    ]
    result = step(math, pairs)
    assert result.rewards.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert result.errors == [None] * 7
    assert result.terminateds.all()
    assert result.answers[1] == "46"


def test_a_verifier_that_hangs_is_killed_and_costs_only_its_row(math):
    pairs = [("1", "1"), (HANGS_SYMPY, "7"), *[(str(i), str(i)) for i in range(20)]]
    begin = time.monotonic()
    result = step(math, pairs)
    assert time.monotonic() - begin < 30
    assert result.errors == [None, TIMEOUT_ERROR, *[None] * 20]
    assert result.rewards.tolist() == [1.0, 0.0, *[1.0] * 20]
    assert step(math, [("3", "3")]).rewards.tolist() == [1.0]  # the pool is whole again


def test_an_answer_key_that_is_no_mathematics_is_an_error_by_type(math):
    result = step(math, [("5", ""), ("5", "5")])
    assert result.errors == ["GoldAnswerError", None]


@pytest.mark.parametrize("verifier_type", ["math", "exact", "last_number"])
def test_verifier_types_agree_on_plain_integers(verifier_type):
    environment = MathEnvironment({"num_workers": 1, "verifier_type": verifier_type})
    result = step(environment, [("12", "12"), (" 12\n", "12"), ("-3", "-3"), ("13", "12"), ("x", "12")])
    environment.shutdown()
    assert result.rewards.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


ECHO = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    item = json.loads(line)
    if item["response"] == "die":
        os._exit(3)
    if item["response"] == "hang":
        time.sleep(600)
    print(json.dumps({"id": item["id"], "score": 1.0, "answer": str(os.getpid()), "error": None}), flush=True)
"""


def test_a_process_that_dies_is_replaced_and_named():
    pool = VerifierPool(2, 3.0, [sys.executable, "-c", ECHO])
    verdicts = pool.verify(["a", "die", "b", "hang", "c"], ["x"] * 5)
    assert [verdict.error for verdict in verdicts] == [None, DIED_ERROR, None, TIMEOUT_ERROR, None]
    assert pool.num_killed == 2
    pids = {int(verdict.answer) for verdict in pool.verify(["a"] * 6, ["x"] * 6)}
    os.kill(pids.pop(), signal.SIGKILL)  # dies while idle: no item is lost
    time.sleep(0.2)
    assert [verdict.error for verdict in pool.verify(["a"] * 6, ["x"] * 6)] == [None] * 6
    pool.shutdown()


def test_a_verifier_that_cannot_start_is_an_error_at_once():
    pool = VerifierPool(1, 1.0, [sys.executable, "-c", "raise SystemExit(5)"])
    with pytest.raises(RuntimeError, match="exit code 5"):
        pool.verify(["a"], ["b"])


def test_workers_see_no_secrets(monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "secret")
    show = ECHO.replace("str(os.getpid())", 'os.environ.get("SOME_API_TOKEN", "absent")')
    pool = VerifierPool(1, 1.0, [sys.executable, "-c", show])
    assert pool.verify(["a"], ["b"])[0].answer == "absent"
    pool.shutdown()


def test_environments_of_tasks_share_one_instance():
    envs = create_envs({"math": {"verifier_type": "exact"}}, {"sums": "math", "products": "math"})
    assert envs["sums"] is envs["products"]
    with pytest.raises(ValueError, match=r"env\.maths is unknown; use one of"):
        create_env("maths", {})
    register_env("broken", "nemo_rl.environments.nowhere.Thing")
    with pytest.raises(ValueError, match="cannot be imported"):
        create_env("broken", {})


def test_the_same_environment_as_a_ray_actor(ray_session):
    environment = create_env("math", {"num_workers": 1, "timeout_s": 20.0}, as_actor=True)
    result = step(environment, [("1/2", "0.5"), ("3", "4")])
    assert result.rewards.tolist() == [1.0, 0.0]
    environment.shutdown()
