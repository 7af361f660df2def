"""One plan for a whole batch: every row of every column is known before the first one is read."""

from __future__ import annotations

import sys
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError
from expstore.storage.advice import ReadAhead, advise, runs_of
from expstore.storage.mapping import SPLIT_BYTES, MappedColumn
from expstore.storage.parallel import Threads
from expstore.storage.protocols import Column, PlannedColumn, Reading


class BatchPlan:
    """What a batch reads of the columns of one store; `run` reads it.

    Large fields are cut into parts for the threads. Small ones of the same rows are copied in one
    compiled loop, a stretch of consecutive rows at a time.
    """

    def __init__(self, threads: Threads, read_ahead: ReadAhead) -> None:
        self._threads = threads
        self._read_ahead = read_ahead
        self._readings: list[Reading] = []
        self._small: dict[int, _Small] = {}  # by the array of rows
        # numba takes a second to import: those who sample have it already.
        self._is_compiled = "numba" in sys.modules

    def add(
        self, column: Column, rows: NDArray[np.int64], out: NDArray[Any], start: int, stop: int
    ) -> None:
        """Also read rows (n,) of a column, all within `start` to `stop`, into `out` (n, *shape)."""
        if (
            self._is_compiled
            and isinstance(column, MappedColumn)
            and out.nbytes < SPLIT_BYTES
            and (base := column.address(start, stop)) is not None
            and out.flags.c_contiguous
        ):
            small = self._small.get(id(rows))
            if small is None:
                small = self._small[id(rows)] = _Small(rows, start, stop)
            small.add(base, out, column.layout.row_bytes)
        elif hasattr(column, "plan"):
            planned = cast(PlannedColumn, column)
            num_threads = self._threads.num_threads
            self._readings.append(planned.plan(rows, out, start, stop, num_threads))
        else:
            column.take(rows, out, start, stop)

    def run(self) -> None:
        """Ask for all of it where it may have to come from a device, then copy and decode."""
        before = self._read_ahead.begin()
        if self._read_ahead.is_on:
            small_ranges = [small.ranges() for small in self._small.values()]
            advise([*small_ranges, *(reading.ranges() for reading in self._readings)])
        for small in self._small.values():
            small.copy()
        self._threads.run([call for reading in self._readings for call in reading.calls])
        for reading in self._readings:
            if reading.finish is not None:
                reading.finish()
        self._read_ahead.end(before)


class _Small:
    """Small fields of the same rows."""

    def __init__(self, rows: NDArray[np.int64], start: int, stop: int) -> None:
        self._rows = np.ascontiguousarray(rows)
        self._start, self._stop = start, stop
        self._places: list[tuple[int, int, int]] = []  # address of row 0, of `out`, bytes of a row

    def add(self, base: int, out: NDArray[Any], row_bytes: int) -> None:
        self._places.append((base, out.__array_interface__["data"][0], row_bytes))

    def ranges(self) -> NDArray[np.int64]:
        """See `Reading.ranges`."""
        runs = runs_of(self._rows)
        return np.concatenate([base + runs * row_bytes for base, _, row_bytes in self._places])

    def copy(self) -> None:
        from expstore.storage.row_kernels import gather_rows

        bad = gather_rows(np.array(self._places), self._rows, self._start, self._stop)
        if bad >= 0:
            raise DamagedError(
                f"row {self._rows[bad]} is not one of those from {self._start} to "
                f"{self._stop - 1} that the commit has; run expstore verify"
            )
