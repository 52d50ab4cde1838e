# SPDX-License-Identifier: Apache-2.0
"""Pure tensor mathematics between HuggingFace and megatron-core layouts; no process group anywhere."""
