# SPDX-License-Identifier: Apache-2.0
"""The Megatron training engine: model, gradients, optimizer and schedules behind the `TrainEngine` interface."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.models.megatron import checkpoint
from nemo_rl.models.megatron.model import build_provider, open_bridge, unwrap, wrap_chunks
from nemo_rl.models.megatron.optimizer import (
    build_optimizer,
    build_scheduler,
    clipped_step,
    param_groups,
    uses_distributed_optimizer,
)
from nemo_rl.models.megatron.schedule import broadcast_from_last_stage, run_schedule
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.engine import OptimStep
from nemo_rl.models.policy.heads import HeadOutput, OutputHead
from nemo_rl.models.policy.microbatch import Microbatch

logger = logging.getLogger(__name__)


class MegatronEngine:
    """A policy in Megatron-core. See :class:`nemo_rl.models.policy.engine.TrainEngine` for the interface.

    Attributes:
        dims: the layout.
        bridge: reads and writes HuggingFace weights.
        vocab_size: real vocabulary, without padding.
    """

    def __init__(
        self,
        config: PolicyConfig,
        dims: ParallelDims,
        *,
        init_optimizer: bool = True,
        load_weights: bool = True,
    ) -> None:
        """Build model, gradient buffers and optimizer, with the weights of ``config.model_name``.

        Args:
            config: the policy section.
            dims: the layout, from :func:`nemo_rl.models.megatron.setup.build_dims`.
            init_optimizer: without it the engine only evaluates.
            load_weights: read the HuggingFace weights; False leaves the weights undefined, for a checkpoint to fill.
        """
        self.dims = dims
        self.config = config
        self.bridge = open_bridge(config)
        provider = build_provider(self.bridge, config)
        self.vocab_size: int = provider.vocab_size
        self.length_multiple = _length_multiple(config)
        self.uniform_microbatches = dims.pp > 1
        chunks = self.bridge.to_megatron_model(provider, load_weights=load_weights)
        distributed = init_optimizer and uses_distributed_optimizer(config, dims)
        self.chunks = (
            wrap_chunks(chunks, config, dims, distributed_optimizer=distributed) if init_optimizer else chunks
        )
        self.optimizer = build_optimizer(self.chunks, config, dims) if init_optimizer else None
        self.scheduler = build_scheduler(self.optimizer, config) if self.optimizer is not None else None
        self._configure_schedule()
        self._gather_pending = False  # an overlapped parameter gather may still be open
        self._hooks_enabled = True  # forward passes of training finish it by themselves
        self.num_skipped_steps = 0

    def _configure_schedule(self) -> None:
        transformer_config = get_model_config(self.chunks[0])
        transformer_config.finalize_model_grads_func = _sum_gradients
        transformer_config.grad_scale_func = None
        transformer_config.timers = None
        if self.optimizer is not None:
            wrapped = self._wrapped()
            if wrapped[0].ddp_config.overlap_grad_reduce:
                no_sync = [chunk.no_sync for chunk in wrapped]
                transformer_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
            self._overlapped_gather = wrapped[0].ddp_config.overlap_param_gather
        else:
            self._overlapped_gather = False

    def _wrapped(self) -> list[DistributedDataParallel]:
        return [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]

    # -- training ------------------------------------------------------------------------------------------

    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: OutputHead, *, forward_only: bool
    ) -> list[HeadOutput]:
        """Run micro-batches through model and head; gradients start at zero and are summed."""
        if forward_only or not self._hooks_enabled:
            self.wait_for_parameters()
        if not forward_only:
            assert self.optimizer is not None, "this engine was built without an optimizer"
            for chunk in self._wrapped():
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        outputs = run_schedule(
            self.chunks, microbatches, head, self.dims, vocab_size=self.vocab_size, forward_only=forward_only
        )
        if not forward_only:
            self._gather_pending = False  # the forward hooks of this pass have finished it
            self._empty_cache(from_level=1)
        return outputs

    def optimizer_step(self, *, skip: bool = False) -> OptimStep:
        """Clip and update, or say why not."""
        assert self.optimizer is not None, "this engine was built without an optimizer"
        step = clipped_step(self.optimizer, self.config.megatron_cfg.optimizer.clip_grad, skip=skip)
        if self._overlapped_gather:
            for chunk in self._wrapped():
                chunk.reset_param_sync_dispatch_state()
            self._gather_pending = True
        self._empty_cache(from_level=2)
        if step.skipped is not None:
            self.num_skipped_steps += 1
            logger.warning("optimizer step skipped: %s", step.skipped)
        return step

    def lr_step(self, num_samples: int) -> None:
        """Advance the schedules by ``num_samples`` rows."""
        assert self.scheduler is not None, "this engine was built without an optimizer"
        self.scheduler.step(increment=num_samples)

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Training mode, or inference mode without gradients."""
        before = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            if chunk.training != training:
                chunk.train(training)
        try:
            with torch.set_grad_enabled(training):
                yield
        finally:
            for chunk, was_training in zip(self.chunks, before, strict=True):
                if chunk.training != was_training:
                    chunk.train(was_training)

    @property
    def can_train(self) -> bool:
        """Whether there are gradient buffers and an optimizer."""
        return self.optimizer is not None

    def set_forward_pre_hooks(self, *, enabled: bool, param_sync: bool = True) -> None:
        """Switch the hooks that finish an overlapped parameter gather inside forward passes."""
        if not self._overlapped_gather or enabled == self._hooks_enabled:
            return
        if not enabled and param_sync:
            self.wait_for_parameters()
        for chunk in self._wrapped():
            if enabled:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=False)
        self._hooks_enabled = enabled

    def wait_for_parameters(self) -> None:
        """Finish the distributed optimizer's overlapped gather. Everything that reads weights calls this first.

        Collective over data parallelism where a gather is open.
        """
        if not self._gather_pending:
            return
        with torch.no_grad():
            for chunk in self._wrapped():
                chunk.start_param_sync(force_sync=True)
        self._gather_pending = False

    # -- weights -------------------------------------------------------------------------------------------

    def models(self) -> list[GPTModel]:
        """The model chunks without their wrappers, with up-to-date weights."""
        self.wait_for_parameters()
        return [unwrap(chunk) for chunk in self.chunks]

    def named_local_state(self) -> dict[str, Tensor]:
        """Live parameters and persistent buffers of this rank."""
        state: dict[str, Tensor] = {}
        models = self.models()
        for index, model in enumerate(models):
            prefix = f"{index}." if len(models) > 1 else ""
            for name, value in model.state_dict(keep_vars=True).items():
                if isinstance(value, Tensor):
                    state[prefix + name] = value
        return state

    def reload_masters(self) -> None:
        """Take over weights that were written from outside into the optimizer's fp32 masters."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def iter_hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by HuggingFace name. Collective."""
        for weight in self.bridge.export_hf_weights(self.models(), dtype=dtype):
            yield weight.name, weight.tensor

    def hf_weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype by HuggingFace name. Collective with pipeline parallelism."""
        return self.bridge.hf_weight_specs(self.models())

    def export_hf(self, path: str) -> None:
        """Write a HuggingFace model directory. Collective."""
        self.bridge.save_hf_pretrained(self.models(), path)

    def broadcast_from_last_stage(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Tensors of the last pipeline stage on every stage."""
        return broadcast_from_last_stage(tensors, self.dims)

    # -- memory --------------------------------------------------------------------------------------------

    def _empty_cache(self, from_level: int) -> None:
        if (
            self.dims.device.type == "cuda"
            and self.config.megatron_cfg.empty_unused_memory_level >= from_level
        ):
            torch.cuda.empty_cache()

    def move(
        self, *, params: str | None = None, grads: str | None = None, optimizer: str | None = None
    ) -> None:
        """Move parts of the state off the device and back; on the CPU there is nowhere to move to."""
        if self.dims.device.type == "cpu":
            return
        self.wait_for_parameters()
        if params is not None or grads is not None:
            _move_buffers(self._wrapped(), params, grads)
        if optimizer is not None and self.optimizer is not None:
            if optimizer == "cpu":
                self.optimizer.offload_to_cpu()
            else:
                self.optimizer.restore_from_cpu()

    # -- checkpoint ----------------------------------------------------------------------------------------

    def save(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Write weights, and optimizer state if a directory for it is given. Collective."""
        if optimizer_path is not None and not self.can_train:
            raise ValueError("this worker has no optimizer to save; pass optimizer_path=None")
        models = self.models()
        checkpoint.save_weights(weights_path, models)
        if optimizer_path is None or self.optimizer is None or self.scheduler is None:
            return
        extra = {"num_samples": self.scheduler.num_steps, "num_skipped_steps": self.num_skipped_steps}
        checkpoint.save_optimizer(_optimizer_dir(weights_path, optimizer_path), models, self.optimizer, extra)

    def load(self, weights_path: str | None, optimizer_path: str | None = None) -> None:
        """Read weights and/or optimizer state (masters, moments, schedules, random state). Collective.

        Raises:
            ValueError: no checkpoint there, or one of another model, or no optimizer to load into.
        """
        if optimizer_path is not None and not self.can_train:
            raise ValueError("this worker has no optimizer to load into; pass optimizer_path=None")
        models = self.models()
        if weights_path is not None:
            checkpoint.load_weights(weights_path, models, self.vocab_size)
            self.reload_masters()
        if optimizer_path is None or self.optimizer is None or self.scheduler is None:
            return
        extra = checkpoint.load_optimizer(
            _optimizer_dir(weights_path, optimizer_path), models, self.optimizer
        )
        self.scheduler.num_steps = extra["num_samples"]
        self.scheduler.step(0)
        self.num_skipped_steps = extra["num_skipped_steps"]

    def learning_rate(self) -> float:
        """Learning rate of the next step; 0 without an optimizer."""
        return float(param_groups(self.optimizer)[0]["lr"]) if self.optimizer is not None else 0.0


def _optimizer_dir(weights_path: str | None, optimizer_path: str) -> str:
    """Where the optimizer lives: in a folder of its own, also if the caller gives one path for both."""
    return f"{optimizer_path}/optimizer" if optimizer_path == weights_path else optimizer_path


def _length_multiple(config: PolicyConfig) -> int:
    """Padded lengths divide by this: sequence parallelism cuts a row into tp parts."""
    multiple = config.make_sequence_length_divisible_by
    mcfg = config.megatron_cfg
    if mcfg.sequence_parallel and multiple % mcfg.tensor_model_parallel_size:
        multiple *= mcfg.tensor_model_parallel_size
    return multiple


def _sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron's finalisation without its division by tokens: losses are divided by global counts already."""
    del num_tokens
    finalize_model_grads(model, None, **groups)


def _move_buffers(chunks: list[DistributedDataParallel], params: str | None, grads: str | None) -> None:
    for where in ("cpu", "device"):
        which = {"move_params": params == where, "move_grads": grads == where}
        if not any(which.values()):
            continue
        for chunk in chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                if where == "cpu":
                    buffer.offload_to_cpu(**which)
                else:
                    buffer.reload_from_cpu(**which)
