"""V-D4RL's HDF5 files: rows with `step_type`, 0 at a reset, 2 at the last row of an episode.

The action of a row led to its observation: the row of a reset has dummies, and the next row's
action was chosen on its observation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats import hdf5
from expstore.formats.keyed import last_only, scalars
from expstore.formats.provenance import FileProvenance
from expstore.formats.rings import Lane, RingSource
from expstore.formats.source import Account, Format, SourceEpisode

STEP_TYPE = "step_type"
FIRST, LAST = 0, 2
REQUIRED = ("observation", "action", "reward", "discount", STEP_TYPE)
DUMMY = "the row of a reset, whose action and reward are dummies"
LOOKS_FOR = f"an HDF5 file with the datasets {', '.join(REQUIRED)} at its root"


class Vd4rlFile(RingSource):
    """The episodes of a file in the order of its rows; their keys count from 0."""

    boundary_rule = (
        "an episode ends with the row of step_type 2, terminated where its discount is 0 and "
        "truncated otherwise"
    )
    final_rows = 1

    def __init__(self, path: Path) -> None:
        super().__init__(str(path.resolve()))
        self._provenance = FileProvenance(path)
        self._file = hdf5.open_file(path)
        try:
            with hdf5.reading(path):
                self._check(path)
                names = [name for name, _ in hdf5.datasets(self._file)]
                self._columns = {n: hdf5.RowReader(self._file[n]) for n in self._kept(names)}
                lane = Lane("", 0, ((0, len(self._file[STEP_TYPE])),))
                self.cut([lane], self._end_rows)
        except BaseException:
            self._file.close()
            raise

    def describe(self) -> str:
        counts = f"{len(self.keys):,} episodes, {self.num_steps:,} steps"
        return f"V-D4RL file {self.name}: {counts}"

    def read(self, key: int | str) -> SourceEpisode:
        cut = self._cuts[key]
        with hdf5.reading(f"rows {cut.start:,} to {cut.stop:,}"):
            rows = {
                name: hdf5.stretch_of(
                    reader, cut.start, cut.stop, f"rows {cut.start:,} to {cut.stop:,}"
                )
                for name, reader in self._columns.items()
            }
        kinds = scalars(STEP_TYPE, rows.pop(STEP_TYPE), Account())
        if kinds[0] != FIRST:
            raise SourceError(f"row {cut.start:,} must be of step_type {FIRST}, got {kinds[0]}")
        num_steps = len(kinds) - 1
        self.account.drop(1, DUMMY)
        observation = rows.pop("observation")
        data = {name: values[1:] for name, values in rows.items()}
        for name in ("reward", "discount"):
            data[name] = scalars(name, data[name], self.account)
        is_last = bool(kinds[-1] == LAST)
        is_terminal = is_last and num_steps > 0 and bool(data["discount"][-1] == 0)
        data["terminated"] = last_only(is_terminal, num_steps)
        data["truncated"] = last_only(is_last and not is_terminal, num_steps)
        self.account.found(f"step_type {LAST}", is_last)
        return SourceEpisode(
            key=key,
            data={"observation": observation, **data},
            end_reason=self.end_of(cut, data) if num_steps else None,
            provenance={
                "format": FORMAT.name,
                "rows": [cut.start, cut.stop],
                **self._provenance.entries,
            },
        )

    def close(self) -> None:
        self._file.close()

    def _check(self, path: Path) -> None:
        if not _is_vd4rl(self._file):
            found = hdf5.found_in(self._file)
            raise SourceError(f"{path} is not of V-D4RL; looked for {LOOKS_FOR}; found {found}")
        lengths = {name: len(self._file[name]) for name in REQUIRED}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise SourceError(
                f"the datasets of {path} must have equally many rows, got {listed}; it was not "
                "written whole, or is not of V-D4RL"
            )

    def _kept(self, names: list[str]) -> list[str]:
        """Datasets that are rows of the same number."""
        kept = []
        for name in names:
            dataset = self._file[name]
            is_rows = dataset.shape[:1] == self._file[STEP_TYPE].shape[:1]
            if is_rows and dataset.dtype.kind in "biuf" and 0 not in dataset.shape[1:]:
                kept.append(name)
            else:
                self.account.left_out[name] = "is not a number per step"
        return kept

    def _end_rows(self, lane: Lane) -> NDArray[np.bool_]:
        kinds = scalars(STEP_TYPE, np.asarray(self._file[STEP_TYPE][()]), Account())
        ends = kinds == LAST
        ends[:-1] |= kinds[1:] == FIRST
        return np.asarray(ends, bool)


def _is_vd4rl(file: Any) -> bool:
    found = [hdf5.member(file, name) for name in REQUIRED]
    return all(hdf5.is_dataset(dataset) and dataset.shape for dataset in found)


def _sniff(path: Path) -> bool:
    if not hdf5.is_hdf5(path):
        return False
    with hdf5.open_file(path) as file, hdf5.reading(path):
        return _is_vd4rl(file)


FORMAT = Format(name="vd4rl", looks_for=LOOKS_FOR, sniff=_sniff, open=Vd4rlFile)
