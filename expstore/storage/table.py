"""The table of a store's episodes, as people filter and print it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from expstore.errors import FieldNotFoundError
from expstore.storage.episodes import EpisodeRow, presented
from expstore.storage.reading import STRIDE, Snapshot


class Episodes(Sequence[EpisodeRow]):
    """The table of a store's episodes: rows by position, columns by name.

    Columns: `number`, `start`, `length`, `end_reason`, `return` (where there are rewards),
    `seed` (None where unknown), `metadata`, and each key of the metadata.
    """

    def __init__(
        self,
        snapshots: tuple[Snapshot, ...],
        selected: tuple[NDArray[np.int64] | None, ...],
        numbers: NDArray[np.int64],
        starts: NDArray[np.int64],
    ) -> None:
        self._snapshots, self._selected = snapshots, selected
        self._numbers, self._starts = numbers, starts

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, key: int) -> EpisodeRow: ...
    @overload
    def __getitem__(self, key: slice) -> list[EpisodeRow]: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            return self._column(key)
        numbers = self._numbers[key]
        if isinstance(key, slice):
            return [self._row(int(number)) for number in numbers]
        return self._row(int(numbers))

    def __iter__(self) -> Iterator[EpisodeRow]:
        return (self._row(int(number)) for number in self._numbers)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that every episode has."""
        return ("number", *self._snapshots[0].index.names, "metadata")

    def _row(self, number: int) -> EpisodeRow:
        position, local = divmod(number, STRIDE)
        return row_of(self._snapshots[position], local, position * STRIDE)

    def _column(self, name: str) -> Any:
        if name == "number":
            return np.array(self._numbers)
        if name == "start":
            return np.array(self._starts)
        if name == "seed":
            return np.array([row[name] for row in self], object)
        if name not in self._snapshots[0].index.names:
            try:
                return [row[name] for row in self]
            except KeyError:
                raise FieldNotFoundError(
                    f"not every episode has {name!r}; columns are {', '.join(self.columns)}, and "
                    f"what the metadata brings: use [row.get({name!r}) for row in store.episodes]"
                ) from None
        values = np.concatenate(
            [
                s.index.column(name)[() if c is None else c - s.first_episode]
                for s, c in zip(self._snapshots, self._selected, strict=True)
            ]
        )
        if name == "end_reason":
            return np.array([presented(name, v) for v in values], str)
        return values


def row_of(snapshot: Snapshot, episode: int, base: int) -> EpisodeRow:
    """One episode's row in the table; `base` is what the union adds to its numbers."""
    index, at = snapshot.index, episode - snapshot.first_episode
    values = {name: presented(name, index.column(name)[at]) for name in index.names}
    values["start"] += base
    return EpisodeRow(base + episode, values, partial(index.metadata, episode))
