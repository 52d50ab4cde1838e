# SPDX-License-Identifier: Apache-2.0
"""Batches in an order that depends only on (seed, epoch), from any place in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.utils.hashing import hash64

STATE_KEYS = ("epoch", "position", "seed", "shuffle", "batch_size", "num_rows", "fingerprint")


class StatefulDataLoader:
    """A resumable loader.

    ``next(loader)`` never ends: epochs roll over. ``for batch in loader`` gives what is left of the current
    epoch and moves on to the next one, so that the next ``for`` gives that. ``state_dict`` counts the
    batches that were handed out, not those that workers prefetched: a loader that loads it continues with
    the very next batch.

    Args:
        dataset: Anything with ``len`` and integer indexing.
        batch_size: Rows per batch.
        shuffle: Whether each epoch has its own order, from ``seed`` and the epoch's number.
        seed: Seed of the order.
        drop_last: Whether a last batch with fewer rows is left out.
        num_workers: Processes that prepare batches ahead; 0 prepares them in this one.
        collate_fn: Makes a batch of a list of rows.
        name: What an error calls the data set.

    Raises:
        ValueError: If there are fewer rows than one batch needs.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[Sequence[Any]], Any] = rl_collate_fn,
        name: str = "data.train",
    ) -> None:
        if len(dataset) == 0 or (drop_last and len(dataset) < batch_size):
            raise ValueError(
                f"{name} has {len(dataset)} rows, fewer than the {batch_size} of one batch; use more rows, or a batch "
                f"of at most {max(1, len(dataset))}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.name = name
        self.epoch = 0
        self.position = 0  # batches of this epoch that were handed out
        self._running: Iterator[Any] | None = None  # batches from the current place on

    def __len__(self) -> int:
        """Batches per epoch."""
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[Any]:
        self._roll_over()
        for _ in range(len(self) - self.position):
            yield next(self)

    def __next__(self) -> Any:
        self._roll_over()
        if self._running is None:
            self._running = iter(self._load())
        batch = next(self._running)
        self.position += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in plain values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "num_rows": len(self.dataset),
            "fingerprint": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            ValueError: If the data set, the batch size or the seed is not what it was then.
        """
        now = self.state_dict()
        for key in STATE_KEYS[2:]:
            if state[key] != now[key]:
                raise ValueError(
                    f"{self.name} cannot resume: {key} was {state[key]!r} when the checkpoint was written and is "
                    f"{now[key]!r} now. Restore the old data config, or start a new run in another logger.log_dir"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._running = None

    def _roll_over(self) -> None:
        """Go to the next epoch if this one is used up."""
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0

    def _load(self) -> DataLoader[Any]:
        """All batches from here on, without end; one set of worker processes serves all epochs."""
        return DataLoader(
            self.dataset,
            batch_sampler=_Endless(self._batches_from_here),
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            generator=torch.Generator(),  # else starting it draws from the global random state
            multiprocessing_context="spawn" if self.num_workers else None,
        )

    def _batches_from_here(self) -> Iterator[list[int]]:
        epoch, position = self.epoch, self.position
        while True:
            yield from self._epoch_batches(epoch)[position:]
            epoch, position = epoch + 1, 0

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        """Row indices of each batch of an epoch."""
        rows = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator().manual_seed(hash64("dataloader", self.seed, epoch))
            order = torch.randperm(rows, generator=generator).tolist()
        else:
            order = list(range(rows))
        return [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self))]

    def _fingerprint(self) -> int:
        """A hash of three rows: enough to notice that the data set is another one."""
        rows = sorted({0, len(self.dataset) // 2, len(self.dataset) - 1})
        return hash64(*(_row_text(self.dataset[index]) for index in rows))


class _Endless:
    """What ``DataLoader`` wants for a sampler: an iterable, here of lists of row indices."""

    def __init__(self, start: Callable[[], Iterator[list[int]]]) -> None:
        self.start = start

    def __iter__(self) -> Iterator[list[int]]:
        return self.start()


def _row_text(row: Any) -> str:
    if isinstance(row, Mapping):
        return repr(sorted((str(key), _row_text(value)) for key, value in row.items()))
    if isinstance(row, (list, tuple)):
        return repr([_row_text(value) for value in row])
    return repr(row.tolist()) if isinstance(row, torch.Tensor) else repr(row)
