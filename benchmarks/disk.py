"""The disk under a benchmark: a cold start, bytes read, and what the device itself gives."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

MADV_DONTNEED = 4
BLOCK_BYTES = 8 << 20  # of one direct read
LIBC = ctypes.CDLL(None, use_errno=True)


def forget(folder: Path) -> None:
    """Evict the files under a folder from the page cache, so that the next read is cold.

    A page that is mapped stays: so this process first lets go of the pages of its maps, which
    come back from the file when they are touched. Other files of the machine keep their pages.
    """
    for start, stop in maps_of(folder):
        if LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED)")
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        file = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(file)  # a page that is not written back stays
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def maps_of(folder: Path) -> list[tuple[int, int]]:
    """The addresses at which this process maps files under a folder."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{folder.resolve()}/"):
            start, stop = (int(number, 16) for number in fields[0].split("-"))
            found.append((start, stop))
    return found


def read_bytes() -> int:
    """Bytes that this process has made the system fetch from storage, all threads together."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


class DirectRead:
    """Reads a file from its beginning to its end, again and again, past the page cache."""

    def __init__(self, path: Path, num_bytes: int):
        self.num_bytes = num_bytes - num_bytes % mmap.PAGESIZE
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._end = os.fstat(self._file).st_size
        self._at = 0
        self._block = mmap.mmap(-1, BLOCK_BYTES)  # aligned, as direct reads must be

    def __call__(self) -> None:
        """Read `num_bytes`."""
        if self._at + self.num_bytes > self._end:
            self._at = 0
        stop = self._at + self.num_bytes
        while self._at < stop:
            room = memoryview(self._block)[: min(BLOCK_BYTES, stop - self._at)]
            found = os.preadv(self._file, [room], self._at)
            assert found > 0, (self._at, stop, self._end)
            self._at += found

    def close(self) -> None:
        os.close(self._file)
