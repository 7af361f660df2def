"""repair: keep every episode that verifies, and put the others into quarantine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError, FormatError
from expstore.storage import files
from expstore.storage.bounds import sound_bounds, split_metadata
from expstore.storage.coded import shard_bytes
from expstore.storage.commits import (
    Root,
    WriterLock,
    damaged_history,
    now,
    publish_root,
    read_root,
    recover,
    restored_root,
    rewrite_history,
)
from expstore.storage.deletion import bury
from expstore.storage.layout import (
    HISTORY_FILE,
    METADATA_FILE,
    PRIORITIES,
    PRIVATE,
    ROOT_COPY,
    ArrayLayout,
)
from expstore.storage.quarantine import Quarantine
from expstore.storage.reading import Snapshot
from expstore.storage.salvage import (
    in_ascent,
    in_order,
    is_in_order,
    salvaged_bytes,
    salvaged_shard,
)
from expstore.storage.store import absolute
from expstore.storage.tombstones import read_tombstones
from expstore.storage.verification import Check, Problem

BLOCK_STEPS = 1 << 16  # mended at a time


@dataclass(frozen=True)
class Lost:
    """An episode that was taken out."""

    number: int
    start: int  # its first step
    length: int
    problems: list[str]


@dataclass(frozen=True)
class Repair:
    """What `repair` found and did."""

    path: str
    commit: int  # number of the newest commit
    num_episodes: int  # that are in the store afterwards, all of which verify
    problems: list[Problem] = field(default_factory=list)  # that were found
    mended: list[str] = field(default_factory=list)  # what was put right, with nothing lost
    lost: list[Lost] = field(default_factory=list)  # episodes that were taken out
    quarantine: str | None = None  # the directory where everything lies that was taken out

    @property
    def was_sound(self) -> bool:
        """Whether there was nothing to do."""
        return not self.problems


def repair(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> Repair:
    """Keep every episode of a damaged store that verifies, and take the others out.

    What follows from what is sound is mended: the root from its copy and the history, metadata
    of arrays, `done` and `episode` from the index, where an episode starts and ends, the order of
    next values, the index of a shard. Episodes that fail a checksum nevertheless are deleted as
    `delete` does it, in one commit, after what can be read of them was copied into the
    quarantine. Files that are damaged as such are moved there, and others of the right size take
    their place. Nothing is destroyed, and the quarantine is never looked at again: remove it when
    you need nothing of it.

    Args:
        path: the store's directory; no writer may be open on it.
        progress: called with (episodes checked, episodes in all).

    Returns:
        What was wrong, mended and lost. Afterwards `verify` finds no problem.

    Raises:
        NotAStoreError: there is no store at `path`.
        FormatError: the store was made by a newer version; or the root is damaged, and so is what
            it could be restored from.
        StoreLockedError: a writer is open.

    Example:
        >>> import numpy as np, os, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     numbers = [writer.append({"reward": np.ones(n)}) for n in (3, 5, 1)]
        >>> with open(path + "/steps/reward/c.0", "r+b") as file:
        ...     _ = file.write(b"damage")
        >>> repaired = expstore.repair(path)
        >>> [episode.number for episode in repaired.lost], repaired.num_episodes
        ([0], 2)
    """
    target = absolute(path)
    if not (target / PRIVATE).is_dir():
        read_root(target)  # raises, and says what is there instead
    with WriterLock(target):
        return _Repair(target).run(progress)


class _Repair:
    """One repair, with the lock held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self.mended: list[str] = []
        self.lost: list[Lost] = []
        self.root = self._root()
        self._quarantine = Quarantine(path, self.root.commit.number + 1)

    def run(self, progress: Callable[[int, int], None] | None) -> Repair:
        if self.problems:
            self._replace_root()
        self.problems += Check(self._snapshot()).all(progress)
        if self.problems:
            self._mend_metadata()
            self._mend_files()
            self._mend_rows()
            self._take_out()
        store = self._snapshot()
        left = list(Check(store).all()) if self.problems else []
        if left:  # a bug, or a disk that goes on failing
            raise DamagedError(
                f"{self.path} is still damaged after the repair: {left[0].text}; check the disk"
            )
        num_episodes = len(store.index) - len(store.deleted)
        result = Repair(
            str(self.path),
            self.root.commit.number,
            num_episodes,
            self.problems,
            self.mended,
            self.lost,
            str(self._quarantine.path) if self._quarantine.is_used else None,
        )
        if self._quarantine.is_used:
            self._quarantine.report({"time": now(), **asdict(result)})
        return result

    def _snapshot(self) -> Snapshot:
        version = files.version(self.path / METADATA_FILE)
        return Snapshot(self.path, self.root, version, fresh=True)

    # -- the root ----------------------------------------------------------------------------------

    def _root(self) -> Root:
        try:
            return read_root(self.path)
        except FormatError as error:
            is_newer = "install a newer" in str(error)
            if is_newer or files.size(self.path / ROOT_COPY) is None:
                raise
            try:
                root = restored_root(self.path)
            except FormatError as other:
                raise FormatError(f"{error}, but {other}") from error
            file = self.path / METADATA_FILE
            what = "is missing" if files.size(file) is None else "is damaged"
            self.problems.append(Problem("root", f"{file} {what}"))
            return root

    def _replace_root(self) -> None:
        if files.size(self.path / METADATA_FILE) is not None:
            self._quarantine.keep(METADATA_FILE, files.read(self.path / METADATA_FILE))
        publish_root(self.path, self.root, durable=True)
        number = self.root.commit.number
        self.mended.append(f"the root, as of commit {number}, from its copy and the history")

    # -- what holds no rows ------------------------------------------------------------------------

    def _mend_metadata(self) -> None:
        """The history, the metadata of single arrays and groups, and saved priorities."""
        if damaged_history(self.path):
            self._quarantine.keep(HISTORY_FILE, files.read(self.path / HISTORY_FILE))
            rewrite_history(self.path, self.root)
            self.mended.append("the history, without the lines that were damaged")
        broken = [p.name for p in self.problems if p.what == "metadata file"]
        for name in broken:
            if name is not None:
                file = name if name == ROOT_COPY else f"{name}/{METADATA_FILE}"
                self._quarantine.take(file)
                self.mended.append(file)
        recover(self.path, self.root, durable=True)
        for problem in self.problems:
            if problem.what == "priorities":
                self._quarantine.take(f"{PRIORITIES}/{problem.name}")

    # -- files of rows -----------------------------------------------------------------------------

    def _mend_files(self) -> None:
        """A file of the right size for every chunk, with all rows that can be read."""
        for layout in self.root.arrays.values():
            start, stop = self.root.commit.dims[layout.dimension]
            for chunk in range(start // layout.chunk_rows, -(-stop // layout.chunk_rows)):
                num_rows = min(stop - chunk * layout.chunk_rows, layout.chunk_rows)
                data = self._whole(layout, chunk, num_rows)
                if data is not None:
                    name = layout.chunk_path(chunk)
                    self._quarantine.take(name)
                    files.write_whole(self.path / name, data, durable=True)
                    files.sync_directory((self.path / name).parent)

    def _whole(self, layout: ArrayLayout, chunk: int, num_rows: int) -> bytes | None:
        """What a chunk's file should hold; None where that is what it holds."""
        path = self.path / layout.chunk_path(chunk)
        if layout.is_coded:
            chunks = salvaged_shard(path, layout, num_rows)
            return None if chunks is None else shard_bytes(layout, chunks)
        if files.size(path) == layout.chunk_bytes:
            return None
        return salvaged_bytes(self.path, layout, chunk).tobytes()

    # -- rows that follow from others --------------------------------------------------------------

    def _mend_rows(self) -> None:
        """Where episodes start and end, whose steps are whose, and the order of next values."""
        snapshot = self._snapshot()
        starts, lengths = sound_bounds(snapshot)
        first = snapshot.first_episode
        self._write_rows("episodes/start", first, starts)
        self._write_rows("episodes/length", first, lengths)
        low, high = snapshot.first_step, snapshot.stop_step
        for name, reader in snapshot.following.items():
            live = reader.start, reader.stop
            steps = np.array(reader.step.slice(*live, *live), np.int64)
            ends = starts + lengths - 1
            if not is_in_order(steps, low, high, ends):
                mended = in_order(steps, low, high, ends)
                self._write_rows(f"next/{name}/step", reader.start, mended)
        self._mend_ends(snapshot)
        for begin in range(low, high, BLOCK_STEPS):
            steps = np.arange(begin, min(begin + BLOCK_STEPS, high))
            owner = np.searchsorted(starts, steps, side="right") - 1
            done = steps == starts[owner] + lengths[owner] - 1
            self._write_rows("steps/done", begin, done)
            self._write_rows("steps/episode", begin, owner + first)

    def _mend_ends(self, snapshot: Snapshot) -> None:
        """Where elements and metadata end: the next ones begin there."""
        for name, layout in self.root.arrays.items():
            if name.endswith("/end") and name.removesuffix("end") + "values" in self.root.arrays:
                values = self.root.arrays[name.removesuffix("end") + "values"]
                live = self.root.commit.dims[layout.dimension]
                found = np.array(snapshot.columns[name].slice(*live, *live), np.int64)
                mended = in_ascent(found, *self.root.commit.dims[values.dimension])
                if name == "episodes/metadata/end":
                    mended = split_metadata(snapshot, mended)
                self._write_rows(name, live[0], mended)

    def _write_rows(self, name: str, first: int, rows: NDArray[Any]) -> None:
        """Put rows in the place of those that differ, which were not what had been committed."""
        layout = self.root.arrays[name]
        rows = np.ascontiguousarray(rows, layout.dtype)
        done = 0
        while done < len(rows):
            chunk, offset = divmod(first + done, layout.chunk_rows)
            part = rows[done : done + layout.chunk_rows - offset].reshape(-1).view(np.uint8)
            path = self.path / layout.chunk_path(chunk)
            at = offset * layout.row_bytes
            found = files.map_file(path)[at : at + len(part)]
            if not np.array_equal(found, part):
                self._quarantine.keep(f"{layout.chunk_path(chunk)}@{at}", found.tobytes())
                with files.opened(files.open_for_writing(path)) as descriptor:
                    files.pwrite(descriptor, part, at, path)
                    files.sync(descriptor, path)
                if name not in self.mended:
                    self.mended.append(name)
            done += len(part) // layout.row_bytes

    # -- episodes ----------------------------------------------------------------------------------

    def _take_out(self) -> None:
        snapshot = self._snapshot()
        failing: dict[int, list[str]] = {}
        for problem in Check(snapshot).all():
            if problem.episode is not None:
                failing.setdefault(problem.episode, []).append(problem.text)
        stones = read_tombstones(snapshot.columns, self.root.commit.dims)
        is_sound = stones.is_sound
        is_sound &= (stones.episode >= 0) & (stones.episode < snapshot.stop_episode)
        if not failing and is_sound.all():
            return
        starts, lengths = sound_bounds(snapshot)
        numbers = np.array(sorted(failing), np.int64)
        at = numbers - snapshot.first_episode
        for number, k in zip(numbers.tolist(), at.tolist(), strict=True):
            lost = Lost(number, int(starts[k]), int(lengths[k]), failing[number])
            self.lost.append(lost)
            self._quarantine.copy(snapshot, number, lost.start, lost.start + lost.length)
        if is_sound.all():
            self.root = bury(self.path, self.root, numbers, lengths[at], durable=True)
            return
        self.mended.append("the list of deleted episodes, without the rows that were damaged")
        self.root = bury(
            self.path,
            self.root,
            np.concatenate([stones.episode[is_sound], numbers]),
            np.concatenate([stones.length[is_sound], lengths[at]]),
            is_whole=True,
            durable=True,
        )
