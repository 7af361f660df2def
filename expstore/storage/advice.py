"""Read-ahead: the pages of a whole batch, asked for before the first one is touched.

The disk so works on all of them at once. A page that is touched too early costs a wait of its own,
and brings a hundred kilobytes around it that nobody wants.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from expstore.storage import files

PIECE_BYTES = 256 << 10  # of one advice; Linux reads at most one request of the device for each

Ranges = NDArray[np.int64]  # (R, 2) half-open, of addresses or of rows


class ReadAhead:
    """Says whether advice is worth its price, 2 to 10 microseconds for each range.

    It is while batches read from the device. Once a batch finds all it wants in memory, it stays
    off until something has to be read again. One object serves all readers of a store.
    """

    def __init__(self) -> None:
        self._is_possible = files.can_advise()
        self.is_on = self._is_possible

    def begin(self) -> tuple[int, int]:
        """What this thread has read from devices before a batch."""
        return device_reads() if self._is_possible else (0, 0)

    def end(self, before: tuple[int, int]) -> None:
        """Decide about the next batch; the same thread has called `begin`."""
        if self._is_possible:
            self.is_on = device_reads() != before


def device_reads() -> tuple[int, int]:
    """Blocks that this thread has had read so far, and how often it has waited for a page."""
    import resource  # not on Windows, where nobody asks

    usage = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return usage.ru_inblock, usage.ru_majflt


def advise(ranges: Iterable[Ranges]) -> None:
    """Have the pages in these ranges of addresses read, all at once."""
    together = np.concatenate([np.empty((0, 2), np.int64), *ranges])
    for first, last in merged_pages(together, mmap.PAGESIZE).tolist():
        for address in range(first, last, PIECE_BYTES):
            files.advise(address, min(PIECE_BYTES, last - address))


def merged_pages(ranges: Ranges, page: int) -> Ranges:
    """The pages that ranges lie in, as ascending ranges with gaps between them.

    >>> merged_pages(np.array([[9000, 9001], [4095, 4097], [20480, 20481]]), 4096).tolist()
    [[0, 12288], [20480, 24576]]
    """
    if not len(ranges):
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    first, last = ranges[:, 0] // page * page, -(-ranges[:, 1] // page) * page
    last = np.maximum.accumulate(last)
    begins = np.ones(len(ranges), np.bool_)
    begins[1:] = first[1:] > last[:-1]
    at = np.flatnonzero(begins)
    return np.stack([first[at], last[np.append(at[1:], len(last)) - 1]], axis=1)


def runs_of(rows: NDArray[np.int64]) -> Ranges:
    """The consecutive stretches of rows (n,), as they come; repeated rows count once.

    >>> runs_of(np.array([3, 4, 4, 5, 9, 8])).tolist()
    [[3, 6], [9, 10], [8, 9]]
    """
    if not len(rows):
        return np.empty((0, 2), np.int64)
    gap = np.diff(rows)
    cut = np.flatnonzero((gap != 0) & (gap != 1)) + 1
    first, last = np.append(0, cut), np.append(cut, len(rows)) - 1
    return np.stack([rows[first], rows[last] + 1], axis=1)
