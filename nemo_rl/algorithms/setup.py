# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the parts of a run.

Order matters: what is cheap and can be wrong (data, tokenizer, checkpoint to resume) comes first, what costs minutes on
a cluster (Ray, model) comes last.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from nemo_rl.algorithms.config import GRPOMasterConfig, SFTMasterConfig
from nemo_rl.algorithms.context import Context
from nemo_rl.algorithms.loop import Cadence, LoopState, load_dataloader_state, resume_state
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.dataloader import StatefulDataLoader
from nemo_rl.data.setup import ResponseData, setup_response_data
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.environments.registry import create_envs
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager, changed_keys, load_run_config
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.run_dir import describe_run
from nemo_rl.utils.tokenizer import get_tokenizer
from nemo_rl.weight_sync import LocalWeightSync

logger = logging.getLogger(__name__)


def build_grpo(config: GRPOMasterConfig, run_dir: Path) -> tuple[Context, Cadence, LoopState]:
    """The parts of a `nemo-rl grpo` run.

    Args:
        config: the resolved tree.
        run_dir: the run directory, held by this process.

    Returns:
        The parts, when to validate and stop, and the counters to go on from.
    """
    grpo = config.grpo
    tokenizer = get_tokenizer(config.policy.tokenizer)
    data = setup_response_data(tokenizer, config.data, config.env, max_rollout_turns=grpo.max_rollout_turns)
    train_loader = _train_loader(data, config, grpo.num_prompts_per_step, grpo.seed)
    val_loaders = _val_loaders(data, grpo.val_batch_size, "grpo.val_batch_size", drop_last=False)
    max_steps = min(grpo.max_num_steps, grpo.max_num_epochs * len(train_loader))
    cadence = _cadence(
        max_steps, grpo.val_period, grpo.val_at_start, grpo.val_at_end, val_loaders, "grpo", grpo.val_start_at
    )
    policy_config = _runtime_policy(config.policy, tokenizer, max_steps)
    with ExitStack() as stack:
        environments = create_envs(config.env, data.env_of_task)
        for environment in set(environments.values()):
            stack.callback(environment.shutdown)
        context, state = _assemble(
            config, policy_config, run_dir, tokenizer, train_loader, val_loaders, environments, stack
        )
        return context, cadence, state


def build_sft(config: SFTMasterConfig, run_dir: Path) -> tuple[Context, Cadence, LoopState]:
    """The parts of a `nemo-rl sft` run; see `build_grpo`."""
    sft = config.sft
    tokenizer = get_tokenizer(config.policy.tokenizer)
    data = setup_response_data(tokenizer, config.data, only_unmask_final=sft.only_unmask_final)
    train_loader = _train_loader(data, config, config.policy.train_global_batch_size, sft.seed)
    val_loaders = _val_loaders(data, sft.val_global_batch_size, "sft.val_global_batch_size", drop_last=True)
    max_steps = min(sft.max_num_steps, sft.max_num_epochs * len(train_loader))
    cadence = _cadence(max_steps, sft.val_period, sft.val_at_start, sft.val_at_end, val_loaders, "sft", -1)
    policy_config = _runtime_policy(config.policy, tokenizer, max_steps)
    with ExitStack() as stack:
        context, state = _assemble(
            config, policy_config, run_dir, tokenizer, train_loader, val_loaders, {}, stack
        )
        return context, cadence, state


def _assemble(
    config: GRPOMasterConfig | SFTMasterConfig,
    policy_config: PolicyConfig,
    run_dir: Path,
    tokenizer: Any,
    train_loader: StatefulDataLoader,
    val_loaders: Mapping[str, DataLoader[Any]],
    environments: Mapping[str, Any],
    stack: ExitStack,
) -> tuple[Context, LoopState]:
    """Start the cluster and the policy, from the last checkpoint if there is one; `stack` passes to the context."""
    checkpointer = CheckpointManager(config.checkpointing)
    checkpointer.remove_unfinished()
    state, checkpoint = resume_state(checkpointer)
    if checkpoint is not None:
        train_loader.load_state_dict(load_dataloader_state(checkpoint))
        logger.info("resuming after step %d from %s", state.step, checkpoint)
        for line in changed_keys(load_run_config(checkpoint), config.to_dict()):
            logger.warning("resuming with another configuration than the checkpoint's: %s", line)
    resumed_step = None if checkpoint is None else state.step
    describe_run(run_dir, config.to_dict(), resumed_step)
    sink = Logger(config.logger, run_dir, resumed_step)
    stack.callback(sink.close)
    sink.log_hyperparams(config.to_dict())
    is_rl = isinstance(config, GRPOMasterConfig)
    _seed_driver(config.grpo.seed if is_rl else config.sft.seed)
    cluster = start_cluster(config, run_dir)
    stack.callback(cluster.shutdown)
    weights = checkpoint / "policy" / "weights" if checkpoint else None
    optimizer = checkpoint / "policy" / "optimizer" if checkpoint else None
    policy = Policy(
        cluster,
        policy_config,
        tokenizer,
        init_optimizer=True,
        weights_path=str(weights) if weights else None,
        optimizer_path=str(optimizer) if optimizer and optimizer.exists() else None,
        init_reference_model=is_rl and not config.grpo.skip_reference_policy_logprobs_calculation,
    )
    stack.callback(policy.shutdown)
    sync = LocalWeightSync(version=state.step)
    sync.connect()
    context = Context(
        config=config,
        run_dir=run_dir,
        tokenizer=tokenizer,
        policy=policy,
        generation=policy,
        weight_sync=sync,
        environments=environments,
        train_loader=train_loader,
        val_loaders=val_loaders,
        logger=sink,
        checkpointer=checkpointer,
        pad_token_id=tokenizer.pad_token_id,
        cleanup=stack.pop_all(),
    )
    return context, state


def start_cluster(config: GRPOMasterConfig | SFTMasterConfig, run_dir: Path) -> RayVirtualCluster:
    """Attach to Ray, or start it, and reserve the devices that `cluster` asks for."""
    cluster = config.cluster
    init_ray(log_dir=str(run_dir / "ray"))
    return RayVirtualCluster(
        bundle_ct_per_node_list=[cluster.gpus_per_node] * cluster.num_nodes,
        use_gpus=resolve_device(cluster.device) == "cuda",
        max_colocated_worker_groups=1,
        num_gpus_per_node=cluster.gpus_per_node,
        name="policy",
        port_range_low=cluster.master_port_range_low,
        port_range_high=cluster.master_port_range_high,
    )


def resolve_device(device: str) -> str:
    """`cpu` or `cuda`: what `cluster.device: auto` means on this Ray cluster."""
    import ray

    if device != "auto":
        return device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def _runtime_policy(policy: PolicyConfig, tokenizer: Any, max_steps: int) -> PolicyConfig:
    """The policy section with what is only known now; a local model becomes an absolute path for the workers."""
    facts: dict[str, Any] = {"megatron_cfg": policy.megatron_cfg.with_runtime(train_iters=max_steps)}
    if Path(policy.model_name).is_dir():
        facts["model_name"] = str(Path(policy.model_name).absolute())
    if policy.generation is not None:
        facts["generation"] = configure_generation_config(policy.generation, tokenizer)
    return policy.with_runtime(**facts)


def _train_loader(data: ResponseData, config: Any, batch_size: int, seed: int) -> StatefulDataLoader:
    return StatefulDataLoader(
        data.train,
        batch_size,
        shuffle=config.data.shuffle,
        seed=seed,
        num_workers=config.data.num_workers,
        name="data.train",
    )


def _val_loaders(
    data: ResponseData, batch_size: int, key: str, *, drop_last: bool
) -> dict[str, DataLoader[Any]]:
    """One loader per validation set; iterating starts from its first row every time."""
    for name, rows in data.validation.items():
        if drop_last and len(rows) < batch_size:
            raise ValueError(
                f"{key}={batch_size} exceeds the {len(rows)} rows of validation set {name!r}; set it to at most "
                f"{len(rows)}"
            )
    return {
        name: DataLoader(rows, batch_size, collate_fn=rl_collate_fn, drop_last=drop_last)  # type: ignore[arg-type]
        for name, rows in data.validation.items()
    }


def _cadence(
    max_steps: int,
    period: int,
    at_start: bool,
    at_end: bool,
    loaders: Mapping[str, Any],
    section: str,
    start_at: int,
) -> Cadence:
    if not loaders and (period > 0 or at_start or at_end):
        raise ValueError(
            f"{section} asks for validation, but data.validation is empty; name a data set, or set "
            f"{section}.val_period=0, {section}.val_at_start=false and {section}.val_at_end=false"
        )
    return Cadence(max_steps, period, at_start, at_end, start_at)


def _seed_driver(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
