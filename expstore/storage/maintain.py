"""Care for stores: verify recomputes every checksum and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from expstore.episode import END_REASONS, end_of
from expstore.errors import ExpstoreError, FormatError
from expstore.storage import files
from expstore.storage.commits import documents_on_disk
from expstore.storage.following import combined_checksum, exceptions_checksum
from expstore.storage.mapping import checked_file
from expstore.storage.reading import Snapshot
from expstore.storage.store import absolute

BLOCK_BYTES = 16 << 20  # of rows checked at a time, so that memory stays small


@dataclass(frozen=True)
class Problem:
    """One thing that is not as the commit says."""

    what: str  # "file", "index", "field", "metadata" or "flags"
    text: str
    episode: int | None = None  # the episode it concerns, if it is one


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    path: str
    commit: int  # number of the commit that was checked
    num_episodes: int
    num_steps: int
    num_bytes: int  # of rows that were read
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.problems


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Check a store against its checksums: files, index, flags, metadata and every field.

    Args:
        path: the store's directory; it may be written meanwhile.
        progress: called with (episodes checked, episodes in all).

    Returns:
        What was checked and every problem found; `is_sound` if there is none.

    Raises:
        NotAStoreError: there is no store at `path`.
        FormatError: the root is damaged, so that nothing else can be trusted.
    """
    snapshot = Snapshot.of(absolute(path))
    check = _Check(snapshot)
    problems = list(check.files())
    if not problems:
        for done, number in enumerate(range(snapshot.first_episode, snapshot.stop_episode)):
            problems += check.episode(number)
            if progress is not None:
                progress(done + 1, len(snapshot.index))
        problems += check.end()
    return Verification(
        str(snapshot.path),
        snapshot.root.commit.number,
        len(snapshot.index),
        snapshot.stop_step - snapshot.first_step,
        check.num_bytes,
        problems,
    )


class _Check:
    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.num_bytes = 0
        self._next_step = snapshot.first_step

    def files(self) -> Iterator[Problem]:
        """Missing files, wrong sizes, and single arrays that lead the commit."""
        root = self.snapshot.root
        for layout in root.arrays.values():
            start, stop = root.commit.dims[layout.dimension]
            for chunk in range(start // layout.chunk_rows, -(-stop // layout.chunk_rows)):
                try:
                    checked_file(self.snapshot.path, layout, chunk)
                except ExpstoreError as error:
                    yield Problem("file", str(error))
        yield from self._documents()

    def _documents(self) -> Iterator[Problem]:
        root, path = self.snapshot.root, self.snapshot.path
        for name, found in documents_on_disk(path, root):
            layout = root.arrays.get(name)
            if isinstance(found, FormatError):
                yield Problem("file", str(found))
            elif layout is not None and self.snapshot.is_newest():
                committed = root.commit.dims[layout.dimension][1]
                if found["shape"][0] > committed:
                    yield Problem(
                        "file",
                        f"{path / name}/zarr.json shows {found['shape'][0]} rows, "
                        f"the commit has {committed}",
                    )

    def episode(self, number: int) -> Iterator[Problem]:
        """Everything that is known of one episode."""
        index = self.snapshot.index
        stored = int(index.column("index_crc32c")[number - self.snapshot.first_episode])
        try:
            row = index.row(number)
        except ExpstoreError as error:
            yield Problem("metadata", str(error), number)
            return
        if row.checksum() != stored:
            yield Problem("index", f"the index row of episode {number} fails its checksum", number)
            return
        if row.start != self._next_step or row.end_reason >= len(END_REASONS):
            yield Problem("index", f"episode {number} does not start where the last ended", number)
            return
        self._next_step = row.start + row.length
        yield from self._flags(number, row.start, row.length, END_REASONS[row.end_reason])
        for name, expected in row.checksums.items():
            if self._checksum(name, row.start, row.length) != expected:
                yield Problem(
                    "field", f"field {name!r} of episode {number} fails its checksum", number
                )

    def end(self) -> Iterator[Problem]:
        """After the last episode: whether all steps belong to one."""
        if self._next_step != self.snapshot.stop_step:
            yield Problem(
                "index",
                f"the episodes end at step {self._next_step}, the commit has steps up to "
                f"{self.snapshot.stop_step}",
            )

    def _flags(self, number: int, start: int, length: int, reason: str) -> Iterator[Problem]:
        done = self.snapshot.rows("done", start, start + length)
        owner = self.snapshot.rows("episode", start, start + length)
        # Compared as bytes: a flipped bit can make a true that is not 1.
        expected = np.zeros(length, np.uint8)
        expected[-1] = 1
        if not np.array_equal(done.view(np.uint8), expected) or (owner != number).any():
            yield Problem(
                "flags", f"'done' or 'episode' of episode {number} is not as its index row", number
            )
        flags = {
            name: self.snapshot.rows(name, start, start + length)
            for name in ("terminated", "truncated")
            if name in self.snapshot.schema.fields
        }
        try:
            end_of(flags, f"in episode {number}", reason)
        except ExpstoreError as error:
            yield Problem("flags", str(error), number)

    def _checksum(self, name: str, start: int, length: int) -> int:
        step_bytes = self.snapshot.schema[name].step_bytes
        block = max(1, BLOCK_BYTES // step_bytes)
        crc = 0
        for first in range(start, start + length, block):
            rows = self.snapshot.rows(name, first, min(first + block, start + length))
            crc = files.crc32c(rows, crc)
            self.num_bytes += rows.nbytes
        if name not in self.snapshot.following:
            return combined_checksum(crc, None)
        return combined_checksum(crc, self._exceptions(name, start, length, block))

    def _exceptions(self, name: str, start: int, length: int, block: int) -> int:
        crc = 0
        for first in range(start, start + length, block):
            parts: tuple[Any, ...] = self.snapshot.following[name].between(
                first, min(first + block, start + length)
            )
            steps, present, values = parts
            if len(steps):
                crc = exceptions_checksum(steps - start, present.view(np.uint8), values, crc)
                self.num_bytes += values.nbytes
        return crc
