# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own layers, DDP, optimizer and checkpoints on gloo: what the platform module must carry."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.world import init_megatron


def _model(tp: int, pp: int, ep: int, sp: bool, moe: bool, dtype: torch.dtype, dropout: float) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        normalization="LayerNorm" if not sp else "RMSNorm",
        add_bias_linear=False,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        sequence_parallel=sp,
        calculate_per_token_loss=True,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        transformer_impl="local",
        num_moe_experts=4 if moe else None,
        moe_router_topk=2,
        moe_ffn_hidden_size=64 if moe else None,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        vocab_size=96,
        max_sequence_length=32,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    _same_weights_in_every_layout(model, ep)
    return config, model


def _same_weights_in_every_layout(model: Any, ep: int) -> None:
    """Full weights from a name's seed, then this rank's part."""
    from megatron.core import parallel_state as ps

    offset = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        name = name.replace("layers.0.", f"layers.{offset}.", 1) if "decoder.layers.0." in name else name
        if "local_experts." in name:
            head, rest = name.split("local_experts.")
            index, tail = rest.split(".", 1)
            name = (
                f"{head}local_experts.{int(index) + ps.get_expert_model_parallel_rank() * (4 // ep)}.{tail}"
            )
            size, rank = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
        else:
            size, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
        dim = (
            getattr(parameter, "partition_dim", -1)
            if getattr(parameter, "tensor_model_parallel", False)
            else -1
        )
        shape = list(parameter.shape)
        if dim >= 0:
            shape[dim] *= size
        full = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if dim >= 0 and getattr(parameter, "partition_stride", 1) == 2:
            part = torch.cat([half.chunk(size, dim)[rank] for half in full.chunk(2, dim)], dim)
        else:
            part = full.chunk(size, dim)[rank] if dim >= 0 else full
        parameter.data.copy_(part)


def _step(batch: Any, model: Any, seen: list[Tensor], count: int) -> Any:
    tokens = next(batch)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    out = model(tokens, positions, None, labels=tokens.roll(-1, 1))

    def loss(per_token: Tensor) -> Any:
        seen.append(per_token.detach().float().sum())
        return per_token.float().sum() / count, torch.tensor(0, dtype=torch.int), {}

    return out, loss


def train(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    sp: bool = False,
    moe: bool = False,
    dtype: torch.dtype = torch.float32,
    distributed_optimizer: bool = False,
    dropout: float = 0.0,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Two optimizer steps on 4 rows; losses (summed over data ranks) and gradient norms; optionally a checkpoint."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    init_megatron(tp, pp, ep=ep)
    config, model = _model(tp, pp, ep, sp, moe, dtype, dropout)
    wrapped = Float16Module(config, model) if dtype == torch.bfloat16 else model
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    ddp = DistributedDataParallel(config, ddp_config, wrapped)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed_optimizer,
            clip_grad=1.0,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    rows = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(3))
    dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    mine = rows.chunk(dp)[rank]
    losses, norms = [], []
    for _ in range(2):
        seen: list[Tensor] = []
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=partial(_step, seen=seen, count=rows.numel()),
            data_iterator=iter(mine.split(1)),
            model=[ddp],
            num_microbatches=len(mine),
            seq_length=16,
            micro_batch_size=1,
            forward_only=False,
        )
        ok, norm, _ = optimizer.step()
        assert ok
        total = torch.stack(seen).sum() if seen else torch.zeros(())
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        losses.append(total.item())
        norms.append(float(norm))
    restored = _checkpoint_round_trip(model, checkpoint) if checkpoint else None
    last = parallel_state.is_pipeline_last_stage()
    return {"losses": losses if last else None, "norms": norms, "restored": restored}


def _checkpoint_round_trip(model: Any, path: str) -> bool:
    from megatron.core import dist_checkpointing

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        Path(path).mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), path), strict=False)
    return all(torch.equal(before[name], p) for name, p in model.named_parameters())
