# SPDX-License-Identifier: Apache-2.0
"""Generation: the backends' common interface, and what their configuration needs from the tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl.models.generation.config import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    TokenizerType = PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)

__all__ = ["TokenizerType", "configure_generation_config"]


def configure_generation_config(
    config: GenerationConfig | Mapping[str, Any], tokenizer: TokenizerType, is_eval: bool = False
) -> GenerationConfig:
    """Fill in what only the tokenizer knows.

    Args:
        config: `policy.generation`.
        tokenizer: the policy's tokenizer.
        is_eval: weights are loaded for evaluation only, without refits (no effect on the `megatron` backend).

    Returns:
        A new configuration whose `_pad_token_id` is the tokenizer's and whose `stop_token_ids` are the
        tokenizer's EOS where the user gave none.

    Raises:
        ValueError: the tokenizer has no pad token.
    """
    del is_eval
    config = GenerationConfig.coerce(config)
    pad_token_id: int | None = tokenizer.pad_token_id  # type: ignore[assignment]
    if pad_token_id is None:
        raise ValueError(
            "the tokenizer has no pad token; set policy.tokenizer.name to one that has, or give it one "
            f"(for example tokenizer.pad_token = tokenizer.eos_token, here {tokenizer.eos_token!r})"
        )
    if config.pad_token_id is not None and config.pad_token_id != pad_token_id:
        _logger.warning(
            "policy.generation._pad_token_id=%d is replaced by the tokenizer's pad token %d",
            config.pad_token_id,
            pad_token_id,
        )
    stop_token_ids = config.stop_token_ids
    if stop_token_ids is None:
        stop_token_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return config.with_runtime(pad_token_id=pad_token_id, stop_token_ids=stop_token_ids)


def __getattr__(name: str) -> Any:
    """Give `TokenizerType` without importing transformers for those who only need a config class."""
    if name != "TokenizerType":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import PreTrainedTokenizerBase

    return PreTrainedTokenizerBase
