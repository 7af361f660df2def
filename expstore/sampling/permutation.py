"""A random order of range(n), computed where it is needed instead of stored.

The positions are laid out as a grid of about sqrt(n) by sqrt(n) and alternately shifted along
rows and columns by keyed hashes of the other coordinate: a Feistel network on mixed radices
(Black, Rogaway: Ciphers with arbitrary finite domains, 2002). The grid has at most sqrt(n)
cells too many; a position that lands on one walks on until it lands on a real one.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError, StepRangeError
from expstore.sampling.draw import fold, mix_words

_PURPOSE = 0x7065726D  # keeps these keys apart from those of the draw with the same number
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


def permute(seed: int, epoch: int, positions: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Where each position goes in the order of this epoch; a bijection of range(n).

    Args:
        seed: Any integer.
        epoch: Any integer; every epoch has an order of its own.
        positions: Any shape, from 0 to n - 1.
        n: How many positions there are, at least 1.

    Raises:
        SchemaError: ``n`` is not from 1 to 2**62.
        StepRangeError: A position is negative or not below ``n``.

    >>> sorted(permute(seed=0, epoch=0, positions=np.arange(5), n=5).tolist())
    [0, 1, 2, 3, 4]
    """
    check_range(positions, n)
    rows, columns = grid(n)
    keys = round_keys(seed, epoch, n)
    at = _walk(positions.astype(np.uint64).ravel(), rows, columns, keys)
    while (outside := np.flatnonzero(at >= n)).size:
        at[outside] = _walk(at[outside], rows, columns, keys)
    return at.astype(np.int64).reshape(positions.shape)


def permute_compiled(
    seed: int, epoch: int, positions: NDArray[np.int64], n: int
) -> NDArray[np.int64]:
    """``permute`` of (B,) positions by the compiled kernel."""
    from expstore.sampling import kernels

    check_range(positions, n)
    rows, columns = grid(n)
    out = np.empty(len(positions), np.int64)
    kernels.fill_permuted(positions, np.uint64(n), rows, columns, round_keys(seed, epoch, n), out)
    return out


def check_range(positions: NDArray[np.int64], n: int) -> None:
    """Raise unless every position is in range(n)."""
    if not 1 <= n <= 2**62:
        raise SchemaError(f"n must be from 1 to 2**62, got {n}")
    bad = (positions < 0) | (positions >= n)
    if bad.any():
        raise StepRangeError(
            f"positions must be from 0 to {n - 1}, got {int(positions[bad].flat[0])}"
        )


def grid(n: int) -> tuple[np.uint64, np.uint64]:
    """Rows and columns of the smallest nearly square grid of at least n cells."""
    rows = isqrt(n - 1) + 1
    return np.uint64(rows), np.uint64(-(-n // rows))


@lru_cache(maxsize=64)
def round_keys(seed: int, epoch: int, n: int) -> NDArray[np.uint64]:
    """One key per round; small grids need more rounds until every order is as likely."""
    num_rounds = 12 if n >= 4096 else 32
    word = np.uint64(fold(seed, epoch, _PURPOSE))
    return mix_words(mix_words(word + np.arange(1, num_rounds + 1, dtype=np.uint64) * _GOLDEN))


def _walk(
    at: NDArray[np.uint64], rows: np.uint64, columns: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    row, column = at % rows, at // rows
    for row_key, column_key in zip(keys[0::2], keys[1::2], strict=True):
        row = (row + (mix_words(row_key + column * _GOLDEN) >> _HALF) * rows // 2**32) % rows
        shift = (mix_words(column_key + row * _GOLDEN) >> _HALF) * columns // 2**32
        column = (column + shift) % columns
    return np.asarray(column * rows + row, np.uint64)
