# SPDX-License-Identifier: Apache-2.0
"""Stop strings across token boundaries, with real tokenizers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_rl.models.generation.megatron.stopping import (
    StopStringMatcher,
    TokenDecoder,
    stop_strings_of_rows,
)

TEXT = [
    "The answer is: 42. So we stop here.\nUser: what else?\n",
    "</answer> </think> <|stop|> café naïve 你好 🙂 stop. Stop! STOP\n\n",
    "let x = 3 ; print ( x ) ### end ## END\tdone ",
]


def _byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=["<|end|>", "<pad>"]
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<pad>")


def _metaspace() -> PreTrainedTokenizerFast:
    """Like sentencepiece: the decoder drops the space of a text's first token, unknown bytes are byte tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials)
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZERS = {"byte_level": _byte_level(), "metaspace": _metaspace()}


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _end(
    tokenizer: PreTrainedTokenizerFast, stops: Sequence[str], prompt: list[int], response: list[int]
) -> int | None:
    """Tokens of the response up to its match, by the matcher."""
    matcher = StopStringMatcher(TokenDecoder(tokenizer), stops, prompt)
    for count, token in enumerate(response, start=1):
        if matcher.push(token):
            return count
    return None


def _end_by_full_decoding(
    tokenizer: PreTrainedTokenizerFast, stops: Sequence[str], prompt: list[int], response: list[int]
) -> int | None:
    start = len(tokenizer.decode(prompt))
    for count in range(1, len(response) + 1):
        text = tokenizer.decode(prompt + response[:count])[start:]
        if any(stop in text for stop in stops):
            return count
    return None


def test_match_inside_one_token_and_across_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, response = _ids(tokenizer, "The"), _ids(tokenizer, "answer is: 42. So we stop here.\nUser: what")
    for stop in ("stop", "p he", "\nUser:", ".\nU", "4", " 42. So we stop", "wer i"):
        end = _end(tokenizer, [stop], prompt, response)
        assert end is not None
        assert end == _end_by_full_decoding(tokenizer, [stop], prompt, response)
        assert stop not in tokenizer.decode(prompt + response[: end - 1])[len(tokenizer.decode(prompt)) :]


def test_no_match_without_the_text_or_in_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, response = _ids(tokenizer, "we stop here. sto"), _ids(tokenizer, "else is: 42.")
    assert _end(tokenizer, ["stop", "here", "43"], prompt, response) is None


def test_leading_space_of_the_response_counts(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = _ids(tokenizer, "The answer is:")
    response = _ids(tokenizer, "The answer is: 42.")[len(prompt) :]
    assert _end(tokenizer, [" 42"], prompt, response) == _end_by_full_decoding(
        tokenizer, [" 42"], prompt, response
    )
    assert _end(tokenizer, [" 42"], prompt, response) is not None


def test_multi_byte_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, response = _ids(tokenizer, "print"), _ids(tokenizer, "x é 日本 🙃 你好 done")
    for stop in ("é", "日", "本 ", "🙃", "好 d"):
        end = _end(tokenizer, [stop], prompt, response)
        assert end is not None
        assert end == _end_by_full_decoding(tokenizer, [stop], prompt, response)


def test_stop_string_before_an_unfinished_character(tokenizer: PreTrainedTokenizerFast) -> None:
    """Bytes that never become a character neither hide a match nor are waited for without end."""
    prompt, tail = _ids(tokenizer, "x"), _ids(tokenizer, "🙃")[-1:]
    response = tail * 20 + _ids(tokenizer, "stop") + tail
    end = _end(tokenizer, ["stop"], prompt, response)
    assert end is not None
    assert end <= len(response) - 1


def test_special_token_as_stop_string() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    end_id = tokenizer.convert_tokens_to_ids("<|end|>")
    response = [*_ids(tokenizer, "so"), end_id]
    assert _end(tokenizer, ["<|end|>"], _ids(tokenizer, "x"), response) == len(response)


def test_random_responses_end_where_full_decoding_says(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    # Whole characters only: what full decoding says of half a character is not what it says one token later.
    text_ids = [t for text in TEXT for t in _ids(tokenizer, text) if "\ufffd" not in tokenizer.decode([t])]
    stops = ["stop", "s:", "\n", " 4", "a", "er", "##", ") ", "is: 4"]
    matched = 0
    for _ in range(300):
        prompt = rng.choices(text_ids, k=rng.randint(1, 12))
        response = rng.choices(text_ids, k=30)
        chosen = rng.sample(stops, rng.randint(1, 3))
        want = _end_by_full_decoding(tokenizer, chosen, prompt, response)
        assert _end(tokenizer, chosen, prompt, response) == want
        matched += want is not None
    assert matched > 100


def test_stop_strings_of_rows_merge_configured_and_own() -> None:
    merged = stop_strings_of_rows([None, "b", ["c", "a"]], ["a"], 3)
    assert merged == [("a",), ("a", "b"), ("a", "c")]
    assert stop_strings_of_rows(None, None, 2) == [(), ()]


def test_malformed_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="1 items for 2 rows"):
        stop_strings_of_rows([["a"]], None, 2)
    with pytest.raises(ValueError, match="empty string"):
        stop_strings_of_rows([["a", ""]], None, 1)
