"""An episode with columns that do not fit in memory, appended piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from expstore.errors import SchemaError
from expstore.formats.lazy_rows import LazyRows
from expstore.schema import is_observation
from expstore.storage.writer import Writer

NEXT = "next_"
PIECE_BYTES = 16 << 20


def is_lazy(flat: Mapping[str, Any]) -> bool:
    """Whether one of the columns is read only while it is written."""
    return any(isinstance(column, LazyRows) for column in flat.values())


def read_whole(flat: Mapping[str, Any]) -> dict[str, Any]:
    """All columns in memory.

    Raises:
        SourceError: one of them could not be read.
    """
    return {
        name: column.read(0, len(column)) if isinstance(column, LazyRows) else column
        for name, column in flat.items()
    }


def append_in_pieces(
    writer: Writer,
    flat: Mapping[str, Any],
    end_reason: str | None,
    metadata: Mapping[str, Any],
    reading: Callable[[], AbstractContextManager[None]],
    reached: Callable[[int], None],
) -> tuple[int, bool]:
    """Append an episode of which only a piece is in memory.

    Returns:
        The bytes of its arrays, and whether its final observation is known.

    Args:
        flat: field -> column of T rows, T + 1 of observations.
        reading: a block in which the source is read, and Ctrl-C may come.
        reached: called with the number of steps after each piece.

    Raises:
        SourceError: a piece could not be read; nothing was appended.
        SchemaError: a piece does not fit; nothing was appended.
    """
    num_steps = _num_steps(flat)
    first = min(num_steps, max(map(_rows_to_tell, flat.values())))
    with reading():  # the first rows tell how large the others will be
        piece = _rows(flat, 0, first)
    step_bytes = sum(map(_num_bytes, piece.values())) // first
    size = max(1, PIECE_BYTES // max(step_bytes, 1))
    num_bytes, at = 0, 0
    with writer.episode(end_reason=end_reason, **metadata) as episode:
        while True:
            num_bytes += sum(map(_num_bytes, piece.values()))
            episode.extend(piece)
            at += len(next(iter(piece.values())))
            reached(at)
            if at == num_steps:
                break
            del piece  # not to be held beside the next one
            with reading():
                piece = _rows(flat, at, min(at + size, num_steps))
        last = {name: column for name, column in flat.items() if len(column) > num_steps}
        if last:
            with reading():
                piece = _rows(last, num_steps, num_steps + 1)
            end = {name: rows[0] for name, rows in piece.items()}
            num_bytes += sum(map(_row_bytes, end.values()))
            episode.add(end)
    return num_bytes, bool(last) or any(
        is_observation(n.removeprefix(NEXT)) for n in flat if n.startswith(NEXT)
    )


def _num_steps(flat: Mapping[str, Any]) -> int:
    """T, where every column has T rows, or one more if it is an observation.

    Raises:
        SchemaError: one of them has another number.
    """
    lengths = {name: len(column) for name, column in flat.items()}
    lead = [length for name, length in lengths.items() if not is_observation(name)]
    num_steps = lead[0] if lead else min(lengths.values())
    for name, length in lengths.items():
        if length != num_steps and not (is_observation(name) and length == num_steps + 1):
            raise SchemaError(f"field {name!r} must have {num_steps} rows here, got {length}")
    return num_steps


def _rows(flat: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {
        name: column.read(start, stop) if isinstance(column, LazyRows) else column[start:stop]
        for name, column in flat.items()
    }


def _rows_to_tell(column: Any) -> int:
    """How many rows there must be to see whether their lengths differ: 1, where they do not."""
    if not isinstance(column, list) or not isinstance(column[0], np.ndarray):
        return 1
    lengths = [len(row) for row in column]
    return 1 + next((i for i, length in enumerate(lengths) if length != lengths[0]), 0)


def _num_bytes(rows: Any) -> int:
    """As an array; of rows that differ in length, with 8 bytes each for the length."""
    found = getattr(rows, "nbytes", None)
    return int(found) if found is not None else sum(map(_row_bytes, rows)) + 8 * len(rows)


def _row_bytes(row: Any) -> int:
    if isinstance(row, str):
        row = row.encode()
    return int(row.nbytes) if hasattr(row, "nbytes") else len(row)
