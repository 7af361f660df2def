"""Next values: `next_f[t]` is `f[t + 1]`, and only where it is not is anything stored."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expstore.ragged import Ragged, Rows, differing, one_row
from expstore.storage import files
from expstore.storage.planning import BatchPlan
from expstore.storage.protocols import Appender, Column
from expstore.storage.ragged import RaggedColumn, rows_checksum


class ValueAppender(Protocol):
    """Takes the values of exceptions, ragged or not."""

    def append(self, rows: Any) -> None: ...


@dataclass
class NextWriter:
    """Finds and appends the exceptions of one field, episode by episode, block by block."""

    step: Appender
    present: Appender
    value: ValueAppender
    checksum: int = 0  # over the exceptions of the open episode
    _last: NDArray[Any] | None = field(default=None, repr=False)  # given for the newest row

    def begin(self) -> None:
        """Start an episode."""
        self.checksum, self._last = 0, None

    def extend(self, start: int, first: int, rows: Rows, following: Rows | None) -> None:
        """Take the next rows of the episode.

        Args:
            start: step number of the episode's first row.
            first: step number of `rows[0]`.
            rows: (n, *shape), already in the step column.
            following: (n, *shape), what came after each of them; None where the source
                does not say, which means: the following row, and nothing after the last.
        """
        if self._last is not None:
            last = one_row(self._last, rows)
            if len(differing(last, rows[:1])):
                self._append(start, np.array([first - 1]), last, present=True)
        self._last = None
        if following is not None:
            differs = differing(following[:-1], rows[1:])
            self._append(start, first + differs, following[differs], present=True)
            self._last = following[-1].copy()

    def finish(self, start: int, last: int, final: NDArray[Any] | None, newest: Rows) -> None:
        """End the episode at step `last`.

        Args:
            final: the value after it, if that is known and was not among the next values.
            newest: the row of the last step, as a column of one row.
        """
        final = self._last if self._last is not None else final
        if final is not None:
            value = one_row(final, newest)
        elif isinstance(newest, Ragged):
            value = Ragged(newest.values[:0], np.zeros(1, np.int64))
        else:
            value = np.zeros_like(newest)
        self._append(start, np.array([last]), value, present=final is not None)

    def _append(self, start: int, steps: NDArray[np.int64], values: Rows, *, present: bool) -> None:
        if not len(steps):
            return
        steps = steps.astype("<i8")
        flags = np.full(len(steps), present)
        self.step.append(steps)
        self.present.append(flags)
        self.value.append(values)
        self.checksum = exceptions_checksum(steps - start, flags, values, self.checksum)


def exceptions_checksum(
    offsets: NDArray[np.int64], present: NDArray[np.bool_], values: Rows, before: int = 0
) -> int:
    """CRC-32C over each exception in turn: offset in the episode (int64), presence, value."""
    num = len(offsets)
    if num > 1 and not isinstance(values, Ragged):
        head = np.empty((num, 9), np.uint8)
        head[:, :8] = offsets.astype("<i8").view(np.uint8).reshape(num, 8)
        head[:, 8] = present
        flat = np.ascontiguousarray(values).reshape(num, -1).view(np.uint8)
        return files.crc32c(np.concatenate([head, flat], axis=1), before)
    crc, flags = before, present.view(np.uint8)  # as they are: a damaged one is neither 0 nor 1
    for i in range(num):
        crc = files.crc32c(struct.pack("<qB", offsets[i], flags[i]), crc)
        crc = rows_checksum(values[i : i + 1], crc)
    return crc


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
    value: Column | RaggedColumn
    start: int  # live range of the exceptions
    stop: int

    def between(self, first: int, last: int) -> tuple[NDArray[Any], NDArray[Any], Rows]:
        """Steps, presence and values of the exceptions at steps `first` to `last`."""
        steps = self._steps()
        low, high = (np.searchsorted(steps, (first, last)) + self.start).tolist()
        live = self.start, self.stop
        return (
            self.step.slice(low, high, *live),
            self.present.slice(low, high, *live),
            self.value.slice(low, high, *live),
        )

    def first_at(self, step: int) -> int:
        """The row of the first exception at `step` or later."""
        return int(np.searchsorted(self._steps(), step)) + self.start

    def find(self, steps: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Which of the given steps (n,) are exceptions, and the rows these stand in."""
        known = self._steps()
        if not len(known):
            return np.empty(0, np.intp), np.empty(0, np.int64)
        row = np.searchsorted(known, steps)
        hits = np.flatnonzero(known[np.minimum(row, len(known) - 1)] == steps)
        return hits, row[hits] + self.start

    def planned(
        self, plan: BatchPlan, steps: NDArray[np.int64], out: NDArray[Any]
    ) -> Callable[[], None]:
        """Read the exceptions at steps (n,) with a batch; the call puts them into `out`."""
        assert not isinstance(self.value, RaggedColumn)
        hits, rows = self.find(steps)
        values = np.empty((len(rows), *out.shape[1:]), out.dtype)
        if len(hits):
            plan.add(self.value, rows, values, self.start, self.stop)

        def correct() -> None:
            out[hits] = values

        return correct

    def corrected(self, steps: NDArray[np.int64], after: Ragged) -> Ragged:
        """The same for ragged values, which do not fit into each other's places."""
        assert isinstance(self.value, RaggedColumn)
        hits, rows = self.find(steps)
        if not len(hits):
            return after
        source = np.arange(len(steps))
        source[hits] = len(steps) + np.arange(len(hits))
        exceptions = self.value.read(rows, self.start, self.stop)
        both: Ragged = Ragged.concatenate([after, exceptions])[source]
        return both

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
