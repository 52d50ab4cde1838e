# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl tiny-model` and the tokenizer options: what transformers loads is what was asked for."""

from __future__ import annotations

import pickle
import string

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.cli.tiny_model import build_character_tokenizer, main, make_tiny_checkpoint
from nemo_rl.utils.tokenizer import get_tokenizer

MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    assert main([str(path)]) == 0
    return path


def test_auto_classes_load_it(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer)
    assert 500_000 < model.num_parameters() < 1_000_000
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.is_fast
    text = tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, 7)
    out = model.generate(ids, max_new_tokens=2, do_sample=False)
    assert out.shape[1] in (8, 9)


def test_one_token_per_character(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "".join(c for c in string.printable if c not in "\r\x0b\x0c") + "  two  spaces "
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


def test_template_marks_the_assistant(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    out = tokenizer.apply_chat_template(
        MESSAGES, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [token for token, bit in zip(out["input_ids"], out["assistant_masks"], strict=True) if bit]
    assert tokenizer.decode(marked) == "2<|end|>"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_sizes_and_seeds(tmp_path, family):
    sizes = {"hidden": 32, "layers": 3, "heads": 8, "kv_heads": 2, "tied": False, "family": family}
    count = make_tiny_checkpoint(tmp_path / "a", **sizes)
    make_tiny_checkpoint(tmp_path / "b", **sizes, seed=1)
    make_tiny_checkpoint(tmp_path / "c", **sizes)
    a, b, c = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "abc")
    assert (a.config.num_hidden_layers, a.config.num_key_value_heads, a.config.head_dim) == (3, 2, 4)
    assert a.num_parameters() == count
    assert "lm_head.weight" in dict(a.named_parameters())
    assert not torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True))


def test_random_state_of_the_caller_is_left_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    make_tiny_checkpoint(tmp_path / "m", hidden=16, layers=1, heads=2, kv_heads=1)
    assert torch.equal(torch.rand(1), expected)


def test_sizes_that_do_not_fit(tmp_path, capsys):
    assert main([str(tmp_path / "m"), "--heads", "3", "--kv-heads", "2"]) == 2
    assert "--kv-heads" in capsys.readouterr().out
    assert main([str(tmp_path / "m"), "--hidden", "100", "--heads", "8"]) == 2
    assert "--hidden" in capsys.readouterr().out
    assert not (tmp_path / "m").exists()


def test_tokenizer_options(checkpoint, tmp_path):
    own = get_tokenizer({"name": str(checkpoint)})
    assert own.apply_chat_template(MESSAGES, tokenize=False) == "<|user|>1+1=<|end|><|assistant|>2<|end|>"
    joined = get_tokenizer({"name": str(checkpoint), "chat_template": None})
    assert joined.apply_chat_template(MESSAGES, tokenize=False) == "1+1=2"
    literal = get_tokenizer({"name": str(checkpoint), "chat_template": "{{ messages[0]['content'] }}!"})
    assert literal.apply_chat_template(MESSAGES, tokenize=False) == "1+1=!"
    (tmp_path / "t.jinja").write_text("{{ mark }}{{ messages | length }}")
    file = get_tokenizer(
        {
            "name": str(checkpoint),
            "chat_template": str(tmp_path / "t.jinja"),
            "chat_template_kwargs": {"mark": "#"},
        }
    )
    assert file.apply_chat_template(MESSAGES, tokenize=False) == "#2"
    assert pickle.loads(pickle.dumps(file)).apply_chat_template(MESSAGES, tokenize=False) == "#2"
    with pytest.raises(ValueError, match=r"policy\.tokenizer\.chat_template"):
        get_tokenizer({"name": str(checkpoint), "chat_template": "missing.jinja"})


def test_a_missing_pad_token_becomes_the_end_token(tmp_path):
    bare = build_character_tokenizer()
    bare.pad_token = None
    bare.save_pretrained(tmp_path / "bare")
    tokenizer = get_tokenizer({"name": str(tmp_path / "bare")})
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.padding_side == "right"
    bare.eos_token = None
    bare.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match="neither a pad nor"):
        get_tokenizer({"name": str(tmp_path / "none")})


def test_no_tokenizer_names_the_key(tmp_path):
    with pytest.raises(ValueError, match=r"policy\.tokenizer\.name=.*nowhere"):
        get_tokenizer({"name": str(tmp_path / "nowhere")})
