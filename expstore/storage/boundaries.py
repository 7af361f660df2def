"""Ends: the steps at which a column says that something ended."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import FieldNotFoundError, SchemaError
from expstore.schema import Field, Schema, unknown_field
from expstore.storage.forking import freed_after_fork
from expstore.storage.protocols import Column

BLOCK_BYTES = 4 << 20  # of a column that are looked at together,
BLOCK_STEPS = 1 << 18  # and how many steps at most


class Ends:
    """The steps of a column that are not zero, looked for once and shared by all snapshots.

    Committed rows never change, so a newer commit costs its new rows only.
    """

    def __init__(self, field: Field) -> None:
        self._row_bytes = field.step_bytes
        self._magnitude = 0x7FFF if field.dtype == "bfloat16" else None  # without its sign: -0.0
        self._lock = freed_after_fork(self)
        self._start = self._stop = 0  # rows that were looked at
        self._steps = np.empty(0, np.int64)

    def _after_fork(self) -> None:
        """Another thread may have been in the middle of bringing these up."""
        self._start = self._stop = 0
        self._steps = np.empty(0, np.int64)

    def between(self, column: Column, start: int, stop: int) -> NDArray[np.int64]:
        """(K,) ascending steps from `start` to `stop - 1`, the live rows of a commit."""
        with self._lock:
            if stop < self._start:  # a snapshot so old that nothing of it is known any more
                return self._read(column, start, stop, (start, stop))
            if start > self._stop:
                self._start, self._stop, self._steps = start, start, self._steps[:0]
            parts = [self._steps]
            if start < self._start:
                parts.insert(0, self._read(column, start, self._start, (start, stop)))
            if stop > self._stop:
                # A newer commit: what it evicted is asked for by older snapshots at most.
                parts[-1] = parts[-1][np.searchsorted(parts[-1], start) :]
                parts.append(self._read(column, self._stop, stop, (start, stop)))
                self._start = start
            if len(parts) > 1:
                self._steps = np.concatenate(parts)
            self._start, self._stop = min(self._start, start), max(self._stop, stop)
            return self._steps[slice(*np.searchsorted(self._steps, [start, stop]))]

    def _read(
        self, column: Column, start: int, stop: int, live: tuple[int, int]
    ) -> NDArray[np.int64]:
        found = [np.empty(0, np.int64)]
        block = max(1, min(BLOCK_BYTES // self._row_bytes, BLOCK_STEPS))
        for first in range(start, stop, block):
            rows = column.slice(first, min(first + block, stop), *live).reshape(-1)
            if self._magnitude is not None:
                rows = rows & self._magnitude
            found.append(np.flatnonzero(rows) + first)
        return np.concatenate(found)


_ends: weakref.WeakKeyDictionary[Column, Ends] = weakref.WeakKeyDictionary()


def ends_of(column: Column, field: Field) -> Ends:
    """What is known of a column, for as long as some snapshot holds it."""
    return _ends.setdefault(column, Ends(field))


def field_that_ends(schema: Schema, done_key: Any) -> str:
    """The name of the field that a `done_key` means: its path, without a leading `next`.

    Raises:
        FieldNotFoundError: there is no such field.
        SchemaError: its values are no single numbers.

    >>> schema = Schema({"info/life_lost": Field((), "bool")})
    >>> field_that_ends(schema, ("next", "info", "life_lost"))
    'info/life_lost'
    """
    path = (done_key,) if isinstance(done_key, str) else tuple(done_key)
    name = "/".join(path[1:] if len(path) > 1 and path[0] == "next" else path)
    if name not in schema.fields:
        raise FieldNotFoundError(f"done_key {done_key!r}: {unknown_field(name, schema.fields)}")
    field = schema.fields[name]
    if field.ragged or any(size != 1 for size in field.shape):
        shape = "any number of values" if field.ragged else f"shape {field.shape}"
        raise SchemaError(
            f"done_key {done_key!r} must name a field of one number per step, but field {name!r} "
            f"has {shape} of {field.dtype}; add a field that says where windows end"
        )
    return name
