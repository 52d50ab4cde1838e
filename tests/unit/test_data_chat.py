# SPDX-License-Identifier: Apache-2.0
"""Chat templates and loss masks (cases 40 and 41)."""

from __future__ import annotations

import pytest

from nemo_rl.cli.tiny_model import CHAT_TEMPLATE, build_character_tokenizer
from nemo_rl.data.chat import (
    ChatTemplateError,
    conversation_segments,
    encode,
    end_of_turn_id,
    find_history_rewrite,
    has_generation_tag,
    observation_text,
    render,
)
from nemo_rl.utils.tokenizer import PASS_THROUGH_TEMPLATE

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thinking of all turns but the last one is dropped, as Qwen3's template does.
REWRITES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAG_WITHOUT_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DROPS_SYSTEM = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}<|im_end|>{% endfor %}"

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3=?"},
    {"role": "assistant", "content": "It is 6"},
]


def tokenizer_with(template):
    tokenizer = build_character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def supervised(tokenizer, segments):
    """The text of each run of tokens in the loss."""
    runs, open_run = [], []
    for segment in segments:
        assert len(segment.token_ids) == len(segment.loss_mask)
        for token, kept in zip(segment.token_ids, segment.loss_mask, strict=True):
            if kept:
                open_run.append(token)
            elif open_run:
                runs, open_run = [*runs, tokenizer.decode(open_run)], []
    return [*runs, tokenizer.decode(open_run)] if open_run else runs


@pytest.mark.parametrize(
    ("template", "end", "tagged"),
    [
        (CHAT_TEMPLATE, "<|end|>", True),
        (CHATML, "<|im_end|>", False),
        (TAG_WITHOUT_END, "<|im_end|>", True),
    ],
)
def test_only_what_the_assistant_says_is_supervised(template, end, tagged):
    tokenizer = tokenizer_with(template)
    assert has_generation_tag(tokenizer) is tagged
    segments = conversation_segments(tokenizer, CONVERSATION)
    assert supervised(tokenizer, segments) == [f"4{end}", f"It is 6{end}"]
    assert "".join(segment.text for segment in segments) == render(tokenizer, CONVERSATION)
    end_id = end_of_turn_id(tokenizer)
    assert tokenizer.decode([end_id]) == end
    kept = [t for s in segments for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m]
    assert kept.count(end_id) == 2  # the number of complete assistant turns


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML])
def test_training_tokens_begin_with_the_prompt_that_sampling_uses(template):
    tokenizer = tokenizer_with(template)
    prompt = encode(tokenizer, render(tokenizer, CONVERSATION[:-1], add_generation_prompt=True))
    segments = conversation_segments(tokenizer, CONVERSATION)
    row = [token for segment in segments for token in segment.token_ids]
    mask = [bit for segment in segments for bit in segment.loss_mask]
    assert row[: len(prompt)] == prompt
    assert mask[len(prompt)] == 1


def test_the_header_can_be_supervised():
    tokenizer = tokenizer_with(CHATML)
    segments = conversation_segments(tokenizer, CONVERSATION[1:3], add_generation_prompt=False)
    assert supervised(tokenizer, segments) == ["<|im_start|>assistant\n4<|im_end|>"]


def test_a_template_that_rewrites_history_is_an_error_not_a_mask_of_ones():
    tokenizer = tokenizer_with(REWRITES)
    thinking = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>x</think>b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>y</think>d"},
    ]
    with pytest.raises(ChatTemplateError, match=r"\{% generation %\}"):
        conversation_segments(tokenizer, thinking)
    # One assistant turn has no history to rewrite.
    assert supervised(tokenizer, conversation_segments(tokenizer, thinking[:2])) == [
        "<think>x</think>b<|im_end|>"
    ]


def test_a_template_that_drops_messages_is_an_error():
    with pytest.raises(ChatTemplateError, match="leaves out what the assistant says"):
        conversation_segments(tokenizer_with(DROPS_SYSTEM), CONVERSATION)


def test_history_rewrites_are_reported_at_token_level():
    assert find_history_rewrite(tokenizer_with(CHATML)) is None
    assert find_history_rewrite(tokenizer_with(CHAT_TEMPLATE)) is None
    report = find_history_rewrite(tokenizer_with(REWRITES))
    assert "from token" in report
    assert "<think>" in report


def test_no_template_is_an_error_that_names_the_key():
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = None
    with pytest.raises(ChatTemplateError, match=r"policy\.tokenizer\.chat_template"):
        render(tokenizer, CONVERSATION)


def test_pass_through_template_has_no_end_of_turn():
    tokenizer = tokenizer_with(PASS_THROUGH_TEMPLATE)
    assert end_of_turn_id(tokenizer) is None
    segments = conversation_segments(tokenizer, CONVERSATION[1:3])
    assert supervised(tokenizer, segments) == ["4"]
    assert not segments[-1].closed


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML])
@pytest.mark.parametrize("closed", [True, False])
def test_observation_as_user_turn_continues_the_conversation(template, closed):
    tokenizer = tokenizer_with(template)
    end = tokenizer.decode([end_of_turn_id(tokenizer)])
    before = render(tokenizer, CONVERSATION[:2], add_generation_prompt=True) + "4" + (end if closed else "")
    after = before + observation_text(tokenizer, "user", "and 3+3=?", closed)
    assert after == render(tokenizer, CONVERSATION[:4], add_generation_prompt=True)


def test_other_observations_go_in_as_they_are():
    assert observation_text(tokenizer_with(CHATML), "environment", "\nwrong\n", True) == "\nwrong\n"
