"""Rows that environments wrote one after the other, often in a ring, cut into episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.keyed import KeyedSource, stretches
from expstore.formats.source import NOTHING, Imported, SourceEpisode

OVERWRITTEN = "rows before the first had been overwritten, perhaps of the same episode"
UNFINISHED = "no end flag on the last rows, so they are kept as incomplete"
BOTH_FLAGS = "both flags set, so it ended as terminated; both are kept"


@dataclass(frozen=True)
class Lane:
    """The rows of one environment, the oldest first."""

    name: str  # "" where there is only one
    number: int
    stretches: tuple[tuple[int, int], ...]  # (start, stop) rows of the source
    was_full: bool = False  # so that older rows may have been overwritten

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.stretches)

    def slices(self, start: int, stop: int) -> list[slice]:
        """Where the rows `start` to `stop`, counted from the oldest, are in the source.

        >>> Lane("", 0, ((4, 6), (0, 4))).slices(1, 4)
        [slice(5, 6, None), slice(0, 2, None)]
        """
        found, before = [], 0
        for first, end in self.stretches:
            a, b = max(start - before, 0), min(stop - before, end - first)
            if a < b:
                found.append(slice(first + a, first + b))
            before += end - first
        return found


def ring(num_rows: int, capacity: int, cursor: int, offset: int = 0) -> tuple[tuple[int, int], ...]:
    """The stretches of a ring in the order of time; `cursor` is the row to be written next.

    >>> ring(3, 6, 3), ring(6, 6, 4)
    (((0, 3),), ((4, 6), (0, 4)))
    """
    if num_rows < capacity or cursor % capacity == 0:
        return ((offset, offset + num_rows),)
    return ((offset + cursor, offset + capacity), (offset, offset + cursor))


@dataclass(frozen=True)
class Cut:
    """The rows of one episode, counted from the oldest of their lane."""

    lane: Lane
    start: int
    stop: int
    is_finished: bool  # False where the lane goes on no further and no flag is set

    @property
    def slices(self) -> list[slice]:
        return self.lane.slices(self.start, self.stop)


class RingSource(KeyedSource):
    """A source of rows; the keys count its episodes, `lane/number` where lanes have names."""

    final_rows = 0  # of an episode, that are no steps: 1 where the last row is an observation

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.keys: list[int | str] = []
        self.num_steps: int | None = 0
        self._cuts: dict[int | str, Cut] = {}

    def cut(self, lanes: Sequence[Lane], ends: Callable[[Lane], NDArray[np.bool_]]) -> None:
        """Find the episodes.

        Args:
            ends: which rows of a lane are the last of their episode, in the order of time.
        """
        for lane in lanes:
            found = ends(lane)
            assert len(found) == lane.num_rows, (len(found), lane)
            if lane.was_full:
                self.account.remark(OVERWRITTEN, 1)
            for number, (start, stop) in enumerate(stretches(found)):
                key = f"{lane.name}/{number}" if lane.name else number
                self._cuts[key] = Cut(lane, start, stop, bool(found[stop - 1]))
        self.keys = list(self._cuts)
        self.num_steps = sum(self._steps_of(cut) for cut in self._cuts.values())

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        """Those that are not imported yet.

        Raises:
            SourceError: one that is has another length now.
        """
        for key, length in imported.lengths.items():
            cut = self._cuts.get(key)
            found = self._steps_of(cut) if cut else 0
            if found != length:
                raise SourceError(
                    f"episode {key} of {self.name} has {found} steps, but had {length} when it "
                    "was imported: the source has changed; import it to a new store"
                )
        yield from super().episodes(imported)

    def _steps_of(self, cut: Cut) -> int:
        return cut.stop - cut.start - self.final_rows

    def end_of(self, cut: Cut, data: dict[str, Any]) -> str | None:
        """Why the episode ended, where its flags do not say so; both flags are remarked on."""
        terminated, truncated = (
            name in data and bool(data[name][-1]) for name in ("terminated", "truncated")
        )
        if terminated and truncated:
            self.account.remark(BOTH_FLAGS, 1)
        if terminated or truncated:
            return None
        if cut.is_finished:
            return "cut"
        self.account.remark(UNFINISHED, 1)
        return "incomplete"


def gather(column: Any, slices: Sequence[slice]) -> NDArray[Any]:
    """The rows of some stretches, one after the other."""
    parts = [np.asarray(column[rows]) for rows in slices]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
