# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl tiny-model OUT``: a small random HuggingFace checkpoint that runs in seconds on a laptop.

The checkpoint is an ordinary one: ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it, and so does
everything else that reads a HuggingFace directory. Its tokenizer has one token per printable ASCII
character, so that the arithmetic data set has no tokenisation quirks, and a chat template whose assistant
part stands in a ``{% generation %}`` block, so that the loss mask is exact.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ("qwen3", "qwen2", "llama")
DTYPES = ("float32", "bfloat16")

PAD_TOKEN = "<|pad|>"
EOS_TOKEN = "<|end|>"
UNK_TOKEN = "<|unk|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")

# One role token, the content, one end token per message; nothing between messages. Rendering a prefix of a
# conversation therefore gives a prefix of its tokens, and the generation prompt is the single role token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' -}}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``nemo-rl tiny-model`` on ``parser``."""
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write the checkpoint to")
    parser.add_argument(
        "--family", choices=FAMILIES, default="qwen3", help="model architecture (default: qwen3)"
    )
    parser.add_argument("--hidden", type=int, default=128, help="hidden size (default: 128)")
    parser.add_argument("--intermediate", type=int, default=None, help="MLP size (default: 3 x hidden)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default: 4)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: 4)")
    parser.add_argument("--kv-heads", type=int, default=2, help="key and value heads (default: 2)")
    parser.add_argument("--max-positions", type=int, default=2048, help="longest sequence (default: 2048)")
    parser.add_argument("--init-std", type=float, default=0.08, help="spread of the weights (default: 0.08)")
    parser.add_argument("--untied", action="store_true", help="give the output head its own weight")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="stored precision (default: float32)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint that ``args`` describes; returns the exit code."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        num_parameters = make_tiny_checkpoint(
            args.out,
            family=args.family,
            hidden=args.hidden,
            intermediate=args.intermediate,
            layers=args.layers,
            heads=args.heads,
            kv_heads=args.kv_heads,
            max_positions=args.max_positions,
            init_std=args.init_std,
            tied=not args.untied,
            dtype=args.dtype,
            seed=args.seed,
        )
    except ValueError as error:
        print(f"nemo-rl tiny-model: {error}")
        return 2
    print(f"wrote {args.out}: {args.family}, {num_parameters:,} parameters")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parse ``argv`` and run; the entry point without the ``nemo-rl`` dispatcher."""
    parser = argparse.ArgumentParser(prog="nemo-rl tiny-model", description=__doc__.split("\n")[0])
    add_arguments(parser)
    return run(parser.parse_args(argv))


def make_tiny_checkpoint(
    path: str | Path,
    *,
    family: str = "qwen3",
    hidden: int = 128,
    intermediate: int | None = None,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 2048,
    init_std: float = 0.08,
    tied: bool = True,
    dtype: str = "float32",
    seed: int = 0,
) -> int:
    """Save a random model and the character tokenizer to ``path``.

    Args:
        path: Directory to write; made if it is missing, files in it are overwritten.
        family: One of :data:`FAMILIES`.
        hidden: Hidden size; a multiple of ``heads``.
        intermediate: Size of the gated MLP; ``None`` means three times ``hidden``.
        layers: Number of transformer layers.
        heads: Attention heads; a multiple of ``kv_heads``.
        kv_heads: Key and value heads.
        max_positions: Longest sequence in tokens.
        init_std: Standard deviation of the weights; at the usual 0.02 so small a model learns several times
            more slowly.
        tied: Whether the output head shares the embedding's weight.
        dtype: Stored precision, ``float32`` or ``bfloat16``.
        seed: Seed of the weights; the caller's random state is left alone.

    Returns:
        The number of parameters (a tied weight counts once).

    Raises:
        ValueError: For sizes that do not fit together or an unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"--family {family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    if heads % kv_heads:
        raise ValueError(
            f"--heads {heads} must be a multiple of --kv-heads {kv_heads}, for example --kv-heads 1"
        )
    if hidden % (2 * heads):
        raise ValueError(f"--hidden {hidden} must be a multiple of 2 x --heads, for example {2 * heads * 8}")
    tokenizer = build_character_tokenizer(max_positions)
    model = _build_model(
        family=family,
        vocab_size=len(tokenizer),
        hidden=hidden,
        intermediate=3 * hidden if intermediate is None else intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        max_positions=max_positions,
        init_std=init_std,
        tied=tied,
        dtype=dtype,
        seed=seed,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return model.num_parameters()


def build_character_tokenizer(model_max_length: int = 2048) -> PreTrainedTokenizerFast:
    """A fast tokenizer with one token per printable ASCII character, tab and newline, and role tokens.

    Args:
        model_max_length: Longest sequence in tokens that the tokenizer announces.

    Returns:
        The tokenizer, with pad, end-of-sequence and unknown token and :data:`CHAT_TEMPLATE`. Decoding what it
        encoded gives the same text, unless a character lies outside ASCII (then the unknown token).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *ROLE_TOKENS]
    characters = ["\n", "\t", *sorted(set(string.printable) - set(string.whitespace) | {" "})]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK_TOKEN, fuse_unk=False))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _build_model(
    *,
    family: str,
    vocab_size: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    max_positions: int,
    init_std: float,
    tied: bool,
    dtype: str,
    seed: int,
    **token_ids: int | None,
) -> PreTrainedModel:
    """A random model of ``family``; the caller's random state is restored afterwards."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_positions,
        initializer_range=init_std,
        tie_word_embeddings=tied,
        dtype=dtype,
        **token_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.to(getattr(torch, dtype))
