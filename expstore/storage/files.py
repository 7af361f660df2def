"""The only place that opens, writes, syncs, renames, unlinks and maps files.

Callers write `files.pwrite(...)`, never a function taken out of the module: tests replace
these functions to fail, shorten, delay or stop any operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from expstore.errors import StorageError

MAX_READ_BYTES = 1 << 30  # of a file that is read whole; those with rows are mapped
_GUARDED = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)  # a link could lead out of the store
SYNC_THREADS = 8  # fsyncs that wait together share the file system's journal commits


class explained:
    """Turns an `OSError` of the operating system into ours, with the file and the next move.

    A class, since a generator takes longer than some of the calls that it stands around.
    """

    def __init__(self, what: str, path: str | Path) -> None:
        self._what, self._path = what, path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            hint = _HINTS.get(error.errno or 0, "see the system's message")
            path, why = os.fspath(self._path), error.strerror or error
            raised = StorageError(f"cannot {self._what} {path!r}: {why}; {hint}")
            raised.errno = error.errno
            raise raised from error


def make_directory(path: Path) -> None:
    with explained("create the directory", path):
        os.makedirs(path, exist_ok=True)


def open_for_writing(path: Path) -> int:
    with explained("open for writing", path):
        return os.open(path, os.O_RDWR | _GUARDED)


def create(path: Path) -> int:
    """A new, empty file; an existing one is emptied."""
    with explained("create", path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | _GUARDED, 0o666)


def set_size(descriptor: int, num_bytes: int, path: Path) -> None:
    """Size a new file without writing it: a hole, that takes no space until rows come."""
    with explained("set the size of", path):
        os.ftruncate(descriptor, num_bytes)


def pwrite(descriptor: int, data: bytes | NDArray[np.uint8], offset: int, path: Path) -> None:
    """Write all of `data`; the system may take it in parts."""
    view = memoryview(data)  # type: ignore[arg-type]
    with explained("write", path):
        while len(view):
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written


def start_writing(descriptor: int, offset: int, num_bytes: int) -> None:
    """Have the system write a part of a file to the disk soon; a hint, which nothing relies on."""
    if sys.platform == "linux":
        _libc().sync_file_range(descriptor, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


def sync(descriptor: int, path: Path) -> None:
    with explained("sync", path):
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    with explained("sync the directory", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Put a file in the place of another one in a single step."""
    with explained("rename to", target):
        os.replace(source, target)


def unlink(path: Path) -> None:
    with explained("remove", path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_directory(path: Path) -> None:
    """Remove a directory with everything in it; links in it are removed, not followed."""
    for entry in list_directory(path):
        if entry.is_dir(follow_symlinks=False):
            remove_directory(Path(entry.path))
        else:
            unlink(Path(entry.path))
    with explained("remove", path), contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def close(descriptor: int) -> None:
    with explained("close", f"descriptor {descriptor}"):
        os.close(descriptor)


def close_all(descriptors: Iterable[int]) -> None:
    """Close every one of them, also when one reports an error, which is raised at the end.

    A closed descriptor may be another file's by now, so callers forget theirs first.
    """
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(close, descriptor)


def read(path: Path) -> bytes:
    """The whole file; a missing one is Python's own FileNotFoundError.

    Raises:
        StorageError: it is no regular file, which might never end, or has more than 1 GiB.
    """
    # Without O_NONBLOCK, opening a named pipe waits for somebody who writes to it.
    flags = os.O_RDONLY | _GUARDED | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(os.fspath(path)) from None
    except OSError as error:
        with explained("read", path):
            raise error
    with explained("read", path), open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if found.st_size > MAX_READ_BYTES:
            raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes")
        return file.read()


def check_no_links(path: Path, names: Iterable[str]) -> None:
    """Refuse symbolic links in the place of directories: they could lead out of the store.

    Raises:
        StorageError: names the first one.
    """
    above = os.fspath(path)
    for name in names:
        if os.path.islink(f"{above}/{name}"):
            with explained("follow", path / name):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def version(path: Path) -> tuple[int, int, int]:
    """What changes when a file is replaced: its inode, time and size, by a single `stat`."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size


def size(path: Path) -> int | None:
    """Bytes of a regular file; None where there is none."""
    with explained("look at", path):
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def allocated_bytes(path: Path) -> int:
    """Bytes that a file takes on disk, which for a sparse file is less than its size."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def list_directory(path: Path) -> list[os.DirEntry[str]]:
    """What lies in a directory; nothing where there is none."""
    with explained("list", path):
        try:
            with os.scandir(path) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []


def write_whole(path: Path, data: bytes, *, durable: bool) -> None:
    """Replace a file's content so that readers see the old or the new one, never a part."""
    prepare(path, data, durable=durable)
    rename(temporary(path), path)


def prepare(path: Path, data: bytes, *, durable: bool) -> None:
    """The first half of `write_whole`: everything up to the rename."""
    with opened(create(temporary(path))) as descriptor:
        pwrite(descriptor, data, 0, path)
        if durable:
            sync(descriptor, path)


def append_line(path: Path, line: bytes, *, durable: bool) -> None:
    """Add a line to the end of a file, which is created if need be."""
    with explained("append to", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _GUARDED, 0o666)
    with opened(descriptor), explained("append to", path):
        while line:  # the system may take it in parts
            line = line[os.write(descriptor, line) :]
        if durable:
            sync(descriptor, path)


def shorten(path: Path, num_bytes: int) -> None:
    """Cut the end of a file off. Never done to a chunk: that would kill those who map it."""
    with explained("shorten", path):
        os.truncate(path, num_bytes)


def temporary(path: Path) -> Path:
    return path.with_name(path.name + ".partial")  # the format's TEMPORARY suffix


@contextlib.contextmanager
def opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        close(descriptor)


def together(calls: Iterable[Callable[[], None]]) -> None:
    """Run operations that wait for the disk side by side; the first error is raised at the end."""
    calls = list(calls)
    # Dealt out at once: to hand single calls over takes as long as a quick disk needs for them.
    ours, *others = (calls[i::SYNC_THREADS] for i in range(SYNC_THREADS))
    try:
        futures = [_pool(os.getpid()).submit(_each, share) for share in others if share]
    except RuntimeError:  # the interpreter is about to end and starts no threads any more
        return _each(calls)
    try:
        _each(ours)
    finally:
        wait(futures)  # all of them: nothing may go on behind the back of who asked
    for future in futures:
        future.result()


def _each(calls: list[Callable[[], None]]) -> None:
    with contextlib.ExitStack() as stack:  # all of them, also when one reports an error
        for call in reversed(calls):
            stack.callback(call)


@functools.lru_cache(maxsize=1)  # threads do not survive a fork
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(SYNC_THREADS, f"expstore-sync-{process}")


def crc32c(data: bytes | NDArray[Any], before: int = 0) -> int:
    """Checksum of bytes or of an array's bytes in C order, continuing from `before`."""
    if isinstance(data, np.ndarray):
        data = np.ascontiguousarray(data).view()
        data.setflags(write=False)  # the C extension copies nothing, and takes only such
    return int(google_crc32c.extend(before, data))


class Mapping:
    """A range of addresses into which files are mapped one after the other, read-only.

    The range is reserved once and takes no memory. Arrays made from `array` keep it alive;
    when the last one goes, all files are unmapped.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        libc = _libc()
        self._unmap = libc.munmap  # kept: module globals may be gone at interpreter exit
        self.address = _mmap(None, num_bytes, 0, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)

    def place(self, path: Path, offset: int, num_bytes: int) -> None:
        """Map a whole file at `offset` of the range, over what was there."""
        flags = _MAP_SHARED | _MAP_FIXED
        with explained("map", path), opened(os.open(path, os.O_RDONLY | _GUARDED)) as source:
            size = os.fstat(source).st_size
            if size < num_bytes:  # beyond its end there is no memory, but a signal that kills
                raise OSError(errno.EIO, f"it must have {num_bytes} bytes, got {size}")
            _mmap(self.address + offset, num_bytes, mmap.PROT_READ, flags, source)

    def clear(self, offset: int, num_bytes: int) -> None:
        """Let go of the files in a part of the range, whose space on disk so becomes free."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        with explained("unmap at", str(offset)):
            _mmap(self.address + offset, num_bytes, 0, flags, -1)

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], skipped: int) -> NDArray[Any]:
        """The range as one array; only what was placed may be read.

        `skipped` bytes are thought to lie before the range, so that a column which has lost
        its oldest files is still indexed by absolute row numbers.
        """
        return np.asarray(_Window(self, dtype, shape, skipped))

    def __del__(self) -> None:
        address = getattr(self, "address", None)
        if address is not None:
            self._unmap(address, self.num_bytes)


class _Window:
    """What numpy needs to see memory as an array, and to keep its owner alive."""

    def __init__(
        self, owner: Mapping, dtype: np.dtype[Any], shape: tuple[int, ...], skipped: int
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (owner.address - skipped, True),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }


def map_file(path: Path) -> NDArray[np.uint8]:
    """A file's bytes as a read-only array, mapped on its own."""
    with explained("map", path), opened(os.open(path, os.O_RDONLY | _GUARDED)) as descriptor:
        if not os.fstat(descriptor).st_size:
            raise OSError(errno.EIO, "it is empty")
        return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)


def can_map_in_place() -> bool:
    """Whether files can be mapped at a chosen address here (not on Windows)."""
    return sys.platform in ("linux", "darwin") and "map_fixed" not in _left_out()


def can_advise() -> bool:
    """Whether the system can be told what will be read soon (not on Windows)."""
    return hasattr(mmap, "MADV_WILLNEED") and "madvise" not in _left_out()


def _left_out() -> list[str]:
    """What EXPSTORE_WITHOUT names: `map_fixed`, `madvise`, or both with a comma in between.

    These are then thought to be missing, so that the ways around them can be tested anywhere.
    """
    return os.environ.get("EXPSTORE_WITHOUT", "").split(",")


def advise(address: int, num_bytes: int) -> None:
    """Have mapped pages read in the background; `address` is that of a page.

    It is only advice, so nothing is said where the system does not take it.
    """
    _libc().madvise(address, num_bytes, mmap.MADV_WILLNEED)


_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS = 0x1000 if sys.platform == "darwin" else 0x20
_MAP_NORESERVE = 0 if sys.platform == "darwin" else 0x4000
_SYNC_FILE_RANGE_WRITE = 2
_FAILED = ctypes.c_void_p(-1).value
_HINTS = {
    errno.ELOOP: "there must be no symbolic links in a store: copy what they lead to (cp -rL)",
    errno.EFBIG: "no file of this kind is so large: it is damaged, or somebody else's",
    28: "the disk is full: free some space; what was committed is safe",
    122: "the quota is used up: free some space; what was committed is safe",
    30: "the file system is read-only: choose another place",
    13: "no permission: choose another place or change its owner",
    24: "too many open files: raise the limit (ulimit -n)",
    12: "out of memory or of maps",
    5: "the device reported an error: check it before writing on",
}


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if sys.platform == "linux":
        int64 = ctypes.c_longlong
        libc.sync_file_range.argtypes = [ctypes.c_int, int64, int64, ctypes.c_uint]
    return libc


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    placed = _libc().mmap(address, num_bytes, protection, flags, descriptor, 0)
    if placed in (None, _FAILED):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(placed)
