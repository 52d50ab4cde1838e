# SPDX-License-Identifier: Apache-2.0
"""A batch as a dict of columns: tensors [B, ...] and lists of B items, cut, joined and sharded by row."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypedDict, TypeVar, overload

import torch

from nemo_rl.distributed import _batch_columns as columns
from nemo_rl.distributed._batch_columns import BatchError
from nemo_rl.distributed._batch_rows import even_rows, length_balanced_rows, uneven_rows

DictT = TypeVar("DictT", bound=Mapping[str, Any])

# Multimodal columns that are plain tensors, handed to the model next to input_ids.
_PLAIN_MULTIMODAL_KEYS = ("token_type_ids", "mm_token_type_ids")


class SequencePackingArgs(TypedDict):
    """How to pack rows into micro-batches; lengths are in tokens."""

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: int


class DynamicBatchingArgs(TypedDict):
    """How to form micro-batches of similar lengths; a micro-batch costs rows x rounded longest row tokens."""

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class BatchedDataDict(UserDict, Generic[DictT]):
    """Columns of equal length: tensors with rows along dimension 0, or lists with one item per row.

    Methods that cut or join rows raise :class:`BatchError` (a ``ValueError``) which names the columns if
    their lengths differ. Pickling with protocol 5 (as Ray does) ships each CPU tensor once, as a raw buffer
    of exactly its own rows, never the larger storage that it may be a view of.

    Attributes:
        micro_batch_indices: per global batch, the [start, end) rows of each micro-batch, relative to that
            global batch; None unless the sharder formed micro-batches.
        micro_batch_lengths: per global batch, the padded token length of each micro-batch; or None.
        elem_counts_per_gb: rows of each global batch in this shard, if they are not equal; or None.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None

    # -- joining ------------------------------------------------------------------------------------------

    @classmethod
    def from_batches(
        cls: type[Self],
        batches: Sequence[Mapping[Any, Any]],
        pad_value_dict: dict[str, int | float] | None = None,
    ) -> Self:
        """Concatenate batches by row; tensors of two or more dimensions are right-padded along dimension 1.

        Args:
            batches: mappings with the same keys; batches without any key are skipped.
            pad_value_dict: padding value per column, 0 for the columns that it does not name.

        Raises:
            KeyError: a batch lacks a column that another has.
            NotImplementedError: a column is neither a tensor nor a list.
            BatchError: tensors of one column cannot be joined (their other dimensions differ).
        """
        filled = [batch for batch in batches if len(batch) > 0]
        joined = cls()
        keys = dict.fromkeys(key for batch in filled for key in batch)
        for key in keys:
            for index, batch in enumerate(filled):
                if key not in batch:
                    raise KeyError(
                        f"column {key!r} is missing in batch {index}, which has {sorted(map(str, batch))}"
                    )
            pad = pad_value_dict[key] if pad_value_dict is not None and key in pad_value_dict else 0
            joined[key] = columns.concatenate(key, [batch[key] for batch in filled], pad)
        return joined

    def all_gather(self, group: torch.distributed.ProcessGroup) -> Self:
        """Concatenate the batches of all ranks of ``group``, in rank order, on every rank (collective).

        Ranks may hold different numbers of rows; columns, and dimensions other than the first, must agree.
        """
        gathered = type(self)()
        for key in sorted(self.data):
            gathered[key] = columns.all_gather(key, self.data[key], group)
        return gathered

    # -- cutting ------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of rows; 0 for a batch without columns."""
        for key, value in self.data.items():
            return columns.length(key, value)
        return 0

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """Rows ``start`` to ``end`` (exclusive); tensors are views."""
        self._checked_size()
        return SlicedDataDict({key: value[start:end] for key, value in self.data.items()})

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """The ``rank``-th of ``chunks`` equal consecutive parts; BatchError if the rows do not divide."""
        size = self._checked_size()
        if not 0 <= rank < chunks:
            raise BatchError(f"chunk {rank} of {chunks} does not exist")
        if size % chunks:
            raise BatchError(f"Total batch size ({size}) is not a multiple of chunks ({chunks})")
        return self.slice(rank * (size // chunks), (rank + 1) * (size // chunks))

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """One global batch of this shard, with the micro-batches that the sharder formed for it.

        Args:
            batch_idx: which global batch.
            batch_size: rows per global batch in this shard; not needed if the sharder recorded the counts.
        """
        if self.elem_counts_per_gb is not None:
            if not 0 <= batch_idx < len(self.elem_counts_per_gb):
                raise BatchError(f"global batch {batch_idx} of {len(self.elem_counts_per_gb)} does not exist")
            start = sum(self.elem_counts_per_gb[:batch_idx])
            end = start + self.elem_counts_per_gb[batch_idx]
        elif batch_size is None:
            raise BatchError("get_batch needs batch_size: this batch carries no row counts of a sharder")
        else:
            start, end = batch_idx * batch_size, (batch_idx + 1) * batch_size
        if not 0 <= start < end <= self.size:
            raise BatchError(f"global batch {batch_idx} is rows {start} to {end}, but there are {self.size}")
        batch = self.slice(start, end)
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        return batch

    def select_indices(self, indices: list[int] | torch.Tensor) -> Self:
        """The rows at ``indices`` (integers, or a boolean mask over the rows), in that order."""
        size = self._checked_size()
        index = torch.as_tensor(indices)
        if index.dtype == torch.bool:
            if index.numel() != size:
                raise BatchError(f"mask of {index.numel()} rows for a batch of {size}")
            index = index.nonzero().flatten()
        index = index.to(device="cpu", dtype=torch.int64).flatten()
        selected = type(self)()
        for key, value in self.data.items():
            selected[key] = columns.take(value, index)
        return selected

    # -- changing -----------------------------------------------------------------------------------------

    def reorder_data(self, reorded_indices: list[int]) -> None:
        """Undo a permutation, in place: row i goes to position ``reorded_indices[i]``.

        If ``shards, order = batch.shard_by_batch_size(...)``, joining what was computed for the shards and
        calling ``reorder_data(order)`` restores the order of ``batch``.
        """
        size = self._checked_size()
        if sorted(reorded_indices) != list(range(size)):
            raise BatchError(f"reorder_data needs a permutation of the {size} rows, got {reorded_indices}")
        inverse = torch.empty(size, dtype=torch.int64)
        inverse[torch.as_tensor(reorded_indices, dtype=torch.int64)] = torch.arange(size)
        for key, value in self.data.items():
            self.data[key] = columns.take(value, inverse)

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Every row ``num_repeats`` times in a row; list items are deep copies of each other."""
        repeated = type(self)()
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                repeated[key] = value.repeat_interleave(num_repeats, dim=0)
            else:
                repeated[key] = [copy.deepcopy(item) for item in value for _ in range(num_repeats)]
        return repeated

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut dimension ``dim`` of tensors that have it to ``truncated_len`` entries, in place (views)."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > dim:
                self.data[key] = value.narrow(dim, 0, truncated_len)

    def to(self, device: str | torch.device) -> Self:
        """Move the tensor columns, in place; returns self."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device)
        return self

    # -- sharding (reference: docs/data-flow.md) ----------------------------------------------------------

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[SlicedDataDict]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]:
        """Deal the rows to ``shards`` data-parallel shards.

        Plain: of every ``batch_size`` consecutive rows (all rows by default) shard r gets the r-th part, so
        the first rows of each shard belong to global batch 0, the next to global batch 1, and so on.
        Dynamic batching: within each global batch rows are dealt by length, and every shard carries the same
        number of micro-batches of the same padded lengths.

        Args:
            shards: number of shards.
            batch_size: rows per global batch, over all shards.
            allow_uneven_shards: without ``batch_size``: ceil(rows / shards) rows each, the last shards fewer.
            dynamic_batching_args: form micro-batches by length.
            sequence_packing_args: not available yet.

        Returns:
            The shards; with dynamic batching also the original row of each row of the joined shards, which
            :meth:`reorder_data` takes.

        Raises:
            BatchError: rows or batch size do not divide, or arguments exclude each other.
            NotImplementedError: sequence packing.
        """
        size = self._checked_size()
        if shards < 1:
            raise BatchError(f"shards must be at least 1, got {shards}")
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise BatchError("dynamic_batching_args and sequence_packing_args exclude each other")
        if sequence_packing_args is not None:
            raise NotImplementedError(
                "sharding into packed sequences needs nemo_rl.data.packing, which does not exist yet: "
                "set policy.sequence_packing.enabled=false"
            )
        if allow_uneven_shards:
            if batch_size is not None or dynamic_batching_args is not None:
                raise BatchError("allow_uneven_shards goes with neither batch_size nor dynamic_batching_args")
            return [self._shard(rows) for rows in uneven_rows(size, shards)]
        batch_size = size if batch_size is None else batch_size
        if batch_size < 1 or size % batch_size:
            raise BatchError(f"Total batch size ({size}) is not a multiple of batch_size ({batch_size})")
        if batch_size % shards:
            raise BatchError(f"Batch size ({batch_size}) is not a multiple of shards ({shards})")
        if dynamic_batching_args is None:
            return [self._shard(rows) for rows in even_rows(size, shards, batch_size)]
        return self._shard_dynamic(shards, batch_size, dynamic_batching_args)

    def _shard_dynamic(
        self, shards: int, batch_size: int, args: DynamicBatchingArgs
    ) -> tuple[list[SlicedDataDict], list[int]]:
        plans = length_balanced_rows(
            lengths=[int(n) for n in self.data[args["input_lengths_key"]]],
            shards=shards,
            batch_size=batch_size,
            max_tokens=args["max_tokens_per_microbatch"],
            length_round=args["sequence_length_round"],
            padded_length=self.data[args["input_key"]].shape[1],
        )
        parts = []
        for plan in plans:
            part = self._shard(plan.rows)
            part.micro_batch_indices = plan.micro_batch_indices
            part.micro_batch_lengths = plan.micro_batch_lengths
            parts.append(part)
        return parts, [row for plan in plans for row in plan.rows]

    def _shard(self, rows: list[int]) -> SlicedDataDict:
        """The rows as a shard; one run of consecutive rows stays a view."""
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return self.slice(rows[0], rows[0] + len(rows))
        if not rows:
            return self.slice(0, 0)
        return SlicedDataDict(self.select_indices(rows).data)

    # -- micro-batches ------------------------------------------------------------------------------------

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Consecutive micro-batches of ``microbatch_size`` rows; BatchError if the rows do not divide."""
        size = self._checked_size()
        if microbatch_size < 1 or size % microbatch_size:
            raise BatchError(
                f"Data dict size ({size}) is not a multiple of the provided microbatch size "
                f"({microbatch_size})"
            )
        return (self.slice(start, start + microbatch_size) for start in range(0, size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[SlicedDataDict]:
        """The micro-batches of dynamic batching, cut to their padded length along ``sequence_dim``."""
        indices, lengths = self._single_plan()
        for (start, end), length in zip(indices, lengths, strict=True):
            batch = self.slice(start, end)
            batch.truncate_tensors(dim=sequence_dim, truncated_len=length)
            yield batch

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Number of micro-batches that dynamic batching formed."""
        return len(self._single_plan()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """The rows of each packed micro-batch, not yet packed."""
        for start, end in self._single_plan()[0]:
            yield self.slice(start, end)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Number of packed micro-batches, and the padded tokens of the longest."""
        indices, lengths = self._single_plan()
        return len(indices), max(lengths)

    def _single_plan(self) -> tuple[list[list[int]], list[int]]:
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise BatchError(
                "this batch carries no micro-batches: shard it with dynamic batching or packing first"
            )
        if len(self.micro_batch_indices) != 1:
            raise BatchError(
                f"this batch spans {len(self.micro_batch_indices)} global batches: take one with get_batch(i)"
            )
        return self.micro_batch_indices[0], self.micro_batch_lengths[0]

    # -- views --------------------------------------------------------------------------------------------

    def get_dict(self) -> dict[Any, Any]:
        """The columns as a plain dict (not a copy)."""
        return self.data

    def get_multimodal_dict(
        self, as_tensors: bool = False, device: torch.device | None = None
    ) -> dict[str, Any]:
        """The columns that go to the model next to ``input_ids``: token type ids, where present.

        Args:
            as_tensors: columns of this kind are tensors already; accepted for the documented signature.
            device: move them there.
        """
        present = {key: self.data[key] for key in _PLAIN_MULTIMODAL_KEYS if key in self.data}
        if as_tensors:
            present = {key: torch.as_tensor(value) for key, value in present.items()}
        if device is not None:
            present = {key: value.to(device) for key, value in present.items()}
        return present

    def _checked_size(self) -> int:
        return columns.common_length(self.data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if protocol < 5:
            return super().__reduce_ex__(protocol)
        encoded = {key: columns.encode(value) for key, value in self.data.items()}
        plan = (self.micro_batch_indices, self.micro_batch_lengths, self.elem_counts_per_gb)
        return _rebuild, (type(self), encoded, plan)


class SlicedDataDict(BatchedDataDict):
    """Rows cut from a larger batch: a shard, a global batch or a micro-batch."""


def _rebuild(
    cls: type[BatchedDataDict], encoded: dict[Any, Any], plan: tuple[Any, Any, Any]
) -> BatchedDataDict:
    batch = cls({key: columns.decode(value) for key, value in encoded.items()})
    batch.micro_batch_indices, batch.micro_batch_lengths, batch.elem_counts_per_gb = plan
    return batch
