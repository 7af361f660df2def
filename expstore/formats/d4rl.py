"""D4RL: one HDF5 file of rows, cut into episodes by `terminals` and `timeouts`.

`actions[t]` was chosen on `observations[t]`; `rewards[t]` and both flags came of it. The
observation after a row is known where the file has `next_observations`, else it is the next
row's, and after the last row of an episode there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import nest
from expstore.errors import SourceError
from expstore.formats import hdf5
from expstore.formats.provenance import FileProvenance
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode

FIELDS = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "timeouts",
    "next_observation": "next_observations",
}
REQUIRED = ("observations", "actions", "rewards", "terminals")
SCALARS = ("reward", "terminated", "truncated")  # one number a row, also where they are (N, 1)
MAX_VALUE = 256  # elements of what is kept as metadata: names and counts, not weights
LOOKS_FOR = (
    "an HDF5 file with the datasets observations, actions, rewards and terminals at its root, or "
    "in groups virtual/0, virtual/1, ..."
)


@dataclass(frozen=True)
class Rows:
    """Rows that followed one another: those of the file, or of one `virtual/<number>`."""

    group: str  # where they are, "/" or "virtual/3"
    datasets: Mapping[str, Any]  # field -> dataset of N rows
    stops: NDArray[np.int64]  # (E,) the row after each episode, the last of them N
    is_finished: bool  # whether the last episode has an end


class D4rlFile:
    """The episodes of a D4RL file, in the order of its rows; their keys count from 0."""

    def __init__(
        self, path: Path, *, max_episode_steps: int | None = None, infos: bool = False
    ) -> None:
        if max_episode_steps is not None and max_episode_steps < 1:
            raise SourceError(
                f"--max-episode-steps (max_episode_steps=) must be >= 1, got {max_episode_steps}"
            )
        if not path.is_file():
            raise SourceError(f"{path} is no file; looked for {LOOKS_FOR}")
        self.name = str(path.resolve())
        self.account = Account()
        self._path, self._max_steps, self._infos = path, max_episode_steps, infos
        self._provenance = FileProvenance(path)
        self._file = hdf5.open_file(path)
        try:
            with hdf5.reading(path):
                self._all = [self._rows(group) for group in _groups(self._file, path)]
                self._dataset = self._dataset_metadata()
        except BaseException:
            self._file.close()
            raise
        self.boundary_rule = (
            "an episode ends with the row that has terminals or timeouts set"
            if max_episode_steps is None
            else "an episode ends with the row that has terminals set, or as truncated after "
            f"{max_episode_steps:,} steps"
        )

    @property
    def num_episodes(self) -> int:
        return sum(len(rows.stops) for rows in self._all)

    @property
    def num_steps(self) -> int:
        return sum(int(rows.stops[-1]) for rows in self._all if len(rows.stops))

    def describe(self) -> str:
        counts = f"{self.num_episodes:,} episodes, {self.num_steps:,} steps"
        return f"D4RL file {self.name}: {counts}"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        key = 0
        for rows in self._all:
            readers = {name: hdf5.RowReader(d) for name, d in rows.datasets.items()}
            start = 0
            for stop in rows.stops.tolist():
                if key not in imported.keys:
                    try:
                        episode = self._episode(key, rows, readers, start, stop)
                    except SourceError as error:
                        self.account.fail(f"episode {key}", str(error))
                    else:
                        yield episode
                elif (length := imported.lengths.get(key, stop - start)) != stop - start:
                    raise SourceError(
                        f"episode {key} of {self._path} has {stop - start} rows, but had {length} "
                        "when it was imported: the file has changed; import it to a new store"
                    )
                key, start = key + 1, stop

    def close(self) -> None:
        self._file.close()

    def _rows(self, group: str) -> Rows:
        found = {name: hdf5.member(self._file[group], old) for name, old in FIELDS.items()}
        used = {name: dataset for name, dataset in found.items() if dataset is not None}
        for dataset in used.values():
            if not dataset.shape:
                raise SourceError(f"{dataset.name} of {self._path} must have one row per step")
        used |= self._others(group, set(FIELDS.values()))
        self._check_lengths(used)
        for name in [name for name, dataset in used.items() if 0 in dataset.shape[1:]]:
            self.account.left_out[FIELDS.get(name, name)] = "has no elements"
            del used[name]
        if "truncated" in used and self._max_steps is not None:
            raise SourceError(
                f"{self._path} has timeouts, which say where episodes were cut; leave out "
                "--max-episode-steps (max_episode_steps=)"
            )
        if "truncated" not in used and self._max_steps is None:
            raise SourceError(
                f"{self._path} has no timeouts, so it does not say where an episode was cut off; "
                "give the limit of its environment, as in --max-episode-steps 1000 "
                "(max_episode_steps=1000)"
            )
        stops, is_finished = self._stops(used)
        return Rows(group, used, stops, is_finished)

    def _others(self, group: str, known: set[str]) -> dict[str, Any]:
        """Datasets that are no part of a step: infos, if they were asked for."""
        infos: dict[str, Any] = {}
        lost: dict[str, str] = {}
        for name, dataset in hdf5.datasets(self._file[group], lost=lost):
            if name in known or name.startswith(("metadata/", "virtual/")):
                continue
            if not name.startswith("infos/"):
                self.account.left_out[name] = "is no part of D4RL"
            elif not self._infos:
                self.account.left_out[name] = "comes with --infos (infos=True)"
            elif dataset.dtype.kind not in "biuf":
                self.account.left_out[name] = f"has dtype {dataset.dtype}"
            else:
                infos[name] = dataset
        if self._infos and lost:
            raise SourceError(f"{next(iter(lost.values()))}; leave out --infos (infos=True)")
        self.account.left_out.update(lost)
        if group == "/" and hdf5.member(self._file, "virtual") is not None:
            self.account.left_out["virtual"] = "the datasets at the root were taken"
        return infos

    def _check_lengths(self, used: Mapping[str, Any]) -> None:
        lengths = {d.name.lstrip("/"): d.shape[0] if d.shape else None for d in used.values()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise SourceError(
                f"the datasets of {self._path} must have equally many rows, got {listed}; it was "
                "not written whole, or is no D4RL file"
            )
        for dataset in used.values():
            hdf5.check_sources(dataset, self._path)

    def _stops(self, used: Mapping[str, Any]) -> tuple[NDArray[np.int64], bool]:
        """Where episodes stop, read from the flags alone; and whether the last has an end."""
        flags = [used[name] for name in ("terminated", "truncated") if name in used]
        readers = [hdf5.RowReader(dataset) for dataset in flags]
        num_rows, found = len(flags[0]), [np.zeros(0, np.int64)]
        for start in range(0, num_rows, hdf5.BLOCK_BYTES):
            stop = min(start + hdf5.BLOCK_BYTES, num_rows)
            ends = np.zeros(stop - start, bool)
            for reader, dataset in zip(readers, flags, strict=True):
                ends |= self._flag(reader.read(start, stop), dataset)
            found.append(np.flatnonzero(ends) + start + 1)
        stops = np.concatenate(found).astype(np.int64)
        if self._max_steps is not None:
            stops = _cut(stops, num_rows, self._max_steps)
        if not num_rows or (len(stops) and stops[-1] == num_rows):
            return stops, True
        return np.append(stops, num_rows), False

    def _flag(self, rows: NDArray[Any], dataset: Any) -> NDArray[np.bool_]:
        name = dataset.name.lstrip("/")
        if rows.size != len(rows):
            raise SourceError(f"{name} of {self._path} must be one flag per row, got {rows.shape}")
        rows = rows.reshape(-1)
        if rows.dtype == bool:
            return rows
        if rows.dtype.kind not in "iuf" or not ((rows == 0) | (rows == 1)).all():
            raise SourceError(f"{name} of {self._path} must hold nothing but 0 and 1")
        return np.asarray(rows == 1)

    def _episode(
        self, key: int, rows: Rows, readers: Mapping[str, hdf5.RowReader], start: int, stop: int
    ) -> SourceEpisode:
        with hdf5.reading(f"rows {start:,} to {stop:,}"):
            data = {
                name: hdf5.stretch_of(reader, start, stop, f"rows {start:,} to {stop:,}")
                for name, reader in readers.items()
            }
        for name in data.keys() & set(SCALARS):
            data[name] = self._scalars(name, data[name], rows.datasets[name])
        is_unfinished = stop == rows.stops[-1] and not rows.is_finished
        if "truncated" not in data:
            data["truncated"] = np.zeros(stop - start, bool)
            data["truncated"][-1] = not (is_unfinished or data["terminated"][-1])
        if is_unfinished:
            self.account.remark("no end flag on the last rows, so they are kept as incomplete", 1)
        self._count_flags(data, "truncated" in rows.datasets)
        return SourceEpisode(
            key=key,
            data=data,
            end_reason="incomplete" if is_unfinished else None,
            metadata={"dataset": self._dataset} if self._dataset else {},
            provenance={
                "format": FORMAT.name,
                "group": rows.group,
                "rows": [start, stop],
                **self._provenance.entries,
            },
        )

    def _scalars(self, name: str, values: NDArray[Any], dataset: Any) -> NDArray[Any]:
        if values.ndim == 2 and values.shape[1] == 1:
            self.account.shape_changes[name] = "(1,) to ()"
            values = values[:, 0]
        if name == "reward" or values.dtype == bool:
            return values
        self.account.dtype_changes[name] = f"{values.dtype} to bool"
        return self._flag(values, dataset)

    def _count_flags(self, data: Mapping[str, NDArray[Any]], has_timeouts: bool) -> None:
        ended = {name: bool(data[name][-1]) for name in ("terminated", "truncated")}
        self.account.found("terminals", ended["terminated"])
        if has_timeouts:
            self.account.found("timeouts", ended["truncated"])
        if all(ended.values()):
            self.account.remark("both flags set, so it ended as terminated; both are kept", 1)

    def _dataset_metadata(self) -> dict[str, Any]:
        """What the file says of itself: the algorithm, not the policy's weights."""
        group = hdf5.member(self._file, "metadata")
        values: dict[str, Any] = {}
        for name, dataset in hdf5.datasets(group) if hdf5.is_group(group) else ():
            try:
                if dataset.size is not None and dataset.size > MAX_VALUE:
                    raise ValueError(f"has {dataset.size:,} elements")
                values[name] = hdf5.plain_value(dataset[()])
            except (ValueError, TypeError) as error:
                self.account.left_out[f"metadata/{name}"] = str(error)
        return nest(values)


def _groups(file: Any, path: Path) -> list[str]:
    """Where rows are."""
    if _has_rows(file):
        return ["/"]
    virtual = hdf5.member(file, "virtual")
    if hdf5.is_group(virtual):
        numbers = sorted((name for name in virtual if name.isdecimal()), key=int)
        if found := [f"virtual/{name}" for name in numbers if _has_rows(virtual[name])]:
            return found
    names = hdf5.found_in(file)
    raise SourceError(f"{path} is not of D4RL; looked for {LOOKS_FOR}; found {names}")


def _has_rows(group: Any) -> bool:
    return hdf5.is_group(group) and all(
        hdf5.is_dataset(hdf5.member(group, name)) for name in REQUIRED
    )


def _cut(stops: NDArray[np.int64], num_rows: int, most: int) -> NDArray[np.int64]:
    """Also stop where an episode has `most` steps.

    >>> _cut(np.array([3, 10]), 15, 4).tolist()
    [3, 7, 10, 14]
    """
    starts, limits = [0, *stops.tolist()], [*stops.tolist(), num_rows + 1]
    cuts = [np.arange(a + most, b, most) for a, b in zip(starts, limits, strict=True)]
    return np.sort(np.concatenate([stops, *cuts])).astype(np.int64)


def _sniff(path: Path) -> bool:
    if not hdf5.is_hdf5(path):
        return False
    with hdf5.open_file(path) as file:
        try:
            _groups(file, path)
        except SourceError:
            return False
    return True


FORMAT = Format(
    name="d4rl",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=D4rlFile,
    options=frozenset({"max_episode_steps", "infos"}),
)
