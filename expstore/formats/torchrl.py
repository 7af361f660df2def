"""TorchRL: a buffer as `dumps` leaves it, or a TensorDict as `memmap` does.

`action` of row t was chosen on what stands beside it, and everything under `next` came of it.
Nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.json_files import read_object
from expstore.formats.keyed import flags, scalars
from expstore.formats.memmaps import BFLOAT16, DTYPES, Column
from expstore.formats.provenance import folder_provenance
from expstore.formats.rings import Cut, Lane, RingSource, gather, ring
from expstore.formats.source import Account, Format, SourceEpisode

META, STORAGE = "meta.json", "storage"
LEN_FILE, CURSOR_FILE = "storage/storage_metadata.json", "writer/metadata.json"
ENDS = ("next/done", "next/terminated", "next/truncated")
TRAJECTORIES = ("collector/traj_ids", "episode")  # numbers that are one for all of an episode
ROOT_FLAGS = ("done", "terminated", "truncated")  # of the state before the action
DONE = "dones"  # `done` is the store's own
LOOKS_FOR = (
    "a folder written by TorchRL's dumps, or by memmap of a TensorDict: meta.json with the shape "
    "and type of a TensorDict, and .memmap files"
)


class TorchrlFolder(RingSource):
    """The episodes of a buffer or TensorDict, the oldest first; their keys count from 0."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path.resolve()))
        self._path = path
        self._folder = path / STORAGE if (path / STORAGE / META).is_file() else path
        if not _is_tensordict(self._folder):
            raise SourceError(f"{path} is not of TorchRL; looked for {LOOKS_FOR}")
        self._columns: dict[str, Column] = {}
        self._texts: dict[str, list[str]] = {}  # one per row
        self._dataset: dict[str, Any] = {}
        self._shape = self._batch_shape()
        self._find_columns(self._folder, "")
        self._names = self._fields()
        self._ends = [name for name in ENDS if name in self._columns]
        ids = [name for name in TRAJECTORIES if name in self._columns]
        self._ids = next((n for n in ids if not self._columns[n].shape), None)
        self._check_ends()
        self.cut(self._lanes(), self._end_rows)

    def describe(self) -> str:
        counts = f"{len(self.keys):,} episodes, {self.num_steps:,} steps"
        return f"TorchRL folder {self.name}: {counts}"

    def read(self, key: int | str) -> SourceEpisode:
        cut = self._cuts[key]
        data: dict[str, Any] = {}
        for name, old in self._names.items():
            data[name] = gather(self._columns[old].of(cut.lane.number), cut.slices)
        if "reward" in data:
            data["reward"] = scalars("reward", data["reward"], self.account)
        for name in (DONE, "terminated", "truncated"):
            if name in data:
                data[name] = flags(name, data[name], self.account)
                self.account.found(self._names[name], bool(data[name][-1]))
        if not self._keeps_done:
            self._compare(data.pop(DONE, None), data)
        for name, texts in self._texts.items():
            data[name] = [text for rows in cut.slices for text in texts[rows]]
        metadata: dict[str, Any] = {"dataset": self._dataset} if self._dataset else {}
        if self._ids is not None:
            first = gather(self._columns[self._ids].of(cut.lane.number), cut.slices[:1])[0]
            metadata[self._ids.rsplit("/", 1)[-1]] = int(first)
        return SourceEpisode(
            key=key,
            data=data,
            end_reason=self.end_of(cut, data),
            metadata=metadata,
            provenance={"format": FORMAT.name, "rows": _listed(cut), **self._where},
        )

    @property
    def _keeps_done(self) -> bool:
        """Whether `next/done` says what the other two do not."""
        return not {"terminated", "truncated"} <= self._names.keys()

    def _compare(self, done: NDArray[np.bool_] | None, data: Mapping[str, Any]) -> None:
        if done is not None and (done != (data["terminated"] | data["truncated"])).any():
            self.account.remark("next/done is not next/terminated or next/truncated", 1)

    @cached_property
    def _where(self) -> dict[str, Any]:
        return folder_provenance(self._path)

    def _batch_shape(self) -> tuple[int, ...]:
        shape = tuple(read_object(self._folder / META)["shape"])
        is_buffer = self._folder != self._path
        if not shape or (len(shape) > 1 and not is_buffer):
            raise SourceError(
                f"{self._path} has the batch axes {shape}, so it does not say which is time; save "
                "it with one axis, the episodes one after the other"
            )
        return shape

    def _find_columns(self, folder: Path, prefix: str) -> None:
        """Every tensor under a folder; what cannot be a column is reported."""
        for key, entry in read_object(folder / META).items():
            name = f"{prefix}{key}"
            if not isinstance(entry, Mapping):
                continue  # shape, device and type of the TensorDict itself
            if not key or "/" in key or key in (".", "..") or "\0" in key:
                raise SourceError(f"{folder / META} has the key {key!r}, which is no file's name")
            if "dtype" in entry:
                self._add(name, folder / f"{key}.memmap", entry)
            elif _is_tensordict(folder / key):
                self._find_columns(folder / key, f"{name}/")
            elif (folder / key / META).is_file():
                self._add_other(name, read_object(folder / key / META))
            else:
                self.account.left_out[name] = f"is a {entry.get('type', 'thing')} that is not read"

    def _add(self, name: str, path: Path, entry: Mapping[str, Any]) -> None:
        shape, lead = tuple(entry["shape"]), len(self._shape)
        if entry.get("is_nested") or entry["dtype"] not in DTYPES:
            kind = "nested tensors" if entry.get("is_nested") else entry["dtype"]
            self.account.left_out[name] = f"holds {kind}, which are not read"
        elif shape[:lead] != self._shape or 0 in shape:
            self.account.left_out[name] = f"has the shape {shape}, which is not one row per step"
        else:
            is_bfloat16 = entry["dtype"] == BFLOAT16
            if is_bfloat16:
                self.account.dtype_changes[_plain(name)] = "bfloat16 to float32"
            dtype = np.dtype(DTYPES[entry["dtype"]]).newbyteorder("<")
            lanes = math.prod(self._shape[1:])
            self._columns[name] = Column(path, dtype, shape[lead:], lanes, is_bfloat16)

    def _add_other(self, name: str, meta: Mapping[str, Any]) -> None:
        """Data that are no tensors: a text per row, or one value for all."""
        found = meta.get("data")
        texts = found if isinstance(found, list) else []
        is_one_per_row = len(self._shape) == 1 and len(texts) == self._shape[0] > 0
        if is_one_per_row and all(isinstance(text, str) for text in texts):
            self._texts[name] = texts
        elif isinstance(found, (str, int, float, bool)):
            self._dataset[name] = found
        else:
            self.account.left_out[name] = "is neither a tensor nor a text"

    def _fields(self) -> dict[str, str]:
        """Field -> column."""
        names: dict[str, str] = {}
        for old in self._columns:
            if old in TRAJECTORIES or old == "index":
                self.account.left_out[old] = "only counts"
            elif old in ROOT_FLAGS or (old == "reward" and "next/reward" in self._columns):
                self.account.left_out[old] = "is of the state before the action, see next"
            elif old.startswith("next/"):
                field = old.removeprefix("next/")
                known = field in self._columns and field not in (*ROOT_FLAGS, "reward")
                names[f"next_{field}" if known else DONE if field == "done" else field] = old
            else:
                names[old] = old
        if DONE in names and {"terminated", "truncated"} <= names.keys():
            self.account.left_out["next/done"] = "is next/terminated or next/truncated"
        return names

    def _check_ends(self) -> None:
        if not self._ends and self._ids is None:
            raise SourceError(
                f"{self._path} does not say where an episode ends; looked for "
                f"{', '.join((*ENDS, *TRAJECTORIES))}"
            )
        found = [f"{' or '.join(self._ends)} set"] if self._ends else []
        rule = f"an episode ends with the row that has {found[0]}" if found else ""
        if self._ids is not None:
            change = f"where {self._ids} changes"
            rule = f"{rule}, or {change}" if rule else f"an episode ends {change}"
        self.boundary_rule = rule

    def _lanes(self) -> list[Lane]:
        capacity, lanes = self._shape[0], math.prod(self._shape[1:])
        num_rows, cursor, was_full = capacity, 0, False
        if self._folder != self._path:
            storage = read_object(self._path / LEN_FILE)
            writer = read_object(self._path / CURSOR_FILE)
            num_rows = min(capacity, int(storage["len"]) // lanes)
            cursor = int(writer.get("cursor", 0)) % capacity
            was_full = num_rows == capacity and int(writer.get("write_count", 0)) > capacity
        columns = [self._columns[n] for n in (*self._ends, self._ids) if n is not None]
        there = min(column.num_rows for column in columns)
        if there < num_rows:
            missing = f"{num_rows - there:,} rows from row {there:,} on"
            self.account.fail(missing, "the files that say where episodes end are cut off")
        rows = [
            (start, min(stop, there))
            for start, stop in ring(num_rows, capacity, cursor)
            if start < there
        ]
        return [
            Lane(str(number) if lanes > 1 else "", number, tuple(rows), was_full)
            for number in range(lanes)
        ]

    def _end_rows(self, lane: Lane) -> NDArray[np.bool_]:
        ends = np.zeros(lane.num_rows, bool)
        if not lane.num_rows:
            return ends
        rows = lane.slices(0, lane.num_rows)
        for name in self._ends:
            ends |= flags(name, gather(self._columns[name].of(lane.number), rows), Account())
        if self._ids is not None:
            ids = gather(self._columns[self._ids].of(lane.number), rows)
            ends[:-1] |= ids[1:] != ids[:-1]
        return ends


def _listed(cut: Cut) -> list[int]:
    """First and last of the rows, the latter exclusive; the smaller one last where it wraps."""
    return [cut.slices[0].start, cut.slices[-1].stop]


def _plain(name: str) -> str:
    return name.removeprefix("next/")


def _is_tensordict(folder: Path) -> bool:
    if not (folder / META).is_file():
        return False
    meta = read_object(folder / META)
    return isinstance(meta.get("shape"), list) and "_type" in meta


def _sniff(path: Path) -> bool:
    if not path.is_dir():
        return False
    try:
        return _is_tensordict(path / STORAGE) or _is_tensordict(path)
    except SourceError:
        return False


FORMAT = Format(name="torchrl", looks_for=LOOKS_FOR, sniff=_sniff, open=TorchrlFolder)
