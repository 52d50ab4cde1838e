# SPDX-License-Identifier: Apache-2.0
"""Rollouts over turns: tokens, rewards, ends, errors of environments (cases 40, 42) and seeds (case 48)."""

from __future__ import annotations

import itertools

import pytest
import torch

from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator
from nemo_rl.cli.tiny_model import build_character_tokenizer
from nemo_rl.data.chat import encode
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.llm_message_utils import message_logs_to_batch
from nemo_rl.data.processors import math_hf_data_processor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.guess_number import GuessNumberEnvironment
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.environments.math_environment import MathEnvironment
from nemo_rl.experience.rollouts import run_multi_turn_rollout
from nemo_rl.experience.seeds import batch_seeds, sample_seeds, turn_seeds
from nemo_rl.models.generation.interfaces import GenerationInterface

TOKENIZER = build_character_tokenizer()
EOS = TOKENIZER.eos_token_id


class Script(GenerationInterface):
    """A policy whose answer is a function of the conversation's text; it ends like a real one, or is cut off."""

    def __init__(self, answer, max_new_tokens=16):
        self.answer = answer
        self.max_new_tokens = max_new_tokens
        self.requests = []

    def init_collective(self, ip, port, world_size):
        return []

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True

    def shutdown(self):
        return True

    def generate(self, data, greedy):
        self.requests.append(data)
        rows, cut = [], []
        for ids, length in zip(data["input_ids"], data["input_lengths"], strict=True):
            prompt = ids[: int(length)].tolist()
            sampled = [*encode(TOKENIZER, self.answer(TOKENIZER.decode(prompt))), EOS]
            cut.append(len(sampled) > self.max_new_tokens)
            rows.append((prompt, sampled[: self.max_new_tokens]))
        width = max(len(prompt) + len(sampled) for prompt, sampled in rows) + 2
        output = torch.full((len(rows), width), TOKENIZER.pad_token_id)
        logprobs = torch.zeros(len(rows), width)
        for index, (prompt, sampled) in enumerate(rows):
            end = len(prompt) + len(sampled)
            output[index, :end] = torch.tensor(prompt + sampled)
            logprobs[index, len(prompt) : end] = -torch.arange(1, len(sampled) + 1) / 8
        return BatchedDataDict(
            output_ids=output,
            logprobs=logprobs,
            generation_lengths=torch.tensor([len(sampled) for _, sampled in rows]),
            unpadded_sequence_lengths=torch.tensor([len(p) + len(s) for p, s in rows]),
            truncated=torch.tensor(cut),
        )


class Fragile(MathEnvironment):
    """Raises for some right answers, whether they come alone or in a batch."""

    def __init__(self, bad):
        super().__init__({"verifier_type": "exact"})
        self.bad = bad

    def step(self, message_log_batch, metadata):
        if any(state["ground_truth"] in self.bad for state in metadata):
            raise LookupError("no such answer")
        return super().step(message_log_batch, metadata)


def prompts(questions, answers=None, task="sums", **columns):
    rows = []
    for index, question in enumerate(questions):
        row = {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answers[index] if answers else "?"},
            ],
            "task_name": task,
        }
        rows.append(math_hf_data_processor(row, TaskDataSpec(task), TOKENIZER, None, index))
    batch = rl_collate_fn(rows)
    for key, value in columns.items():
        batch[key] = value
    return batch


def exact_math():
    return MathEnvironment({"verifier_type": "exact"})


def last_question(text):
    return text.split("<|user|>")[-1].split("<|end|>")[0]


def test_one_turn():
    policy = Script(lambda text: "4" if "2+2" in text else "5")
    batch = prompts(["2+2=", "3+3="], ["4", "6"])
    out, metrics = run_multi_turn_rollout(policy, batch, TOKENIZER, {"sums": exact_math()}, 64, 1)
    assert out["total_reward"].tolist() == [1.0, 0.0]
    assert out["reward_valid"].tolist() == [1.0, 1.0]
    assert out["loss_multiplier"].tolist() == [1.0, 1.0]
    assert not out["truncated"].any()
    train = message_logs_to_batch(out["message_log"], pad_token_id=0)
    texts = [
        TOKENIZER.decode(ids[:n]) for ids, n in zip(train["input_ids"], train["input_lengths"], strict=True)
    ]
    assert texts[0] == "<|user|>2+2=<|end|><|assistant|>4<|end|>"
    assert train["token_mask"][0].tolist() == [0] * 7 + [1, 1]
    assert train["generation_logprobs"][0].tolist() == [0] * 7 + [-0.125, -0.25]
    assert metrics["avg_turns_per_sample"] == 1
    assert metrics["natural_termination_rate"] == 1
    assert metrics["mean_gen_tokens_per_sample"] == 2
    assert metrics["num_env_errors"] == 0
    assert len(batch["message_log"][0]) == 1  # the caller's batch is as it was


def test_sampled_ids_go_into_training_as_they_were_sampled():
    # Sampled one character at a time, "12" comes back from a word-level tokenizer as one token; here the ids themselves
    # are odd: a special token in the middle, which decoding drops and encoding the text again would lose.
    odd = [*encode(TOKENIZER, "1<|user|>2"), EOS]
    policy = Script(lambda text: "1<|user|>2")
    out, _ = run_multi_turn_rollout(policy, prompts(["a"]), TOKENIZER, {"sums": exact_math()}, 64, 1)
    message = out["message_log"][0][1]
    assert message["token_ids"].tolist() == odd
    assert message["content"] == "12"
    train = message_logs_to_batch(out["message_log"], pad_token_id=0)
    start = int(out["prompt_lengths"][0])
    assert train["input_ids"][0, start : start + len(odd)].tolist() == odd


def guesses(text):
    """Binary search between 0 and 15, from the hints in the conversation."""
    low, high, guess = 0, 15, None
    for turn in text.split("<|user|>")[2:]:
        guess = (low + high) // 2
        low, high = (guess + 1, high) if turn.startswith("higher") else (low, guess - 1)
    return str((low + high) // 2)


def test_several_turns():
    targets = [7, 0, 12, 3]
    states = [{"target": target, "guesses_left": 5} for target in targets]
    batch = prompts(["0-15"] * 4, task="guess", extra_env_info=states)
    policy = Script(guesses)
    out, metrics = run_multi_turn_rollout(policy, batch, TOKENIZER, {"guess": GuessNumberEnvironment()}, 256)
    assert out["total_reward"].tolist() == [1.0] * 4
    assert out["num_turns"].tolist() == [1, 4, 4, 2]
    assert [len(request["input_lengths"]) for request in policy.requests] == [4, 3, 2, 2]
    text = TOKENIZER.decode(torch.cat([message["token_ids"] for message in out["message_log"][3]]))
    assert text == ("<|user|>0-15<|end|><|assistant|>7<|end|><|user|>lower<|end|><|assistant|>3<|end|>")
    train = message_logs_to_batch(out["message_log"], pad_token_id=0)
    assert TOKENIZER.decode(train["input_ids"][3][train["token_mask"][3] > 0]) == "7<|end|>3<|end|>"
    assert metrics["total_turns"] == 11
    assert metrics["max_turns_per_sample"] == 4
    assert metrics["mean_env_tokens_per_sample"] > 0


def test_each_turn_starts_with_the_tokens_of_the_turn_before():
    states = [{"target": 0, "guesses_left": 9}]
    policy = Script(guesses)
    batch = prompts(["0-15"], task="guess", extra_env_info=states)
    run_multi_turn_rollout(policy, batch, TOKENIZER, {"guess": GuessNumberEnvironment()}, 256)
    seen = [request["input_ids"][0].tolist() for request in policy.requests]
    for before, after in itertools.pairwise(seen):
        assert after[: len(before)] == before


def test_turn_limit_and_guess_limit():
    states = [{"target": 99, "guesses_left": 9}, {"target": 99, "guesses_left": 1}]
    batch = prompts(["0-15"] * 2, task="guess", extra_env_info=states)
    policy = Script(lambda text: "1")
    out, metrics = run_multi_turn_rollout(
        policy, batch, TOKENIZER, {"guess": GuessNumberEnvironment()}, 256, 3
    )
    assert out["num_turns"].tolist() == [3, 1]
    assert metrics["max_turns_reached_rate"] == 0.5
    assert metrics["natural_termination_rate"] == 0.5
    assert out["message_log"][0][-1]["role"] == "assistant"  # no observation that nobody answers


def test_an_observation_that_does_not_fit_ends_the_row():
    states = [{"target": 99, "guesses_left": 9}]
    batch = prompts(["0-15"], task="guess", extra_env_info=states)
    out, metrics = run_multi_turn_rollout(
        Script(lambda text: "1"), batch, TOKENIZER, {"guess": GuessNumberEnvironment()}, 16
    )
    assert out["truncated"].tolist() == [True]
    assert metrics["truncation_rate"] == 1
    assert sum(len(message["token_ids"]) for message in out["message_log"][0]) == int(out["length"][0]) <= 16


def test_a_response_that_is_cut_off_is_judged_and_ends_the_row():
    states = [{"target": 99, "guesses_left": 9}]
    batch = prompts(["0-15"], task="guess", extra_env_info=states)
    policy = Script(lambda text: "12345", max_new_tokens=3)
    out, _ = run_multi_turn_rollout(policy, batch, TOKENIZER, {"guess": GuessNumberEnvironment()}, 64)
    assert out["truncated"].tolist() == [True]
    assert out["num_turns"].tolist() == [1]
    assert out["message_log"][0][-1]["token_ids"].tolist() == encode(TOKENIZER, "123")


def test_tasks_go_to_their_own_environments():
    sums, games = prompts(["2+2="], ["4"]), prompts(["0-15"], task="guess")
    games["extra_env_info"] = [{"target": 4, "guesses_left": 1}]
    batch = BatchedDataDict.from_batches([sums, games])
    out, _ = run_multi_turn_rollout(
        Script(lambda text: "4"),
        batch,
        TOKENIZER,
        {"sums": exact_math(), "guess": GuessNumberEnvironment()},
        64,
    )
    assert out["total_reward"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="'guess' has no environment"):
        run_multi_turn_rollout(Script(lambda text: "4"), batch, TOKENIZER, {"sums": exact_math()}, 64)


def test_environment_that_raises_on_one_of_eight_rows():
    answers = ["1", "2", "bad", "4", "1", "2", "3", "4"]
    batch = prompts(["q"] * 8, answers)
    out, metrics = run_multi_turn_rollout(
        Script(lambda text: "1"), batch, TOKENIZER, {"sums": Fragile({"bad"})}, 64, 1
    )
    assert out["errors"] == [None, None, "LookupError", *[None] * 5]
    assert out["reward_valid"].tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    assert out["loss_multiplier"].tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    assert metrics["env_errors/LookupError"] == 1
    assert metrics["num_env_errors"] == 1

    groups, mask = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), torch.ones(8, 2)
    advantages = GRPOAdvantageEstimator().compute_advantage(
        groups, out["total_reward"], mask, valid=out["reward_valid"]
    )[:, 0]
    without = [0, 1, 3, 4, 5, 6, 7]
    expected = GRPOAdvantageEstimator().compute_advantage(
        groups[without], out["total_reward"][without], mask[without]
    )[:, 0]
    assert torch.equal(advantages[without], expected)
    assert advantages[2] == 0
    assert exact_math().global_post_process_and_metrics(out)[1]["accuracy"] == pytest.approx(2 / 7)


def test_environment_that_always_raises_stops_the_run():
    batch = prompts(["q"] * 4, ["bad"] * 4)
    with pytest.raises(RuntimeError, match="LookupError: no such answer"):
        run_multi_turn_rollout(Script(lambda text: "1"), batch, TOKENIZER, {"sums": Fragile({"bad"})}, 64, 1)


class Scored(EnvironmentInterface):
    """Several named rewards, and one that is not a number."""

    def step(self, message_log_batch, metadata):
        result = exact_math().step(message_log_batch, metadata)
        brevity = torch.tensor([0.5, float("nan"), 0.25])
        return result._replace(rewards={"correct": result.rewards, "brief": brevity})

    def global_post_process_and_metrics(self, batch):
        return batch, {}


def test_named_rewards_and_rewards_that_are_not_finite():
    batch = prompts(["q"] * 3, ["1", "1", "2"])
    out, metrics = run_multi_turn_rollout(
        Script(lambda text: "1"), batch, TOKENIZER, {"sums": Scored()}, 64, 1
    )
    assert out["total_reward"].tolist() == [1.5, 0.0, 0.25]
    assert out["reward/correct"].tolist() == [1.0, 0.0, 0.0]
    assert out["reward/brief"].tolist() == [0.5, 0.0, 0.25]
    assert out["reward_valid"].tolist() == [1, 0, 1]
    assert metrics["env_errors/NonFiniteReward"] == 1


def test_over_long_prompts_keep_their_place_and_count_for_nothing():
    """What is left of such a prompt is a stump: sampling it would only lower the reward and the accuracy."""
    policy = Script(lambda text: "1")
    batch = prompts(["q"] * 2, ["1", "1"], loss_multiplier=torch.tensor([1.0, 0.0]))
    out, metrics = run_multi_turn_rollout(policy, batch, TOKENIZER, {"sums": exact_math()}, 64, 1)
    assert len(policy.requests[0]["input_ids"]) == 1
    assert out["loss_multiplier"].tolist() == [1.0, 0.0]
    assert out["reward_valid"].tolist() == [1.0, 0.0]
    assert out["errors"] == [None, "PromptTooLong"]
    assert metrics["env_errors/PromptTooLong"] == 1


def test_a_prompt_without_room_for_a_response_is_left_out():
    batch = prompts(["q", "q" * 30], ["1", "1"])
    out, metrics = run_multi_turn_rollout(
        Script(lambda text: "1"), batch, TOKENIZER, {"sums": exact_math()}, 33, 1
    )
    assert out["errors"] == [None, "PromptTooLong"]
    assert out["loss_multiplier"].tolist() == [1.0, 0.0]
    assert len(out["message_log"][1]) == 1
    assert metrics["env_errors/PromptTooLong"] == 1
    only, _ = run_multi_turn_rollout(Script(lambda text: "1"), batch, TOKENIZER, {"sums": exact_math()}, 4, 1)
    assert only["reward_valid"].tolist() == [0.0, 0.0]


def test_stop_strings_reach_the_generator():
    policy = Script(lambda text: "1")
    batch = prompts(["q"] * 2, ["1", "1"], stop_strings=[["x"], None])
    run_multi_turn_rollout(policy, batch, TOKENIZER, {"sums": exact_math()}, 64, 1)
    assert policy.requests[0]["stop_strings"] == [["x"], None]


def test_seeds_depend_on_the_row_and_nothing_else():
    seeds = batch_seeds(run_seed=5, step=3, num_prompts=4, num_generations=8)
    assert seeds.dtype == torch.int64
    assert seeds.shape == (32,)
    assert int(seeds.min()) >= 0
    assert seeds[8 * 2 + 3] == sample_seeds(5, 3, 2, 3)[0]
    others = [
        batch_seeds(5, 4, 4, 8),
        batch_seeds(6, 3, 4, 8),
        turn_seeds(seeds, 1),
        turn_seeds(seeds, 2),
    ]
    assert len(set(torch.cat([seeds, *others]).tolist())) == 32 * 5
    assert torch.equal(turn_seeds(seeds, 0), seeds)
    # One batch of 4 prompts, or 4 batches of one: the same seeds.
    alone = torch.cat([sample_seeds(5, 3, prompt, torch.arange(8)) for prompt in range(4)])
    assert torch.equal(alone, seeds)


def test_seeds_of_near_rows_share_no_pattern():
    bits = torch.stack([(batch_seeds(0, 0, 64, 64) >> shift) & 1 for shift in range(63)]).double()
    assert (bits.mean(dim=1) - 0.5).abs().max() < 0.05
    assert torch.corrcoef(bits).fill_diagonal_(0).abs().max() < 0.08


def test_seeds_are_pinned():
    """A resumed run of another version must sample the same tokens."""
    assert batch_seeds(42, 0, 1, 2).tolist() == [7341287744806094167, 8325155120666854729]


def test_rollout_hands_over_seeds_of_the_active_rows():
    states = [{"target": 7, "guesses_left": 5}, {"target": 0, "guesses_left": 2}]
    policy = Script(guesses)
    batch = prompts(["0-15"] * 2, task="guess", extra_env_info=states)
    seeds = torch.tensor([11, 22])
    run_multi_turn_rollout(policy, batch, TOKENIZER, {"guess": GuessNumberEnvironment()}, 256, seeds=seeds)
    assert policy.requests[0]["seeds"].tolist() == [11, 22]
    assert policy.requests[1]["seeds"].tolist() == turn_seeds(seeds[1:], 1).tolist()
