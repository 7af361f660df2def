"""Next values: `next_f[t]` is `f[t + 1]`, and only where it is not is anything stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError
from expstore.storage import files
from expstore.storage.parallel import Threads
from expstore.storage.undecided import Appender


class Column(Protocol):
    """What an array is read through; rows `start` to `stop` are those of the commit."""

    def take(
        self,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        start: int,
        stop: int,
        threads: Threads = ...,
    ) -> NDArray[Any]: ...

    def slice(self, first: int, last: int, start: int, stop: int) -> NDArray[Any]: ...

    def check(self, start: int, stop: int) -> Iterator[DamagedError]: ...


@dataclass
class NextWriter:
    """Finds and appends the exceptions of one field, episode by episode, block by block."""

    step: Appender
    present: Appender
    value: Appender
    checksum: int = 0  # over the exceptions of the open episode
    _last: NDArray[Any] | None = field(default=None, repr=False)  # given for the newest row

    def begin(self) -> None:
        """Start an episode."""
        self.checksum, self._last = 0, None

    def extend(
        self, start: int, first: int, rows: NDArray[Any], following: NDArray[Any] | None
    ) -> None:
        """Take the next rows of the episode.

        Args:
            start: step number of the episode's first row.
            first: step number of `rows[0]`.
            rows: (n, *shape), already in the step column.
            following: (n, *shape), what came after each of them; None where the source
                does not say, which means: the following row, and nothing after the last.
        """
        if self._last is not None and _bytes(self._last[None]) != _bytes(rows[:1]):
            self._append(start, np.array([first - 1]), self._last[None], present=True)
        self._last = None
        if following is not None:
            differs = _differ(following[:-1], rows[1:])
            self._append(start, first + differs, following[differs], present=True)
            self._last = following[-1].copy()

    def finish(self, start: int, last: int, final: NDArray[Any] | None, row: NDArray[Any]) -> None:
        """End the episode at step `last`, whose value is `row`; `final` came after it, if known."""
        final = self._last if self._last is not None else final
        value = np.zeros_like(row) if final is None else final
        self._append(start, np.array([last]), value[None], present=final is not None)

    def _append(
        self, start: int, steps: NDArray[np.int64], values: NDArray[Any], *, present: bool
    ) -> None:
        if not len(steps):
            return
        steps = steps.astype("<i8")
        flags = np.full(len(steps), present)
        self.step.append(steps)
        self.present.append(flags)
        self.value.append(values)
        self.checksum = exceptions_checksum(steps - start, flags, values, self.checksum)


def exceptions_checksum(
    offsets: NDArray[np.int64], present: NDArray[np.bool_], values: NDArray[Any], before: int = 0
) -> int:
    """CRC-32C over each exception in turn: offset in the episode (int64), presence, value."""
    num = len(offsets)
    record = np.empty((num, 9 + values[:1].nbytes), np.uint8)
    record[:, :8] = offsets.astype("<i8").view(np.uint8).reshape(num, 8)
    record[:, 8] = present
    record[:, 9:] = np.ascontiguousarray(values).reshape(num, -1).view(np.uint8)
    return files.crc32c(record, before)


def combined_checksum(rows: int, exceptions: int | None) -> int:
    """A field's checksum: that of its rows, continued over that of its exceptions, if any."""
    if exceptions is None:
        return rows
    return files.crc32c(exceptions.to_bytes(4, "little"), rows)


@dataclass(frozen=True)
class NextReader:
    """Looks the exceptions of one field up, as of one commit."""

    step: Column
    present: Column
    value: Column
    start: int  # live range of the exceptions
    stop: int

    def between(self, first: int, last: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Steps, presence and values of the exceptions at steps `first` to `last`."""
        steps = self._steps()
        low, high = np.searchsorted(steps, (first, last)) + self.start
        return tuple(  # type: ignore[return-value]
            column.slice(int(low), int(high), self.start, self.stop)
            for column in (self.step, self.present, self.value)
        )

    def find(self, steps: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Which of the given steps (n,) are exceptions, and the rows these stand in."""
        known = self._steps()
        if not len(known):
            return np.empty(0, np.intp), np.empty(0, np.int64)
        row = np.searchsorted(known, steps)
        hits = np.flatnonzero(known[np.minimum(row, len(known) - 1)] == steps)
        return hits, row[hits] + self.start

    def correct(self, steps: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Put the exceptions in their places in `out` (n, *shape), read from the rows after."""
        hits, rows = self.find(steps)
        if len(hits):
            values = np.empty((len(rows), *out.shape[1:]), out.dtype)
            out[hits] = self.value.take(rows, values, self.start, self.stop)

    def has_next(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether there is a value after each step."""
        answer = np.ones(len(steps), bool)
        hits, rows = self.find(steps)
        if len(hits):
            present = np.empty(len(rows), bool)
            answer[hits] = self.present.take(rows, present, self.start, self.stop)
        return answer

    def _steps(self) -> NDArray[np.int64]:
        return self.step.slice(self.start, self.stop, self.start, self.stop)


def next_readers(
    columns: Mapping[str, Column], dims: Mapping[str, tuple[int, int]], names: tuple[str, ...]
) -> dict[str, NextReader]:
    """A reader for every field that has next values."""
    return {
        name: NextReader(
            columns[f"next/{name}/step"],
            columns[f"next/{name}/present"],
            columns[f"next/{name}/value"],
            *dims[f"next/{name}"],
        )
        for name in names
    }


def _differ(given: NDArray[Any], rows: NDArray[Any]) -> NDArray[np.int64]:
    """Where two arrays (n, *shape) differ in bytes, so that NaN equals itself and -0 is not 0."""
    if not len(given):
        return np.empty(0, np.int64)
    a, b = (np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8) for x in (given, rows))
    return np.flatnonzero((a != b).any(axis=1))


def _bytes(rows: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(rows).tobytes()
