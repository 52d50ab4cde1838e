# SPDX-License-Identifier: Apache-2.0
"""Gated feed-forward input projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bridge.mapping.base import Geometry, ParamMapping, Readable, Shard
from megatron_bridge.mapping.dense import join


@dataclass(frozen=True)
class GatedMLP(ParamMapping):
    """``hf`` is (gate, up). Each rank holds its gate rows, then its up rows."""

    def hf_to_local(self, tensors: Mapping[str, Readable], shard: Shard) -> Tensor:
        """[gate rows; up rows] of this rank."""
        return torch.cat(
            [source[shard.range_of(source.shape[0])] for source in (tensors[n] for n in self.hf)]
        )

    def local_to_hf(self, shards: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """Gate and up projections."""
        halves = [shard.tensor_split(2) for shard in shards]
        return {name: join([half[i] for half in halves], 0) for i, name in enumerate(self.hf)}
