"""Zip archives, and the arrays in them read row by row, none of them whole."""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError

ZIP_MAGIC = b"PK\x03\x04"
BLOCK_BYTES = 1 << 20
# What zipfile, its decompressors and numpy's headers make of damage.
UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError),
    *(NotImplementedError, RuntimeError, MemoryError),
)


def is_zip(path: Path) -> bool:
    """Whether a file begins as a zip archive does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC


def open_zip(path: Path) -> zipfile.ZipFile:
    """The archive, for reading.

    Raises:
        SourceError: it is none, or is cut off.
    """
    if not is_zip(path):
        raise SourceError(f"{path} is no zip archive: it does not begin as one")
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise SourceError(
            f"{path} is cut off: the list of what is in a zip archive is at its end, and is not "
            "there; copy it again"
        ) from error


def check_member(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    """Read a member to its end, where its checksum is: damage before may look like data.

    Raises:
        SourceError: it is damaged.
    """
    try:
        with archive.open(name) as stream:
            while stream.read(BLOCK_BYTES):
                pass
    except UNREADABLE as error:
        raise SourceError(
            f"{name} of {path} is damaged, and nothing says which of its rows are: {error}; copy "
            "it again"
        ) from error


@contextlib.contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Give what damage raises as a SourceError; our own errors pass."""
    try:
        yield
    except SourceError:
        raise
    except UNREADABLE as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(f"{what} cannot be read: {text}") from error


class NpyRows:
    """Rows of one `.npy` stream, read forward.

    Attributes:
        shape: of the whole array, (N, ...).
    """

    def __init__(self, stream: IO[bytes], what: str) -> None:
        """Read the header.

        Raises:
            SourceError: begins with `what`; it holds objects, or lies in another order.
        """
        self._stream, self._what = stream, what
        with reading(what):
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                header = np.lib.format.read_array_header_1_0(stream)
            else:
                header = np.lib.format.read_array_header_2_0(stream)
        self.shape, is_columns, self.dtype = header
        if self.dtype.hasobject:
            raise SourceError(f"{what} holds pickled objects, which are not read")
        if is_columns and len(self.shape) > 1:
            raise SourceError(
                f"{what} lies column by column, so its rows cannot be read one after the other; "
                "save it as np.ascontiguousarray gives it"
            )
        self._row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])

    def read(self, num_rows: int) -> NDArray[Any]:
        """The next rows, as many.

        Raises:
            SourceError: the stream ends before, or is damaged.
        """
        with reading(self._what):
            rows = np.empty((num_rows, *self.shape[1:]), self.dtype)
        content, at = rows.reshape(-1).view(np.uint8), 0
        for block in self._blocks(rows.nbytes):
            content[at : at + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
        return rows

    def skip(self, num_rows: int) -> None:
        """Leave the next rows out."""
        for _ in self._blocks(num_rows * self._row_bytes):
            pass

    def _blocks(self, left: int) -> Iterator[bytes]:
        with reading(self._what):
            while left:
                block = self._stream.read(min(BLOCK_BYTES, left))
                if not block:
                    raise SourceError(f"{self._what} ends before its last row")
                left -= len(block)
                yield block
