"""Columns that are read while they are written, piece by piece, where they would fill memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EAGER_BYTES = 32 << 20  # a column that takes no more is read at once


class LazyRows:
    """A column of which a piece is read when its turn comes; slices of it are lazy, too.

    Pieces are asked for in order, each once: sources may read forward only.

    Attributes:
        row_bytes: of one row, as it will be in memory.
    """

    def __init__(
        self, num_rows: int, row_bytes: int, read: Callable[[int, int], Any], offset: int = 0
    ) -> None:
        self.row_bytes = row_bytes
        self._num_rows, self._read, self._offset = num_rows, read, offset

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, rows: slice) -> LazyRows:
        start, stop, stride = rows.indices(self._num_rows)
        assert stride == 1, rows
        return LazyRows(max(0, stop - start), self.row_bytes, self._read, self._offset + start)

    @property
    def nbytes(self) -> int:
        return self._num_rows * self.row_bytes

    def read(self, start: int, stop: int) -> Any:
        """The rows `start` to `stop`, as an array or a list.

        Raises:
            SourceError: they cannot be read.
        """
        return self._read(self._offset + start, self._offset + stop)


def rows_or_lazy(num_rows: int, row_bytes: int, read: Callable[[int, int], Any]) -> Any:
    """All rows at once, or a lazy column where they are many bytes.

    Args:
        read: given start and stop; raises SourceError where they cannot be read.
    """
    if num_rows * row_bytes <= EAGER_BYTES:
        return read(0, num_rows)
    return LazyRows(num_rows, row_bytes, read)
