# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizer and schedules, built from config; and one step that never applies a bad gradient."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from nemo_rl.distributed.parallel_dims import ParallelDims
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.engine import OptimStep
from nemo_rl.models.policy.megatron_config import MegatronSchedulerConfig

logger = logging.getLogger(__name__)


def uses_distributed_optimizer(config: PolicyConfig, dims: ParallelDims) -> bool:
    """Whether masters and moments are sharded over data parallelism; with one rank there is nothing to shard.

    Raises:
        ValueError: asked for with an optimizer that megatron-core cannot shard.
    """
    ocfg = config.megatron_cfg.optimizer
    if ocfg.use_distributed_optimizer and ocfg.optimizer == "sgd":
        raise ValueError(
            "policy.megatron_cfg.optimizer.use_distributed_optimizer=true works with optimizer=adam only; set "
            "use_distributed_optimizer=false for sgd"
        )
    return ocfg.use_distributed_optimizer and dims.dp * dims.cp > 1


def build_optimizer(
    chunks: list[MegatronModule], config: PolicyConfig, dims: ParallelDims
) -> MegatronOptimizer:
    """The optimizer over wrapped chunks: fp32 parameters directly, bf16 ones through fp32 masters.

    Raises:
        ValueError: options that do not fit precision or device.
    """
    ocfg = config.megatron_cfg.optimizer
    bf16 = config.precision == "bfloat16"
    if config.precision == "float16":
        raise ValueError(
            "policy.precision=float16 needs loss scaling, which is not supported; train in bfloat16 or float32"
        )
    if ocfg.params_dtype != "float32":
        raise ValueError(
            f"policy.megatron_cfg.optimizer.params_dtype={ocfg.params_dtype}: masters are float32; leave the key out"
        )
    if ocfg.bf16 != bf16:
        raise ValueError(
            f"policy.megatron_cfg.optimizer.bf16={str(ocfg.bf16).lower()} contradicts policy.precision="
            f"{config.precision}; leave it out, or set it to {str(bf16).lower()}"
        )
    if ocfg.use_precision_aware_optimizer and dims.device.type != "cuda":
        raise ValueError(
            "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true needs Transformer Engine on CUDA; set it "
            "to false"
        )
    optimizer_config = OptimizerConfig(
        optimizer=ocfg.optimizer,
        lr=ocfg.lr,
        min_lr=ocfg.min_lr,
        weight_decay=ocfg.weight_decay,
        bf16=bf16,
        fp16=False,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        adam_beta1=ocfg.adam_beta1,
        adam_beta2=ocfg.adam_beta2,
        adam_eps=ocfg.adam_eps,
        sgd_momentum=ocfg.sgd_momentum,
        use_distributed_optimizer=uses_distributed_optimizer(config, dims),
        use_precision_aware_optimizer=ocfg.use_precision_aware_optimizer,
        overlap_param_gather=config.megatron_cfg.distributed_data_parallel_config.overlap_param_gather,
        clip_grad=0.0,  # clipping happens in `clipped_step`, after the norm has been looked at
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)
    _fuse_adam(optimizer)
    return optimizer


def _fuse_adam(optimizer: MegatronOptimizer) -> None:
    """Step torch's Adam in one pass over memory instead of a dozen (Transformer Engine's is fused anyway)."""
    for part in chained(optimizer):
        inner = part.optimizer
        if isinstance(inner, torch.optim.Adam):  # AdamW is one
            inner.defaults["fused"] = True
            for group in inner.param_groups:
                group["fused"] = True


def build_scheduler(optimizer: MegatronOptimizer, config: PolicyConfig) -> OptimizerParamScheduler:
    """Schedules of learning rate and weight decay, counted in rows.

    Iterations of the config become rows through ``train_global_batch_size``, because the schedule advances by the rows
    of each ``train()`` call.
    """
    ocfg, scfg = config.megatron_cfg.optimizer, config.megatron_cfg.scheduler
    rows = config.train_global_batch_size
    iterations = config.megatron_cfg.train_iters or _ENDLESS
    decay = scfg.lr_decay_iters or max(iterations, scfg.lr_warmup_iters + 1)
    _check_schedule(scfg, ocfg.lr, decay)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scfg.lr_warmup_init,
        max_lr=ocfg.lr,
        min_lr=min(ocfg.min_lr, ocfg.lr),
        lr_warmup_steps=scfg.lr_warmup_iters * rows,
        lr_decay_steps=decay * rows,
        lr_decay_style=scfg.lr_decay_style,
        start_wd=scfg.start_weight_decay,
        end_wd=scfg.end_weight_decay,
        wd_incr_steps=iterations * rows,
        wd_incr_style=scfg.weight_decay_incr_style,
    )


_ENDLESS = 1_000_000  # iterations where train_iters is not known: no run reaches the end of its schedules


def _check_schedule(scfg: MegatronSchedulerConfig, lr: float, decay: int) -> None:
    section = "policy.megatron_cfg.scheduler."
    if decay <= scfg.lr_warmup_iters:
        raise ValueError(
            f"{section}lr_decay_iters={decay} must be above lr_warmup_iters={scfg.lr_warmup_iters}; try "
            f"lr_decay_iters={scfg.lr_warmup_iters + 1}"
        )
    if scfg.lr_warmup_init > lr:
        raise ValueError(
            f"{section}lr_warmup_init={scfg.lr_warmup_init} is above policy.megatron_cfg.optimizer.lr={lr}; warm-up "
            f"goes up, so use at most {lr}"
        )
    if scfg.lr_decay_style == "WSD":
        raise ValueError(
            f"{section}lr_decay_style=WSD needs the length of its decay, which has no key yet; use linear or cosine"
        )
    start, end = scfg.start_weight_decay, scfg.end_weight_decay
    if start > end or (start != end and scfg.weight_decay_incr_style == "constant"):
        raise ValueError(
            f"{section}start_weight_decay={start} and end_weight_decay={end} do not go with weight_decay_incr_style="
            f"{scfg.weight_decay_incr_style}; make them equal, or rise with weight_decay_incr_style=linear"
        )


def chained(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers behind one: several if experts have their own."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def param_groups(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Parameter groups of all optimizers of this rank."""
    return [group for part in chained(optimizer) for group in part.param_groups]


@torch.no_grad()
def clipped_step(optimizer: MegatronOptimizer, max_norm: float | None, *, skip: bool) -> OptimStep:
    """Clip to ``max_norm`` and update; leave everything alone if told to, or if the norm is not finite.

    The norm is the same on all ranks, so all take the same decision. Collective over the model-parallel ranks.

    Args:
        optimizer: with gradients summed over data parallelism.
        max_norm: global norm to clip to; None or 0 for no clipping.
        skip: the batch had no weight at all.
    """
    groups = param_groups(optimizer)
    lr = float(groups[0]["lr"]) if groups else 0.0
    decay = max((float(group["weight_decay"]) for group in groups), default=0.0)
    if skip:
        return OptimStep(0.0, lr, decay, skipped="no row of the batch has any weight")
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(norm):
        return OptimStep(norm, lr, decay, skipped=f"the gradient norm is {norm}")
    if max_norm:
        for part in chained(optimizer):
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=max_norm,
                    total_norm=norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
    optimizer.step_with_ready_grads()
    return OptimStep(norm, lr, decay)
