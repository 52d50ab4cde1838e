# SPDX-License-Identifier: Apache-2.0
"""Stop strings: incremental decoding of the rows that have some. Host only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character
_CONTEXT_TOKENS = 5  # of the prompt, so that the first token is decoded as a continuation and keeps its space
_MAX_PENDING = 8  # tokens; a UTF-8 character has at most 4 bytes, so more are not one incomplete character


class StopStringMatcher:
    """Decodes the response of one row as it grows and looks for stop strings in it.

    A stop string may begin and end inside tokens; text of the prompt does not count. Tokens that cannot be
    the end of a match (their text has none of the stop strings' last characters) are only noted, and decoded
    when one that can comes.
    """

    def __init__(self, decoder: TokenDecoder, stop_strings: Sequence[str], prompt_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._stop_strings = tuple(stop_strings)
        self._last_chars = frozenset(text[-1] for text in stop_strings)
        self._overlap = max(len(text) for text in stop_strings) - 1
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._context_start = 0  # ids[context_start:text_end] are decoded again as context of what follows
        self._text_end = len(self._ids)
        self._tail = ""  # the last characters of the text so far: a match may have begun there

    def push(self, token: int) -> bool:
        """Append one token of the response; True if the response now contains a stop string."""
        self._ids.append(token)
        if not self._decoder.may_end_with(token, self._last_chars):
            return False
        known = self._decoder.text(self._ids[self._context_start : self._text_end])
        both = self._decoder.text(self._ids[self._context_start :])
        new = both[len(known) :]
        incomplete = both.endswith(_REPLACEMENT) and len(self._ids) - self._text_end <= _MAX_PENDING
        window = self._tail + (new.rstrip(_REPLACEMENT) if incomplete else new)
        if any(text in window for text in self._stop_strings):
            return True
        if new and not incomplete:
            self._context_start, self._text_end = self._text_end, len(self._ids)
            self._tail = window[-self._overlap :] if self._overlap else ""
        return False


class TokenDecoder:
    """A tokenizer's decoding, with what is known of single tokens kept."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._chars: dict[int, frozenset[str]] = {}

    def text(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included (a stop string may be one)."""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def may_end_with(self, token: int, last_chars: frozenset[str]) -> bool:
        """Whether a text that ends in one of `last_chars` can end inside `token`."""
        chars = self._chars.get(token)
        if chars is None:
            # Twice, because some decoders strip the space of the first token of a text.
            chars = self._chars[token] = frozenset(self.text([token, token]))
        return not chars or _REPLACEMENT in chars or not chars.isdisjoint(last_chars)


def stop_strings_of_rows(rows: Any, configured: Sequence[str] | None, num_rows: int) -> list[tuple[str, ...]]:
    """The stop strings of each row: the configured ones and its own.

    Args:
        rows: column `stop_strings` of a batch: None, or one item a row: None, a string, or a list of strings.
        configured: `policy.generation.stop_strings`.
        num_rows: rows of the batch.

    Raises:
        ValueError: wrong number of items, or an empty string (it would match at once).
    """
    common = list(configured) if configured else []
    own: list[Any] = [None] * num_rows if rows is None else list(rows)
    if len(own) != num_rows:
        raise ValueError(
            f"stop_strings has {len(own)} items for {num_rows} rows; give one item a row (None or a list)"
        )
    result = []
    for item in own:
        texts = [item] if isinstance(item, str) else list(item) if item is not None else []
        if "" in texts or "" in common:
            raise ValueError("stop_strings contains an empty string, which every text contains; remove it")
        result.append(tuple(dict.fromkeys(common + texts)))
    return result
