"""Tombstones: the episodes that were deleted, one row for each, never taken back."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.storage import files
from expstore.storage.layout import DELETED
from expstore.storage.protocols import Column


@dataclass(frozen=True)
class Tombstones:
    """What the live rows of `deleted/` say, in the order of the deletions."""

    start: int  # number of the first row
    episode: NDArray[np.int64]  # (K,) number of the episode
    length: NDArray[np.int64]  # (K,) its steps
    crc32c: NDArray[np.uint32]  # (K,) of the row's number and of both of the above

    @staticmethod
    def of(start: int, episode: NDArray[np.int64], length: NDArray[np.int64]) -> Tombstones:
        """Rows to be appended after `start` others."""
        return Tombstones(start, episode, length, _checksums(start, episode, length))

    @property
    def is_sound(self) -> NDArray[np.bool_]:
        """(K,) whether the checksum of each row holds."""
        expected = _checksums(self.start, self.episode, self.length)
        return np.asarray(self.crc32c == expected, np.bool_)

    def columns(self) -> dict[str, NDArray[Any]]:
        """The rows of each array, by path."""
        return {
            f"{DELETED}/episode": self.episode.astype("<i8"),
            f"{DELETED}/length": self.length.astype("<i8"),
            f"{DELETED}/crc32c": self.crc32c.astype("<u4"),
        }


def read_tombstones(
    columns: Mapping[str, Column], dims: Mapping[str, tuple[int, int]]
) -> Tombstones:
    """The tombstones of a commit; a store in which nothing was deleted has no arrays for them."""
    start, stop = dims.get(DELETED, (0, 0))
    if start == stop:
        none = np.empty(0, np.int64)
        return Tombstones.of(start, none, none)
    episode, length, crc32c = (
        np.array(columns[f"{DELETED}/{name}"].slice(start, stop, start, stop))
        for name in ("episode", "length", "crc32c")
    )
    return Tombstones(start, episode, length, crc32c)


def _checksums(
    start: int, episode: NDArray[np.int64], length: NDArray[np.int64]
) -> NDArray[np.uint32]:
    rows = zip(range(start, start + len(episode)), episode.tolist(), length.tolist(), strict=True)
    return np.array([files.crc32c(struct.pack("<3q", *row)) for row in rows], np.uint32)
