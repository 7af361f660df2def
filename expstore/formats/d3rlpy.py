"""d3rlpy's HDF5 files, of version 2.1 and of version 1.

`actions[t]` was chosen on `observations[t]`, and `rewards[t]` came of it. The observation after
the last action is not stored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats import hdf5
from expstore.formats.keyed import KeyedSource, flags, last_only, scalars
from expstore.formats.provenance import FileProvenance
from expstore.formats.rings import Lane, RingSource
from expstore.formats.source import Account, Format, SourceEpisode

NAMES = {"observations": "observation", "actions": "action", "rewards": "reward"}
COUNT, COLUMNS, VERSION = "num_episodes", "columns", "version"
ENDS = ("terminals", "episode_terminals")  # of version 1
NOT_TERMINATED = "not terminated, and d3rlpy does not say why it ended, so it is kept as cut"
LOOKS_FOR = (
    f"an HDF5 file with {COUNT}, {COLUMNS} and observations_0, actions_0, ... (version 2), or "
    f"with rows of observations, actions, rewards, {' and '.join(ENDS)} (version 1)"
)


class D3rlpyFile(KeyedSource):
    """The episodes of a file of version 2.1 by their numbers."""

    boundary_rule = "observations_0, actions_0, ... are one episode; terminated_0 is its end"

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(str(path.resolve()))
        self._file, self._provenance = file, FileProvenance(path)
        with hdf5.reading(path):
            self._version = hdf5.plain_value(file[VERSION][()]) if VERSION in file else None
            if self._version is None:
                self.account.remark("the file has no version, which d3rlpy writes last")
            elif self._version == "2.0":
                raise SourceError(
                    f"{path} is of version 2.0, which d3rlpy has given up; dump it again with a "
                    "newer one"
                )
            self._columns = [str(name) for name in hdf5.plain_value(file[COLUMNS][()])]
            self.keys = range(int(file[COUNT][()]))

    def describe(self) -> str:
        return f"d3rlpy file {self.name}, version {self._version}: {len(self.keys):,} episodes"

    def read(self, key: int | str) -> SourceEpisode:
        data: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        with hdf5.reading("it"):
            for old in self._columns:
                for name, dataset in self._datasets(old, key).items():
                    self._add(name, dataset, data, metadata)
        if missing := [old for old, name in NAMES.items() if not _has(data, name)]:
            raise SourceError(f"{', '.join(missing)} are missing: it was not written whole")
        num_steps = len(data["reward"])
        for name, values in data.items():
            if len(values) != num_steps:
                raise SourceError(
                    f"{name} has {len(values)} rows, but there are {num_steps} rewards: it was "
                    "not written whole"
                )
        terminated = metadata.pop("terminated", None)
        end = "cut" if num_steps else None
        if terminated is not None:
            data["terminated"] = last_only(bool(terminated), num_steps)
            self.account.found("terminated", bool(terminated))
            end = None if terminated else end
        if end == "cut":
            self.account.remark(NOT_TERMINATED, 1)
        return SourceEpisode(
            key=key,
            data=data,
            end_reason=end,
            metadata=metadata,
            provenance={"format": FORMAT.name, **self._provenance.entries},
        )

    def close(self) -> None:
        self._file.close()

    def _datasets(self, old: str, key: int | str) -> dict[str, Any]:
        """A column of an episode by the names of its fields: one, or one for each of a tuple."""
        name = NAMES.get(old, old)
        if (dataset := hdf5.member(self._file, f"{old}_{key}")) is not None:
            return {name: dataset}
        found: dict[str, Any] = {}
        while (dataset := hdf5.member(self._file, f"{old}_{key}_{len(found)}")) is not None:
            found[f"{name}/{len(found)}"] = dataset
        if not found:
            raise SourceError(f"{old}_{key} is missing: it was not written whole")
        return found

    def _add(self, name: str, dataset: Any, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        if not dataset.shape:
            metadata[name] = hdf5.plain_value(dataset[()])
        elif dataset.dtype.kind not in "biuf" or 0 in dataset.shape[1:]:
            self.account.left_out[name] = f"is of dtype {dataset.dtype}, or has no elements"
        elif name == "reward":
            data[name] = scalars(name, dataset[()], self.account)
        else:
            data[name] = dataset[()]


class D3rlpyRows(RingSource):
    """The episodes of a file of version 1 in the order of its rows; their keys count from 0."""

    boundary_rule = (
        "an episode ends with the row that has episode_terminals or terminals set; it was "
        "truncated where only the former is"
    )

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(str(path.resolve()))
        self._file, self._path, self._provenance = file, path, FileProvenance(path)
        self._columns: dict[str, hdf5.RowReader] = {}
        self._metadata: dict[str, Any] = {}
        with hdf5.reading(path):
            lengths = {}
            for old, dataset in hdf5.datasets(file):
                hdf5.check_sources(dataset, path)
                if not dataset.shape:
                    self._metadata[old] = hdf5.plain_value(dataset[()])
                elif dataset.dtype.kind not in "biuf" or 0 in dataset.shape[1:]:
                    self.account.left_out[old] = "is not a number per step"
                else:
                    lengths[old] = len(dataset)
                    self._columns[old] = hdf5.RowReader(dataset)
            if len(set(lengths.values())) > 1:
                listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
                raise SourceError(
                    f"the datasets of {path} must have equally many rows, got {listed}; it was "
                    "not written whole, or is not of d3rlpy"
                )
            lane = Lane("", 0, ((0, lengths[ENDS[0]]),))
            self.cut([lane], self._end_rows)

    def describe(self) -> str:
        counts = f"{len(self.keys):,} episodes, {self.num_steps:,} steps"
        return f"d3rlpy file {self.name}, version 1: {counts}"

    def read(self, key: int | str) -> SourceEpisode:
        cut = self._cuts[key]
        with hdf5.reading(f"rows {cut.start:,} to {cut.stop:,}"):
            rows = {old: r.read(cut.start, cut.stop) for old, r in self._columns.items()}
        data = {NAMES.get(old, old): values for old, values in rows.items() if old not in ENDS}
        data["reward"] = scalars("reward", data["reward"], self.account)
        terminals, ends = (flags(old, rows[old], self.account) for old in ENDS)
        for old, column in zip(ENDS, (terminals, ends), strict=True):
            self.account.found(old, bool(column[-1]))
        data |= {"terminated": terminals, "truncated": ends & ~terminals}
        return SourceEpisode(
            key=key,
            data=data,
            end_reason=self.end_of(cut, data),
            metadata={"dataset": self._metadata} if self._metadata else {},
            provenance={
                "format": FORMAT.name,
                "rows": [cut.start, cut.stop],
                **self._provenance.entries,
            },
        )

    def close(self) -> None:
        self._file.close()

    def _end_rows(self, lane: Lane) -> NDArray[np.bool_]:
        found = np.zeros(lane.num_rows, bool)
        for old in ENDS:
            found |= flags(old, self._file[old][()], Account())
        return found


def _has(data: dict[str, Any], name: str) -> bool:
    return name in data or f"{name}/0" in data


def _version_of(file: Any) -> int:
    """2 or 1; 0 where it is not of d3rlpy."""
    if COUNT in file and COLUMNS in file:
        has_episodes = any(re.fullmatch(r"observations_0(_0)?", name) for name in file)
        return 2 if has_episodes or file[COUNT][()] == 0 else 0
    rows = (*NAMES, *ENDS)
    is_first = all(hdf5.is_dataset(hdf5.member(file, name)) for name in rows)
    return 1 if is_first and all(file[name].shape for name in rows) else 0


def open_file(path: Path) -> D3rlpyFile | D3rlpyRows:
    """The episodes of a file, of whichever version it is.

    Raises:
        SourceError: it is not of d3rlpy, is cut off, or of a version that is not known.
    """
    file = hdf5.open_file(path)
    try:
        with hdf5.reading(path):
            version = _version_of(file)
        if not version:
            found = hdf5.found_in(file)
            raise SourceError(f"{path} is not of d3rlpy; looked for {LOOKS_FOR}; found {found}")
        return D3rlpyFile(file, path) if version == 2 else D3rlpyRows(file, path)
    except BaseException:
        file.close()
        raise


def _sniff(path: Path) -> bool:
    if not hdf5.is_hdf5(path):
        return False
    with hdf5.open_file(path) as file, hdf5.reading(path):
        return _version_of(file) > 0


FORMAT = Format(name="d3rlpy", looks_for=LOOKS_FOR, sniff=_sniff, open=open_file)
