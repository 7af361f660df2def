"""Ragged: values whose length differs from step to step, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError


@dataclass(frozen=True)
class Ragged:
    """One value per step, each of any number of elements of one shape and dtype.

    >>> points = Ragged.of([np.ones((2, 3)), np.zeros((0, 3)), np.ones((1, 3))])
    >>> len(points), points[0].shape, points.values.shape, points.lengths.tolist()
    (3, (2, 3), (3, 3), [2, 0, 1])
    """

    values: NDArray[Any]  # (N, *shape) all elements
    lengths: NDArray[np.int64]  # (T,) elements of each step; their sum is N

    @staticmethod
    def of(rows: Sequence[NDArray[Any]]) -> Ragged:
        """Of arrays (n, *shape), one per step and at least one."""
        lengths = np.array([len(row) for row in rows], np.int64)
        return Ragged(np.concatenate(rows), lengths)

    @staticmethod
    def concatenate(parts: Sequence[Ragged]) -> Ragged:
        return Ragged(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )

    @property
    def ends(self) -> NDArray[np.int64]:
        """(T,) where each step's elements end."""
        return np.cumsum(self.lengths)

    @property
    def shape(self) -> tuple[int, ...]:
        """(T, *shape), the elements' own shape, as if they were one per step."""
        return (len(self), *self.values.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.lengths.nbytes

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, step: int) -> NDArray[Any]:
        """(n, *shape), the elements of one step; negative ones count from the end."""
        step = range(len(self))[step]
        stop = int(self.lengths[: step + 1].sum())
        return self.values[stop - int(self.lengths[step]) : stop]

    def __getitem__(self, steps: Any) -> Any:
        """One step's elements, or a Ragged of several (a slice or an index array)."""
        if isinstance(steps, (int, np.integer)):
            return self.row(int(steps))
        lengths = self.lengths[steps]
        starts = (self.ends - self.lengths)[steps]
        return Ragged(self.values[spread(starts, lengths)], lengths)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter(np.split(self.values, self.ends[:-1]) if len(self) else [])

    def padded(self) -> NDArray[Any]:
        """(T, longest, *shape), shorter steps filled up with zeros."""
        longest = int(self.lengths.max(initial=0))
        out = np.zeros((len(self), longest, *self.values.shape[1:]), self.values.dtype)
        out[np.arange(longest) < self.lengths[:, None]] = self.values
        return out


Rows = NDArray[Any] | Ragged  # of one field, one per step


def spread(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`start`, `start + 1`, ... for each stretch of the given length, one after the other.

    >>> spread(np.array([10, 5]), np.array([3, 2])).tolist()
    [10, 11, 12, 5, 6]
    """
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def one_row(value: NDArray[Any], like: Rows) -> Rows:
    """One step's value as a column of one row, of the kind of `like`."""
    return Ragged.of([value]) if isinstance(like, Ragged) else value[None]


def differing(given: Rows, rows: Rows) -> NDArray[np.int64]:
    """Which rows of two columns differ in bytes, so that NaN equals itself and -0 is not 0."""
    if not len(given):
        return np.empty(0, np.int64)
    if isinstance(given, Ragged) or isinstance(rows, Ragged):
        same = [a.tobytes() == b.tobytes() for a, b in zip(given, rows, strict=True)]
        return np.flatnonzero(~np.array(same))
    a, b = (np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8) for x in (given, rows))
    return np.flatnonzero((a != b).any(axis=1))


def text_of(row: NDArray[np.uint8]) -> str:
    """A step's text from its UTF-8 bytes."""
    try:
        return row.tobytes().decode()
    except UnicodeDecodeError as error:
        raise DamagedError(f"a text is not UTF-8: {error}; run expstore verify") from error
