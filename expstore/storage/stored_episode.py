"""StoredEpisode: an episode of a store, read block by block to be copied to another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import END_REASONS
from expstore.errors import DamagedError
from expstore.ragged import Rows
from expstore.storage.reading import Snapshot

BLOCK_BYTES = 16 << 20  # of rows in memory at a time


class StoredEpisode:
    """One episode of a snapshot; nothing but a block of it is in memory.

    Args:
        number: of an episode in the live range.
        metadata: its JSON in the copy; that of the store by default.
    """

    def __init__(self, snapshot: Snapshot, number: int, metadata: bytes | None = None) -> None:
        self._snapshot, self._number = snapshot, number
        self._row = snapshot.index.row(number)
        self.metadata = self._row.metadata if metadata is None else metadata
        self.seed = self._row.seed
        self.length = self._row.length

    @property
    def end_reason(self) -> str:
        return END_REASONS[self._row.end_reason]

    @cached_property
    def final(self) -> dict[str, NDArray[Any]]:
        """field -> the value after the last step, where it is known."""
        last, found = self._row.start + self.length - 1, {}
        for name, reader in self._snapshot.following.items():
            _, present, values = reader.between(last, last + 1)
            if len(present) and present[-1]:
                found[name] = np.array(values[len(present) - 1])
        return found

    def blocks(self) -> Iterator[tuple[dict[str, Rows], dict[str, Rows]]]:
        """Columns, and next values of the fields that have some beside the last one."""
        fields = self._snapshot.schema.fields
        step_bytes = sum(field.step_bytes for field in fields.values())
        block = max(2, BLOCK_BYTES // step_bytes)
        start, last = self._row.start, self._row.start + self.length - 1
        # The value after the last step may be unknown, so next values are not given with it.
        edges = [*range(start, last, block), last, last + 1]
        for first, stop in pairwise(edges):
            if first < stop:
                columns = {name: self._snapshot.rows(name, first, stop) for name in fields}
                names = self._with_exceptions if stop <= last else ()
                yield columns, {name: self._next(name, first, stop) for name in names}

    def check(self, checksums: Mapping[str, int], rows_checksums: Mapping[str, int]) -> None:
        """Compare what was copied with what was written once.

        Args:
            checksums: field -> that of the copy.
            rows_checksums: the same without next values, for fields that have none here.

        Raises:
            DamagedError: names the field.
        """
        for name, stored in self._row.checksums.items():
            has_next = name in self._snapshot.following
            if stored != (checksums if has_next else rows_checksums)[name]:
                raise DamagedError(
                    f"field {name!r} of episode {self._number} of {self._snapshot.path} fails its "
                    "checksum; run expstore repair, and try again"
                )

    @cached_property
    def _with_exceptions(self) -> tuple[str, ...]:
        start = self._row.start
        return tuple(
            name
            for name, reader in self._snapshot.following.items()
            if len(reader.between(start, start + self.length)[0]) > 1
        )

    def _next(self, name: str, first: int, stop: int) -> Rows:
        field, steps = self._snapshot.schema[name], np.arange(first, stop)
        if field.ragged:
            return self._snapshot.take_ragged(f"next_{name}", steps)
        out = np.empty((len(steps), *field.shape), field.stored_dtype)
        self._snapshot.take(f"next_{name}", steps, out)
        return out
