"""Copies of rows that numba compiles."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray


@numba.njit(nogil=True, cache=True)  # type: ignore[misc, untyped-decorator, unused-ignore]
def copy_rows(source: NDArray[np.uint64], rows: NDArray[np.int64], out: NDArray[np.uint64]) -> None:
    """Copy rows (n,) of `source` (N, words), all of which exist, into `out` (n, words)."""
    for i in range(len(rows)):
        for j in range(source.shape[1]):
            out[i, j] = source[rows[i], j]
