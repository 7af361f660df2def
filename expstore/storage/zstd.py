"""Zstandard, with a decompression context that each thread keeps.

numcodecs makes a context per call. That asks the processor for its features, an instruction which
virtual machines answer slowly: 10 microseconds, as long as decoding 100 KB takes. So the same
library is called with a context of ours, where its functions can be found, else numcodecs is.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

MAGIC = b"\x28\xb5\x2f\xfd"  # a frame begins with it


def compress(rows: NDArray[Any], level: int) -> bytes:
    """One frame with its size in it."""
    data: bytes = zstd.compress(np.ascontiguousarray(rows), level)
    return data


def decompress(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Fill `out` (n,) with the n bytes of one frame; both are contiguous.

    Raises:
        ValueError: it is none, or not of n bytes.
    """
    if _library is None:
        _decompress_by_numcodecs(data, out)
        return
    try:
        context = _of_thread.context
    except AttributeError:
        context = _of_thread.context = Context(_library)
    context.decompress(data, out)


def frame_bytes(data: NDArray[np.uint8]) -> int | None:
    """Size of the frame at the beginning of `data` (n,); None where there is no whole one.

    Only its header and those of its blocks are looked at (RFC 8878, section 3.1.1).
    """
    if len(data) < 5 or data[:4].tobytes() != MAGIC:
        return None
    descriptor = int(data[4])
    is_single = descriptor >> 5 & 1
    content = (is_single, 2, 4, 8)[descriptor >> 6]
    at = 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3] + content
    is_last = 0
    while not is_last:
        if at + 3 > len(data):
            return None
        header = int.from_bytes(data[at : at + 3].tobytes(), "little")
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == 1 else size)  # a repeated byte stands for all of its block
    at += 4 * (descriptor >> 2 & 1)
    return at if at <= len(data) else None


class Context:
    """What libzstd keeps between two frames; for one thread at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._decompress = library.ZSTD_decompressDCtx
        self._address = library.ZSTD_createDCtx()
        if not self._address:
            raise MemoryError("no memory for a zstd context")
        weakref.finalize(self, library.ZSTD_freeDCtx, self._address)

    def decompress(self, data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """See `decompress`."""
        num_bytes = self._decompress(
            self._address, out.ctypes.data, out.nbytes, data.ctypes.data, data.nbytes
        )
        if num_bytes != out.nbytes:  # an error is a number beyond every size
            raise ValueError(f"not a zstd frame of {out.nbytes} bytes")


def _decompress_by_numcodecs(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    try:
        zstd.decompress(data, out)  # refuses a larger one
        num_bytes = len(zstd.decompress(data))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if num_bytes != out.nbytes:
        raise ValueError(f"not a zstd frame of {out.nbytes} bytes")


def _found() -> ctypes.CDLL | None:
    """The library within numcodecs, if it shows the functions needed (all stable in zstd 1)."""
    try:
        library = ctypes.CDLL(zstd.__file__)
        create, decompress, free = (
            library.ZSTD_createDCtx,
            library.ZSTD_decompressDCtx,
            library.ZSTD_freeDCtx,
        )
    except (OSError, AttributeError, TypeError):
        return None
    create.argtypes, create.restype = [], ctypes.c_void_p
    decompress.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_void_p, ctypes.c_size_t),
    ]
    decompress.restype = ctypes.c_size_t
    free.argtypes, free.restype = [ctypes.c_void_p], ctypes.c_size_t
    return library


_library = _found()
_of_thread = threading.local()
