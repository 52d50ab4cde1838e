# SPDX-License-Identifier: Apache-2.0
"""The batch equation: how a step's rows divide into optimizer steps, data-parallel shards and micro-batches.

``prompts x generations = updates x global batch`` and ``global batch = data parallel x micro-batch x accumulation``.
Torch-free: it is checked before anything expensive starts, and printed at start-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl.utils.config_model import Violation

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig

_TP = "policy.megatron_cfg.tensor_model_parallel_size"
_PP = "policy.megatron_cfg.pipeline_model_parallel_size"
_CP = "policy.megatron_cfg.context_parallel_size"
_GPUS = "cluster.gpus_per_node"
_NODES = "cluster.num_nodes"
_GLOBAL = "policy.train_global_batch_size"
_MICRO = "policy.train_micro_batch_size"
LAYOUT_KEYS = (_TP, _PP, _CP, _GPUS, _NODES)


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of a step divide.

    Attributes:
        world_size: Devices (on CPU: workers) of the policy.
        tensor, pipeline, context: Model-parallel degrees.
        data_parallel: Replicas of the model.
        rows_per_step: Rows of one step: prompts x generations, or the global batch in SFT.
        prompts, generations: Factors of `rows_per_step`; generations is 1 in SFT.
        global_batch_size: Rows per optimizer step.
        micro_batch_size: Rows per forward and backward pass of a replica.
        accumulation: Micro-batches per optimizer step of a replica.
        updates_per_step: Optimizer steps per step.
    """

    world_size: int
    tensor: int
    pipeline: int
    context: int
    data_parallel: int
    prompts: int
    generations: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def rows_per_step(self) -> int:
        """Rows of one step."""
        return self.prompts * self.generations

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step of a replica."""
        return self.global_batch_size // (self.data_parallel * self.micro_batch_size)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per step."""
        return self.rows_per_step // self.global_batch_size

    def __str__(self) -> str:
        plural = "s" if self.world_size > 1 else ""
        layout = f"{self.world_size} worker{plural} = TP {self.tensor} x PP {self.pipeline}"
        layout += f" x CP {self.context}" if self.context > 1 else ""
        group = f"{self.prompts} prompts x {self.generations} generations = " if self.generations > 1 else ""
        updates = f"{self.updates_per_step} x global batch {self.global_batch_size}"
        step = f"{group}{self.rows_per_step} rows per step = {updates}"
        return (
            f"{layout} x DP {self.data_parallel}; {step}; global batch {self.global_batch_size} = "
            f"DP {self.data_parallel} x micro-batch {self.micro_batch_size} x accumulation {self.accumulation}"
        )


def batch_equation(cfg: MasterConfig) -> BatchPlan:
    """Work out how the rows of a step divide.

    Raises:
        ValueError: the sizes do not divide; the message names the key to change and sizes that work.
    """
    problems = list(batch_violations(cfg))
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return _plan(cfg)


def batch_violations(cfg: MasterConfig) -> Iterator[Violation]:
    """Give every reason why the rows of a step do not divide."""
    if not cfg.policy.megatron_cfg.enabled:
        return  # no backend whose layout is known; the policy section reports it
    plan = _plan(cfg)
    model_parallel = plan.tensor * plan.pipeline * plan.context
    if plan.world_size % model_parallel:
        fits = -(-plan.world_size // model_parallel) * model_parallel
        yield Violation(
            _GPUS,
            f"{cfg.cluster.gpus_per_node} per node x {cfg.cluster.num_nodes} nodes = {plan.world_size} workers are no "
            f"multiple of TP {plan.tensor} x PP {plan.pipeline} x CP {plan.context} = {model_parallel}; "
            + (
                f"set it to {fits // cfg.cluster.num_nodes}, or lower the parallel degrees"
                if fits % cfg.cluster.num_nodes == 0
                else "lower the parallel degrees"
            ),
            LAYOUT_KEYS,
        )
        return
    unit = plan.data_parallel * plan.micro_batch_size
    if plan.global_batch_size % unit:
        yield Violation(
            _GLOBAL,
            f"{plan.global_batch_size} is not DP {plan.data_parallel} x micro-batch {plan.micro_batch_size} x a whole "
            f"number; {_neighbours(plan.global_batch_size, unit)}{_micro_fix(plan)}",
            (_MICRO, *LAYOUT_KEYS),
        )
    if plan.rows_per_step % plan.global_batch_size:
        yield Violation(
            _GLOBAL,
            f"{plan.prompts} prompts x {plan.generations} generations = {plan.rows_per_step} rows per step are no "
            f"multiple of {plan.global_batch_size}; set it to {_best_divisor(plan, unit)}",
            ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", _MICRO, *LAYOUT_KEYS),
        )


def _plan(cfg: MasterConfig) -> BatchPlan:
    policy = cfg.policy
    megatron = policy.megatron_cfg
    world = cfg.cluster.gpus_per_node * cfg.cluster.num_nodes
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp = megatron.context_parallel_size
    prompts, generations = cfg.rows_per_step()
    return BatchPlan(
        world_size=world,
        tensor=tp,
        pipeline=pp,
        context=cp,
        data_parallel=max(1, world // (tp * pp * cp)),
        prompts=prompts,
        generations=generations,
        global_batch_size=policy.train_global_batch_size,
        micro_batch_size=policy.train_micro_batch_size,
    )


def _neighbours(value: int, unit: int) -> str:
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} and {above} work" if below else f"{above} works"


def _micro_fix(plan: BatchPlan) -> str:
    """Say which micro-batch size works with the global batch as it is."""
    if plan.global_batch_size % plan.data_parallel:
        return ""
    per_replica = plan.global_batch_size // plan.data_parallel
    fits = max(size for size in range(1, plan.micro_batch_size + 1) if per_replica % size == 0)
    return f", or {_MICRO}={fits}"


def _best_divisor(plan: BatchPlan, unit: int) -> str:
    """Give the global batch closest to the one asked for that divides the step and fits the layout."""
    fits = [size for size in range(unit, plan.rows_per_step + 1, unit) if plan.rows_per_step % size == 0]
    if not fits:
        return f"a multiple of {unit}, and make prompts x generations a multiple of {unit} too"
    return str(min(fits, key=lambda size: abs(size - plan.global_batch_size)))
