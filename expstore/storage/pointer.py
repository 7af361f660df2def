"""The pointer of a saved set: one JSON file that names the newest generation and checks it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from expstore.errors import DamagedError, FormatError
from expstore.storage import files
from expstore.storage.commits import newer_format
from expstore.storage.layout import (
    FORMAT,
    METADATA_FILE,
    PRIORITIES_KEY,
    ArrayLayout,
    canonical_json,
    chunk_rows,
    group_metadata,
    parents,
)
from expstore.storage.states import KEY

GENERATION = re.compile(r"[0-9a-f]{16}")  # 64 random bits
RAW = "raw"  # the arrays of this name hold one priority for each step


@dataclass(frozen=True)
class SavedArray:
    """One array of a state."""

    layout: ArrayLayout  # its path begins with the generation
    num_rows: int
    crc32c: int  # of its rows in C order

    @staticmethod
    def of(generation: str, place: str, rows: NDArray[Any]) -> SavedArray:
        """Where the array at a place of the state is to lie."""
        row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
        layout = ArrayLayout(
            f"{generation}/{place}",
            place,
            rows.shape[1:],
            rows.dtype,
            chunk_rows(row_bytes, len(rows)),
            tuple(f"{place}[{axis}]" for axis in range(1, rows.ndim)),
        )
        return SavedArray(layout, len(rows), files.crc32c(rows))

    @property
    def chunks(self) -> range:
        """The numbers of its chunks."""
        return range(-(-self.num_rows // self.layout.chunk_rows))

    def rows_of(self, chunk: int) -> slice:
        """The rows of a chunk, of which the last one may have fewer."""
        return slice(chunk * self.layout.chunk_rows, (chunk + 1) * self.layout.chunk_rows)


@dataclass(frozen=True)
class Pointer:
    """What the pointer of a set says."""

    generation: str
    time: float  # seconds since 1970, UTC
    store_ids: tuple[str, ...]
    document: dict[str, Any]  # the state with None where arrays stand
    arrays: Mapping[str, SavedArray]  # by place

    @property
    def num_steps(self) -> int:
        """How many priorities are saved."""
        return sum(a.num_rows for place, a in self.arrays.items() if place.split("/")[-1] == RAW)

    def documents(self) -> dict[str, dict[str, Any]]:
        """The `zarr.json` of every group and array by path; "" is the pointer itself."""
        arrays = {a.layout.path: a.layout.metadata(a.num_rows) for a in self.arrays.values()}
        groups = {self.generation: None, **dict.fromkeys(parents(arrays))}
        inside = dict(sorted((dict.fromkeys(groups, group_metadata()) | arrays).items()))
        documents: dict[str, dict[str, Any]] = dict(arrays)
        for group in groups:
            prefix = f"{group}/"
            documents[group] = group_metadata(
                {p.removeprefix(prefix): d for p, d in inside.items() if p.startswith(prefix)}
            )
        documents[""] = self._own_document(inside)
        return documents

    def _own_document(self, inside: dict[str, Any]) -> dict[str, Any]:
        document = group_metadata(inside)
        ours = {
            "format": FORMAT,
            "generation": self.generation,
            "time": self.time,
            "store_ids": list(self.store_ids),
            "state": self.document,
            "arrays": {place: saved.crc32c for place, saved in sorted(self.arrays.items())},
        }
        document["attributes"][PRIORITIES_KEY] = ours
        ours["crc32c"] = files.crc32c(canonical_json(document))
        return document

    @staticmethod
    def from_json(path: Path, document: Any) -> Pointer:
        """Read the pointer of the set at `path`.

        Raises:
            DamagedError: its checksum does not hold.
            FormatError: made by a newer version.
        """
        try:
            ours = document["attributes"][PRIORITIES_KEY]
            version, crc = ours["format"], ours.pop("crc32c")
            if type(version) is not int or version < 1:
                raise ValueError(f"its format is {version!r}")
            if version > FORMAT:
                raise FormatError(newer_format(path, version, ours.get("needs")))
            if crc != files.crc32c(canonical_json(document)):
                raise ValueError("its checksum does not hold")
            generation = ours["generation"]
            if not GENERATION.fullmatch(generation):
                raise ValueError(f"generation {generation!r}")
            entries = document["consolidated_metadata"]["metadata"]
            arrays = {
                place: _described(f"{generation}/{_checked(place)}", entries, crc)
                for place, crc in ours["arrays"].items()
            }
            ids = tuple(map(str, ours["store_ids"]))
            return Pointer(generation, float(ours["time"]), ids, dict(ours["state"]), arrays)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise DamagedError(
                f"{path / METADATA_FILE} is not the pointer of saved priorities: {error}; restore "
                "it from a copy, or remove the directory to begin anew"
            ) from error


def _described(path: str, entries: Mapping[str, Any], crc: Any) -> SavedArray:
    return SavedArray(ArrayLayout.of_metadata(path, entries[path]), entries[path]["shape"][0], crc)


def _checked(place: str) -> str:
    if not all(KEY.fullmatch(part) for part in place.split("/")):
        raise ValueError(f"an array at {place!r}")
    return place
