# SPDX-License-Identifier: Apache-2.0
"""The generation package's documented functions and classes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.models.generation.interfaces import (
    GenerationConfig,
    GenerationInterface,
    GenerationSamplingParams,
    sampling_params,
    verify_right_padding,
)


def _tokenizer(**special: str) -> PreTrainedTokenizerFast:
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, "a")), **special)


def test_configure_fills_pad_and_stop_tokens_into_a_copy() -> None:
    config = GenerationConfig()
    filled = configure_generation_config(config, _tokenizer(pad_token="<pad>", eos_token="</s>"))
    assert (filled.pad_token_id, filled.stop_token_ids) == (0, [2])
    assert filled["_pad_token_id"] == 0
    assert (config.pad_token_id, config.stop_token_ids) == (None, None)


def test_configure_keeps_the_users_stop_tokens_and_takes_a_mapping() -> None:
    plain = {"max_new_tokens": 5, "stop_token_ids": [3]}
    filled = configure_generation_config(plain, _tokenizer(pad_token="<pad>", eos_token="</s>"), is_eval=True)
    assert (filled.max_new_tokens, filled.stop_token_ids) == (5, [3])


def test_configure_warns_of_a_users_pad_token(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = _tokenizer(pad_token="<pad>", eos_token="</s>")
    with caplog.at_level(logging.WARNING):
        assert configure_generation_config({"_pad_token_id": 3}, tokenizer).pad_token_id == 0
    assert "_pad_token_id=3" in caplog.text


def test_configure_refuses_a_tokenizer_without_pad_token() -> None:
    with pytest.raises(ValueError, match="no pad token"):
        configure_generation_config(GenerationConfig(), _tokenizer(eos_token="</s>"))


def test_sampling_params_of_training_and_validation() -> None:
    config = GenerationConfig.coerce(
        {"temperature": 0.7, "top_k": -1, "val_temperature": 0.0, "val_top_p": 0.5}
    )
    assert sampling_params(config) == GenerationSamplingParams(0.7, 1.0, None)
    assert sampling_params(config, validation=True) == GenerationSamplingParams(0.0, 0.5, None)


def _rows(ids: list[list[int]], lengths: list[int], prefix: str = "input") -> BatchedDataDict[Any]:
    names = (
        ("input_ids", "input_lengths") if prefix == "input" else ("output_ids", "unpadded_sequence_lengths")
    )
    return BatchedDataDict(dict(zip(names, (torch.tensor(ids), torch.tensor(lengths)), strict=True)))


@pytest.mark.parametrize("prefix", ["input", "output"])
def test_right_padding_holds(prefix: str) -> None:
    assert verify_right_padding(_rows([[5, 6, 0], [7, 8, 9], [0, 0, 0]], [2, 3, 0], prefix)) == (True, None)
    assert verify_right_padding(_rows([[5, 9, 9], [7, 8, 9]], [1, 3], prefix), pad_value=9)[0]
    # The pad value may occur inside a row: it is often the EOS token.
    assert verify_right_padding(_rows([[0, 6, 0]], [2], prefix))[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_rows([[5, 6, 0], [0, 0, 7]], [2, 1]), "row 1 of input_ids has token 7 at position 2"),
        (_rows([[5, 6, 0]], [4]), "length 4 is outside 0 to 3"),
        (_rows([[5, 6, 0]], [2, 2]), "has 1 rows"),
        (_rows([5, 6], [2, 2]), "expected \\[B, S\\]"),  # type: ignore[list-item]
        (BatchedDataDict({"tokens": torch.zeros(1, 1)}), "the batch has \\['tokens'\\]"),
    ],
)
def test_wrong_padding_is_explained(data: BatchedDataDict[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_right_padding(data)
    right, text = verify_right_padding(data, raise_error=False)
    assert not right
    assert text


def test_a_backend_without_refit_says_so() -> None:
    class Local(GenerationInterface):
        def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
            return []

        def generate(self, data: Any, greedy: bool) -> Any:
            return data

        def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
            return True

        def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
            return True

    local = Local()
    for call in (local.update_weights_via_ipc_zmq, local.update_weights_from_collective):
        with pytest.raises(NotImplementedError, match="Local takes no weights"):
            call()
    assert not local.invalidate_kv_cache()
    assert local.get_logger_metrics() == {}
    with pytest.raises(TypeError, match="abstract"):
        GenerationInterface()  # type: ignore[abstract]
