# SPDX-License-Identifier: Apache-2.0
"""Loading a tokenizer as ``policy.tokenizer`` describes it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.models.policy.config import TokenizerConfig

logger = logging.getLogger(__name__)

PASS_THROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""``chat_template: null``: the contents of all messages, one after the other."""


def get_tokenizer(tokenizer_config: TokenizerConfig | Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``policy.tokenizer``.

    Args:
        tokenizer_config: ``name`` (HuggingFace id or directory); optionally ``chat_template`` (absent or
            ``"default"``: the tokenizer's own; ``None``: contents are joined; ending in ``.jinja``: a file;
            else the template itself) and ``chat_template_kwargs`` (arguments of every
            ``apply_chat_template``).

    Returns:
        The tokenizer, with right padding and a pad token (the end-of-sequence token if it had none).

    Raises:
        ValueError: If there is no such tokenizer, the template file is missing, or neither a pad nor an
            end-of-sequence token exists.
    """
    from transformers import AutoTokenizer

    name = tokenizer_config["name"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"policy.tokenizer.name={name!r} (by default policy.model_name) is no directory with a tokenizer and no "
            f"name that HuggingFace knows here: {reason}"
        ) from error
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"policy.tokenizer.name={name!r} has neither a pad nor an end-of-sequence token; name a tokenizer "
                "that has one"
            )
        tokenizer.pad_token = tokenizer.eos_token
    if "chat_template" in tokenizer_config:
        _set_template(tokenizer, tokenizer_config["chat_template"])
    if tokenizer_config.get("chat_template_kwargs"):
        _bind_template_arguments(tokenizer, dict(tokenizer_config["chat_template_kwargs"]))
    return tokenizer


def _set_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    if template == "default":
        return
    if template is None:
        tokenizer.chat_template = PASS_THROUGH_TEMPLATE
    elif template.endswith(".jinja"):
        try:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(
                f"policy.tokenizer.chat_template={template!r} does not exist; give the path of a .jinja file, a "
                "template, or null"
            ) from None
    else:
        tokenizer.chat_template = template


def _bind_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> None:
    """Pass ``arguments`` to every ``apply_chat_template``; survives pickling (the function goes by
    reference).
    """
    function = type(tokenizer).apply_chat_template
    tokenizer.apply_chat_template = functools.partial(function, tokenizer, **arguments)  # type: ignore[method-assign]
