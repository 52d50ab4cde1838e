# SPDX-License-Identifier: Apache-2.0
"""Layers of our own that megatron-core's models are built from where Transformer Engine is absent."""
