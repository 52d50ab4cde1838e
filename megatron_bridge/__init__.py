# SPDX-License-Identifier: Apache-2.0
"""HuggingFace <-> megatron-core: load, export, convert; megatron-core on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_bridge.notices import quiet_known_messages

if TYPE_CHECKING:
    from megatron_bridge.auto_bridge import AutoBridge

__all__ = ["AutoBridge"]

quiet_known_messages()  # before anything imports megatron.core, which warns while it is imported


def __getattr__(name: str) -> Any:
    """Imports torch and megatron-core only when they are needed."""
    if name == "AutoBridge":
        from megatron_bridge.auto_bridge import AutoBridge

        return AutoBridge
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
