"""Capacity: whole oldest episodes leave at a commit, and the files that only they were in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expstore.errors import CapacityError, SchemaError
from expstore.schema import Schema
from expstore.storage import files
from expstore.storage.commits import Root
from expstore.storage.layout import EPISODE, METADATA_VALUES, STEP, ChunkLimits
from expstore.storage.protocols import Column
from expstore.storage.reading import Snapshot

CHUNKS_OF_CAPACITY = 16  # a column has about as many files, so that little more than it is kept


@dataclass(frozen=True)
class Capacity:
    """How much a store may hold."""

    num_steps: int | None = None
    num_bytes: int | None = None  # allocated on disk, as `du` counts

    def __post_init__(self) -> None:
        for name, value in (
            ("capacity_steps", self.num_steps),
            ("capacity_bytes", self.num_bytes),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise SchemaError(f"{name} must be an integer of at least 1, got {value!r}")

    @property
    def is_limited(self) -> bool:
        return self.num_steps is not None or self.num_bytes is not None

    def chunk_limits(self, schema: Schema, most: int) -> ChunkLimits:
        """Rows that chunks may have, at most `most`, so that space comes back in small parts."""
        if not self.is_limited:
            return ChunkLimits(most)
        limits = [most]
        if self.num_steps is not None:
            limits.append(self.num_steps // CHUNKS_OF_CAPACITY)
        if self.num_bytes is not None:
            step_bytes = sum(field.step_bytes for field in schema.fields.values())
            limits.append(self.num_bytes // CHUNKS_OF_CAPACITY // step_bytes)
        rows = max(1, min(limits))
        return ChunkLimits(rows, rows, values_bytes=0)

    def check(self, num_steps: int, num_bytes: int, where: str) -> None:
        """Refuse an episode that alone is more than the store may hold.

        Raises:
            CapacityError: names the limit.
        """
        for name, value, most in (
            ("steps", num_steps, self.num_steps),
            ("bytes", num_bytes, self.num_bytes),
        ):
            if most is not None and value > most:
                raise CapacityError(
                    f"there are {value} {name} {where}, but the store may hold {most} "
                    f"(capacity_{name}); cut the episode, or raise the capacity"
                )

    def first_to_keep(self, snapshot: Snapshot) -> int:
        """The oldest episode that may stay; at least the newest one always does."""
        first = snapshot.first_episode
        if self.num_steps is not None:
            starts = snapshot.index.column("start")
            oldest = snapshot.stop_step - self.num_steps
            first += int(np.searchsorted(starts, oldest))
        if self.num_bytes is not None:
            first = max(first, self._first_that_fits(snapshot, first))
        return min(first, max(snapshot.first_episode, snapshot.stop_episode - 1))

    def _first_that_fits(self, snapshot: Snapshot, low: int) -> int:
        """By bisection: the later the first episode, the fewer files stay."""
        assert self.num_bytes is not None
        allocated = _allocated(snapshot)
        high = max(low, snapshot.stop_episode - 1)
        while low < high:
            middle = (low + high) // 2
            starts = starts_of(snapshot, middle)
            if _kept_bytes(snapshot.root, allocated, starts) <= self.num_bytes:
                high = middle
            else:
                low = middle + 1
        return low


def starts_of(snapshot: Snapshot, episode: int) -> dict[str, int]:
    """Where the live range of every dimension begins if `episode` is the first that stays."""
    dims, columns = snapshot.root.commit.dims, snapshot.columns
    starts = {name: bounds[0] for name, bounds in dims.items()}
    at = episode - snapshot.first_episode
    if not 0 < at < len(snapshot.index):
        return starts
    step = int(snapshot.index.column("start")[at])
    starts[STEP], starts[EPISODE] = step, episode
    starts[METADATA_VALUES] = int(snapshot.index.column("metadata/end")[at - 1])
    for name, reader in snapshot.following.items():
        starts[f"next/{name}"] = reader.first_at(step)
    for name, field in snapshot.schema.fields.items():
        if field.ragged:
            places = [(f"steps/{name}/end", STEP, f"{name}/values")]
            if field.has_next:
                places.append((f"next/{name}/value/end", f"next/{name}", f"next/{name}/values"))
            for path, dimension, elements in places:
                start = _end_before(columns[path], starts[dimension], *dims[dimension])
                starts[elements] = starts[elements] if start is None else start
    return starts


def _end_before(column: Column, row: int, start: int, stop: int) -> int | None:
    """Where the elements of the row before end; None if `row` is the first live one."""
    return int(column.slice(row - 1, row, start, stop)[0]) if row > start else None


def remove_evicted(path: Path, old: Root, new: Root) -> None:
    """Remove the files that were live in `old`, or newer, and hold nothing that is live in `new`.

    Readers that have mapped them are not disturbed: the space is free when they let go.
    """
    for layout in new.arrays.values():
        # The first commit with a schema may evict what came with it.
        before, after = (r.commit.dims.get(layout.dimension, (0, 0))[0] for r in (old, new))
        for chunk in range(before // layout.chunk_rows, after // layout.chunk_rows):
            files.unlink(path / layout.chunk_path(chunk))


def _allocated(snapshot: Snapshot) -> dict[str, dict[int, int]]:
    """Bytes on disk of every live file, by array and chunk."""
    dims = snapshot.root.commit.dims
    return {
        name: {
            chunk: files.allocated_bytes(snapshot.path / layout.chunk_path(chunk))
            for chunk in range(
                dims[layout.dimension][0] // layout.chunk_rows,
                -(-dims[layout.dimension][1] // layout.chunk_rows),
            )
        }
        for name, layout in snapshot.root.arrays.items()
    }


def _kept_bytes(root: Root, allocated: dict[str, dict[int, int]], starts: dict[str, int]) -> int:
    return sum(
        num_bytes
        for name, chunks in allocated.items()
        for chunk, num_bytes in chunks.items()
        if chunk >= starts[root.arrays[name].dimension] // root.arrays[name].chunk_rows
    )
