# SPDX-License-Identifier: Apache-2.0
"""The documented interface between an algorithm and a policy, whatever backend trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypedDict

import torch

if TYPE_CHECKING:
    import ray

    from nemo_rl.algorithms.interfaces import LossFunction
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.generation.interfaces import GenerationDatumSpec


class LogprobOutputSpec(TypedDict):
    """``logprobs`` [B, S]: position i is the log-probability of token i, position 0 is 0."""

    logprobs: torch.Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """``reference_logprobs`` [B, S], aligned like ``logprobs``, from the frozen reference weights."""

    reference_logprobs: torch.Tensor


class ScoreOutputSpec(TypedDict):
    """``scores`` [B]: one reward per row."""

    scores: torch.Tensor


class TopkLogitsOutputSpec(TypedDict):
    """``topk_logits`` [B, S, k] (float32) and ``topk_indices`` [B, S, k] (global vocabulary ids)."""

    topk_logits: torch.Tensor
    topk_indices: torch.Tensor


class PolicyInterface(ABC):
    """A trainable policy.

    ``timer`` of the optional parameters is a ``nemo_rl.utils.timer.Timer`` that the call reports its phases to.
    """

    @abstractmethod
    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], timer: Any | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Log-probabilities of the tokens of ``data`` under the current weights.

        Args:
            data: ``input_ids`` int64[B, S] (right padding) and ``input_lengths`` int[B].
            timer: optional phase timer.

        Returns:
            ``logprobs`` float32[B, S] on the CPU.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        timer: Any | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """The same under the frozen reference weights, as ``reference_logprobs``."""

    @abstractmethod
    def get_topk_logits(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        k: int,
        micro_batch_size: int | None = None,
        timer: Any | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """The ``k`` largest logits at each position, with their token ids."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Any | None = None,
    ) -> dict[str, Any]:
        """One optimizer step per ``gbs`` rows; with ``eval_mode`` only the loss.

        Returns:
            ``loss`` (one entry per global batch), ``grad_norm``, ``all_mb_metrics`` and more.
        """

    @abstractmethod
    def score(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ScoreOutputSpec]:
        """One reward per row, of a policy that is a reward model."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring weights, gradients and optimizer state to the training device."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Called when a training phase ends."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write weights, and optimizer state if asked, to a directory."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release workers; True if that went well. May be called more than once."""

    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """Scales for an fp8 KV cache; for backends that support one."""
        raise NotImplementedError(f"{type(self).__name__} does not calibrate fp8 KV-cache scales")


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that can share devices with, and push its weights to, a generation backend."""

    @abstractmethod
    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int
    ) -> list[ray.ObjectRef]:
        """Join the process group that spans training and generation workers."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Free what a weight transfer does not need (gradients, optimizer state)."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Free the weights too, once they are transferred."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Shape and dtype of every tensor that a refit sends, by its HuggingFace name."""

    @abstractmethod
    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Send weights to generation workers on the same device, through IPC handles."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef]:
        """Send weights through the process group of ``init_collective``."""

    @abstractmethod
    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Bring the weights to the device and set inference mode, for log-prob passes.

        Args:
            keep_train_buffers: keep gradients and optimizer state where they are (a split training step is open).
        """

    def offload_to_cpu(self) -> None:
        """Move everything to the CPU."""
        self.offload_after_refit()
