# SPDX-License-Identifier: Apache-2.0
"""What a mapping is: one megatron-core parameter, the HuggingFace tensors it is made of, both directions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from megatron_bridge.mapping import patterns


class Readable(Protocol):
    """A tensor, or a tensor in a file of which only the asked-for slice is read."""

    @property
    def shape(self) -> Sequence[int]:
        """Full shape."""
        ...

    def __getitem__(self, index: Any) -> Tensor:
        """Reads a slice."""
        ...


@dataclass(frozen=True)
class Geometry:
    """The sizes that tensor layouts depend on.

    Attributes:
        num_heads: query heads.
        num_groups: key/value heads.
        head_dim: channels of one head.
        vocab_size: rows of the HuggingFace embedding.
        padded_vocab_size: rows over all tensor-parallel ranks (padding included).
    """

    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int


@dataclass(frozen=True)
class Shard:
    """One tensor-parallel rank's share."""

    geometry: Geometry
    rank: int = 0
    size: int = 1

    def range_of(self, length: int) -> slice:
        """This rank's equal share of ``length`` rows or columns."""
        assert length % self.size == 0, f"{length} does not divide by {self.size}"
        step = length // self.size
        return slice(self.rank * step, (self.rank + 1) * step)


@dataclass(frozen=True)
class ParamMapping(ABC):
    """Maps one megatron-core parameter to and from HuggingFace tensors.

    Attributes:
        megatron: parameter name or pattern, in the local layer spec's naming.
        hf: HuggingFace names or patterns, in the order that the mapping expects.
    """

    megatron: str
    hf: tuple[str, ...]

    def resolve(self, name: str) -> ParamMapping | None:
        """This mapping with concrete names if ``name`` matches, else None."""
        numbers = patterns.match(self.megatron, name)
        if numbers is None:
            return None
        return replace(self, megatron=name, hf=tuple(patterns.fill(pattern, numbers) for pattern in self.hf))

    @abstractmethod
    def hf_to_local(self, tensors: Mapping[str, Readable], shard: Shard) -> Tensor:
        """The shard of one rank, reading no more than it needs.

        Args:
            tensors: readable tensors of at least the names in ``hf``.
            shard: which rank's share.
        """

    @abstractmethod
    def local_to_hf(self, shards: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """The full HuggingFace tensors from the shards of all tensor-parallel ranks, in rank order.

        May return views of the shards. Works on meta tensors too, which gives the expected shapes.
        """
