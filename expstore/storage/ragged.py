"""Ragged columns: all elements one after the other, and where each step's elements end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError
from expstore.ragged import Ragged, Rows, spread
from expstore.storage import files
from expstore.storage.protocols import Appender, Column


def rows_checksum(rows: Rows, before: int = 0) -> int:
    """CRC-32C over a column's bytes; each ragged step begins with its length (int64)."""
    if not isinstance(rows, Ragged):
        return files.crc32c(rows, before)
    crc = before
    for row in rows:
        crc = files.crc32c(row, files.crc32c(len(row).to_bytes(8, "little"), crc))
    return crc


@dataclass(frozen=True)
class RaggedAppender:
    """Appends to the two arrays of a ragged column."""

    values: Appender
    end: Appender

    def append(self, rows: Ragged) -> None:
        """Add one value per step."""
        first = self.values.num_rows
        if len(rows.values):
            self.values.append(np.ascontiguousarray(rows.values))
        self.end.append((first + rows.ends).astype("<i8"))


@dataclass(frozen=True)
class RaggedColumn:
    """Reads the two arrays of a ragged column, as of one commit."""

    values: Column
    end: Column
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    first_element: int  # live range of `values`
    stop_element: int

    def read(self, rows: NDArray[np.int64], start: int, stop: int) -> Ragged:
        """Live rows (n,), in any order; `start` to `stop` is the live range of `end`.

        Raises:
            DamagedError: an end lies outside of what the commit has.
        """
        ends = self.end.take(rows, np.empty(len(rows), np.int64), start, stop)
        before = self.end.take(np.maximum(rows - 1, start), np.empty_like(ends), start, stop)
        before[rows == start] = self.first_element
        if ((before < self.first_element) | (ends < before) | (ends > self.stop_element)).any():
            raise DamagedError(
                "a ragged column ends outside of what the commit has; run expstore verify"
            )
        elements = spread(before, ends - before)
        out = np.empty((len(elements), *self.row_shape), self.dtype)
        if len(elements):
            self.values.take(elements, out, self.first_element, self.stop_element)
        return Ragged(out, ends - before)

    def slice(self, first: int, last: int, start: int, stop: int) -> Ragged:
        """Live rows `first` to `last`."""
        return self.read(np.arange(first, last), start, stop)
