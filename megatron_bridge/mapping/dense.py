# SPDX-License-Identifier: Apache-2.0
"""Replicated, column-parallel, row-parallel and vocabulary-parallel parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bridge.mapping.base import Geometry, ParamMapping, Readable, Shard


@dataclass(frozen=True)
class Replicated(ParamMapping):
    """The same on every rank: norms, biases of row-parallel linears, routers."""

    def hf_to_local(self, tensors: Mapping[str, Readable], shard: Shard) -> Tensor:
        """The whole tensor."""
        return tensors[self.hf[0]][...]

    def local_to_hf(self, shards: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """The first rank's copy."""
        return {self.hf[0]: shards[0]}


@dataclass(frozen=True)
class Column(ParamMapping):
    """Output features are split: rows of the weight, elements of the bias."""

    def hf_to_local(self, tensors: Mapping[str, Readable], shard: Shard) -> Tensor:
        """This rank's rows."""
        source = tensors[self.hf[0]]
        return source[shard.range_of(source.shape[0])]

    def local_to_hf(self, shards: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """Rows in rank order."""
        return {self.hf[0]: join(shards, 0)}


@dataclass(frozen=True)
class Row(ParamMapping):
    """Input features are split: columns of the weight."""

    def hf_to_local(self, tensors: Mapping[str, Readable], shard: Shard) -> Tensor:
        """This rank's columns."""
        source = tensors[self.hf[0]]
        return source[:, shard.range_of(source.shape[1])]

    def local_to_hf(self, shards: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """Columns in rank order."""
        return {self.hf[0]: join(shards, 1)}


@dataclass(frozen=True)
class Vocabulary(ParamMapping):
    """Rows are tokens, padded with zero rows to a multiple of the ranks; padding never leaves."""

    def hf_to_local(self, tensors: Mapping[str, Readable], shard: Shard) -> Tensor:
        """This rank's rows, zero where there is no such token."""
        source = tensors[self.hf[0]]
        rows = shard.range_of(shard.geometry.padded_vocab_size)
        real = source[min(rows.start, source.shape[0]) : min(rows.stop, source.shape[0])]
        missing = rows.stop - rows.start - real.shape[0]
        return torch.cat([real, real.new_zeros(missing, *real.shape[1:])]) if missing else real

    def local_to_hf(self, shards: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """The real tokens' rows."""
        return {self.hf[0]: join(shards, 0)[: geometry.vocab_size]}


def join(shards: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates; a single shard is returned as it is."""
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)
