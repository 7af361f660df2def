"""Compressed columns: shards written whole and renamed, inner chunks decoded into the batch.

A shard is a file of encoded inner chunks and an index at its end, as Zarr's
`sharding_indexed` codec says. It is never changed in place.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError, StorageError
from expstore.storage import files, zstd
from expstore.storage.advice import advise
from expstore.storage.forking import freed_after_fork
from expstore.storage.layout import MISSING_CHUNK, ZSTD_LEVEL, ArrayLayout
from expstore.storage.mapping import as_words, is_streamed, missing_file
from expstore.storage.parallel import ONE, Threads
from expstore.storage.protocols import Reading

SHARDS_KEPT = 4096  # maps of shard files per column
CHUNKS_PER_CALL = 4  # decoded by a thread before it asks for more work


def encode(rows: NDArray[Any]) -> bytes:
    """An inner chunk as it is stored: zstd, then the CRC-32C of that."""
    data = zstd.compress(rows, ZSTD_LEVEL)
    return data + files.crc32c(data).to_bytes(4, "little")


def decode(data: NDArray[np.uint8], out: NDArray[Any], path: Path, chunk: int) -> None:
    """Fill `out`, a whole inner chunk in C order, from its stored form.

    Raises:
        DamagedError: it cannot be; the shard at `path` and the chunk's number in it are named.
    """
    body = data[:-4]
    if len(data) < 4 or files.crc32c(body) != int.from_bytes(data[-4:].tobytes(), "little"):
        raise DamagedError(f"inner chunk {chunk} of {path} fails its checksum; run expstore verify")
    try:
        zstd.decompress(body, out.reshape(-1).view(np.uint8))
    except ValueError as error:
        raise DamagedError(
            f"inner chunk {chunk} of {path} cannot be decoded: {error}; run expstore verify"
        ) from error


class CodedAppender:
    """Appends rows to one compressed array.

    The encoded chunks of the growing shard are kept, so that a commit encodes the tail only.
    """

    def __init__(self, root: Path, layout: ArrayLayout, num_rows: int) -> None:
        self.root = root
        self.layout = layout
        self._shards: dict[
            int, Path
        ] = {}  # complete since the last commit, by their temporary file
        self._unsynced: dict[int, Path] = {}  # the same and the growing one, after `flush`
        self._tail = np.empty((layout.inner_rows, *layout.row_shape), layout.dtype)
        self._encoded: list[bytes] = []  # whole chunks of the growing shard
        self._shard = -1
        self._continue_at(num_rows)
        self._is_changed = False

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows (n, *row_shape) of the array's dtype; the caller may reuse them at once."""
        inner, done = self.layout.inner_rows, 0
        self._is_changed = True
        while done < len(rows):
            at = self.num_rows % inner
            count = min(inner - at, len(rows) - done)
            if count == inner:
                self._add_chunk(encode(rows[done : done + inner]))
            else:
                self._tail[at : at + count] = rows[done : done + count]
                if at + count == inner:
                    self._add_chunk(encode(self._tail))
            done += count
            self.num_rows += count

    def flush(self) -> None:
        """Write the growing shard under a temporary name, beside the complete ones."""
        if not self._is_changed:
            return
        tail_rows = self.num_rows % self.layout.inner_rows
        chunks = list(self._encoded)
        if tail_rows:
            self._tail[tail_rows:] = 0
            chunks.append(encode(self._tail))
        self._unsynced = dict(self._shards)
        if chunks:
            self._unsynced[self._shard] = self._write(self._shard, chunks)

    def syncs(self) -> list[Any]:
        """The calls that make the written shards durable, to be run side by side."""
        return [partial(_sync, path) for path in self._unsynced.values()]

    def place(self) -> bool:
        """Give the written shards their names; True where the directory has to be synced.

        They replace shards that hold the same committed rows, so that readers of an older
        commit do not notice.
        """
        for shard, path in self._unsynced.items():
            files.rename(path, self._path(shard))
        is_placed = bool(self._unsynced)
        self._shards, self._unsynced, self._is_changed = {}, {}, False
        return is_placed

    def rewind(self, num_rows: int) -> None:
        """Forget the rows from `num_rows` on."""
        if num_rows != self.num_rows:
            self._continue_at(num_rows)

    def close(self) -> None:
        """Nothing stays open; shards without a name are removed when the store is next opened."""

    def _add_chunk(self, data: bytes) -> None:
        if len(self._encoded) + 1 < self.layout.chunks_per_shard:
            self._encoded.append(data)
            return
        # Written before anything changes, so that it can be tried again when it fails.
        self._shards[self._shard] = self._write(self._shard, [*self._encoded, data])
        self._shard, self._encoded = self._shard + 1, []

    def _continue_at(self, num_rows: int) -> None:
        """Take up the shard that row `num_rows` will go to, from memory or from its file."""
        layout = self.layout
        shard, rest = divmod(num_rows, layout.chunk_rows)
        num_chunks, tail_rows = divmod(rest, layout.inner_rows)
        if shard != self._shard or num_chunks < len(self._encoded):
            # Of another chunk than the growing one: its rows are in an encoded chunk.
            encoded = self._stored_chunks(shard, -(-rest // layout.inner_rows)) if rest else []
            if tail_rows:
                last = np.frombuffer(encoded.pop(), np.uint8)
                decode(last, self._tail, self._path(shard), num_chunks)
            self._encoded = encoded
        self._shard, self.num_rows = shard, num_rows
        self._shards = {s: path for s, path in self._shards.items() if s < shard}
        self._unsynced = {}
        self._is_changed = True

    def _stored_chunks(self, shard: int, count: int) -> list[bytes]:
        if shard == self._shard:
            return self._encoded[:count]
        path = self._shards.get(shard, self._path(shard))
        opened = Shard.map(path, self.layout)
        return [opened.chunk(chunk).tobytes() for chunk in range(count)]

    def _write(self, shard: int, chunks: list[bytes]) -> Path:
        path = files.temporary(self._path(shard))
        data = shard_bytes(self.layout, chunks)
        with files.opened(files.create(path)) as descriptor:
            files.pwrite(descriptor, data, 0, path)
        return path

    def _path(self, shard: int) -> Path:
        return self.root / self.layout.chunk_path(shard)


def shard_bytes(layout: ArrayLayout, chunks: list[bytes]) -> bytes:
    """A shard with these inner chunks, encoded, at its beginning."""
    index = np.full((layout.chunks_per_shard, 2), MISSING_CHUNK, "<u8")
    sizes = [len(chunk) for chunk in chunks]
    index[: len(chunks), 1] = sizes
    index[: len(chunks), 0] = np.cumsum([0, *sizes[:-1]])
    trailer = index.tobytes()
    return b"".join([*chunks, trailer, files.crc32c(trailer).to_bytes(4, "little")])


def _sync(path: Path) -> None:
    with files.opened(files.open_for_writing(path)) as descriptor:
        files.sync(descriptor, path)


@dataclass(frozen=True)
class Shard:
    """A shard file's bytes and where each inner chunk lies in them."""

    path: Path
    data: NDArray[np.uint8]  # mapped
    index: NDArray[np.uint64]  # (chunks_per_shard, 2) offset and size
    valid_rows: int = 0  # of the array, known to be in this file or in earlier ones

    @staticmethod
    def map(path: Path, layout: ArrayLayout, valid_rows: int = 0) -> Shard:
        """Map a shard file and check its index.

        Raises:
            DamagedError: it is missing, too short, or its index fails its checksum.
        """
        num_bytes, index_bytes = files.size(path), 16 * layout.chunks_per_shard
        if num_bytes is None:
            raise DamagedError(
                f"{path} is missing, but the commit counts rows in it; run expstore verify"
            )
        if num_bytes < index_bytes + 4:
            raise DamagedError(
                f"{path} is too short for a shard: it must have {index_bytes + 4} bytes at least, "
                f"got {num_bytes}; run expstore verify"
            )
        data = files.map_file(path)
        trailer = data[-index_bytes - 4 :]
        if files.can_advise():  # of a file that is not in memory, no more than this is wanted
            first = trailer.__array_interface__["data"][0]
            advise([np.array([[first, first + len(trailer)]])])
        if files.crc32c(trailer[:-4]) != int.from_bytes(trailer[-4:].tobytes(), "little"):
            raise DamagedError(
                f"the index of {path} fails its checksum: it was damaged, or the file was cut "
                f"short, at {num_bytes} bytes; run expstore verify"
            )
        index = trailer[:-4].copy().view("<u8").reshape(-1, 2)
        return Shard(path, data, index, valid_rows)

    def chunk(self, number: int) -> NDArray[np.uint8]:
        """An inner chunk as it is stored."""
        offset, size = self.index[number].tolist()
        if offset + size > len(self.data):
            raise DamagedError(f"{self.path} has no inner chunk {number}; run expstore verify")
        return self.data[offset : offset + size]


@dataclass
class Piece:
    """What a batch wants of one inner chunk."""

    chunk: int  # number in the whole array
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # first row in it, rows, place


class CodedColumn:
    """A compressed array, shared by all snapshots of a store in this process.

    Args:
        live_start: asks for the first live row as of the newest commit, when a file is missing.

    Attributes:
        num_decoded: inner chunks decoded so far.
    """

    def __init__(
        self, root: Path, layout: ArrayLayout, live_start: Callable[[], int] = lambda: 0
    ) -> None:
        self.root = root
        self.layout = layout
        self._live_start = live_start
        self.num_decoded = 0
        self._lock = freed_after_fork(self)
        self._of_thread = threading.local()
        self._shards: OrderedDict[int, Shard] = OrderedDict()

    def take(
        self,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        start: int,
        stop: int,
        threads: Threads = ONE,
    ) -> NDArray[Any]:
        """Copy rows, all within `start` to `stop`, in any order into `out`.

        Every inner chunk is decoded once: into `out` itself where it is wanted whole, unless no
        cache holds `out`, which is then written only once, from a buffer that stays in the cache.
        """
        reading = self.plan(rows, out, start, stop)
        threads.run(reading.calls)
        if reading.finish is not None:
            reading.finish()
        return out

    def plan(
        self,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        start: int,
        stop: int,
        num_threads: int = 1,
    ) -> Reading:
        """See `PlannedColumn.plan` and `take`."""
        repeated = np.flatnonzero(rows[1:] == rows[:-1]) + 1
        pieces = self._pieces(rows, repeated)
        size = CHUNKS_PER_CALL
        groups = [pieces[i : i + size] for i in range(0, len(pieces), size)]
        fill = self._stream if is_streamed(out) else self._fill

        def repeat() -> None:  # padding: copied from the row before, which is there by now
            first = np.arange(len(rows))
            first[repeated] = 0
            out[repeated] = out[np.maximum.accumulate(first)[repeated]]

        return Reading(
            [partial(fill, group, out, stop) for group in groups],
            lambda: self._ranges_of(pieces, stop),
            repeat if len(repeated) else None,
        )

    def slice(self, first: int, last: int, start: int, stop: int) -> NDArray[Any]:
        """Rows `first` to `last`, decoded."""
        out = np.empty((last - first, *self.layout.row_shape), self.layout.dtype)
        return self.take(np.arange(first, last), out, start, stop)

    def check(self, start: int, stop: int) -> Iterator[DamagedError]:
        """What is wrong with the shard files that hold rows `start` to `stop`."""
        rows = self.layout.chunk_rows
        for shard in range(start // rows, -(-stop // rows)):
            try:
                self._shard(shard, stop)
            except DamagedError as error:
                yield error

    def let_go(self, start: int) -> bool:
        """See `Column.let_go`."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            for old in [s for s in self._shards if s < start // self.layout.chunk_rows]:
                del self._shards[old]
        finally:
            self._lock.release()
        return True

    def _pieces(self, rows: NDArray[np.int64], repeated: NDArray[np.intp]) -> list[Piece]:
        """Which rows of which chunks go where; repeated rows are left out."""
        inner = self.layout.inner_rows
        place = np.delete(np.arange(len(rows)), repeated)
        wanted = rows[place]
        # A run ends where the next row is another one or goes elsewhere, or a chunk begins.
        cut = (np.diff(wanted) != 1) | (np.diff(place) != 1) | (wanted[1:] % inner == 0)
        begin = np.concatenate([[0], np.flatnonzero(cut) + 1]) if len(wanted) else np.empty(0, int)
        count = np.diff(np.append(begin, len(wanted)))
        pieces: dict[int, Piece] = {}
        runs = (wanted[begin] // inner, wanted[begin] % inner, count, place[begin])
        for chunk, *copy in zip(*(run.tolist() for run in runs), strict=True):
            pieces.setdefault(chunk, Piece(chunk)).copies.append((copy[0], copy[1], copy[2]))
        return list(pieces.values())

    def _ranges_of(self, pieces: list[Piece], stop: int) -> NDArray[np.int64]:
        """(R, 2) addresses of the inner chunks as they are stored."""
        ranges = np.empty((len(pieces), 2), np.int64)
        for i, piece in enumerate(pieces):
            number, within = divmod(piece.chunk, self.layout.chunks_per_shard)
            stored = self._shard(number, stop).chunk(within)
            first = stored.__array_interface__["data"][0]
            ranges[i] = first, first + len(stored)
        return ranges

    def _fill(self, pieces: list[Piece], out: NDArray[Any], stop: int) -> None:
        inner = self.layout.inner_rows
        for piece in pieces:
            whole = next((place for _, count, place in piece.copies if count == inner), None)
            decoded = self._scratch() if whole is None else out[whole : whole + inner]
            self._decode(piece.chunk, decoded, stop)
            for first, count, place in piece.copies:
                if place != whole:
                    out[place : place + count] = decoded[first : first + count]

    def _stream(self, pieces: list[Piece], out: NDArray[Any], stop: int) -> None:
        from expstore.storage.row_kernels import copy_block

        decoded = self._scratch()
        read, write = as_words(decoded), as_words(out)
        for piece in pieces:
            self._decode(piece.chunk, decoded, stop)
            for first, count, place in piece.copies:
                copy_block(read, first, count, write, place)

    def _scratch(self) -> NDArray[Any]:
        """Room for one inner chunk, of this thread; fresh memory would be faulted in anew."""
        try:
            scratch: NDArray[Any] = self._of_thread.scratch
        except AttributeError:
            shape = (self.layout.inner_rows, *self.layout.row_shape)
            scratch = self._of_thread.scratch = np.empty(shape, self.layout.dtype)
        return scratch

    def _decode(self, chunk: int, out: NDArray[Any], stop: int) -> None:
        number, within = divmod(chunk, self.layout.chunks_per_shard)
        shard = self._shard(number, stop)
        decode(shard.chunk(within), out, shard.path, within)
        with self._lock:
            self.num_decoded += 1

    def _shard(self, number: int, stop: int) -> Shard:
        """The shard's file, mapped anew if a later commit than the cached one is read."""
        needed = min(stop, (number + 1) * self.layout.chunk_rows)
        with self._lock:
            shard = self._shards.get(number)
            if shard is None or shard.valid_rows < needed:
                path = self.root / self.layout.chunk_path(number)
                try:
                    shard = self._shards[number] = Shard.map(path, self.layout, needed)
                except (DamagedError, StorageError):
                    if files.size(path) is None:  # now, if not when it was looked at
                        raise missing_file(path, self.layout, number, self._live_start()) from None
                    raise
                if len(self._shards) > SHARDS_KEPT:
                    self._shards.popitem(last=False)
            return shard
