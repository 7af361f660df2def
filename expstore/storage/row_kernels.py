"""Copies of large rows that numba compiles, past the caches.

A batch that no cache holds is written with non-temporal stores: the processor does not read what
is overwritten, and keeps in its caches what is worth it. (LLVM Language Reference, metadata
`!nontemporal`; on processors without such stores these are plain ones.)
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

STORE_BYTES = 16  # of one store, and the alignment of what it writes to


@numba.njit(nogil=True, cache=True)  # type: ignore[misc, untyped-decorator, unused-ignore]
def copy_rows(source: NDArray[np.uint64], rows: NDArray[np.int64], out: NDArray[np.uint64]) -> None:
    """Copy rows (n,) of `source` (N, words), all of which exist, into `out` (n, words).

    Both are contiguous, `out` begins at a multiple of `STORE_BYTES`, and so does each row.
    """
    num_bytes = 8 * out.shape[1]
    read, write = source.ctypes.data, out.ctypes.data
    for i in range(len(rows)):
        _copy(read + rows[i] * num_bytes, write + i * num_bytes, num_bytes)
    _fence()  # type: ignore[call-arg, unused-ignore]


@numba.njit(nogil=True, cache=True)  # type: ignore[misc, untyped-decorator, unused-ignore]
def copy_block(
    source: NDArray[np.uint64], first: int, count: int, out: NDArray[np.uint64], place: int
) -> None:
    """Copy `count` rows of `source` from `first` on to those of `out` from `place` on."""
    num_bytes = 8 * out.shape[1]
    _copy(
        source.ctypes.data + first * num_bytes,
        out.ctypes.data + place * num_bytes,
        count * num_bytes,
    )
    _fence()  # type: ignore[call-arg, unused-ignore]


@numba.njit(nogil=True, cache=True)  # type: ignore[misc, untyped-decorator, unused-ignore]
def _copy(read: int, write: int, num_bytes: int) -> None:
    for at in range(0, num_bytes, STORE_BYTES):
        _store(read + at, write + at)  # type: ignore[call-arg, unused-ignore]


@numba.njit(nogil=True, cache=True)  # type: ignore[misc, untyped-decorator, unused-ignore]
def gather_rows(places: NDArray[np.int64], rows: NDArray[np.int64], start: int, stop: int) -> int:
    """Copy the same rows (n,) of several arrays, a stretch of consecutive ones at a time.

    Args:
        places: (F, 3) of each array the address of row 0, that of its copy, and the bytes of a row.
        rows: Where they are read.
        start: The first row that may be read.
        stop: One past the last.

    Returns:
        -1, or the index of the first row outside of that; nothing has been copied then.
    """
    for i in range(len(rows)):
        if rows[i] < start or rows[i] >= stop:
            return i
    first = 0
    while first < len(rows):
        last = first + 1
        while last < len(rows) and rows[last] == rows[last - 1] + 1:
            last += 1
        for f in range(len(places)):
            num_bytes = places[f, 2]
            _move(  # type: ignore[call-arg, unused-ignore]
                places[f, 0] + rows[first] * num_bytes,
                places[f, 1] + first * num_bytes,
                (last - first) * num_bytes,
            )
        first = last
    return -1


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def _move(context: Any, read: Any, write: Any, num_bytes: Any) -> Any:
    """`memcpy` between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        source, target = (builder.inttoptr(a, pointer) for a in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)  # type: ignore[no-untyped-call, unused-ignore]
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def _store(context: Any, read: Any, write: Any) -> Any:
    """Copy the bytes of one store from the address `read` to the address `write`."""
    vector = ir.VectorType(ir.IntType(64), STORE_BYTES // 8)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = (builder.inttoptr(a, vector.as_pointer()) for a in arguments)
        value = builder.load(source)
        value.align = 8
        stored = builder.store(value, target)
        stored.align = STORE_BYTES
        once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        stored.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def _fence(context: Any) -> Any:
    """What was stored is seen by other threads after this, as with plain stores."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
