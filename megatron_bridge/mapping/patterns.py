# SPDX-License-Identifier: Apache-2.0
"""Parameter name patterns: ``*`` stands for one number (a layer, an expert)."""

from __future__ import annotations

import functools
import re

# Transformer Engine's layout fuses norms into the following linear; the tables use the local layout's names.
_TE_ALIASES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(re.escape(part) for part in pattern.split("*")))


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """The numbers that ``*`` stands for if the whole name matches, else None."""
    found = _compiled(pattern).fullmatch(name)
    return found.groups() if found else None


def fill(pattern: str, numbers: tuple[str, ...]) -> str:
    """Puts the numbers in the places of ``*``, from left to right."""
    assert pattern.count("*") == len(numbers), f"{pattern} takes {pattern.count('*')} numbers, got {numbers}"
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


def local_layout(name: str) -> str:
    """The name that the local layer spec gives to a parameter of either layout."""
    for te_name, local_name in _TE_ALIASES:
        name = name.replace(te_name, local_name)
    return name
