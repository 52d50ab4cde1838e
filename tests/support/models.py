# SPDX-License-Identifier: Apache-2.0
"""Tiny random HuggingFace models and the oracle's log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(
    family: str,
    *,
    tied: bool = False,
    vocab: int = 97,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """A random fp32 causal LM, every parameter (norms and biases too) away from its initial value."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        **{
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "dtype": "float32",
            **overrides,
        }
    )
    state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = model_class(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    noise = 0.1 * torch.randn_like(parameter)
                    parameter.copy_(noise if name.endswith("bias") else 1.0 + noise)
                else:
                    parameter.normal_(std=0.15)
    finally:
        torch.set_rng_state(state)
    return model


def tiny_hf_dir(path: str | Path, family: str, **options: Any) -> str:
    """Save `tiny_model(family, **options)` under `path` in HuggingFace's layout and return the path."""
    tiny_model(family, **options).save_pretrained(path)
    return str(path)


def hf_token_logprobs(
    model: PreTrainedModel, input_ids: Tensor, lengths: Tensor, temperature: float = 1.0
) -> Tensor:
    """Oracle log-probabilities, one row per call, with autograd.

    Args:
        model: a transformers causal LM.
        input_ids: int64 [B, S], right-padded.
        lengths: int64 [B].
        temperature: logits are divided by it.

    Returns:
        float [B, S]: position i is log p(token i | tokens < i); position 0 and padding are 0.
    """
    rows = []
    for ids, length in zip(input_ids, lengths.tolist(), strict=True):
        logits = model(input_ids=ids[None, :length]).logits[0, :-1] / temperature
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[1:length, None])[:, 0]
        rows.append(torch.nn.functional.pad(logprobs, (1, input_ids.shape[1] - length)))
    return torch.stack(rows)
