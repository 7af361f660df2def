"""The episode index: what is known of each episode, and its metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import END_REASONS
from expstore.errors import DamagedError, FieldNotFoundError
from expstore.schema import Schema
from expstore.storage import files
from expstore.storage.layout import EPISODE, METADATA_VALUES, NO_SEED
from expstore.storage.protocols import Appender, Column

COLLECTED_ROWS, COLLECTED_BYTES = 1024, 1 << 20  # of entries that wait in memory for a commit


@dataclass(frozen=True)
class IndexRow:
    """One episode's entry, as it is written."""

    start: int  # its first step
    length: int
    end_reason: int  # position in END_REASONS
    seed: int  # NO_SEED where there is none
    returned: NDArray[np.float64] | None  # sum of the rewards, of the reward's shape
    checksums: dict[str, int]  # field -> CRC-32C
    metadata: bytes  # UTF-8 JSON, empty where there is none
    added: frozenset[str] = frozenset()  # fields that came later, which the checksum leaves out

    def checksum(self) -> int:
        """CRC-32C over everything above, checksums in the order of the sorted field names."""
        # Of fields that were there when the episode came: else adding one would change the entry.
        numbers = struct.pack("<4q", self.start, self.length, self.end_reason, self.seed)
        returned = b"" if self.returned is None else self.returned.astype("<f8").tobytes()
        crcs = [crc for name, crc in sorted(self.checksums.items()) if name not in self.added]
        checksums = struct.pack(f"<{len(crcs)}I", *crcs)
        return files.crc32c(numbers + returned + checksums + self.metadata)


class IndexAppender:
    """Adds episodes to the index.

    Their entries are collected, since writing each one into every column takes longer than all
    the rest of a short episode.
    """

    def __init__(self, appenders: Mapping[str, Appender]) -> None:
        self._columns = {p: a for p, a in appenders.items() if p.startswith("episodes/")}
        self._rows: list[IndexRow] = []  # collected
        self._num_bytes = 0  # of their metadata
        self._handed = self._counts_of_columns()

    def counts(self) -> dict[str, int]:
        """Episodes and bytes of metadata added so far, by dimension."""
        episodes, num_bytes = self._handed
        return {
            EPISODE: episodes + len(self._rows),
            METADATA_VALUES: num_bytes + self._num_bytes,
        }

    def append(self, row: IndexRow) -> None:
        """Add the entry of the next episode."""
        self._rows.append(row)
        self._num_bytes += len(row.metadata)
        if len(self._rows) >= COLLECTED_ROWS or self._num_bytes >= COLLECTED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand the collected entries to the columns; can be called again when that failed."""
        if not self._rows:
            return
        self._rewind_columns(*self._handed)  # of what an attempt that failed has left there
        for path, values in _columns_of(self._rows, self._handed[1]).items():
            self._columns[path].append(values)
        self._rows, self._num_bytes = [], 0
        self._handed = self._counts_of_columns()

    def rewind(self, counts: Mapping[str, int]) -> None:
        """Forget the episodes that go beyond `counts`."""
        if not self._columns:
            return
        del self._rows[max(0, counts[EPISODE] - self._handed[0]) :]
        self._num_bytes = sum(len(row.metadata) for row in self._rows)
        if counts[EPISODE] < self._handed[0]:
            self._handed = counts[EPISODE], counts[METADATA_VALUES]
            self._rewind_columns(*self._handed)

    def _counts_of_columns(self) -> tuple[int, int]:
        if not self._columns:  # of a store without fields
            return 0, 0
        ends, values = (self._columns[f"episodes/metadata/{n}"] for n in ("end", "values"))
        return ends.num_rows, values.num_rows

    def _rewind_columns(self, num_episodes: int, num_bytes: int) -> None:
        for path, column in self._columns.items():
            column.rewind(num_bytes if path == "episodes/metadata/values" else num_episodes)


def _columns_of(rows: Sequence[IndexRow], metadata_start: int) -> dict[str, NDArray[Any]]:
    """One row per episode for each array of the index, by path; JSON begins at the given byte."""
    lengths = np.array([len(row.metadata) for row in rows], "<i8")
    columns: dict[str, NDArray[Any]] = {
        "episodes/start": np.array([row.start for row in rows], "<i8"),
        "episodes/length": np.array([row.length for row in rows], "<i8"),
        "episodes/end_reason": np.array([row.end_reason for row in rows], "u1"),
        "episodes/seed": np.array([row.seed for row in rows], "<i8"),
        "episodes/index_crc32c": np.array([row.checksum() for row in rows], "<u4"),
        "episodes/metadata/values": np.frombuffer(b"".join(r.metadata for r in rows), np.uint8),
        "episodes/metadata/end": metadata_start + np.cumsum(lengths),
    }
    returned = [row.returned for row in rows if row.returned is not None]
    if returned:
        columns["episodes/return"] = np.array(returned, "<f8")
    for name in rows[0].checksums:
        columns[f"episodes/crc32c/{name}"] = np.array([r.checksums[name] for r in rows], "<u4")
    return columns


class EpisodeIndex:
    """The index as of one commit; nothing but maps is held, whatever its size.

    Args:
        kept: makes an array keep the files mapped that it lies in.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        dims: Mapping[str, tuple[int, int]],
        schema: Schema,
        kept: Callable[[NDArray[Any]], NDArray[Any]],
    ) -> None:
        self._columns = columns
        self._fields, self._added = list(schema.fields), schema.added
        self._kept = kept
        self.first, self.stop = dims.get(EPISODE, (0, 0))
        self._metadata_range = dims.get(METADATA_VALUES, (0, 0))

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that `column` has."""
        returned = ("return",) if "episodes/return" in self._columns else ()
        return ("start", "length", "end_reason", *returned, "seed")

    def column(self, name: str) -> NDArray[Any]:
        """A column of the live episodes, (E, ...), without a copy."""
        return self._column(f"episodes/{name}")

    def row(self, episode: int) -> IndexRow:
        """One episode's whole entry, by its number; the caller checked that it is live."""
        return replace(self.row_without_metadata(episode), metadata=self.metadata_bytes(episode))

    def row_without_metadata(self, episode: int) -> IndexRow:
        """The same, as if it had no metadata."""
        at = episode - self.first
        returned = None
        if "episodes/return" in self._columns:
            returned = np.asarray(self.column("return")[at], "<f8")
        start, length, end_reason, seed = (
            int(self.column(name)[at]) for name in ("start", "length", "end_reason", "seed")
        )
        return IndexRow(
            start,
            length,
            end_reason,
            seed,
            returned,
            {name: int(self.column(f"crc32c/{name}")[at]) for name in self._fields},
            b"",
            self._added,
        )

    def metadata_bytes(self, episode: int) -> bytes:
        """The JSON of an episode as it was written."""
        ends = self.column("metadata/end")
        at = episode - self.first
        low = int(ends[at - 1]) if at else self._metadata_range[0]
        high = int(ends[at])
        if not self._metadata_range[0] <= low <= high <= self._metadata_range[1]:
            raise DamagedError(
                f"the metadata of episode {episode} lies outside of what is stored; "
                "run expstore verify"
            )
        values = self._columns["episodes/metadata/values"]
        return values.slice(low, high, *self._metadata_range).tobytes()

    def metadata(self, episode: int) -> dict[str, Any]:
        """The metadata of an episode; parsed each time, since it may be large."""
        text = self.metadata_bytes(episode)
        try:
            parsed = json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            raise DamagedError(
                f"the metadata of episode {episode} is not JSON: {error}; run expstore verify"
            ) from error
        return dict(parsed)

    def _column(self, path: str) -> NDArray[Any]:
        if path not in self._columns:  # of a store without fields
            return np.empty(0, np.int64)
        column = self._columns[path]
        return self._kept(column.slice(self.first, self.stop, self.first, self.stop))


class EpisodeRow(Mapping[str, Any]):
    """One row of the table: the index columns, `number`, `metadata`, and the metadata's own keys.

    >>> row = EpisodeRow(3, {"length": 5, "return": 1.5}, lambda: {"policy": "sac"})
    >>> row["number"], row["length"], row["policy"], row.get("missing")
    (3, 5, 'sac', None)
    """

    def __init__(self, number: int, values: dict[str, Any], metadata: Any) -> None:
        self._values = {"number": number, **values}
        self._load = metadata
        self._metadata: dict[str, Any] | None = None

    def __getitem__(self, key: str) -> Any:
        if key == "seed" and self._values.get(key) is None:
            return self["metadata"].get(key)  # one that is no non-negative integer stands there
        if key in self._values:
            return self._values[key]
        if self._metadata is None:  # parsed only when something asks for it
            self._metadata = self._load()
        if key == "metadata":
            return self._metadata
        try:
            return self._metadata[key]
        except KeyError:
            raise FieldNotFoundError(
                f"episode {self._values['number']} has no {key!r}; it has "
                f"{', '.join(self)}: use .get({key!r}) where not every episode has it"
            ) from None

    def __iter__(self) -> Iterator[str]:
        yield from {**self._values, **self["metadata"]}

    def __len__(self) -> int:
        return len({**self._values, **self["metadata"]})

    def __repr__(self) -> str:
        return f"EpisodeRow({dict(self)!r})"


def presented(name: str, value: Any) -> Any:
    """A stored value of the index as people read it."""
    if name == "end_reason":
        return END_REASONS[int(value)]
    if name == "seed":
        return None if int(value) == NO_SEED else int(value)
    if np.ndim(value):
        return np.array(value)
    return value.item()
