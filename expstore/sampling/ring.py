"""A ring buffer in memory, described by its end flags, its newest row and whether it is full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import AnchorShapeError, FieldNotFoundError, SchemaError, StepRangeError
from expstore.sampling.arrays import take
from expstore.sampling.window import Integers, WindowPlan, WindowShape, lay_windows

DoneKey = str | tuple[str, ...] | None


@dataclass(frozen=True, eq=False)
class Ring:
    """Rows of parallel lanes, written in order and overwritten from the oldest on.

    Flags are read when a window is laid, never copied or cached, so that an edit takes effect
    at once; only the rows that a window could reach are looked at.

    Args:
        flags: (rows, *lanes) end flags, non-zero where an episode ends, array or torch tensor
            of any number dtype, trailing dimensions of size 1 allowed; or ``{done_key: flags}``.
            A single array answers to every ``done_key``.
        newest: Row of the last write, -1 if nothing was written.
        is_full: Whether every row was written; else the rows after ``newest`` are not live.

    Raises:
        SchemaError: No flags, flags of different numbers of rows, or ``newest`` out of range.

    >>> from expstore.sampling.sequence import Sequence
    >>> ring = Ring(np.array([0, 0, 0, 0, 0, 1]), newest=1, is_full=True)
    >>> index, info = Sequence(length=3).expand(np.array([4, 0]), {}, ring)
    >>> index.tolist(), info["validity_mask"].tolist()
    ([4, 5, 5, 0, 1, 1], [True, True, False, True, True, False])
    """

    flags: Any
    _: KW_ONLY
    newest: int
    is_full: bool

    def __post_init__(self) -> None:
        arrays = list(self.flags.values()) if isinstance(self.flags, Mapping) else [self.flags]
        if not arrays:
            raise SchemaError("a ring needs at least one array of flags to know its rows")
        if any(not np.ndim(flags) for flags in arrays):
            raise SchemaError("flags must have shape (rows, *lanes), got a single number")
        if len({len(flags) for flags in arrays}) > 1:
            raise SchemaError(f"all flags must have as many rows, got {[len(f) for f in arrays]}")
        lowest = 0 if self.is_full else -1
        if not lowest <= self.newest < self.num_rows:
            raise SchemaError(
                f"newest must be a row from {lowest} to {self.num_rows - 1}, got {self.newest}"
            )

    @property
    def num_rows(self) -> int:
        """Rows that the ring has room for."""
        return len(self._any_flags())

    @property
    def num_live(self) -> int:
        """Rows that were written and not yet overwritten, per lane."""
        return self.num_rows if self.is_full else self.newest + 1

    @property
    def oldest(self) -> int:
        """Row at position 0: the one that the next write overwrites if the ring is full."""
        return (self.newest + 1) % self.num_rows if self.is_full else 0

    def plan(
        self, shape: WindowShape, coordinates: tuple[Integers, ...], done_key: DoneKey, ends: bool
    ) -> WindowPlan:
        """Lay a window over each anchor; the steps of the plan are physical rows.

        Args:
            shape: The window.
            coordinates: D arrays (B,), the anchors' rows and then their lanes.
            done_key: Which flags end an episode, None for none.
            ends: Whether ends bound the windows; else flags are not read.

        Raises:
            AnchorShapeError: The anchors have another number of dimensions than the ring.
            StepRangeError: An anchor is not a live row, or its lane does not exist.
            FieldNotFoundError: There are no flags of that ``done_key``.
        """
        flags = self._flags_of(done_key) if ends and done_key is not None else None
        self._check(coordinates, self._any_flags() if flags is None else flags)
        lanes = coordinates[1:]
        positions = (coordinates[0] - self.oldest) % self.num_rows
        start, stop = np.zeros_like(positions), np.full_like(positions, self.num_live)
        if flags is not None and len(positions):
            reach = shape.dilation * (shape.num_records - shape.burn_in - 1)
            stop = self._stop_after(flags, positions, lanes, reach)
            start = self._start_before(
                flags, positions, lanes, shape.need + shape.burn_in * shape.dilation
            )
        at, valid = lay_windows(shape, positions, start, stop)
        return WindowPlan(steps=(at + self.oldest) % self.num_rows, valid=valid, positions=at)

    def _any_flags(self) -> Any:
        return next(iter(self.flags.values())) if isinstance(self.flags, Mapping) else self.flags

    def _flags_of(self, done_key: str | tuple[str, ...]) -> Any:
        if not isinstance(self.flags, Mapping):
            return self.flags
        for key in self.flags:
            if _as_path(key) == _as_path(done_key):
                return self.flags[key]
        raise FieldNotFoundError(
            f"key {done_key!r} not found in the ring, which has flags {list(self.flags)}"
        )

    def _check(self, coordinates: tuple[Integers, ...], flags: Any) -> None:
        shape, num_axes = tuple(flags.shape), len(coordinates)
        if len(shape) < num_axes or any(size != 1 for size in shape[num_axes:]):
            rule = (
                "Sequence expected multidimensional anchors with shape [batch, D]."
                if num_axes == 1
                else "Multidimensional anchors must have shape [batch, storage.ndim]."
            )
            raise AnchorShapeError(f"{rule} Got D = {num_axes} for flags of shape {shape}")
        for axis, values in enumerate(coordinates):
            size = shape[axis] if axis else self.num_live
            bad = (values < 0) | (values >= size)
            if bad.any():
                what = f"coordinate {axis} of an anchor" if axis else "an anchor's row"
                raise StepRangeError(
                    f"{what} must be from 0 to {size - 1}, got {int(values[bad][0])}"
                )

    def _stop_after(
        self, flags: Any, positions: Integers, lanes: tuple[Integers, ...], reach: int
    ) -> Integers:
        # An end further away than any record of the window cannot change it.
        last = self.num_live - 1
        ahead = np.minimum(positions[:, None] + np.arange(min(reach, last) + 1), last)
        is_end = (ahead == last) | self._is_end(flags, ahead, lanes)
        return _first_or_last(ahead, is_end) + 1

    def _start_before(
        self, flags: Any, positions: Integers, lanes: tuple[Integers, ...], reach: int
    ) -> Integers:
        back = np.arange(min(reach, self.num_live) + 1)
        before = np.maximum(positions[:, None] - 1 - back, -1)
        is_end = (before < 0) | self._is_end(flags, np.maximum(before, 0), lanes)
        return _first_or_last(before, is_end) + 1

    def _is_end(
        self, flags: Any, positions: Integers, lanes: tuple[Integers, ...]
    ) -> NDArray[np.bool_]:
        rows = (positions + self.oldest) % self.num_rows
        return take(flags, (rows, *(lane[:, None] for lane in lanes))).reshape(rows.shape)


def _first_or_last(values: Integers, marked: NDArray[np.bool_]) -> Integers:
    """(B,) the first marked value of each row of (B, K), its last value if none is marked."""
    column = np.where(marked.any(axis=1), marked.argmax(axis=1), values.shape[1] - 1)
    return np.take_along_axis(values, column[:, None], axis=1)[:, 0]


def _as_path(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)
