# SPDX-License-Identifier: Apache-2.0
"""Names for the axes of a grid of workers: the driver's map between ranks and coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class NamedSharding:
    """An n-dimensional grid of worker ranks whose axes have names.

    ``NamedSharding([[0, 1], [2, 3]], ["data", "tensor"])`` says that rank 2 has data coordinate 1 and
    tensor coordinate 0.

    Args:
        layout: nested sequences or array of distinct integer ranks, one dimension per axis.
        names: one distinct name per dimension, outermost first.

    Raises:
        ValueError: ragged or non-integer layout, a rank or a name that occurs twice, or a number of names
            other than the number of dimensions.
    """

    def __init__(self, layout: Sequence[Any] | np.ndarray, names: list[str]) -> None:
        grid = _integer_grid(layout)
        if grid.ndim != len(names):
            raise ValueError(f"layout has {grid.ndim} dimensions but {len(names)} names were given: {names}")
        if len(set(names)) != len(names):
            raise ValueError(f"axis names must be distinct, got {names}")
        ranks, counts = np.unique(grid, return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"ranks must be distinct, these occur more than once: {ranks[counts > 1].tolist()}"
            )
        self._layout = grid
        self._names = list(names)
        self._coords = {int(rank): tuple(map(int, index)) for index, rank in np.ndenumerate(grid)}

    @property
    def shape(self) -> dict[str, int]:
        """Size of every axis, outermost first."""
        return dict(zip(self._names, map(int, self._layout.shape), strict=True))

    @property
    def names(self) -> list[str]:
        """Axis names, outermost first (a copy)."""
        return list(self._names)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """Number of ranks in the grid."""
        return int(self._layout.size)

    @property
    def layout(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """The grid of ranks (a copy)."""
        return self._layout.copy()

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Coordinate of one rank along every axis; ValueError if the rank is not in the grid."""
        if worker_id not in self._coords:
            raise ValueError(f"rank {worker_id} is not in {self!r}")
        return dict(zip(self._names, self._coords[worker_id], strict=True))

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Ranks whose coordinates equal ``coords``, ascending; empty if a coordinate is beyond its axis.

        Raises:
            ValueError: unknown axis name.
        """
        index: list[Any] = [slice(None)] * self.ndim
        for name, coordinate in coords.items():
            axis = self.get_axis_index(name)
            if not 0 <= coordinate < self._layout.shape[axis]:
                return []
            index[axis] = coordinate
        return sorted(int(rank) for rank in np.ravel(self._layout[tuple(index)]))

    def get_ranks(self, **kwargs: int) -> NamedSharding | int:
        """Fix some coordinates: the grid over the remaining axes, or the one rank if none remain.

        Raises:
            ValueError: unknown axis name.
            IndexError: coordinate beyond its axis.
        """
        index: list[Any] = [slice(None)] * self.ndim
        for name, coordinate in kwargs.items():
            axis = self.get_axis_index(name)
            if not 0 <= coordinate < self._layout.shape[axis]:
                raise IndexError(
                    f"coordinate {coordinate} is beyond axis {name!r} of size {self.shape[name]}"
                )
            index[axis] = coordinate
        subgrid = self._layout[tuple(index)]
        if np.ndim(subgrid) == 0:
            return int(subgrid)
        return NamedSharding(subgrid, [name for name in self._names if name not in kwargs])

    def get_axis_index(self, name: str) -> int:
        """Position of an axis, 0 is the outermost; ValueError for an unknown name."""
        if name not in self._names:
            raise ValueError(f"unknown axis {name!r}, the axes are {self._names}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Number of coordinates along an axis; ValueError for an unknown name."""
        return int(self._layout.shape[self.get_axis_index(name)])

    def is_axis_zero(self, worker_id: int, name: str) -> bool:
        """Whether the rank's coordinate along the axis is 0."""
        axis = self.get_axis_index(name)
        if worker_id not in self._coords:
            raise ValueError(f"rank {worker_id} is not in {self!r}")
        return self._coords[worker_id][axis] == 0

    def __repr__(self) -> str:
        return f"NamedSharding(shape={self.shape}, names={self._names}, layout={self._layout.tolist()})"


def _integer_grid(layout: Sequence[Any] | np.ndarray) -> np.ndarray:
    """``layout`` as an int32 array; ValueError if it is ragged or holds anything but integers."""
    try:
        grid = np.array(layout)
    except ValueError as error:
        raise ValueError(f"layout must be a regular grid of ranks, got {layout!r}") from error
    if grid.size == 0 or grid.dtype == object or not np.issubdtype(grid.dtype, np.number):
        raise ValueError(f"layout must be a non-empty regular grid of integer ranks, got {layout!r}")
    integers = grid.astype(np.int32)
    if not np.array_equal(integers, grid):
        raise ValueError(f"ranks must be integers, got {layout!r}")
    return integers
