"""The episode index: what is known of each episode, and its metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import END_REASONS
from expstore.errors import DamagedError
from expstore.storage import files
from expstore.storage.layout import EPISODE, METADATA_VALUES, NO_SEED
from expstore.storage.protocols import Column


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

    def checksum(self) -> int:
        """CRC-32C over everything above, checksums in the order of the sorted field names."""
        numbers = np.array([self.start, self.length, self.end_reason, self.seed], "<i8").tobytes()
        returned = b"" if self.returned is None else self.returned.astype("<f8").tobytes()
        checksums = np.array([crc for _, crc in sorted(self.checksums.items())], "<u4").tobytes()
        return files.crc32c(numbers + returned + checksums + self.metadata)

    def columns(self, metadata_end: int) -> dict[str, NDArray[Any]]:
        """One row for each array of the index, by path; `metadata_end` is where the JSON ends."""
        rows: dict[str, Any] = {
            "episodes/start": np.array([self.start], "<i8"),
            "episodes/length": np.array([self.length], "<i8"),
            "episodes/end_reason": np.array([self.end_reason], "u1"),
            "episodes/seed": np.array([self.seed], "<i8"),
            "episodes/index_crc32c": np.array([self.checksum()], "<u4"),
            "episodes/metadata/values": np.frombuffer(self.metadata, np.uint8),
            "episodes/metadata/end": np.array([metadata_end], "<i8"),
        }
        if self.returned is not None:
            rows["episodes/return"] = self.returned.astype("<f8")[None]
        for name, crc in self.checksums.items():
            rows[f"episodes/crc32c/{name}"] = np.array([crc], "<u4")
        return rows


class EpisodeIndex:
    """The index as of one commit; nothing but maps is held, whatever its size."""

    def __init__(
        self, columns: Mapping[str, Column], dims: Mapping[str, tuple[int, int]], fields: list[str]
    ) -> None:
        self._columns = columns
        self._fields = fields
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
            self.metadata_bytes(episode),
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
        return self._columns[path].slice(self.first, self.stop, self.first, self.stop)


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
        return self._metadata if key == "metadata" else self._metadata[key]

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
