"""Care for stores: verify recomputes every checksum and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from expstore.episode import END_REASONS, end_of
from expstore.errors import DamagedError, ExpstoreError, FormatError
from expstore.storage.commits import Root, documents_on_disk, read_history
from expstore.storage.following import combined_checksum, exceptions_checksum
from expstore.storage.layout import METADATA_FILE
from expstore.storage.ragged import rows_checksum
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
    snapshot = Snapshot.of(absolute(path), fresh=True)
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
        self._next_step: int | None = snapshot.first_step  # None after a row that is damaged

    def files(self) -> Iterator[Problem]:
        """Missing files, wrong sizes, and metadata that is not as the commit says."""
        root = self.snapshot.root
        for layout in root.arrays.values():
            column = self.snapshot.columns[layout.path]
            for error in column.check(*root.commit.dims[layout.dimension]):
                yield Problem("file", str(error))
        yield from self._documents()

    def _documents(self) -> Iterator[Problem]:
        root, path = self.snapshot.root, self.snapshot.path
        expected = root.documents()
        lengths: dict[str, set[int]] | None = None  # allowed besides; None where nothing may lag
        for position, (name, found) in enumerate(documents_on_disk(path, root)):
            # A commit writes this one last: as long as it is older, others may be, too.
            if position == 0 and found != expected[name]:
                lengths = _lengths(path, root)
            is_sound = found == expected[name] or (
                lengths is not None and (found is None or _agrees(found, expected[name], lengths))
            )
            # Asked after reading: what a writer published meanwhile is no problem.
            if not is_sound and self.snapshot.is_newest():
                text = f"{path / name / METADATA_FILE} is not as the commit says"
                if isinstance(found, FormatError):
                    text = str(found)
                hint = "open the store with a Writer once, which mends it"
                yield Problem("file", f"{text}; {hint}")

    def episode(self, number: int) -> Iterator[Problem]:
        """Everything that is known of one episode."""
        index = self.snapshot.index
        start, self._next_step = self._next_step, None
        stored = int(index.column("index_crc32c")[number - self.snapshot.first_episode])
        try:
            row = index.row(number)
        except ExpstoreError as error:
            yield Problem("metadata", str(error), number)
            return
        if row.checksum() != stored:
            yield Problem("index", f"the index row of episode {number} fails its checksum", number)
            return
        if start not in (None, row.start) or row.end_reason >= len(END_REASONS):
            yield Problem("index", f"episode {number} does not start where the last ended", number)
            return
        self._next_step = row.start + row.length
        yield from self._flags(number, row.start, row.length, END_REASONS[row.end_reason])
        for name, expected in row.checksums.items():
            try:
                is_sound = self._checksum(name, row.start, row.length) == expected
                text = f"field {name!r} of episode {number} fails its checksum"
            except DamagedError as error:
                is_sound, text = False, f"field {name!r} of episode {number}: {error}"
            if not is_sound:
                yield Problem("field", text, number)

    def end(self) -> Iterator[Problem]:
        """After the last episode: whether all steps belong to one."""
        if self._next_step not in (None, self.snapshot.stop_step):
            yield Problem(
                "index",
                f"the episodes end at step {self._next_step}, the commit has steps up to "
                f"{self.snapshot.stop_step}",
            )

    def _flags(self, number: int, start: int, length: int, reason: str) -> Iterator[Problem]:
        done = np.asarray(self.snapshot.rows("done", start, start + length))
        owner = np.asarray(self.snapshot.rows("episode", start, start + length))
        # Compared as bytes: a flipped bit can make a true that is not 1.
        expected = np.zeros(length, np.uint8)
        expected[-1] = 1
        if not np.array_equal(done.view(np.uint8), expected) or (owner != number).any():
            yield Problem(
                "flags", f"'done' or 'episode' of episode {number} is not as its index row", number
            )
        flags = {
            name: np.asarray(self.snapshot.rows(name, start, start + length))
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
            crc = rows_checksum(rows, crc)
            self.num_bytes += rows.nbytes
        if name not in self.snapshot.following:
            return combined_checksum(crc, None)
        return combined_checksum(crc, self._exceptions(name, start, length, block))

    def _exceptions(self, name: str, start: int, length: int, block: int) -> int:
        crc = 0
        for first in range(start, start + length, block):
            last = min(first + block, start + length)
            steps, present, values = self.snapshot.following[name].between(first, last)
            if len(steps):
                crc = exceptions_checksum(steps - start, present.view(np.uint8), values, crc)
                self.num_bytes += values.nbytes
        return crc


def _lengths(path: Path, root: Root) -> dict[str, set[int]]:
    """How long each dimension ever was: an array's own metadata may lag behind the commit."""
    lengths = {name: {stop} for name, (_, stop) in root.commit.dims.items()}
    for entry in read_history(path):
        for name, (_, stop) in entry["dims"].items():
            lengths.setdefault(name, set()).add(stop)
    return lengths


def _agrees(found: Any, expected: Any, lengths: Mapping[str, set[int]]) -> bool:
    """Whether a document says what the commit says, or for some array what an older one said."""
    if not isinstance(expected, dict):
        return bool(found == expected)
    if not isinstance(found, dict) or found.keys() != expected.keys():
        return False
    if expected.get("node_type") != "array":
        return all(_agrees(found[key], value, lengths) for key, value in expected.items())
    shape = found.get("shape")
    return (
        isinstance(shape, list)
        and len(shape) == len(expected["shape"])
        and shape[1:] == expected["shape"][1:]
        and isinstance(shape[0], int)
        and shape[0] in lengths[expected["dimension_names"][0]] | {0}
        and shape[0] <= expected["shape"][0]
        # Without rows the layout was not decided yet.
        and ({**found, "shape": expected["shape"]} == expected or shape[0] == 0)
    )
