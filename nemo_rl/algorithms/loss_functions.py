# SPDX-License-Identifier: Apache-2.0
"""The documented module of losses; the implementations live in `nemo_rl.algorithms.loss`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypedDict

from torch import Tensor

from nemo_rl.algorithms.interfaces import LossFunction, LossType
from nemo_rl.algorithms.loss.clipped_pg import ClippedPGLossDataDict, ClippedPGLossFn
from nemo_rl.algorithms.loss.config import ClippedPGLossConfig
from nemo_rl.algorithms.loss.nll import NLLLoss
from nemo_rl.algorithms.loss.preference import (
    DPOLossDataDict,
    DPOLossFn,
    PreferenceLoss,
    PreferenceLossDataDict,
)
from nemo_rl.algorithms.loss.preference_config import DistillationLossConfig, DPOLossConfig

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossDataDict",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossDataDict",
    "DistillationLossFn",
    "NLLLoss",
    "PreferenceLoss",
    "PreferenceLossDataDict",
    "SequencePackingLossWrapper",
    "Tensor",
]


class DistillationLossDataDict(TypedDict):
    """Columns of on-policy distillation: [B, S], [B], and the teacher's top-k [B, S, k]."""

    input_ids: Tensor
    input_lengths: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor


class DistillationLossFn:
    """KL to a teacher's top-k distribution. Not yet: it arrives with the distillation algorithm."""

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, cfg: DistillationLossConfig | Mapping[str, Any]) -> None:
        self.cfg = DistillationLossConfig.coerce(cfg)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not yet; see the class."""
        raise NotImplementedError(
            "DistillationLossFn arrives with on-policy distillation; supervised fine-tuning on the teacher's samples "
            "(NLLLoss) works today"
        )


class SequencePackingLossWrapper:
    """Replaced: a packed row is unpacked into rows before the loss is called once, so no wrapper is needed."""

    def __init__(
        self, loss_fn: LossFunction, cu_seqlens_q: Tensor, cu_seqlens_q_padded: Tensor | None = None
    ) -> None:
        raise NotImplementedError(
            "SequencePackingLossWrapper is replaced: losses always see rows [B, S]; "
            "nemo_rl.models.policy.microbatch unpacks them. Pass the loss itself to Policy.train"
        )
