"""One checkpoint of a Dopamine replay: gzipped arrays of a ring of rows, read forward."""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats import pickles
from expstore.formats.archive import BLOCK_BYTES, NpyRows, reading
from expstore.formats.rings import ring
from expstore.formats.source import Account

STORE = "$store$_"
REQUIRED = ("observation", "action", "reward", "terminal")
ENDS = "episode_end_indices"
GZIP_MAGIC = b"\x1f\x8b"
NPY_MAGIC = b"\x93NUMPY"
MAX_SMALL_BYTES = 64 << 20  # of a set of numbers
MIN_HORIZON = 1  # of the update, which invalid_range is longer than the stack by
_NAME = re.compile(r"(\$store\$_)?(\w+)_ckpt\.(\d+)\.gz")


@dataclass(frozen=True)
class Piece:
    """Rows of one episode that follow one another; `start` counts from the first ever added."""

    start: int
    stop: int
    rows: dict[str, NDArray[Any]]  # field -> (rows, ...)
    is_end: bool  # an end is set on the last of them
    is_terminal: bool


class Checkpoint:
    """The files of one suffix.

    Attributes:
        suffix: the number in the names of its files.
        file_names: of the arrays of rows.
    """

    def __init__(self, folder: Path, suffix: int, files: dict[str, str]) -> None:
        self._folder, self.suffix, self._files = folder, suffix, files
        self.file_names = [name for key, name in sorted(files.items()) if key.startswith(STORE)]
        self.has_ends = ENDS in files
        self._small: dict[str, NDArray[Any]] = {}
        self._ends: list[int] = []  # rows of the files that are the last of an episode

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether there is an array of observations, gzipped."""
        for name in _named(folder, f"{STORE}observation"):
            try:
                with gzip.open(folder / name) as stream:
                    if stream.read(len(NPY_MAGIC)) == NPY_MAGIC:
                        return True
            except (OSError, EOFError, zlib.error):
                continue
        return False

    def load(self) -> int:
        """Read what is small; returns how many zero rows there are before an episode.

        Raises:
            SourceError: a file is missing or damaged.
        """
        missing = [name for name in REQUIRED if STORE + name not in self._files]
        if missing or "add_count" not in self._files:
            names = ", ".join([*missing, *(["add_count"] * ("add_count" not in self._files))])
            raise SourceError(f"it was not written whole: {names} missing")
        for name in self._files.values():
            self._check(name)
        self._small = {name: self._whole(STORE + name) for name in ("terminal", "action", "reward")}
        self._add_count = int(self._whole("add_count"))
        self._capacity = len(self._small["terminal"])
        self._num_rows = min(self._add_count, self._capacity)
        ends = np.flatnonzero(self._small["terminal"][: self._num_rows])
        if self.has_ends:
            ends = np.union1d(ends, self._end_indices())
        self._ends = ends.tolist()
        return self._num_padding()

    def unload(self) -> None:
        """Let go of what was read."""
        self._small, self._ends = {}, []

    def pieces(self, reached: int, account: Account) -> Iterator[Piece]:
        """The rows from `reached` on, the oldest first, parted where an episode ends.

        Rows that cannot be read are reported, and left out.

        Raises:
            SourceError: the arrays do not fit each other.
        """
        first = self._add_count - self._num_rows
        for start, stop in self._stretches:
            skipped = max(0, reached - first)
            if start + skipped < stop:
                yield from self._stretch(start + skipped, stop, first + skipped, account)
            first += stop - start

    @property
    def _stretches(self) -> tuple[tuple[int, int], ...]:
        if not self._num_rows:
            return ()
        return ring(self._num_rows, self._capacity, self._add_count % self._capacity)

    def _stretch(self, start: int, stop: int, first: int, account: Account) -> Iterator[Piece]:
        """Rows `start` to `stop` of the files, the first of which was added as number `first`."""
        stops = [end + 1 for end in self._ends if start <= end < stop]
        last_of = set(stops)
        if not stops or stops[-1] != stop:
            stops.append(stop)
        at = start
        try:
            with contextlib.ExitStack() as opened:
                streams = self._open(opened)
                for rows in streams.values():
                    rows.skip(start)
                for end in stops:
                    rows_of = {name: rows.read(end - at) for name, rows in streams.items()}
                    is_terminal = bool(self._small["terminal"][end - 1])
                    at_start, at_stop = first + at - start, first + end - start
                    yield Piece(at_start, at_stop, rows_of, end in last_of, is_terminal)
                    at = end
        except SourceError as error:
            rows_lost = f"rows {at:,} to {stop:,} of checkpoint {self.suffix}"
            account.fail(rows_lost, str(error))

    def _open(self, opened: contextlib.ExitStack) -> dict[str, NpyRows]:
        streams: dict[str, NpyRows] = {}
        for key, name in sorted(self._files.items()):
            if not key.startswith(STORE):
                continue
            stream = opened.enter_context(gzip.GzipFile(self._folder / name))
            rows = NpyRows(stream, name)  # type: ignore[arg-type]
            if not rows.shape or rows.shape[0] != self._capacity:
                raise SourceError(
                    f"{name} has the shape {rows.shape}, but there are {self._capacity} terminals"
                )
            streams[key.removeprefix(STORE)] = rows
        return streams

    def _check(self, name: str) -> None:
        """Read a file to its checksum: damage before may look like data. A cut is found later.

        Raises:
            SourceError: it is damaged.
        """
        try:
            with gzip.open(self._folder / name) as stream:
                while stream.read(BLOCK_BYTES):
                    pass
        except EOFError:
            pass
        except (OSError, zlib.error) as error:
            raise SourceError(
                f"{name} is damaged, and nothing says which of its rows are: {error}; copy it again"
            ) from error

    def _whole(self, key: str) -> NDArray[Any]:
        name = self._files[key]
        if key.startswith(STORE):
            with reading(name), gzip.open(self._folder / name) as stream:
                rows = NpyRows(stream, name)  # type: ignore[arg-type]
                return rows.read(rows.shape[0] if rows.shape else 0)
        content = self._content(name)
        if content.startswith(NPY_MAGIC):
            with reading(name):
                return np.asarray(np.load(io.BytesIO(content), allow_pickle=False))
        return np.asarray(pickles.parse_pickle(content, self._folder / name))

    def _content(self, name: str) -> bytes:
        """All of a small file.

        Raises:
            SourceError: it is none, or is damaged.
        """
        content = bytearray()
        with reading(name), gzip.open(self._folder / name) as stream:
            while block := stream.read(BLOCK_BYTES):
                content += block
                if len(content) > MAX_SMALL_BYTES:
                    raise SourceError(f"{name} is larger than what belongs there")
        return bytes(content)

    def _end_indices(self) -> NDArray[np.int64]:
        """Rows that are the last of their episode, from a pickled set; no code of it is run."""
        name = self._files[ENDS]
        found = pickles.parse_pickle(self._content(name), self._folder / name)
        if not isinstance(found, (set, frozenset)):
            raise SourceError(f"{name} must hold a set of numbers")
        indices = np.array(sorted(int(index) for index in found), np.int64)
        return indices[(indices >= 0) & (indices < self._num_rows)]

    def _num_padding(self) -> int:
        """The rows that every episode here has at its start and that are zero, as far as seen."""
        least = 0
        if "invalid_range" in self._files:
            least = self._whole("invalid_range").size - MIN_HORIZON - 1
        order = np.zeros(0, np.int64)
        for start, stop in self._stretches:
            order = np.append(order, np.arange(start, stop))
        is_zero = np.ones(self._num_rows, bool)
        for values in self._small.values():
            rows = values[order].reshape(self._num_rows, -1)
            is_zero &= ~rows.astype(bool).any(axis=1)
        starts = np.flatnonzero(np.isin(order, self._ends)) + 1
        for start in starts.tolist():
            run = is_zero[start : start + least]
            if len(run) == least and not run.all():  # shorter where the recording ends there
                least = int(np.argmin(run))
        return max(0, least)


def checkpoints(folder: Path, account: Account) -> list[Checkpoint]:
    """Those of a folder, in the order of their numbers; other files are reported."""
    files: dict[int, dict[str, str]] = {}
    for entry in sorted(folder.iterdir()):
        match = _NAME.fullmatch(entry.name)
        if match is None:
            account.left_out[entry.name] = "is no part of a checkpoint"
            continue
        key = f"{match[1] or ''}{match[2]}"
        files.setdefault(int(match[3]), {})[key] = entry.name
    return [Checkpoint(folder, suffix, files[suffix]) for suffix in sorted(files)]


def _named(folder: Path, key: str) -> Iterator[str]:
    """Files of one kind, of any checkpoint."""
    for entry in sorted(folder.iterdir()):
        match = _NAME.fullmatch(entry.name)
        if match is not None and f"{match[1] or ''}{match[2]}" == key:
            yield entry.name
