# SPDX-License-Identifier: Apache-2.0
"""The documented policy worker of the Megatron backend: `MegatronPolicyWorker` (Ray) and `MegatronPolicyWorkerImpl`.

The undecorated class runs without Ray too, under torchrun or in a test; extensions subclass it and decorate themselves.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist

from megatron_bridge.platform import prepare_platform
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.megatron.engine import MegatronEngine
from nemo_rl.models.megatron.setup import (
    build_dims,
    destroy_parallel_state,
    device_from_env,
    seed_everything,
    set_threads_from_env,
    setup_distributed,
)
from nemo_rl.models.policy.base_policy_worker import PolicyWorkerBase
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.utils import get_gpu_info

if TYPE_CHECKING:
    from ray.util.queue import Queue
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.distributed.named_sharding import NamedSharding
    from nemo_rl.models.generation.interfaces import GenerationSamplingParams
    from nemo_rl.models.generation.megatron.engine import MegatronGenerator

    TokenizerType = PreTrainedTokenizerBase
else:
    TokenizerType = Any

logger = logging.getLogger(__name__)

DEFAULT_SEED = 1234


class MegatronPolicyWorkerImpl(PolicyWorkerBase):
    """One rank of a Megatron policy.

    The rank, world size, master address, device and number of threads come from the environment that the worker group
    sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, NRL_DEVICE, NRL_NUM_THREADS).
    """

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: TokenizerType,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        *,
        worker_sharding_annotations: NamedSharding | None = None,
        pre_init_communication_queue: Queue | None = None,
        skip_weight_load: bool = False,
        seed: int = DEFAULT_SEED,
        **kwargs: Any,
    ) -> None:
        """Join the process group, build the model, and load weights.

        Order: HuggingFace weights, then the reference snapshot of them, then the checkpoint.

        Args:
            config: the policy section, as a model or a plain mapping.
            tokenizer: for generation with stop strings.
            weights_path: checkpoint directory to take the weights from.
            optimizer_path: checkpoint directory to take optimizer, schedules and random state from.
            init_optimizer: without it the worker cannot train.
            init_reference_model: keep the initial weights for ``get_reference_policy_logprobs``.
            worker_sharding_annotations: the driver's layout; checked against ours.
            pre_init_communication_queue: unused here; part of the documented signature.
            skip_weight_load: leave the weights undefined, for a worker that receives them.
            seed: base of all random streams of this worker.
            **kwargs: of other backends; ignored.
        """
        del pre_init_communication_queue, kwargs
        self.config = PolicyConfig.coerce(config)
        self.tokenizer = tokenizer
        self.device = device_from_env()
        set_threads_from_env()
        prepare_platform("cuda" if self.device.type == "cuda" else "cpu")
        setup_distributed(self.device)
        dims = build_dims(self.config.megatron_cfg, self.device)
        _check_annotations(worker_sharding_annotations, dims.world_size)
        seed_everything(seed, dims)
        if skip_weight_load and init_optimizer:
            raise ValueError(
                "skip_weight_load=True is for workers that only evaluate; pass init_optimizer=False"
            )
        self._engine = MegatronEngine(
            self.config, dims, init_optimizer=init_optimizer, load_weights=not skip_weight_load
        )
        if init_reference_model:
            self.snapshot_reference()
        self.engine.load(weights_path, optimizer_path)
        self._generator: MegatronGenerator | None = None
        self._zmq_address = f"ipc://{tempfile.gettempdir()}/{uuid.uuid4()}.sock"
        logger.info("policy worker ready: %s", dims.describe())

    def __repr__(self) -> str:
        """Ray shows this in front of the worker's log lines."""
        rank = dist.get_rank() if dist.is_initialized() else "?"
        return f"MegatronPolicyWorker[rank={rank}]"

    @property
    def engine(self) -> MegatronEngine:
        """Model, gradients and optimizer."""
        return self._engine

    # -- generation ----------------------------------------------------------------------------------------

    def generate(
        self,
        *,
        data: BatchedDataDict[Any],
        greedy: bool = False,
        sampling: GenerationSamplingParams | None = None,
    ) -> BatchedDataDict[Any]:
        """Sample responses to the prompts of this rank's shard, with the policy's own weights.

        Args:
            data: ``input_ids`` int64[B, S] (right padding), ``input_lengths`` int[B], optionally ``stop_strings`` and
                ``seeds``.
            greedy: take the likeliest token instead of sampling.
            sampling: other temperature, top-p and top-k than the configuration's (validation has its own).

        Returns:
            The documented GenerationOutputSpec.

        Raises:
            ValueError: ``policy.generation`` is not configured.
        """
        self.engine.wait_for_parameters()
        with self.engine.mode(training=False):
            return self._get_generator().generate(data, greedy, sampling=sampling)

    def _get_generator(self) -> MegatronGenerator:
        if self._generator is None:
            from nemo_rl.models.generation.megatron.engine import MegatronGenerator

            if self.config.generation is None:
                raise ValueError("policy.generation is null; configure it (backend: megatron) to generate")
            self._generator = MegatronGenerator(
                self.engine.models(),
                self.dims,
                self._generation_config(self.config.generation),
                vocab_size=self.engine.vocab_size,
                tokenizer=self.tokenizer,
                max_total_sequence_length=self.config.max_total_sequence_length,
            )
        return self._generator

    def _generation_config(self, config: GenerationConfig) -> GenerationConfig:
        """With what follows from the rest of the policy: pad and stop tokens, and the number of slots."""
        if config.pad_token_id is None and self.tokenizer is not None:
            config = configure_generation_config(config, self.tokenizer)
        engine = config.mcore_generation_config
        if engine.num_slots is None:
            tp = self.dims.tp
            slots = -(-self.config.generation_batch_size // tp) * tp
            config = config.with_runtime(mcore_generation_config=engine.with_runtime(num_slots=slots))
        return config

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Bring the weights to the device."""
        del args, kwargs
        self.engine.move(params="device")
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing to free: a KV cache lives as long as its generate() call."""
        del args, kwargs
        return True

    def invalidate_kv_cache(self) -> bool:
        """Nothing to forget: every generate() call starts with empty KV rows."""
        return True

    # -- phases and memory ---------------------------------------------------------------------------------

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring weights, gradient buffers and optimizer state to the device."""
        del args, kwargs
        self.engine.move(params="device", grads="device", optimizer="device")

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the next phase says what it needs."""
        del args, kwargs

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Bring the weights to the device; free what a log-prob pass does not need, as configured."""
        self.engine.move(params="device")
        if not keep_train_buffers and self.config.offload_optimizer_for_logprob:
            self.engine.move(optimizer="cpu")

    def finish_inference(self) -> None:
        """Nothing to do: weights stay where they are."""

    def offload_before_refit(self) -> None:
        """Free gradient buffers, and optimizer state if configured, before weights are sent."""
        if not self.engine.can_train:
            return
        self.engine.move(grads="cpu", optimizer="cpu" if self.config.offload_optimizer_for_refit else None)
        self._empty_cache()

    def offload_after_refit(self) -> None:
        """Free the weights' device memory too, unless this worker's own model generates."""
        self.offload_before_refit()
        if self.config.generation is None or self.config.generation.backend != "megatron":
            self.engine.move(params="cpu")
            self._empty_cache()

    def offload_to_cpu(self) -> None:
        """Move everything to the CPU."""
        self.engine.move(params="cpu", grads="cpu", optimizer="cpu")
        self._empty_cache()

    def move_model(
        self, model: torch.nn.Module, device: str, move_params: bool = True, move_grads: bool = True
    ) -> torch.nn.Module:
        """Move the worker's model to ``"cpu"`` or ``"cuda"``; the argument is part of the documented signature."""
        where = "cpu" if device == "cpu" else "device"
        self.engine.move(params=where if move_params else None, grads=where if move_grads else None)
        return model

    def _empty_cache(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def enable_forward_pre_hook(self) -> None:
        """Let forward passes finish the distributed optimizer's overlapped parameter gather again."""
        self.engine.set_forward_pre_hooks(enabled=True)

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Take the hooks of the overlapped parameter gather off; with ``param_sync`` finish an open gather first."""
        self.engine.set_forward_pre_hooks(enabled=False, param_sync=param_sync)

    def zero_out_weights(self) -> None:
        """Set all weights to zero: a test then sees whether a refit replaces every one."""
        with torch.no_grad():
            for tensor in self.engine.named_local_state().values():
                tensor.zero_()

    # -- weights to others ---------------------------------------------------------------------------------

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> None:
        """Not yet: generation on devices of its own arrives with the vLLM backend."""
        raise NotImplementedError(_REFIT.format("init_collective"))

    @torch.no_grad()
    def prepare_refit_info(self) -> dict[str, Any]:
        """Shape and dtype of every tensor of the model by HuggingFace name."""
        return {
            name: (torch.Size(shape), dtype) for name, (shape, dtype) in self.engine.hf_weight_specs().items()
        }

    def iter_hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by HuggingFace name. Collective: every rank iterates to the end."""
        return self.engine.iter_hf_weights(dtype)

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int = 0) -> None:
        """Not yet; see the message."""
        raise NotImplementedError(_REFIT.format("stream_weights_via_ipc_zmq"))

    def broadcast_weights_for_collective(self) -> None:
        """Not yet; see the message."""
        raise NotImplementedError(_REFIT.format("broadcast_weights_for_collective"))

    def get_zmq_address(self) -> str:
        """Address of the socket that weights are announced on."""
        return self._zmq_address

    def maybe_init_zmq(self) -> None:
        """Not yet; see the message."""
        raise NotImplementedError(_REFIT.format("maybe_init_zmq"))

    # -- checkpoints ---------------------------------------------------------------------------------------

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, **kwargs: Any) -> None:
        """Write a sharded checkpoint. Collective.

        Args:
            weights_path: directory of the weights.
            optimizer_path: directory of optimizer, fp32 masters, schedules and random state; None leaves them out. May
                be the same directory.
            **kwargs: ``tokenizer_path``: rank 0 saves the tokenizer there; others are of other backends.
        """
        self.engine.save(weights_path, optimizer_path)
        tokenizer_path = kwargs.get("tokenizer_path")
        if tokenizer_path is not None and self.dims.rank == 0 and self.tokenizer is not None:
            self.tokenizer.save_pretrained(tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Read a checkpoint of this layout into the live worker. Collective."""
        self.engine.load(weights_path, optimizer_path)

    def finalize_async_save(self) -> None:
        """Nothing to wait for: saves are synchronous."""

    def export_hf(self, path: str) -> None:
        """Write the weights, config and tokenizer as a HuggingFace model directory. Collective."""
        self.engine.export_hf(path)

    # -- observation ---------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """True, if the worker answers at all."""
        return True

    def reset_peak_memory_stats(self) -> None:
        """Start the peak-memory count of the device anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def get_gpu_info(self) -> dict[str, Any]:
        """Rank, device, memory and a sample parameter of this worker."""
        return get_gpu_info(self.engine.models()[0])

    def report_device_id(self) -> str:
        """UUID of this worker's device; ``cpu-<rank>`` where there is none."""
        if self.device.type == "cuda":
            return str(torch.cuda.get_device_properties(self.device).uuid)
        return f"cpu-{self.dims.rank}"

    def get_free_memory_bytes(self) -> int:
        """Free memory of the device, or of the host on the CPU."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def report_node_ip_and_gpu_id(self) -> list[tuple[str, int]]:
        """Address of this worker's node and the index of its device there."""
        address = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
        return [(address, int(os.environ.get("LOCAL_RANK", "0")))]

    def check_tensor_parallel_attributes(self) -> dict[str, Any]:
        """Which parameters are split over the tensor-parallel ranks, and which are replicated."""
        split, whole = [], []
        for model in self.engine.models():
            for name, parameter in model.named_parameters():
                (split if getattr(parameter, "tensor_model_parallel", False) else whole).append(name)
        return {
            "tp_size": self.dims.tp,
            "tp_params": split,
            "non_tp_params": whole,
            "total_params": len(split) + len(whole),
        }

    def start_gpu_profiling(self) -> None:
        """Start the CUDA profiler; nothing on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.profiler.start()

    def stop_gpu_profiling(self) -> None:
        """Stop the CUDA profiler; nothing on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.profiler.stop()

    def shutdown(self) -> bool:
        """Leave the process groups."""
        destroy_parallel_state()
        return True


_REFIT = (
    "{}: generation with generation.backend=megatron uses the policy's own weights and needs no transfer; transfers "
    "arrive with the vLLM backend. export_hf(path) or iter_hf_weights() give the weights today"
)


def _check_annotations(annotations: NamedSharding | None, world_size: int) -> None:
    if annotations is None:
        return
    names = list(annotations.names)
    expected = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
    if names != expected:
        raise ValueError(
            f"worker_sharding_annotations has axes {names}; they must be {expected}, slowest first"
        )
    size = 1
    for name in names:
        size *= annotations.get_axis_size(name)
    if size != world_size:
        raise ValueError(
            f"worker_sharding_annotations describes {size} ranks, but the world has {world_size}"
        )


@ray.remote
class MegatronPolicyWorker(MegatronPolicyWorkerImpl):
    """The Ray actor."""


def broadcast_object_across_pp_ranks(obj: Any) -> Any:
    """An object that exactly one stage has (the others hold None), on all stages of this rank's pipeline."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return obj
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, obj, group=group)
    found = [item for item in gathered if item is not None]
    if not found:
        raise ValueError("no pipeline stage has the object to broadcast")
    return found[0]


def setup_megatron_model(*args: Any, **kwargs: Any) -> Any:
    """Replaced: build a :class:`nemo_rl.models.megatron.engine.MegatronEngine` from a PolicyConfig."""
    raise NotImplementedError(
        "setup_megatron_model took megatron-bridge's ConfigContainer; build "
        "nemo_rl.models.megatron.engine.MegatronEngine(config, dims) instead"
    )


__all__ = [
    "MegatronPolicyWorker",
    "MegatronPolicyWorkerImpl",
    "broadcast_object_across_pp_ranks",
    "destroy_parallel_state",
    "setup_megatron_model",
]
