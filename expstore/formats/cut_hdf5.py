"""HDF5 files of which the end is missing: what lies before it can be read, and nothing else."""

from __future__ import annotations

import io
import os
import weakref
from pathlib import Path
from typing import Any

from expstore.errors import SourceError


class MissingRowsError(SourceError):
    """A dataset lies beyond the end of its file."""


class CutFile(io.RawIOBase):
    """A file that seems to have the bytes that it announces; those beyond its end are zeros.

    HDF5 refuses a file that is shorter than it should be, whatever is asked for. Zeros are no
    metadata of HDF5, so what it cannot find in them is an error. Of data, `check_there` tells.

    Args:
        announced: how many bytes the file should have.
    """

    def __init__(self, path: Path, announced: int) -> None:
        self._file = path.open("rb")
        self.path, self.announced = path, announced
        self.num_bytes = os.fstat(self._file.fileno()).st_size
        _open[repr(self)] = self

    def __repr__(self) -> str:
        # h5py takes it for the name of the file.
        return f"cut-{id(self)}"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            return self._file.seek(self.announced + offset)
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        begin = self._file.tell()
        num_bytes = max(0, min(len(view), self.announced - begin))
        there = self._file.readinto(view[:num_bytes]) or 0
        view[there:num_bytes] = bytes(num_bytes - there)
        self._file.seek(begin + num_bytes)
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()

    @property
    def account(self) -> str:
        """How much of it is there, for errors."""
        return f"{self.num_bytes:,} of its {self.announced:,} bytes are there"


_open: weakref.WeakValueDictionary[str, CutFile] = weakref.WeakValueDictionary()


def cut_at(path: Path) -> CutFile | None:
    """The file of that path, if it is open and cut off."""
    return next((cut for cut in list(_open.values()) if cut.path == path), None)


def check_there(dataset: Any) -> None:
    """Refuse a dataset of a `CutFile` that does not lie before its end, or cannot be found.

    Raises:
        MissingRowsError: names it.
    """
    cut = _open.get(dataset.file.filename)
    if cut is None:
        return
    try:
        stop = _stop(dataset)
    except (OSError, RuntimeError, ValueError):
        stop = cut.announced
    if stop > cut.num_bytes:
        raise MissingRowsError(
            f"{dataset.name} lies beyond the end of {cut.path}, which is cut off: {cut.account}"
        )


def _stop(dataset: Any) -> int:
    """The byte of the file behind the last one of a dataset; 0 if it takes none."""
    import h5py

    node = dataset.id
    layout = node.get_create_plist().get_layout()
    if layout == h5py.h5d.CHUNKED:
        chunks = (node.get_chunk_info(number) for number in range(node.get_num_chunks()))
        return max((chunk.byte_offset + chunk.size for chunk in chunks), default=0)
    if layout == h5py.h5d.CONTIGUOUS and node.get_offset() is not None:
        return int(node.get_offset() + node.get_storage_size())
    return 0
