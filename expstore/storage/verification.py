"""verify: recompute every checksum of a store, and change nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from expstore.episode import END_REASONS, end_of
from expstore.errors import DamagedError, EvictedError, ExpstoreError, FormatError
from expstore.storage import files
from expstore.storage.bounds import ends_of_episodes
from expstore.storage.commits import (
    Root,
    copied_commit,
    damaged_history,
    documents_on_disk,
    read_history,
    read_root,
)
from expstore.storage.following import NextReader, combined_checksum, exceptions_checksum
from expstore.storage.layout import (
    DELETED,
    HISTORY_FILE,
    METADATA_FILE,
    PRIORITIES,
    ROOT_COPY,
)
from expstore.storage.priorities import check_documents, load_state, set_names
from expstore.storage.ragged import rows_checksum
from expstore.storage.reading import Snapshot
from expstore.storage.salvage import KnownRows, SalvagedColumn, in_order, is_in_order
from expstore.storage.store import absolute
from expstore.storage.tombstones import read_tombstones

BLOCK_BYTES = 16 << 20  # of rows checked at a time, so that memory stays small
HINT = "; run expstore verify"  # what others say, and this module should not
MENDED = "open the store with a Writer once, or run expstore repair, which mends it"
MOST_MISSING = 100_000  # files; a commit that names more than that has nothing to be checked
MOST_NAMED = 100  # files of one array that are named; others are counted
MAX_TRIES = 20  # when episodes are evicted meanwhile, it begins anew with the newest commit


@dataclass(frozen=True)
class Problem:
    """One thing that is not as the commit says."""

    # "file", "metadata file", "history", "deleted", "index", "order", "field", "metadata",
    # "flags" or "priorities"
    what: str
    text: str
    episode: int | None = None  # the episode it concerns, if it is one
    name: str | None = None  # of the array, file or set that it concerns


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    path: str
    commit: int  # number of the commit that was checked
    num_episodes: int  # that were checked; deleted ones are not
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

    Every episode is checked, also when files are missing or of another size. Of deleted episodes
    only the tombstones are: nobody reads their rows but who opens an older commit, and a repair
    could do no more than delete them. Priorities saved beside the data are checked, too; no
    episode depends on them.

    Args:
        path: the store's directory; it may be written meanwhile.
        progress: called with (episodes checked, episodes in all).

    Returns:
        What was checked and every problem found; `is_sound` if there is none. `repair` takes
        care of them.

    Raises:
        NotAStoreError: there is no store at `path`.
        FormatError: the root is damaged, so that nothing else can be trusted.
        DamagedError: hardly a file is there of those that the commit names.
    """
    for attempt in range(MAX_TRIES):
        snapshot = Snapshot.of(absolute(path), fresh=True)
        check = Check(snapshot)
        try:
            problems = list(check.all(progress))
        except EvictedError:
            problems = []
        # What an eviction removed meanwhile is no damage.
        if attempt == MAX_TRIES - 1 or not _has_evicted(snapshot):
            break
    return Verification(
        str(snapshot.path),
        snapshot.root.commit.number,
        check.num_episodes,
        check.num_steps,
        check.num_bytes,
        problems,
    )


def _has_evicted(snapshot: Snapshot) -> bool:
    if snapshot.is_newest():
        return False
    newest = read_root(snapshot.path).commit.dims
    return newest["step"][0] > snapshot.first_step


class Check:
    """One look at everything that a snapshot, which shares nothing with others, holds."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.num_bytes = self.num_episodes = self.num_steps = 0
        self.following: dict[str, NextReader] = {}
        self.deleted = np.empty(0, np.int64)  # (K,) ascending
        self._next_step: int | None = snapshot.first_step  # None after a row that is damaged

    def all(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Problem]:
        """Every problem."""
        snapshot = self.snapshot
        yield from self.files()
        yield from self._documents()
        yield from self._history()
        yield from self._tombstones()
        self.num_episodes = len(snapshot.index) - len(self.deleted)
        yield from self._order()
        is_deleted = np.zeros(len(snapshot.index), bool)
        is_deleted[self.deleted - snapshot.first_episode] = True
        lengths = snapshot.index.column("length")[is_deleted]
        self.num_steps = snapshot.stop_step - snapshot.first_step - int(lengths.sum())
        done = 0
        for number in range(snapshot.first_episode, snapshot.stop_episode):
            if is_deleted[number - snapshot.first_episode]:
                self._skip(number)
                continue
            yield from self.episode(number)
            done += 1
            if progress is not None:
                progress(done, self.num_episodes)
        yield from self._end()
        yield from _saved_priorities(snapshot.path / PRIORITIES)

    # -- files -----------------------------------------------------------------------------------

    def files(self) -> Iterator[Problem]:
        """Missing files and wrong sizes; what can be read of such arrays is read from then on."""
        root = self.snapshot.root
        check_presence(self.snapshot.path, root)
        for layout in root.arrays.values():
            column = self.snapshot.columns[layout.path]
            errors = list(column.check(*root.commit.dims[layout.dimension]))
            for error in errors[:MOST_NAMED]:
                yield Problem("file", _without_hint(error), name=layout.path)
            if len(errors) > MOST_NAMED:
                text = f"{len(errors) - MOST_NAMED:,} other files of {layout.path} likewise"
                yield Problem("file", text, name=layout.path)
            if errors and not layout.is_coded:
                self.snapshot.columns[layout.path] = SalvagedColumn(self.snapshot.path, layout)

    def _documents(self) -> Iterator[Problem]:
        """The metadata of single arrays and groups, and the copy of the root."""
        root, path = self.snapshot.root, self.snapshot.path
        expected = root.documents()
        copied = copied_commit(path, root.store_id)
        lengths: dict[str, set[int]] = {}
        # A commit writes the copy last: as long as it is older, others may be, too.
        lags = copied is not None and copied < root.commit.number
        for position, (name, found) in enumerate(documents_on_disk(path, root)):
            if copied in (None, -1) and position == 0:  # without a copy, the last one but that
                lags = found != expected[name]
            is_sound = found == expected[name]
            if not is_sound and lags:
                lengths = lengths or _lengths(path, root)
                is_sound = found is None or _agrees(found, expected[name], lengths)
            # Asked after reading: what a writer published meanwhile is no problem.
            if not is_sound and self.snapshot.is_newest():
                text = f"{path / name / METADATA_FILE} is not as the commit says"
                if isinstance(found, FormatError):
                    text = str(found)
                yield Problem("metadata file", f"{text}; {MENDED}", name=name)
        is_copy = copied is None or 0 <= copied <= root.commit.number
        if not is_copy and self.snapshot.is_newest():
            text = f"{path / ROOT_COPY} is not a copy of the root"
            yield Problem("metadata file", f"{text}; {MENDED}", name=ROOT_COPY)

    def _history(self) -> Iterator[Problem]:
        file = self.snapshot.path / HISTORY_FILE
        for line in damaged_history(self.snapshot.path):
            yield Problem("history", f"line {line} of {file} fails its checksum", name=HISTORY_FILE)

    def _tombstones(self) -> Iterator[Problem]:
        snapshot = self.snapshot
        stones = read_tombstones(snapshot.columns, snapshot.root.commit.dims)
        is_sound = stones.is_sound
        is_sound &= (stones.episode >= 0) & (stones.episode < snapshot.stop_episode)
        for at in np.flatnonzero(~is_sound).tolist():
            text = f"row {stones.start + at} of {snapshot.path / DELETED} fails its checksum"
            yield Problem("deleted", f"{text}: a deleted episode is not known any more")
        live = is_sound & (stones.episode >= snapshot.first_episode)
        self.deleted = np.unique(stones.episode[live])

    def _order(self) -> Iterator[Problem]:
        """Exceptions are looked up by bisection, so one that is out of order hides others."""
        snapshot = self.snapshot
        low, high = snapshot.first_step, snapshot.stop_step
        ends = np.asarray(snapshot.index.column("start") + snapshot.index.column("length")) - 1
        for name, reader in snapshot.following.items():
            live = reader.start, reader.stop
            steps = reader.step.slice(*live, *live)
            if not is_in_order(steps, low, high, ends):
                ends = ends_of_episodes(snapshot)
                if not is_in_order(steps, low, high, ends):
                    path = snapshot.path / f"next/{name}/step"
                    yield Problem(
                        "order", f"the steps in {path} are not as they must be", name=name
                    )
                    mended = in_order(np.array(steps), low, high, ends)
                    reader = replace(reader, step=KnownRows(mended, reader.start))
            self.following[name] = reader

    # -- episodes --------------------------------------------------------------------------------

    def episode(self, number: int) -> Iterator[Problem]:
        """Everything that is known of one episode."""
        index = self.snapshot.index
        start, self._next_step = self._next_step, None
        stored = int(index.column("index_crc32c")[number - self.snapshot.first_episode])
        try:
            row = index.row(number)
        except EvictedError:
            raise
        except ExpstoreError as error:
            yield Problem("metadata", _without_hint(error), number)
            return
        if row.checksum() != stored:
            yield Problem("index", f"the index row of episode {number} fails its checksum", number)
            return
        is_inside = row.length >= 1 and row.start + row.length <= self.snapshot.stop_step
        is_next = start in (None, row.start) and row.start >= self.snapshot.first_step
        if not is_inside or not is_next or row.end_reason >= len(END_REASONS):
            yield Problem("index", f"episode {number} does not start where the last ended", number)
            return
        self._next_step = row.start + row.length
        yield from self._flags(number, row.start, row.length, END_REASONS[row.end_reason])
        for name, expected in row.checksums.items():
            try:
                is_sound = self._checksum(name, row.start, row.length) == expected
                text = f"field {name!r} of episode {number} fails its checksum"
            except DamagedError as error:
                is_sound = False
                text = f"field {name!r} of episode {number}: {_without_hint(error)}"
            if not is_sound:
                yield Problem("field", text, number, name)

    def _skip(self, number: int) -> None:
        at = number - self.snapshot.first_episode
        start, length = (int(self.snapshot.index.column(n)[at]) for n in ("start", "length"))
        self._next_step = start + length if self._next_step == start else None

    def _end(self) -> Iterator[Problem]:
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
        try:
            flags = {
                name: np.asarray(self.snapshot.rows(name, start, start + length))
                for name in ("terminated", "truncated")
                if name in self.snapshot.schema.fields
            }
            end_of(flags, f"in episode {number}", reason)
        except EvictedError:
            raise
        except DamagedError:
            return  # of a compressed flag, whose checksum will say so
        except ExpstoreError as error:
            yield Problem("flags", str(error), number, "flag")

    def _checksum(self, name: str, start: int, length: int) -> int:
        step_bytes = self.snapshot.schema[name].step_bytes
        block = max(1, BLOCK_BYTES // step_bytes)
        crc = 0
        for first in range(start, start + length, block):
            rows = self.snapshot.rows(name, first, min(first + block, start + length))
            crc = rows_checksum(rows, crc)
            self.num_bytes += rows.nbytes
        if name not in self.following:
            return combined_checksum(crc, None)
        return combined_checksum(crc, self._exceptions(name, start, length, block))

    def _exceptions(self, name: str, start: int, length: int, block: int) -> int:
        crc = 0
        for first in range(start, start + length, block):
            last = min(first + block, start + length)
            steps, present, values = self.following[name].between(first, last)
            if len(steps):
                crc = exceptions_checksum(steps - start, present.view(np.uint8), values, crc)
                self.num_bytes += values.nbytes
        return crc


def check_presence(path: Path, root: Root) -> None:
    """Refuse a commit of which hardly a file is there: to look for each would take for ever.

    Raises:
        DamagedError: more files are missing than anybody wants to hear of.
    """
    missing = 0
    for layout in root.arrays.values():
        start, stop = root.commit.dims[layout.dimension]
        needed = -(-stop // layout.chunk_rows) - start // layout.chunk_rows
        if needed > MOST_NAMED:
            needed -= sum(e.name.startswith("c.") for e in files.list_directory(path / layout.path))
            missing += max(0, needed)
    if missing > MOST_MISSING:
        raise DamagedError(
            f"{path} lacks {missing:,} of the files that its commit names; copy the store again, "
            "or restore it from another copy"
        )


def _saved_priorities(directory: Path) -> Iterator[Problem]:
    for name in set_names(directory):
        try:
            load_state(directory / name)
            check_documents(directory / name)
        except (DamagedError, FormatError) as error:
            yield Problem("priorities", str(error), name=name)


def _without_hint(error: Exception) -> str:
    return str(error).replace(HINT, "")


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
