"""Columns read as far as they can be, when files of them are missing or damaged."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError
from expstore.storage import files, zstd
from expstore.storage.coded import decode, encode
from expstore.storage.layout import MISSING_CHUNK, ArrayLayout
from expstore.storage.mapping import checked_file
from expstore.storage.parallel import ONE, Threads

CHUNKS_KEPT = 16


class SalvagedColumn:
    """A mapped array some of whose files are missing or have the wrong size.

    What is not there reads as zero; a checksum says that it is wrong, unless it was zero.
    """

    def __init__(self, root: Path, layout: ArrayLayout) -> None:
        self.root = root
        self.layout = layout
        self._chunks: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._newest: tuple[int, int, NDArray[Any]] | None = None  # of several chunks

    def take(
        self,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        start: int,
        stop: int,
        threads: Threads = ONE,
    ) -> NDArray[Any]:
        """See `Column.take`."""
        chunks = rows // self.layout.chunk_rows
        for chunk in np.unique(chunks).tolist():
            here = chunks == chunk
            out[here] = self._chunk(chunk)[rows[here] - chunk * self.layout.chunk_rows]
        return out

    def slice(self, first: int, last: int, start: int, stop: int) -> NDArray[Any]:
        """See `Column.slice`."""
        if self._newest is not None and self._newest[:2] == (first, last):
            return self._newest[2]
        rows = self.layout.chunk_rows
        parts = [
            self._chunk(chunk)[max(0, first - chunk * rows) : last - chunk * rows]
            for chunk in range(first // rows, -(-last // rows))
        ]
        if len(parts) < 2:
            return parts[0] if parts else np.empty((0, *self.layout.row_shape), self.layout.dtype)
        self._newest = first, last, np.concatenate(parts)
        return self._newest[2]

    def check(self, start: int, stop: int) -> Iterator[DamagedError]:
        """See `Column.check`."""
        for chunk in range(start // self.layout.chunk_rows, -(-stop // self.layout.chunk_rows)):
            try:
                checked_file(self.root, self.layout, chunk)
            except DamagedError as error:
                yield error

    def let_go(self, start: int) -> bool:
        """See `Column.let_go`."""
        return True

    def _chunk(self, chunk: int) -> NDArray[Any]:
        if chunk not in self._chunks:
            layout = self.layout
            if files.size(self.root / layout.chunk_path(chunk)):
                data = salvaged_bytes(self.root, layout, chunk)
                rows = data.view(layout.dtype).reshape(-1, *layout.row_shape)
            else:  # one row that stands for all
                zero = np.zeros(layout.row_shape, layout.dtype)
                rows = np.broadcast_to(zero, (layout.chunk_rows, *layout.row_shape))
            self._chunks[chunk] = rows
            if len(self._chunks) > CHUNKS_KEPT:
                self._chunks.popitem(last=False)
        return self._chunks[chunk]


def salvaged_bytes(root: Path, layout: ArrayLayout, chunk: int) -> NDArray[np.uint8]:
    """A chunk of a mapped array with zeros where its file has nothing."""
    path = root / layout.chunk_path(chunk)
    num_bytes = files.size(path)
    if num_bytes == layout.chunk_bytes:
        return files.map_file(path)
    data = np.zeros(layout.chunk_bytes, np.uint8)
    if num_bytes:
        found = np.frombuffer(files.read(path), np.uint8)[: layout.chunk_bytes]
        data[: len(found)] = found
    return data


class KnownRows:
    """Rows in memory in the place of a column.

    Args:
        rows: those from row `first` on.
    """

    def __init__(self, rows: NDArray[Any], first: int) -> None:
        self._rows, self._first = rows, first

    def take(
        self,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        start: int,
        stop: int,
        threads: Threads = ONE,
    ) -> NDArray[Any]:
        """See `Column.take`."""
        return self._rows.take(rows - self._first, axis=0, out=out)

    def slice(self, first: int, last: int, start: int, stop: int) -> NDArray[Any]:
        """See `Column.slice`."""
        return self._rows[first - self._first : last - self._first]

    def check(self, start: int, stop: int) -> Iterator[DamagedError]:
        """See `Column.check`."""
        return iter(())

    def let_go(self, start: int) -> bool:
        """See `Column.let_go`."""
        return True


# -- the order of exceptions -----------------------------------------------------------------------


def is_in_order(steps: NDArray[np.int64], low: int, high: int, ends: NDArray[np.int64]) -> bool:
    """Whether the steps of the exceptions of a field can be right; see `in_order`."""
    if not len(steps):
        return not len(ends)
    if steps[0] < low or steps[-1] >= high or (np.diff(steps) <= 0).any():
        return False
    at = np.minimum(np.searchsorted(steps, ends), len(steps) - 1)
    return bool((steps[at] == ends).all())


def in_order(
    steps: NDArray[np.int64], low: int, high: int, ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """What the steps of the exceptions of a field must have been, some of them being damaged.

    They ascend, lie from `low` to `high - 1`, and the last step of every episode is among them:
    `ends` (E,). Where that leaves a choice, some choice is made, so that all others can be found
    again; a checksum tells whether it was the right one.

    >>> in_order(np.array([2, 1 << 40, 9, 12]), 0, 13, ends=np.array([2, 5, 12])).tolist()
    [2, 5, 9, 12]
    """
    if len(steps) <= len(ends):
        return ends[: len(steps)].copy()
    kept = _longest_ascent(steps, low, high)
    while (wrong := _wrong(steps, kept, low, high, ends)) is not None:
        kept.remove(wrong)
    out = steps.copy()
    for (i, before), (j, after) in pairwise(_edges(steps, kept, low, high)):
        if j - i > 1:
            out[i + 1 : j] = _between(before, after, j - i - 1, ends)
    return out


def _edges(steps: NDArray[np.int64], kept: list[int], low: int, high: int) -> list[tuple[int, int]]:
    """Position and value of the kept rows, and of what lies before and behind all rows."""
    return [(-1, low - 1), *((at, int(steps[at])) for at in kept), (len(steps), high)]


def _wrong(
    steps: NDArray[np.int64], kept: list[int], low: int, high: int, ends: NDArray[np.int64]
) -> int | None:
    """A kept row that cannot be right: others do not fit beside it, or a last step is missing."""
    edges = _edges(steps, kept, low, high)
    places, values = (np.array(column) for column in zip(*edges, strict=True))
    room = np.diff(values) - 1
    needed = np.maximum(np.diff(places) - 1, 0)
    # A last step that no kept row has needs a row between its neighbours.
    missing = np.setdiff1d(ends, values)
    gap = np.searchsorted(values, missing) - 1
    lacking = np.bincount(gap, minlength=len(room)) > needed
    for k in np.flatnonzero((needed > room) | lacking).tolist():
        lost = missing[gap == k]
        beside = [e for e in (k, k + 1) if 0 < e <= len(kept) and values[e] not in ends]
        beside = beside or [e for e in (k, k + 1) if 0 < e <= len(kept)]
        # The one that differs in fewer bits from what is missing.
        likely = min(
            beside, key=lambda e: min([(int(values[e]) ^ int(x)).bit_count() for x in lost] or [0])
        )
        return int(places[likely])
    return None


def _between(before: int, after: int, count: int, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    inside = ends[(before < ends) & (ends < after)][:count]
    others = np.setdiff1d(np.arange(before + 1, min(after, before + 1 + 2 * count)), inside)
    return np.sort(np.concatenate([inside, others[: count - len(inside)]]))


def _longest_ascent(steps: NDArray[np.int64], low: int, high: int) -> list[int]:
    """Positions of a longest ascending subsequence of values from `low` to `high - 1`."""
    tails: list[int] = []  # smallest last value of an ascent of each length
    at_tail: list[int] = []
    before = [-1] * len(steps)
    for at, value in enumerate(steps.tolist()):
        if low <= value < high:
            length = bisect_left(tails, value)
            before[at] = at_tail[length - 1] if length else -1
            tails[length : length + 1] = [value]
            at_tail[length : length + 1] = [at]
    found: list[int] = []
    at = at_tail[-1] if at_tail else -1
    while at >= 0:
        found.append(at)
        at = before[at]
    return found[::-1]


def in_ascent(ends: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
    """What the ends of runs of elements may have been, some of them being damaged.

    They never descend, lie from `low` to `high`, and the last one is `high`. A run whose end is
    not known becomes empty, and the next one gets its elements.

    >>> in_ascent(np.array([2, 1 << 40, 9, 12]), 0, 11).tolist()
    [2, 2, 9, 11]
    """
    out = np.array(ends, np.int64)
    if not len(out):
        return out
    out[-1] = high
    is_inside = bool(out[0] >= low and out.max() <= high)
    if is_inside and (np.diff(out) >= 0).all():
        return out
    # Distinct values, as they would be if no run was empty.
    kept = _longest_ascent(out + np.arange(len(out)), low, high + len(out))
    is_kept = np.zeros(len(out), bool)
    is_kept[kept] = True
    is_kept &= (low <= out) & (out <= high)
    is_kept[-1] = True
    last_kept = np.maximum.accumulate(np.where(is_kept, np.arange(len(out)), -1))
    return np.where(last_kept < 0, low, out[np.maximum(last_kept, 0)])


# -- shards ----------------------------------------------------------------------------------------


def salvaged_shard(path: Path, layout: ArrayLayout, num_rows: int) -> list[bytes] | None:
    """The inner chunks of a shard's first rows, encoded, zeros in the place of damaged ones.

    Returns:
        None where the shard is as it must be.
    """
    num_chunks = -(-num_rows // layout.inner_rows)
    num_bytes, index_bytes = files.size(path), 16 * layout.chunks_per_shard
    data = np.frombuffer(files.read(path) if num_bytes else b"", np.uint8)
    trailer = data[-index_bytes - 4 :]
    index = np.full((layout.chunks_per_shard, 2), MISSING_CHUNK, np.uint64)
    is_sound = len(trailer) == index_bytes + 4
    if is_sound:
        index = trailer[:-4].copy().view("<u8").reshape(-1, 2)
        crc = int.from_bytes(trailer[-4:].tobytes(), "little")
        is_sound = files.crc32c(trailer[:-4]) == crc
    scratch = np.empty((layout.inner_rows, *layout.row_shape), layout.dtype)
    chunks: list[bytes | None] = []
    end = 0  # where the chunk before ends, which is where this one begins if all is well
    for number in range(num_chunks):
        (offset, size), after = index[number].tolist(), index[number + 1 :, 0].tolist()
        found = None
        # The last one is what the frame itself says, should the index have been cut off.
        frame = zstd.frame_bytes(data[end:])
        itself = end if frame is None else end + frame + 4
        places = ((offset, offset + size), (end, end + size), (end, (after or [0])[0]))
        for first, last in (*places, (end, itself)):
            if 0 <= first < last <= len(data) and _can_be_decoded(data[first:last], scratch):
                found = data[first:last].tobytes()
                end = last
                break
        else:
            end = itself
        is_sound = is_sound and found is not None
        chunks.append(found)
    if is_sound:
        return None
    zeros = encode(np.zeros_like(scratch))
    return [zeros if chunk is None else chunk for chunk in chunks]


def _can_be_decoded(data: NDArray[np.uint8], out: NDArray[Any]) -> bool:
    try:
        decode(data, out, Path(), 0)
    except DamagedError:
        return False
    return True
