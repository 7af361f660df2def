"""Tianshou's replay buffers, as HDF5 (`save_hdf5`) or as a pickle.

`act`, `rew` and the flags of a row belong to its `obs`. Each environment writes rows of its own,
in a ring. What is pickled inside an HDF5 file is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats import hdf5, pickles
from expstore.formats.keyed import flags, scalars
from expstore.formats.provenance import FileProvenance
from expstore.formats.rings import Lane, RingSource, gather, ring
from expstore.formats.source import Account, Format, SourceEpisode

NAMES = {"obs": "observation", "obs_next": "next_observation", "act": "action", "rew": "reward"}
META = "_meta"
FLAGS = ("terminated", "truncated")
DONE = "done"
ON_REQUEST = ("info", "policy")
PACKAGES = ("tianshou", "gymnasium", "gym", "torch")
TRUSTED = "it was unpickled as trusted, which may have run code"
LOOKS_FOR = (
    f"a replay buffer of Tianshou: an HDF5 file with {META}/obs, {META}/act, {META}/rew and "
    "last_index, or a pickle"
)


class TianshouBuffer(RingSource):
    """The episodes of a buffer, the oldest first; keys count from 0, `env/number` for several."""

    boundary_rule = "an episode ends with the row that has done, terminated or truncated set"

    def __init__(self, path: Path, *, infos: bool = False, trust: bool = False) -> None:
        super().__init__(str(path.resolve()))
        self._path, self._provenance = path, FileProvenance(path)
        self._file: Any = None
        try:
            if hdf5.is_hdf5(path):
                if trust:
                    raise SourceError(f"{path} is no pickle; leave out --trust (trust=)")
                self._file = hdf5.open_file(path)
                with hdf5.reading(path):
                    values, found = self._of_file()
            else:
                values, found = self._of_pickle(trust)
            self._columns = self._kept(found, int(values.get("maxsize", 0)), infos)
            ends = [name for name in (*FLAGS, DONE) if name in self._columns]
            if not {"act", "rew"} <= self._columns.keys() or not ends:
                raise SourceError(f"{path} is not of Tianshou; looked for {LOOKS_FOR}")
            self._ends = ends
            self.cut(_lanes(values), self._end_rows)
        except BaseException:
            self.close()
            raise

    def describe(self) -> str:
        counts = f"{len(self.keys):,} episodes, {self.num_steps:,} steps"
        return f"Tianshou buffer {self.name}: {counts}"

    def read(self, key: int | str) -> SourceEpisode:
        cut = self._cuts[key]
        with hdf5.reading("its rows"):
            rows = {old: gather(column, cut.slices) for old, column in self._columns.items()}
        data = {_field(old): values for old, values in rows.items()}
        data["reward"] = scalars("reward", data["reward"], self.account)
        for name in self._ends:
            data[name] = flags(name, data[name], self.account)
            self.account.found(name, bool(data[name][-1]))
        if DONE in data:
            done = data.pop(DONE)
            if not set(FLAGS) <= data.keys():
                data["dones"] = done  # `done` is the store's own
            elif (done != (data["terminated"] | data["truncated"])).any():
                self.account.remark("done is not terminated or truncated", 1)
        return SourceEpisode(
            key=key,
            data=data,
            end_reason=self.end_of(cut, data),
            provenance={
                "format": FORMAT.name,
                "environment": cut.lane.number,
                "rows": [cut.slices[0].start, cut.slices[-1].stop],
                **self._provenance.entries,
            },
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _of_file(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the buffer says of itself, and its columns."""
        if not _is_tianshou(self._file):
            found = hdf5.found_in(self._file)
            raise SourceError(
                f"{self._path} is not of Tianshou; looked for {LOOKS_FOR}; found {found}"
            )
        values = {name: hdf5.plain_value(value) for name, value in self._file.attrs.items()}
        for name in ("last_index", "_offset", "_lengths", "_extend_offset"):
            if (dataset := hdf5.member(self._file, name)) is not None:
                values[name] = np.asarray(dataset[()])
        return values, dict(hdf5.datasets(hdf5.member(self._file, META)))

    def _of_pickle(self, trust: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self._path.is_file():
            raise SourceError(f"{self._path} is no file; looked for {LOOKS_FOR}")
        if trust:
            self.account.remark(TRUSTED)
        read = pickles.run_pickle if trust else _read_pickle
        buffer = read(self._path)
        values = dict(vars(buffer)) if hasattr(buffer, "__dict__") else {}
        if META not in values or "maxsize" not in values:
            raise SourceError(f"{self._path} is not of Tianshou; looked for {LOOKS_FOR}")
        for name in ("last_index", "_offset", "_lengths", "_extend_offset"):
            if name in values:
                values[name] = np.asarray(values[name][:])
        return values, dict(_members(values[META]))

    def _kept(self, found: dict[str, Any], maxsize: int, infos: bool) -> dict[str, Any]:
        """Columns of one row per step; what is not is reported."""
        kept: dict[str, Any] = {}
        for old, column in found.items():
            shape = getattr(column, "shape", ())
            is_number = getattr(column, "objects", None) is None and hasattr(column, "dtype")
            if old.split("/")[0] in ON_REQUEST and not infos:
                self.account.left_out[old] = "comes with --infos (infos=True)"
            elif not is_number or column.dtype.kind not in "biuf" or shape[:1] != (maxsize,):
                self.account.left_out[old] = "is not one row of numbers per step"
            elif 0 in shape:
                self.account.left_out[old] = "has no elements"
            else:
                kept[old] = column
        if {*FLAGS, DONE} <= kept.keys():
            self.account.left_out[DONE] = "is terminated or truncated"
        return kept

    def _end_rows(self, lane: Lane) -> NDArray[np.bool_]:
        ends = np.zeros(lane.num_rows, bool)
        slices = lane.slices(0, lane.num_rows)
        for name in self._ends if slices else ():
            ends |= flags(name, gather(self._columns[name], slices), Account())
        return ends


def _lanes(values: Mapping[str, Any]) -> list[Lane]:
    """The ring of each environment; a buffer of one has neither offsets nor lengths."""
    if "_lengths" not in values:
        bounds, lengths = [0, int(values["maxsize"])], [int(values["_size"])]
    else:
        bounds = np.asarray(values["_extend_offset"]).tolist()
        lengths = np.asarray(values["_lengths"]).tolist()
    last = np.asarray(values["last_index"]).reshape(-1).tolist()
    if not len(last) == len(lengths) == len(bounds) - 1:
        raise SourceError(f"last_index has {len(last)} environments, _lengths {len(lengths)}")
    lanes = []
    for number, (offset, length) in enumerate(zip(bounds[:-1], lengths, strict=True)):
        capacity = bounds[number + 1] - offset
        if not 0 <= length <= capacity or not 0 <= offset <= int(values["maxsize"]) - capacity:
            raise SourceError(
                f"environment {number} has {length} rows from {offset} on, of {capacity}: the "
                "buffer is damaged"
            )
        cursor = (last[number] + 1 - offset) % max(capacity, 1)
        name = str(number) if len(lengths) > 1 else ""
        stretches = ring(length, capacity, cursor, offset) if length else ()
        lanes.append(Lane(name, number, stretches, was_full=0 < length == capacity))
    return lanes


def _members(batch: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a Batch or dictionary, by their paths."""
    members = batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})
    for name, value in members.items():
        if isinstance(value, Mapping) or (hasattr(value, "__dict__") and not _is_array(value)):
            yield from _members(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _field(old: str) -> str:
    first, *rest = old.split("/")
    return "/".join([NAMES.get(first, "infos" if first == "info" else first), *rest])


def _read_pickle(path: Path) -> Any:
    return pickles.read_pickle(path, PACKAGES)


def _is_tianshou(file: Any) -> bool:
    meta = hdf5.member(file, META)
    return hdf5.is_group(meta) and {"obs", "act", "rew"} <= set(meta) and "last_index" in file


def _sniff(path: Path) -> bool:
    if hdf5.is_hdf5(path):
        with hdf5.open_file(path) as file, hdf5.reading(path):
            return _is_tianshou(file)
    found = pickles.first_class(path) if path.is_file() else None
    return found is not None and found[0].startswith("tianshou.") and "Buffer" in found[1]


FORMAT = Format(
    name="tianshou",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=TianshouBuffer,
    options=frozenset({"infos", "trust"}),
)
