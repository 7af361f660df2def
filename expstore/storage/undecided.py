"""Columns whose layout waits for data: rows are kept until the first commit decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.schema import Field
from expstore.storage.coded import encode
from expstore.storage.layout import inner_rows
from expstore.storage.protocols import Appender

MIN_CODED_STEP_BYTES = 1024  # smaller steps are cheaper to map, whatever they could save
MIN_SAVED = 0.5  # share of the bytes that compression must save
MAX_SAMPLES = 8  # inner chunks that are tried
MAX_KEPT_BYTES = 64 << 20  # then the layout is decided before the commit


def is_undecided(field: Field) -> bool:
    """Whether data must decide: "auto", and steps that are large enough for either."""
    is_large = field.step_bytes >= MIN_CODED_STEP_BYTES and not field.ragged
    return field.layout == "auto" and is_large


def choose(field: Field, rows: NDArray[Any]) -> str:
    """The layout for a column that begins with these rows (n, *shape)."""
    size = inner_rows(field.step_bytes)
    last = max(0, len(rows) - size)
    starts = np.unique(np.linspace(0, last, MAX_SAMPLES).astype(int)).tolist()
    samples = [rows[start : start + size] for start in starts]
    squeezed = sum(len(encode(sample)) for sample in samples)
    raw = sum(sample.nbytes for sample in samples)
    return "coded" if squeezed <= (1 - MIN_SAVED) * raw else "mapped"


class UndecidedAppender:
    """Keeps the rows of one array until its layout is known, then hands everything on.

    Args:
        decide: called when more rows are here than should stay in memory.
    """

    def __init__(self, decide: Callable[[], None]) -> None:
        self.num_rows = 0
        self._decide = decide
        self._rows: list[NDArray[Any]] = []
        self._num_bytes = 0
        self._decided: Appender | None = None

    def hand_over(self, appender: Appender) -> None:
        """Give a copy of all rows to `appender`, which so far has none."""
        if self._rows:
            appender.append(self.rows())

    def become(self, appender: Appender) -> None:
        """Be `appender` from now on, after everything was handed over."""
        self._decided, self._rows = appender, []

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows (n, *row_shape); the caller may reuse them at once."""
        if self._decided is not None:
            self._decided.append(rows)
            self.num_rows = self._decided.num_rows
            return
        self._rows.append(rows.copy())
        self.num_rows += len(rows)
        self._num_bytes += rows.nbytes
        if self._num_bytes > MAX_KEPT_BYTES:
            self._decide()

    def rows(self) -> NDArray[Any]:
        """All rows that are kept, of which there is at least one."""
        return np.concatenate(self._rows)

    def rewind(self, num_rows: int) -> None:
        """Forget the rows from `num_rows` on."""
        if self._decided is not None:
            self._decided.rewind(num_rows)
        elif num_rows < self.num_rows:
            kept = self.rows()[:num_rows].copy()
            self._rows, self._num_bytes = [kept] if num_rows else [], kept.nbytes
        self.num_rows = num_rows

    def flush(self) -> None:
        if self._decided is not None:
            self._decided.flush()

    def syncs(self) -> list[Callable[[], None]]:
        return [] if self._decided is None else self._decided.syncs()

    def place(self) -> bool:
        return self._decided is not None and self._decided.place()

    def close(self) -> None:
        if self._decided is not None:
            self._decided.close()
