# SPDX-License-Identifier: Apache-2.0
"""Processors, set-up of the data section, collation and flattening."""

from __future__ import annotations

import json

import pytest
import torch

from nemo_rl.cli.tiny_model import build_character_tokenizer
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.config import DataConfig, ResponseDatasetConfig
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.llm_message_utils import (
    batched_message_log_to_flat_message,
    message_logs_to_batch,
    message_text,
)
from nemo_rl.data.processors import math_hf_data_processor, register_processor, sft_processor
from nemo_rl.data.registry import load_response_dataset, register_dataset
from nemo_rl.data.setup import setup_response_data
from nemo_rl.environments.config import MathEnvConfig
from nemo_rl.utils.tokenizer import PASS_THROUGH_TEMPLATE

ROW = {
    "messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}],
    "task_name": "sums",
}
TWO_TURNS = {
    "messages": [*ROW["messages"], {"role": "user", "content": "?"}, {"role": "assistant", "content": "5"}]
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer()


def text_of(tokenizer, datum, *, supervised=False):
    ids = torch.cat([message["token_ids"] for message in datum["message_log"]])
    if supervised:
        ids = ids[torch.cat([message["token_loss_mask"] for message in datum["message_log"]]) > 0]
    return tokenizer.decode(ids)


def test_prompt_for_sampling(tokenizer):
    datum = math_hf_data_processor(ROW, TaskDataSpec("sums"), tokenizer, 64, 7)
    assert text_of(tokenizer, datum) == "<|user|>2+2=<|end|><|assistant|>"
    assert text_of(tokenizer, datum, supervised=True) == ""
    assert datum["extra_env_info"] == {"ground_truth": "4"}
    assert (datum["idx"], datum["task_name"], datum["loss_multiplier"]) == (7, "sums", 1.0)
    assert datum["length"] == sum(len(m["token_ids"]) for m in datum["message_log"])


def test_prompt_files(tokenizer, tmp_path):
    (tmp_path / "prompt.txt").write_text("Give {{}}: {}")
    (tmp_path / "system.txt").write_text("Be brief.")
    spec = TaskDataSpec("sums", tmp_path / "prompt.txt", tmp_path / "system.txt")
    datum = math_hf_data_processor(ROW, spec, tokenizer, None, 0)
    assert text_of(tokenizer, datum) == "<|system|>Be brief.<|end|><|user|>Give {}: 2+2=<|end|><|assistant|>"
    (tmp_path / "bad.txt").write_text("\\boxed{x}: {}")
    with pytest.raises(ValueError, match="doubled"):
        math_hf_data_processor(ROW, TaskDataSpec("sums", tmp_path / "bad.txt"), tokenizer, None, 0)
    with pytest.raises(ValueError, match="does not exist"):
        TaskDataSpec("sums", tmp_path / "missing.txt")


def test_a_prompt_that_is_too_long_stays_out_of_the_loss(tokenizer):
    datum = math_hf_data_processor(ROW, TaskDataSpec("sums"), tokenizer, 6, 0)
    assert datum["loss_multiplier"] == 0.0
    assert datum["length"] == len(datum["message_log"][0]["token_ids"]) == 4
    exact = math_hf_data_processor(ROW, TaskDataSpec("sums"), tokenizer, 7, 0)
    assert (exact["loss_multiplier"], exact["length"]) == (1.0, 7)


def test_a_row_without_answer(tokenizer):
    with pytest.raises(ValueError, match="output_key"):
        math_hf_data_processor({"messages": ROW["messages"][:1]}, TaskDataSpec("sums"), tokenizer, 64, 3)
    with pytest.raises(ValueError, match="no assistant message"):
        sft_processor({"messages": ROW["messages"][:1]}, TaskDataSpec("sums"), tokenizer, 64, 3)


def test_conversation_to_learn_from(tokenizer):
    datum = sft_processor(TWO_TURNS, TaskDataSpec(), tokenizer, 64, 0)
    assert text_of(tokenizer, datum, supervised=True) == "4<|end|>5<|end|>"
    final = sft_processor(TWO_TURNS, TaskDataSpec(), tokenizer, 64, 0, only_unmask_final=True)
    assert text_of(tokenizer, final, supervised=True) == "5<|end|>"
    assert text_of(tokenizer, final) == text_of(tokenizer, datum)
    cut = sft_processor(TWO_TURNS, TaskDataSpec(), tokenizer, 8, 0)
    assert cut["loss_multiplier"] == 0.0
    assert cut["length"] <= 8


def test_end_and_beginning_of_sequence():
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = PASS_THROUGH_TEMPLATE
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    datum = sft_processor(ROW, TaskDataSpec(), tokenizer, 64, 0)
    assert text_of(tokenizer, datum) == "<|begin|>2+2=4<|end|>"
    assert text_of(tokenizer, datum, supervised=True) == "4<|end|>"
    bare = sft_processor(ROW, TaskDataSpec(), tokenizer, 64, 0, add_bos=False, add_eos=False)
    assert text_of(tokenizer, bare) == "2+2=4"


def test_jsonl_with_columns_and_with_messages(tokenizer, tmp_path):
    columns, chats = tmp_path / "columns.jsonl", tmp_path / "chats.jsonl"
    columns.write_text("".join(json.dumps({"q": f"{i}+1=", "a": i + 1}) + "\n" for i in range(6)))
    chats.write_text("".join(json.dumps({"talk": ROW["messages"]}) + "\n\n" for _ in range(3)))
    raw = load_response_dataset(
        ResponseDatasetConfig(data_path=str(columns), input_key="q", output_key="a", split_validation_size=2)
    )
    texts = [[row["messages"][0]["content"] for row in part] for part in (raw.dataset, raw.val_dataset)]
    assert (len(texts[0]), len(texts[1])) == (4, 2)
    assert sorted(texts[0] + texts[1]) == [f"{i}+1=" for i in range(6)]
    assert raw.dataset[0]["messages"][1]["content"].isdigit()
    raw = load_response_dataset(ResponseDatasetConfig(data_path=str(chats), chat_key="talk", num_examples=2))
    assert len(raw.dataset) == 2
    assert raw.dataset[0]["messages"] == ROW["messages"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"data_path": "missing.jsonl"}, "does not exist"),
        ({"data_path": "rows.jsonl", "input_key": "q"}, "output_key"),
        ({"data_path": "rows.jsonl", "input_key": "x", "output_key": "a"}, r"data\.\*\.input_key"),
        ({"data_path": "rows.jsonl"}, r"data\.\*\.chat_key"),
        ({"data_path": "broken.jsonl"}, "line 2 is not JSON"),
        (
            {"data_path": "rows.jsonl", "input_key": "q", "output_key": "a", "split_validation_size": 2},
            "split_val",
        ),
        ({"dataset_name": "arithmatic"}, "arithmetic"),
        ({"dataset_name": "arithmetic", "kwargs": {"max_operandd": 3}}, "max_operandd"),
        ({}, "data_path"),
    ],
)
def test_data_that_cannot_be_read(config, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"q": "1", "a": "2"}\n{"q": "3", "a": "4"}\n')
    (tmp_path / "broken.jsonl").write_text('{"q": 1}\n{"q": \n')
    with pytest.raises(ValueError, match=message):
        load_response_dataset(ResponseDatasetConfig(**config))


def test_saved_huggingface_data_sets(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"q": f"{i}", "a": f"{i + 1}"} for i in range(5)])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([0, 1])}).save_to_disk(str(tmp_path / "two"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    keys = {"input_key": "q", "output_key": "a"}
    for path, split, count in (("one", None, 5), ("two", "test", 2), ("rows.parquet", None, 5)):
        config = ResponseDatasetConfig(data_path=str(tmp_path / path), split=split, **keys)
        assert len(load_response_dataset(config).dataset) == count
    with pytest.raises(ValueError, match="train, test"):
        load_response_dataset(ResponseDatasetConfig(data_path=str(tmp_path / "two"), **keys))


def test_set_up_for_reinforcement_learning(tokenizer):
    config = DataConfig(
        default={"dataset_name": "arithmetic", "kwargs": {"max_operand": 20}},
        train={"num_examples": 50},
        validation=[{"split": "validation", "num_examples": 10}, {"split": "validation", "seed": 1}],
    )
    env = {"math": MathEnvConfig(stop_strings=["="])}
    data = setup_response_data(tokenizer, config, env)
    assert len(data.train) == 50
    assert {name: len(rows) for name, rows in data.validation.items()}.keys() == {
        "arithmetic",
        "arithmetic_2",
    }
    assert data.env_of_task == {"arithmetic": "math", "arithmetic_2": "math"}
    assert data.train[0]["stop_strings"] == ["="]
    batch = rl_collate_fn([data.train[0], data.train[1]])
    assert batch["task_name"] == ["arithmetic"] * 2
    assert batch["idx"] == [0, 1]
    batch["message_log"][0].append({"role": "assistant", "content": "x"})
    assert len(rl_collate_fn([data.train[0]])["message_log"][0]) == 1


def test_a_template_that_rewrites_history_is_reported_at_start(caplog):
    tokenizer = build_character_tokenizer()
    config = DataConfig(train={"dataset_name": "arithmetic", "num_examples": 4})
    setup_response_data(tokenizer, config, {"math": MathEnvConfig()}, max_rollout_turns=3)
    assert "rewrites earlier turns" not in caplog.text
    drops = "m['content'].split('</think>')[-1]"
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{{{ m['content'] if loop.last else {drops} }}}}{{% endfor %}}"
    )
    setup_response_data(tokenizer, config, {"math": MathEnvConfig()}, max_rollout_turns=3)
    assert "rewrites earlier turns: from token" in caplog.text


def test_what_every_row_would_meet_is_met_at_start():
    config = DataConfig(train={"dataset_name": "arithmetic", "num_examples": 4})
    bare = build_character_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template; set policy\.tokenizer\.chat_template"):
        setup_response_data(bare, config, {"math": MathEnvConfig()})
    bare.chat_template = "{# says nothing #}"
    with pytest.raises(ValueError, match=r"first row of task 'arithmetic' has no tokens"):
        setup_response_data(bare, config, {"math": MathEnvConfig()})


def test_set_up_for_supervised_learning(tokenizer):
    config = DataConfig(train={"dataset_name": "arithmetic", "num_examples": 9, "split_validation_size": 4})
    data = setup_response_data(tokenizer, config)
    assert (len(data.train), len(data.validation["arithmetic"])) == (9, 4)
    assert data.env_of_task == {}
    assert sum(int(m["token_loss_mask"].sum()) for m in data.train[0]["message_log"]) >= 2


def test_environment_must_be_named_if_there_are_several(tokenizer):
    arithmetic = {"dataset_name": "arithmetic", "num_examples": 4}
    env = {"math": MathEnvConfig(), "math_default": MathEnvConfig()}
    with pytest.raises(ValueError, match=r"data\.\*\.env_name"):
        setup_response_data(tokenizer, DataConfig(train=arithmetic), env)
    named = setup_response_data(tokenizer, DataConfig(train={**arithmetic, "env_name": "math_default"}), env)
    assert named.env_of_task == {"arithmetic": "math_default"}


def test_registered_processors_and_data_sets(tokenizer):
    def shout(datum_dict, task_data_spec, tokenizer, max_seq_length, idx):
        loud = {"messages": [{**m, "content": m["content"] + "!"} for m in datum_dict["messages"]]}
        return math_hf_data_processor(loud, task_data_spec, tokenizer, max_seq_length, idx)

    register_processor("shout", shout)
    register_dataset("two_rows", lambda config, task: ([{**ROW, "task_name": task}] * 2, None))
    config = DataConfig(train={"dataset_name": "two_rows", "processor": "shout"})
    data = setup_response_data(tokenizer, config, {"math": MathEnvConfig()})
    assert text_of(tokenizer, data.train[1]) == "<|user|>2+2=!<|end|><|assistant|>"
    with pytest.raises(ValueError, match="already"):
        register_processor("shout", math_hf_data_processor)
    with pytest.raises(ValueError, match="is unknown; use one of"):
        setup_response_data(tokenizer, DataConfig(train={"dataset_name": "two_rows", "processor": "whisper"}))


def test_flatten_and_pad():
    logs = [
        [
            {"role": "user", "content": "ab", "token_ids": torch.tensor([5, 6])},
            {
                "role": "assistant",
                "content": "c",
                "token_ids": torch.tensor([7, 8]),
                "token_loss_mask": torch.tensor([1, 1]),
                "generation_logprobs": torch.tensor([-0.5, -0.25]),
            },
        ],
        [{"role": "user", "content": "d", "token_ids": torch.tensor([9])}],
    ]
    batch = message_logs_to_batch(logs, pad_token_id=3, make_sequence_length_divisible_by=3)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 3, 3], [9, 3, 3, 3, 3, 3]]
    assert batch["input_lengths"].tolist() == [4, 1]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 1, 0, 0], [0] * 6]
    assert batch["generation_logprobs"].tolist() == [[0, 0, -0.5, -0.25, 0, 0], [0] * 6]
    flat, lengths = batched_message_log_to_flat_message(logs, {"token_ids": 3})
    assert flat["role"] == [["user", "assistant"], ["user"]]
    assert lengths.tolist() == [4, 1]
    assert (message_text(logs[0], sampled=False), message_text(logs[0], sampled=True)) == ("ab", "c")


def test_misaligned_messages_are_refused():
    tokens = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="message 0 has 2 tokens, but 1"):
        message_logs_to_batch(
            [[{"role": "user", "content": "", "token_ids": tokens, "token_loss_mask": tokens[:1]}]],
            pad_token_id=0,
        )
    with pytest.raises(ValueError, match="no token_ids"):
        batched_message_log_to_flat_message(
            [[{"role": "user", "content": "", "token_ids": tokens}, {"role": "user", "content": ""}]]
        )
