"""Uncompressed columns: rows appended by `pwrite`, read through maps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError
from expstore.storage import files
from expstore.storage.layout import ArrayLayout
from expstore.storage.mapping import missing_file

# Few large writes: the page cache takes them in larger pieces, which pays for the copy.
WRITE_BYTES = 2 << 20  # room for rows that are collected before they are written
DIRECT_BYTES = 1 << 20  # rows of at least this size are written from the caller's array
EARLY_BYTES = 256 << 10  # a write of at least this size goes on to the disk before the commit
MAX_UNSYNCED = 4  # full files of an array that wait for the commit
# Files that stay open between writes, of all arrays in this process, which may open 1,024. What
# goes beyond is opened anew for each write and each sync.
MAX_KEPT = 384

_kept: set[int] = set()  # their descriptors


class MappedAppender:
    """Appends rows to one array; what it wrote counts only once a commit says so.

    Args:
        sync: runs calls out of `syncs` before the commit does.
        early: have the disk at work long before the commit, which then waits less for it.
    """

    def __init__(
        self,
        root: Path,
        layout: ArrayLayout,
        num_rows: int,
        sync: Callable[[list[Any]], None] = files.together,
        *,
        early: bool = False,
    ) -> None:
        self.root = root
        self.layout = layout
        self._sync = sync
        self._early = early
        self._num_committed = num_rows
        self._written = num_rows
        self._collected: NDArray[Any] | None = None  # room for rows that are not written yet
        self._num_collected = 0
        self._chunk = -1  # whose file is open
        self._path = root  # of that file
        self._descriptor = -1
        self._unsynced: dict[int, Path] = {}  # descriptor -> file
        self._unsynced_closed: set[Path] = set()  # files that could not be kept open
        self._new_files = False

    @property
    def num_rows(self) -> int:
        """Rows appended, whether written or still collected."""
        return self._written + self._num_collected

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows (n, *row_shape) of the array's dtype; the caller may reuse them at once."""
        if rows.nbytes >= DIRECT_BYTES:
            self.flush()
            self._write(rows)
            self._written += len(rows)
            return
        if self._collected is None:
            room = max(1, WRITE_BYTES // self.layout.row_bytes)
            self._collected = np.empty((room, *self.layout.row_shape), self.layout.dtype)
        if self._num_collected + len(rows) > len(self._collected):
            self.flush()
        stop = self._num_collected + len(rows)
        self._collected[self._num_collected : stop] = rows
        self._num_collected = stop

    def flush(self) -> None:
        """Hand all rows to the operating system; nothing is synced."""
        if self._num_collected:
            assert self._collected is not None
            self._write(self._collected[: self._num_collected])
            self._written, self._num_collected = self.num_rows, 0

    def rewind(self, num_rows: int) -> None:
        """Forget the rows from `num_rows` on; written ones are written over by the next."""
        self._written = min(self._written, num_rows)
        self._num_collected = num_rows - self._written

    def syncs(self) -> list[Any]:
        """The calls that make the written rows durable, to be run side by side."""
        calls: list[Any] = [
            lambda descriptor=descriptor, path=path: files.sync(descriptor, path)
            for descriptor, path in self._unsynced.items()
        ]
        return calls + [partial(_sync_closed, path) for path in self._unsynced_closed]

    def place(self) -> bool:
        """After `syncs`: True where the directory has to be synced, for it has new files."""
        done, has_new_files = self._unsynced.keys() - {self._descriptor}, self._new_files
        self._unsynced, self._unsynced_closed, self._new_files = {}, set(), False
        _close_all(done)
        return has_new_files

    def close(self) -> None:
        """Close all files; rows that were not flushed are dropped."""
        done = {self._descriptor, *self._unsynced} - {-1}
        self._descriptor, self._chunk, self._unsynced = -1, -1, {}
        _close_all(done)

    def _write(self, rows: NDArray[Any]) -> None:
        row = self._written
        done = 0
        while done < len(rows):
            chunk, offset = divmod(row + done, self.layout.chunk_rows)
            count = min(len(rows) - done, self.layout.chunk_rows - offset)
            self._open(chunk)
            part = rows[done : done + count].reshape(-1).view(np.uint8)
            files.pwrite(self._descriptor, part, offset * self.layout.row_bytes, self._path)
            self._unsynced[self._descriptor] = self._path
            if self._early and len(part) >= EARLY_BYTES:
                files.start_writing(self._descriptor, offset * self.layout.row_bytes, len(part))
            done += count
        if self._descriptor not in _kept:
            self._close_early()

    def _close_early(self) -> None:
        """Close the open file, which is synced all the same."""
        descriptor, self._descriptor, self._chunk = self._descriptor, -1, -1
        if descriptor in self._unsynced:
            self._unsynced_closed.add(self._unsynced.pop(descriptor))
        if descriptor >= 0:
            files.close(descriptor)

    def _open(self, chunk: int) -> None:
        if chunk == self._chunk:
            return
        if self._descriptor not in _kept:
            self._close_early()
        if len(self._unsynced) + len(self._unsynced_closed) >= MAX_UNSYNCED:
            self._settle()
        path = self.root / self.layout.chunk_path(chunk)
        size = files.size(path)
        if size is None:
            if chunk * self.layout.chunk_rows < self._num_committed:
                raise missing_file(path, self.layout, chunk, 0)
            self._create(path)
        elif size != self.layout.chunk_bytes:
            raise DamagedError(
                f"{path} must have {self.layout.chunk_bytes} bytes, got {size}; run expstore verify"
            )
        elif chunk * self.layout.chunk_rows >= self._num_committed:
            # Left there by rows that were discarded: its name may not be durable yet.
            self._new_files = True
        descriptor = files.open_for_writing(path)
        done = {self._descriptor} - self._unsynced.keys() - {-1}
        self._chunk, self._descriptor, self._path = chunk, descriptor, path
        if len(_kept) < MAX_KEPT:
            _kept.add(descriptor)
        _close_all(done)

    def _settle(self) -> None:
        """Sync full files before the commit does, and close them."""
        self._sync(self.syncs())
        done, self._unsynced = {*self._unsynced, self._descriptor} - {-1}, {}
        self._chunk, self._descriptor, self._unsynced_closed = -1, -1, set()
        _close_all(done)

    def _create(self, path: Path) -> None:
        # Sized before it gets its name: other readers fail on a chunk of any other size.
        unfinished = files.temporary(path)
        with files.opened(files.create(unfinished)) as descriptor:
            files.set_size(descriptor, self.layout.chunk_bytes, path)
        self._new_files = True
        files.rename(unfinished, path)


def _close_all(descriptors: set[int]) -> None:
    _kept.difference_update(descriptors)
    files.close_all(descriptors)


def _sync_closed(path: Path) -> None:
    with files.opened(files.open_for_writing(path)) as descriptor:
        files.sync(descriptor, path)
