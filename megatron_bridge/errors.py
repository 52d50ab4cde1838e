# SPDX-License-Identifier: Apache-2.0
"""Errors that a user of the bridge can act on."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint does not hold what the model needs; the message names the file or the tensor."""


class UnsupportedModelError(ValueError):
    """An architecture, or an option in its config, that the bridge cannot express; the message names it."""
