"""What a column is written and read through, mapped and coded alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError
from expstore.storage.parallel import Threads


class Appender(Protocol):
    """Adds rows to one array; what it wrote counts only once a commit says so."""

    @property
    def num_rows(self) -> int:
        """Rows appended so far."""
        ...

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows (n, *row_shape); the caller may reuse them at once."""
        ...

    def rewind(self, num_rows: int) -> None:
        """Forget the rows from `num_rows` on."""
        ...

    def flush(self) -> None:
        """Hand all rows to the operating system."""
        ...

    def syncs(self) -> list[Callable[[], None]]:
        """The calls that make what was flushed durable, to be run side by side."""
        ...

    def place(self) -> bool:
        """After `syncs`: put files in their places; True where the directory must be synced."""
        ...

    def close(self) -> None:
        """Close all files; rows that were not flushed are dropped."""
        ...


@dataclass(frozen=True)
class Reading:
    """What has to be done to read rows of one column."""

    calls: Sequence[Callable[[], None]]  # all of it, side by side
    ranges: Callable[[], NDArray[np.int64]]  # (R, 2) addresses that the calls will read
    finish: Callable[[], None] | None = None  # after all calls


class Column(Protocol):
    """What an array is read through; rows `start` to `stop` are those of the commit."""

    def take(
        self,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        start: int,
        stop: int,
        threads: Threads = ...,
    ) -> NDArray[Any]: ...

    def slice(self, first: int, last: int, start: int, stop: int) -> NDArray[Any]: ...

    def check(self, start: int, stop: int) -> Iterator[DamagedError]: ...

    def let_go(self, start: int) -> bool:
        """Unmap the files below row `start`, which no snapshot reaches any more.

        Called when a snapshot is garbage, at any moment of any thread, and so it never waits.

        Returns:
            False where another thread is in the way: nothing was unmapped.
        """
        ...


class PlannedColumn(Column, Protocol):
    """A column of files, whose reading can be planned before anything is read."""

    def plan(
        self,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        start: int,
        stop: int,
        num_threads: int = ...,
    ) -> Reading:
        """How rows, all within `start` to `stop`, come into `out`, in about so many calls."""
        ...
