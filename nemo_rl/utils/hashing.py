# SPDX-License-Identifier: Apache-2.0
"""A stable 63-bit hash: the same in every process and Python version, unlike the built-in ``hash``."""

from __future__ import annotations

import hashlib


def hash64(*parts: str | int) -> int:
    """Hash ``parts`` to an integer in [0, 2**63); ``1`` and ``"1"`` differ."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
