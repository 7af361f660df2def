"""Chunk files as one ndarray: all files of a column in one range of addresses.

Where that is impossible (chunks that are no multiple of the page, no `MAP_FIXED`, too many maps
in the process) the same class reads file by file.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError, EvictedError, StorageError
from expstore.storage import files
from expstore.storage.advice import runs_of
from expstore.storage.forking import freed_after_fork
from expstore.storage.layout import ArrayLayout, fits_pages
from expstore.storage.parallel import ONE, Threads, parts_of
from expstore.storage.protocols import Reading

MAX_MAPS = 30_000  # of the 65,530 that a Linux process may hold
CHUNKS_KEPT = 64  # files mapped at once by a column that is read file by file
SPLIT_BYTES = 1 << 20  # rows of a batch are copied by several threads from this size on
STREAMED_BYTES = 24 << 20  # rows of a batch that no cache holds
STREAMED_ROW_BYTES = 4096  # least size of such a row
STREAMED_ALIGNMENT = 16  # of such rows, in bytes: what row_kernels stores at a time
RESERVED_BYTES = 64 << 30  # address space of a column, so that it can grow in place; or less,
RESERVED_SHARE = 1024  # as no column takes a larger part of what is left
ADDRESS_BYTES = 64 << 40  # of the 128 TiB that a process has on most machines


class MappedColumn:
    """The chunk files of one array, shared by all snapshots of a store in this process.

    Args:
        live_start: asks for the first live row as of the newest commit, when a file is missing.
    """

    def __init__(
        self, root: Path, layout: ArrayLayout, live_start: Callable[[], int] = lambda: 0
    ) -> None:
        self.root = root
        self.layout = layout
        self._live_start = live_start
        self._lock = freed_after_fork(self)
        self._in_place = files.can_map_in_place() and fits_pages(layout, mmap.PAGESIZE)
        self._ranges: tuple[_Range, ...] = ()  # newest first; none has a gap
        self._chunks: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def whole(self, start: int, stop: int) -> NDArray[Any] | None:
        """An array indexed by absolute row of which rows `start` to `stop` may be read.

        Returns:
            None where the column has to be read file by file.
        """
        found = self._range(start, stop)
        return None if found is None else found.array

    def address(self, start: int, stop: int) -> int | None:
        """Where row 0 would lie in memory, if rows `start` to `stop` lie there in a row."""
        found = self._range(start, stop)
        return None if found is None else found.base

    def _range(self, start: int, stop: int) -> _Range | None:
        for current in self._ranges:
            if current.start <= start and stop <= current.stop:
                return current
        if not self._in_place:
            return None
        with self._lock:
            return self._extended(start, stop)

    def take(
        self,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        start: int,
        stop: int,
        threads: Threads = ONE,
    ) -> NDArray[Any]:
        """Copy rows, all within `start` to `stop`, in any order into `out`."""
        reading = self.plan(rows, out, start, stop, threads.num_threads)
        threads.run(reading.calls)
        return out

    def plan(
        self,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        start: int,
        stop: int,
        num_threads: int = 1,
    ) -> Reading:
        """See `PlannedColumn.plan`."""
        found = self._range(start, stop)
        if found is None:
            return self._plan_by_file(rows, out)
        row_bytes, base = self.layout.row_bytes, found.base
        copy = _copier(found.array, out)
        is_split = num_threads > 1 and out.nbytes >= SPLIT_BYTES
        parts = parts_of(len(rows), num_threads if is_split else 1)
        return Reading(
            [partial(copy, rows[part], out=out[part]) for part in parts],
            lambda: base + runs_of(rows) * row_bytes,
        )

    def _plan_by_file(self, rows: NDArray[np.int64], out: NDArray[Any]) -> Reading:
        chunk_rows, row_bytes = self.layout.chunk_rows, self.layout.row_bytes
        chunks = rows // chunk_rows
        wanted = np.unique(chunks).tolist()

        def copy(chunk: int) -> None:
            here = chunks == chunk
            out[here] = self._chunk(chunk)[rows[here] - chunk * chunk_rows]

        def ranges() -> NDArray[np.int64]:
            found = []
            for chunk in wanted:
                first = self._chunk(chunk).__array_interface__["data"][0]
                local = rows[chunks == chunk] - chunk * chunk_rows
                found.append(first + runs_of(local) * row_bytes)
            return np.concatenate(found)

        return Reading([partial(copy, chunk) for chunk in wanted], ranges)

    def slice(self, first: int, last: int, start: int, stop: int) -> NDArray[Any]:
        """Rows `first` to `last`, where possible without a copy."""
        if first == last:
            return np.empty((0, *self.layout.row_shape), self.layout.dtype)
        if not start <= first < last <= stop:  # there is no memory behind such rows
            raise DamagedError(
                f"{self.root / self.layout.path} was asked for rows {first} to {last}, but the "
                f"commit has {start} to {stop}; run expstore verify"
            )
        array = self.whole(start, stop)
        if array is not None:
            return array[first:last]
        rows = self.layout.chunk_rows
        parts = [
            self._chunk(chunk)[max(0, first - chunk * rows) : last - chunk * rows]
            for chunk in range(first // rows, -(-last // rows))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def check(self, start: int, stop: int) -> Iterator[DamagedError]:
        """What is wrong with the files that hold rows `start` to `stop`."""
        rows = self.layout.chunk_rows
        for chunk in range(start // rows, -(-stop // rows)):
            try:
                checked_file(self.root, self.layout, chunk)
            except DamagedError as error:
                yield error

    def let_go(self, start: int) -> bool:
        """See `Column.let_go`."""
        chunk = start // self.layout.chunk_rows
        if not self._lock.acquire(blocking=False):
            return False
        try:
            for mapped in self._ranges:
                mapped.drop(chunk)
            self._ranges = tuple(r for r in self._ranges if r.first < r.last)
            for old in [c for c in self._chunks if c < chunk]:
                del self._chunks[old]
        finally:
            self._lock.release()
        return True

    def _extended(self, start: int, stop: int) -> _Range | None:
        rows = self.layout.chunk_rows
        first, last = start // rows, -(-stop // rows)
        if last - first > MAX_MAPS:
            self._in_place = False
            return None
        if files.size(self.root / self.layout.chunk_path(first)) is None:
            return None  # evicted, or damage: reading file by file finds out what is left
        current = next((r for r in self._ranges if r.can_grow_to(first, last)), None)
        if current is None:
            current = _Range.reserve(self.layout, first, last)
        try:
            is_placed = current is not None and current.place(
                self.root, first, last, self._live_start
            )
        except EvictedError:
            return None
        if current is None or not is_placed:
            self._in_place = False  # no address space or too many maps: from now on by file
            return None
        if current not in self._ranges:
            self._ranges = (current, *self._ranges)
        return current

    def _chunk(self, chunk: int) -> NDArray[Any]:
        with self._lock:
            if chunk in self._chunks:
                self._chunks.move_to_end(chunk)
                return self._chunks[chunk]
            path = checked_file(self.root, self.layout, chunk, self._live_start)
            with explained_if_gone(path, self.layout, chunk, self._live_start):
                array = files.map_file(path).view(self.layout.dtype)
            array = array.reshape(-1, *self.layout.row_shape)
            self._chunks[chunk] = array
            if len(self._chunks) > CHUNKS_KEPT:
                self._chunks.popitem(last=False)
            return array


def is_streamed(out: NDArray[Any]) -> bool:
    """Whether large rows go into `out` (n, *shape) past the caches, as no cache holds them all."""
    return (
        out.nbytes >= STREAMED_BYTES
        and out.strides[0] >= STREAMED_ROW_BYTES
        and out.flags.c_contiguous
        and not (out.strides[0] | out.ctypes.data) % STREAMED_ALIGNMENT
    )


def as_words(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """Contiguous rows (n, *shape) as (n, words)."""
    return rows.reshape(len(rows), -1).view(np.uint64)


def _copier(array: NDArray[Any], out: NDArray[Any]) -> Callable[..., Any]:
    """What copies rows of `array` into `out` fastest: called with (rows, out=...)."""
    if not is_streamed(out):
        # Without mode="clip" numpy copies into a buffer first: four times slower.
        return partial(array.take, axis=0, mode="clip")
    words = as_words(array)

    def copy(rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        from expstore.storage.row_kernels import copy_rows

        copy_rows(words, rows, as_words(out))

    return copy


class _Range:
    """Some consecutive chunks of a column in one mapping, and what is still reserved."""

    num_maps = 0  # of all ranges in this process
    num_reserved_bytes = 0  # likewise

    def __init__(self, layout: ArrayLayout, first: int, room: int) -> None:
        self.layout = layout
        self.room = range(first, first + room)  # chunks that have a place
        self.first = self.last = first  # chunks that are mapped
        self.mapping = files.Mapping(room * layout.chunk_bytes)
        shape = (self.room.stop * layout.chunk_rows, *layout.row_shape)
        self.array = self.mapping.array(layout.dtype, shape, first * layout.chunk_bytes)
        self.base = self.mapping.address - first * layout.chunk_bytes  # of row 0
        _Range.num_reserved_bytes += self.mapping.num_bytes
        self._count = [0]
        weakref.finalize(self, _uncount, self._count, self.mapping.num_bytes)

    @staticmethod
    def reserve(layout: ArrayLayout, first: int, last: int) -> _Range | None:
        """Addresses for the chunks and as many again, or more; None if there are none.

        A union of many stores has thousands of columns, so what each gets becomes less and less.
        """
        left = max(0, ADDRESS_BYTES - _Range.num_reserved_bytes)
        spare = min(RESERVED_BYTES, left // RESERVED_SHARE) // layout.chunk_bytes
        room = max(2 * (last - first), spare, 1)
        try:
            return _Range(layout, first, room)
        except OSError:
            return None

    @property
    def start(self) -> int:
        return self.first * self.layout.chunk_rows

    @property
    def stop(self) -> int:
        return self.last * self.layout.chunk_rows

    def drop(self, chunk: int) -> None:
        """Unmap the chunks before this one."""
        chunk = min(chunk, self.last)
        if chunk > self.first:
            offset = (self.first - self.room.start) * self.layout.chunk_bytes
            self.mapping.clear(offset, (chunk - self.first) * self.layout.chunk_bytes)
            _Range.num_maps -= chunk - self.first
            self._count[0] -= chunk - self.first
            self.first = chunk

    def can_grow_to(self, first: int, last: int) -> bool:
        """Whether the chunks have a place, and are next to those that are mapped.

        What lay in between would be neither mapped nor known to be missing.
        """
        has_room = self.room.start <= first and last <= self.room.stop
        return has_room and first <= self.last and self.first <= last

    def place(self, root: Path, first: int, last: int, live_start: Callable[[], int]) -> bool:
        """Map the chunks that are not mapped yet; False when the process has too many maps."""
        missing = [*range(first, min(self.first, last)), *range(max(self.last, first), last)]
        if _Range.num_maps + len(missing) > MAX_MAPS:
            return False
        # All are checked first: an error in between would leave maps that nobody counts.
        paths = [checked_file(root, self.layout, chunk, live_start) for chunk in missing]
        for chunk, path in zip(missing, paths, strict=True):
            offset = (chunk - self.room.start) * self.layout.chunk_bytes
            try:
                with explained_if_gone(path, self.layout, chunk, live_start):
                    self.mapping.place(path, offset, self.layout.chunk_bytes)
            except StorageError as error:
                if error.errno == errno.ENOMEM:  # others in this process took the maps
                    return False
                raise
            self._count[0] += 1
            _Range.num_maps += 1
        empty = self.first == self.last
        self.first = first if empty else min(self.first, first)
        self.last = last if empty else max(self.last, last)
        return True


def _uncount(count: list[int], num_bytes: int) -> None:
    _Range.num_maps -= count[0]
    _Range.num_reserved_bytes -= num_bytes


def checked_file(
    root: Path, layout: ArrayLayout, chunk: int, live_start: Callable[[], int] = lambda: 0
) -> Path:
    """The file of a chunk, which must be there and have exactly the chunk's size.

    A shorter file would kill the process with SIGBUS once it is read through a map.
    """
    path = root / layout.chunk_path(chunk)
    size = files.size(path)
    if size is None:
        raise missing_file(path, layout, chunk, live_start())
    if size != layout.chunk_bytes:
        raise DamagedError(
            f"{path} must have {layout.chunk_bytes} bytes, got {size}; run expstore verify"
        )
    return path


@contextlib.contextmanager
def explained_if_gone(
    path: Path, layout: ArrayLayout, chunk: int, live_start: Callable[[], int]
) -> Iterator[None]:
    """Say why a file is missing that was there when it was looked at."""
    try:
        yield
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise missing_file(path, layout, chunk, live_start()) from error
        raise


def missing_file(
    path: Path, layout: ArrayLayout, chunk: int, live_start: int
) -> DamagedError | EvictedError:
    """Why a file is not there: `live_start` is the first live row as of the newest commit."""
    if (chunk + 1) * layout.chunk_rows <= live_start:
        return EvictedError(
            f"{path} was evicted: its rows were among the oldest of a store with a capacity; go on "
            "with store.latest(), a Replay with follow=True, or open the store again"
        )
    return DamagedError(f"{path} is missing, but the commit counts rows in it; run expstore verify")
