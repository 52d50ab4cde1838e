# SPDX-License-Identifier: Apache-2.0
"""The bridge as users see it: one object per HuggingFace model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

import megatron_bridge.models  # noqa: F401  (registers the families)
from megatron_bridge.comm import gather_objects
from megatron_bridge.errors import CheckpointError, UnsupportedModelError
from megatron_bridge.export import HFWeight, export_weights, hf_specs
from megatron_bridge.hf_io import (
    HFCheckpoint,
    ShardedWriter,
    atomic_directory,
    copy_companions,
    parse_size,
    set_config_dtype,
)
from megatron_bridge.load import load_weights
from megatron_bridge.mapping.base import Geometry, Shard
from megatron_bridge.plan import ParamTask, build_plan, groups_of, unwrap
from megatron_bridge.platform import prepare_platform
from megatron_bridge.provider import ModelProvider
from megatron_bridge.registry import family_of, supported_architectures

logger = logging.getLogger(__name__)


class AutoBridge:
    """Converts between a HuggingFace model and megatron-core models of it, at any layout.

    Args:
        config: the model's HuggingFace config.
        path: its directory; None if only the config is known (then nothing can be loaded or copied).

    Raises:
        UnsupportedModelError: unknown architecture (lists the supported ones), or an option that cannot be expressed.
    """

    def __init__(self, config: PreTrainedConfig, path: Path | None = None) -> None:
        self.config = config
        self.path = path
        self.family = family_of(config)
        self._checkpoint: HFCheckpoint | None = None
        ModelProvider(config, self.family)  # refuses now what cannot be expressed

    @classmethod
    def from_hf_pretrained(cls, path: str | os.PathLike[str], trust_remote_code: bool = False) -> AutoBridge:
        """Opens a HuggingFace directory. Reads its config only; weights are read when they are needed."""
        directory = Path(path)
        if not (directory / "config.json").is_file():
            raise CheckpointError(
                f"{directory} has no config.json; give the directory of a HuggingFace model"
            )
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        return cls(config, directory)

    @classmethod
    def from_hf_config(cls, config: PreTrainedConfig) -> AutoBridge:
        """For models without weights (random initialisation, tests)."""
        return cls(config)

    @staticmethod
    def list_supported_models() -> list[str]:
        """Architecture strings that can be converted."""
        return supported_architectures()

    @classmethod
    def can_handle(cls, path: str | os.PathLike[str], trust_remote_code: bool = False) -> bool:
        """Whether the model in a directory can be converted."""
        try:
            cls.from_hf_pretrained(path, trust_remote_code)
        except (UnsupportedModelError, CheckpointError):
            return False
        return True

    # -- models --------------------------------------------------------------------------------------------------------

    def to_megatron_provider(self) -> ModelProvider:
        """A provider at TP=PP=1; set its layout and dtype, then build."""
        return ModelProvider(self.config, self.family)

    def to_megatron_model(
        self, provider: ModelProvider | None = None, load_weights: bool = True
    ) -> list[GPTModel]:
        """Builds this rank's chunks (not wrapped in DDP), with the HuggingFace weights or random ones.

        ``megatron.core.parallel_state`` must be initialised with the provider's layout.
        """
        prepare_platform()
        provider = provider or self.to_megatron_provider()
        if load_weights:
            provider.perform_initialization = False
        chunks = provider.provide()
        if load_weights:
            self.load_hf_weights(chunks)
        else:
            self._clear_vocabulary_padding(chunks)
        return chunks

    def load_hf_weights(
        self,
        chunks: Sequence[nn.Module],
        path: str | os.PathLike[str] | None = None,
        track: Callable[[Sequence[ParamTask]], Iterable[ParamTask]] = iter,
    ) -> None:
        """Fills the chunks from the model's directory (or another one of the same shapes). Collective over pipelines.

        Args:
            chunks: this rank's model chunks, wrapped or not.
            path: another HuggingFace directory.
            track: wraps the list of parameters, for progress display.

        Raises:
            CheckpointError: names tensors that are missing, unused or misshapen, or a file that is damaged.
        """
        groups = groups_of(unwrap(chunks[0]))
        geometry = self._geometry(chunks)
        shard = Shard(geometry, groups.tp_rank, groups.tp_size)
        load_weights(self.plan(chunks), self._weights(path), self.family, shard, track)

    # -- export --------------------------------------------------------------------------------------------------------

    def export_hf_weights(
        self, chunks: Sequence[nn.Module], dtype: torch.dtype | None = None
    ) -> Iterator[HFWeight]:
        """Streams every HuggingFace tensor, full, once, in the same order on every rank. Collective over tp x pp.

        Every rank must exhaust the stream. Tensors may be views of parameters: use them before the next update.

        Args:
            chunks: this rank's model chunks; DDP and mixed-precision wrappers are looked through.
            dtype: of the stream; None keeps the parameters'.
        """
        model = unwrap(chunks[0])
        device = next(model.parameters()).device
        return export_weights(self.plan(chunks), self._geometry(chunks), groups_of(model), device, dtype)

    def hf_weight_specs(
        self, chunks: Sequence[nn.Module], dtype: torch.dtype | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of what :meth:`export_hf_weights` yields, in its order. Collective over pipelines."""
        size, geometry = groups_of(unwrap(chunks[0])).tp_size, self._geometry(chunks)
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for task in self.plan(chunks):
            if task.exported:
                for name, (shape, own_dtype) in hf_specs(task, geometry, size).items():
                    specs[name] = (shape, dtype or own_dtype)
        return specs

    def save_hf_pretrained(
        self,
        chunks: Sequence[nn.Module],
        path: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        max_shard_size: str | int = "5GB",
        track: Callable[[Iterator[HFWeight], int], Iterable[HFWeight]] = lambda stream, total: stream,
    ) -> None:
        """Writes a HuggingFace directory that appears complete or not at all. Collective over all ranks of the world.

        Config, tokenizer, chat template, generation config and custom code are copied from the source directory.
        Global rank 0 writes. An existing non-empty directory is refused.

        Args:
            chunks: this rank's model chunks, wrapped or not.
            path: new directory.
            dtype: of the files; None keeps the parameters'.
            max_shard_size: upper bound of one file, in bytes or like "5GB".
            track: wraps (stream, number of tensors), for progress display.

        Raises:
            CheckpointError: on every rank, if writing failed on rank 0.
        """
        writes = not dist.is_initialized() or dist.get_rank() == 0
        specs = self.hf_weight_specs(chunks, dtype)
        limit = parse_size(max_shard_size)
        stream = self.export_hf_weights(chunks, dtype)
        failure: BaseException | None = None
        if writes:
            try:
                self._write_directory(track(stream, len(specs)), specs, Path(path), limit)
            except (OSError, ValueError) as error:
                failure = error
        for _ in stream:  # the other ranks, and rank 0 after a failure, still take part in the collectives
            pass
        if dist.is_initialized():
            failures = gather_objects(None if failure is None else str(failure), dist.group.WORLD)
            if failure is None and failures[0] is not None:
                raise CheckpointError(f"rank 0 could not write {path}: {failures[0]}")
        if failure is not None:
            raise failure

    def _write_directory(
        self,
        stream: Iterable[HFWeight],
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]],
        path: Path,
        max_shard_bytes: int,
    ) -> None:
        with atomic_directory(path) as temporary:
            dtype = next(iter(specs.values()))[1]
            if self.path is not None:
                copy_companions(self.path, temporary)
            if self._config_differs_from_file():
                self.config.save_pretrained(temporary)
            set_config_dtype(temporary, dtype)
            ShardedWriter(temporary, specs, max_shard_bytes).write(stream)

    def _config_differs_from_file(self) -> bool:
        """Whether the bridge was made with another config than its directory holds (or without a directory)."""
        if self.path is None:
            return True
        stored = type(self.config).from_pretrained(self.path)
        return stored.to_dict() != self.config.to_dict()

    # -- conversion without a job --------------------

    @classmethod
    def import_ckpt(cls, hf_dir: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        """HuggingFace directory -> layout-free megatron-core checkpoint; see :func:`convert.import_checkpoint`."""
        from megatron_bridge.convert import import_checkpoint

        import_checkpoint(hf_dir, path)

    def export_ckpt(self, checkpoint: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        """Megatron-core checkpoint of this model -> HuggingFace directory; see :func:`convert.export_checkpoint`."""
        from megatron_bridge.convert import export_checkpoint

        if self.path is None:
            raise CheckpointError(
                "this bridge was made from a config; open the HuggingFace directory instead"
            )
        export_checkpoint(checkpoint, path, self.path)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def plan(self, chunks: Sequence[nn.Module]) -> list[ParamTask]:
        """The parameters of the whole model, in export order. Collective over pipelines."""
        return build_plan(chunks, self.family, tied=bool(self.config.tie_word_embeddings))

    def _geometry(self, chunks: Sequence[nn.Module]) -> Geometry:
        provider = ModelProvider(self.config, self.family)
        provider.tensor_model_parallel_size = groups_of(unwrap(chunks[0])).tp_size
        return provider.geometry

    def weights_dtype(self) -> torch.dtype:
        """The dtype of the weights in the model's directory."""
        checkpoint = self._weights(None)
        return checkpoint[checkpoint.names[0]].dtype

    def _weights(self, path: str | os.PathLike[str] | None) -> HFCheckpoint:
        if path is not None:
            return HFCheckpoint(path)
        if self._checkpoint is None:
            if self.path is None:
                raise CheckpointError("this bridge was made from a config; give the path of the weights")
            self._checkpoint = HFCheckpoint(self.path)
        return self._checkpoint

    @torch.no_grad()
    def _clear_vocabulary_padding(self, chunks: Sequence[nn.Module]) -> None:
        """Rows of tokens that do not exist are zero."""
        rank = groups_of(unwrap(chunks[0])).tp_rank
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                    real = self.config.vocab_size - rank * parameter.shape[0]
                    parameter[max(real, 0) :].zero_()
