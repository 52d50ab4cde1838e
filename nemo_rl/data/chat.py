# SPDX-License-Identifier: Apache-2.0
"""Chat templates: prompts for sampling, and conversations with the assistant's tokens marked.

The assistant's text is found in one of two ways. A template with a ``{% generation %}`` block marks it
itself. Otherwise prefixes of the conversation are rendered: what the assistant's message adds to the prefix
is its text. A template that changes earlier messages when later ones come breaks that, and is an error,
never a mask of ones.

The text is cut at the ends of the assistant's turns and each piece is tokenised on its own, because
sampling does the
same: the prompt is tokenised, and the response starts with a fresh token.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.interfaces import TokenizerType

Message = Mapping[str, Any]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE_ANSWER = "probe-answer-7"


class ChatTemplateError(ValueError):
    """The chat template cannot do what is asked of it."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a rendered conversation.

    Attributes:
        role: ``assistant`` for what the policy is to learn; else ``user``, whoever spoke.
        text: The rendered text.
        token_ids: Its tokens; the segments' tokens joined are the row.
        loss_mask: 1 for each token that the policy would have to sample.
        closed: Whether the turn ends with an end-of-turn token (assistant segments).
    """

    role: str
    text: str
    token_ids: list[int]
    loss_mask: list[int]
    closed: bool


def render(
    tokenizer: TokenizerType, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> str:
    """The conversation as text.

    Raises:
        ChatTemplateError: If the tokenizer has no chat template.
    """
    _require_template(tokenizer)
    return tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )


def encode(tokenizer: TokenizerType, text: str) -> list[int]:
    """Token ids of rendered text: nothing is added, special tokens in it are recognised."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def has_generation_tag(tokenizer: TokenizerType) -> bool:
    """Whether the template marks the assistant's text itself."""
    template = tokenizer.chat_template
    return isinstance(template, str) and _GENERATION_TAG.search(template) is not None


def end_of_turn_id(tokenizer: TokenizerType) -> int | None:
    """The token that the template puts right after the assistant's content; ``None`` if it puts none."""
    text = render(tokenizer, _probe())
    _, found, tail = text.rpartition(_PROBE_ANSWER)
    if not found:
        raise ChatTemplateError(
            f"the chat template leaves out what the assistant says (rendered: {text!r}); set "
            "policy.tokenizer.chat_template to one that keeps every message"
        )
    ids = encode(tokenizer, tail.lstrip())
    return ids[0] if ids and ids[0] in set(tokenizer.all_special_ids) | set(_added_ids(tokenizer)) else None


def conversation_segments(
    tokenizer: TokenizerType,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Render a conversation and mark what the assistant said.

    Args:
        tokenizer: With a chat template.
        messages: Dicts with ``role`` and ``content``.
        add_generation_prompt: For templates without a generation block: true keeps the assistant's header
            (which a prompt for sampling ends with) out of the loss, false puts it in.

    Returns:
        Segments, in order; each assistant message gives one. Its mask is 1 up to and including the
        end-of-turn token, and 0 for what the template puts behind that.

    Raises:
        ChatTemplateError: If the assistant's text cannot be told from the rest.
    """
    _require_template(tokenizer)
    text = render(tokenizer, messages)
    num_turns = sum(message["role"] == "assistant" for message in messages)
    end_id = end_of_turn_id(tokenizer)
    spans = _tagged_spans(tokenizer, messages, text) if has_generation_tag(tokenizer) else None
    if spans is None or not _all_end_with(tokenizer, text, spans, end_id):
        # A generation block that leaves the end-of-turn token out would teach the policy never to stop.
        spans = _prefix_spans(tokenizer, messages, text, add_generation_prompt)
    if len(spans) != num_turns:
        raise ChatTemplateError(
            f"the chat template rendered {len(spans)} assistant turns of {num_turns}; it drops or merges messages, so "
            "the loss mask would be wrong. Set policy.tokenizer.chat_template to one that keeps every message"
        )
    segments: list[Segment] = []
    at = 0
    for start, end in spans:
        if start > at:
            segments.append(_context_segment(tokenizer, text[at:start]))
        segments.append(_assistant_segment(tokenizer, text[start:end], end_id))
        at = end
    if at < len(text):
        segments.append(_context_segment(tokenizer, text[at:]))
    return segments


def find_history_rewrite(tokenizer: TokenizerType) -> str | None:
    """Whether the template changes earlier turns when a later one comes (it drops old thinking, say).

    Rollouts never render history again: they append tokens, so they are not affected. But a server that
    renders the whole conversation each turn would show the policy other tokens than the ones it was trained
    on.

    Returns:
        ``None``, or a sentence with the first tokens that differ.
    """
    first = [
        {"role": "user", "content": "probe one"},
        {"role": "assistant", "content": "<think>\nprobe thought\n</think>\n\nprobe answer"},
    ]
    before = encode(tokenizer, render(tokenizer, first))
    after = encode(tokenizer, render(tokenizer, [*first, {"role": "user", "content": "probe two"}]))
    for index, token in enumerate(before):
        if index >= len(after) or after[index] != token:
            was, now = tokenizer.decode(before[index : index + 8]), tokenizer.decode(after[index : index + 8])
            return (
                f"the chat template rewrites earlier turns: from token {index} on, {was!r} becomes {now!r} once the "
                "next user message is there"
            )
    return None


def observation_text(tokenizer: TokenizerType, role: str, content: str, response_closed: bool) -> str:
    """What follows a response in a multi-turn rollout.

    Args:
        tokenizer: With a chat template if ``role`` is ``user``.
        role: ``user`` renders the content as a user turn that ends with the generation prompt; any other
            role gives the content as it is (the environment formats it itself).
        content: The observation.
        response_closed: Whether the sampled tokens end with the end-of-turn token, which then is not
            repeated.

    Returns:
        The text between the response's last token and the next response's first one.
    """
    if role != "user":
        return content
    messages = [*_probe(), {"role": "user", "content": content}]
    full = render(tokenizer, messages, add_generation_prompt=True)
    # The probe's answer may be followed by its own copy inside `content`; the first one after the probe's
    # question is it.
    start = full.index(_PROBE_ANSWER) + len(_PROBE_ANSWER)
    tail = full[start:]
    end_id = end_of_turn_id(tokenizer)
    if response_closed and end_id is not None:
        end_text = tokenizer.decode([end_id], skip_special_tokens=False)
        stripped = tail.lstrip()
        if stripped.startswith(end_text):
            return stripped[len(end_text) :]
    return tail


def _probe() -> list[dict[str, str]]:
    return [{"role": "user", "content": "probe"}, {"role": "assistant", "content": _PROBE_ANSWER}]


def _added_ids(tokenizer: TokenizerType) -> list[int]:
    return list(tokenizer.get_added_vocab().values())


def _require_template(tokenizer: TokenizerType) -> None:
    if tokenizer.chat_template is None:
        raise ChatTemplateError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set policy.tokenizer.chat_template to a "
            ".jinja file, or to null to join the contents of messages"
        )


def _tagged_spans(
    tokenizer: TokenizerType, messages: Sequence[Message], text: str
) -> list[tuple[int, int]] | None:
    """Character spans of the template's generation blocks; ``None`` if they do not fit the plain
    rendering.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    bound = tokenizer.apply_chat_template  # a partial if policy.tokenizer.chat_template_kwargs is set
    arguments = bound.keywords if isinstance(bound, functools.partial) else {}
    rendered, indices = render_jinja_template(
        conversations=[list(messages)],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
        **{**tokenizer.special_tokens_map, **arguments},
    )
    return [(int(start), int(end)) for start, end in indices[0]] if rendered[0] == text else None


def _prefix_spans(
    tokenizer: TokenizerType, messages: Sequence[Message], text: str, add_generation_prompt: bool
) -> list[tuple[int, int]]:
    """Character spans of the assistant's messages, from renderings of every prefix that ends before or
    after one.
    """
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = (
            render(tokenizer, messages[:index], add_generation_prompt=add_generation_prompt) if index else ""
        )
        after = render(tokenizer, messages[: index + 1])
        if not after.startswith(before) or not text.startswith(after):
            raise ChatTemplateError(
                f"the assistant's message {index} cannot be found in the rendered conversation: the chat template has "
                "no {% generation %} block, and it changes earlier messages when later ones come. Add the block to "
                "policy.tokenizer.chat_template, or give conversations with one assistant turn"
            )
        spans.append((len(before), len(after)))
    return spans


def _all_end_with(
    tokenizer: TokenizerType, text: str, spans: Sequence[tuple[int, int]], end_id: int | None
) -> bool:
    if end_id is None:
        return True
    return all(end_id in encode(tokenizer, text[start:end]) for start, end in spans)


def _context_segment(tokenizer: TokenizerType, text: str) -> Segment:
    ids = encode(tokenizer, text)
    return Segment(role="user", text=text, token_ids=ids, loss_mask=[0] * len(ids), closed=True)


def _assistant_segment(tokenizer: TokenizerType, text: str, end_id: int | None) -> Segment:
    ids = encode(tokenizer, text)
    closed = end_id is not None and end_id in ids
    kept = len(ids) - (ids[::-1].index(end_id) if end_id is not None and closed else 0)
    mask = [1] * kept + [0] * (len(ids) - kept)
    return Segment(role="assistant", text=text, token_ids=ids, loss_mask=mask, closed=closed)
