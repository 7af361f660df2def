"""An episode on its way to disk: rows, next values and checksums, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import END_REASONS
from expstore.ragged import Ragged, Rows
from expstore.schema import Schema
from expstore.storage.episodes import IndexRow
from expstore.storage.following import NextWriter, ValueAppender, combined_checksum
from expstore.storage.protocols import Appender
from expstore.storage.ragged import RaggedAppender, rows_checksum


class OpenEpisode:
    """Appends the rows of one episode; it counts only once the index has its row."""

    def __init__(
        self,
        schema: Schema,
        appenders: Mapping[str, Appender],
        start: int,
        number: int,
        check_size: Callable[[int, int], None],
    ) -> None:
        self.schema = schema
        self._check_size = check_size  # given steps and bytes so far
        self._num_bytes = 0
        self.start = start
        self.length = 0
        self._number = number
        self._appenders = appenders
        self._checksums = dict.fromkeys(schema.fields, 0)
        self._newest: dict[str, Rows] = {}  # field -> column of the newest row
        self._returned: NDArray[np.float64] | None = None
        if "reward" in schema.fields:
            self._returned = np.zeros(schema["reward"].shape)
        self._next = {
            name: NextWriter(
                appenders[f"next/{name}/step"],
                appenders[f"next/{name}/present"],
                self._appender(f"next/{name}/value", name),
            )
            for name in schema.next_fields
        }
        self._steps = {name: self._appender(f"steps/{name}", name) for name in schema.fields}

    def _appender(self, path: str, name: str) -> ValueAppender:
        if not self.schema.fields[name].ragged:
            return self._appenders[path]
        return RaggedAppender(self._appenders[f"{path}/values"], self._appenders[f"{path}/end"])

    @property
    def rows_checksums(self) -> dict[str, int]:
        """field -> CRC-32C of its rows so far, without that of its exceptions."""
        return dict(self._checksums)

    def extend(self, columns: Mapping[str, Rows], following: Mapping[str, Rows]) -> None:
        """Append a block of rows (n, *shape) of every field, checked before."""
        first = self.start + self.length
        num_rows = len(next(iter(columns.values())))
        self._num_bytes += sum(rows.nbytes for rows in columns.values())
        self._check_size(self.length + num_rows, self._num_bytes)
        for name, rows in columns.items():
            self._steps[name].append(rows)
            self._checksums[name] = rows_checksum(rows, self._checksums[name])
            if name in self._next:
                self._next[name].extend(self.start, first, rows, following.get(name))
                self._newest[name] = rows[-1:] if isinstance(rows, Ragged) else rows[-1:].copy()
        if self._returned is not None:
            rewards = columns["reward"]
            assert not isinstance(rewards, Ragged)
            self._returned = _added(self._returned, rewards, self.schema["reward"].dtype)
        self._appenders["steps/episode"].append(np.full(num_rows, self._number, "<i8"))
        self.length += num_rows

    def finish(
        self,
        final: Mapping[str, NDArray[Any]],
        end_reason: str,
        seed: int,
        metadata: bytes,
    ) -> IndexRow:
        """Append what only the end tells; returns the row for the index."""
        # Flags before the last step are false by definition, so they are written only now.
        done = np.zeros(self.length, bool)
        done[-1] = True
        self._appenders["steps/done"].append(done)
        last = self.start + self.length - 1
        for name, writer in self._next.items():
            writer.finish(self.start, last, final.get(name), self._newest[name])
        checksums = {
            name: combined_checksum(crc, self._next[name].checksum if name in self._next else None)
            for name, crc in self._checksums.items()
        }
        reason = END_REASONS.index(end_reason)
        return IndexRow(
            self.start, self.length, reason, seed, self._returned, checksums, metadata,
            self.schema.added,
        )  # fmt: skip


@np.errstate(all="ignore")  # infinite and NaN rewards are the caller's to have
def _added(before: NDArray[np.float64], rows: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """A sum continued row by row: the same to the bit in whatever blocks the rows come."""
    if dtype == "bfloat16":
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    sums = np.empty((len(rows) + 1, *rows.shape[1:]))
    sums[0], sums[1:] = before, rows
    # `sum` adds in pairs, in an order that depends on the number of rows.
    return np.asarray(np.add.accumulate(sums, out=sums)[-1])
