"""OGBench: one `.npz` file of rows, cut into trajectories by `terminals`.

A row is a state and the action that was chosen on it. What the last action of a trajectory led
to is not stored: its row gives the final observation, and the action is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.archive import NpyRows, check_member, is_zip, open_zip, reading
from expstore.formats.provenance import FileProvenance
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode

NAMES = {"observations": "observation", "actions": "action"}  # others keep theirs
ENDS = "terminals"
NOT_HERE = ("rewards", "next_observations")  # then it is something else
LAST_ACTION = "the last action of a trajectory, whose result is not stored"
LOOKS_FOR = "an .npz file with the arrays observations, actions and terminals, and without rewards"


class OgbenchFile:
    """The trajectories of a file in the order of its rows; their keys count from 0."""

    boundary_rule = (
        "an episode ends with the row that has terminals set; that row is its final observation"
    )

    def __init__(self, path: Path) -> None:
        self.name = str(path.resolve())
        self.account = Account()
        self._path, self._provenance = path, FileProvenance(path)
        self._archive = open_zip(path)
        try:
            if not _is_ogbench(self._archive.namelist()):
                found = ", ".join(self._archive.namelist()[:8]) or "nothing"
                raise SourceError(
                    f"{path} is not of OGBench; looked for {LOOKS_FOR}; found {found}"
                )
            self._stops, self._is_finished = self._read_stops()
        except BaseException:
            self._archive.close()
            raise

    @property
    def num_episodes(self) -> int:
        return len(self._stops)

    @property
    def num_steps(self) -> int:
        return (int(self._stops[-1]) if len(self._stops) else 0) - len(self._stops)

    def describe(self) -> str:
        counts = f"{self.num_episodes:,} trajectories, {self.num_steps:,} steps"
        return f"OGBench file {self.name}: {counts}"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        with contextlib.ExitStack() as opened:
            streams = self._streams(opened)
            start = 0
            for key, stop in enumerate(self._stops.tolist()):
                if key in imported.keys:
                    for rows in streams.values():
                        rows.skip(stop - start)
                else:
                    yield self._episode(key, streams, start, stop)
                start = stop

    def close(self) -> None:
        self._archive.close()

    def _read_stops(self) -> tuple[NDArray[np.int64], bool]:
        """Where trajectories stop, and whether the last has an end."""
        with reading(self._path), self._archive.open(f"{ENDS}.npy") as stream:
            rows = NpyRows(stream, ENDS)
            if len(rows.shape) not in (1, 2) or (len(rows.shape) == 2 and rows.shape[1] != 1):
                raise SourceError(f"{ENDS} of {self._path} must be one flag per row")
            ends = rows.read(rows.shape[0]).reshape(-1)
        if not ((ends == 0) | (ends == 1)).all():
            raise SourceError(f"{ENDS} of {self._path} must hold nothing but 0 and 1")
        stops = np.flatnonzero(ends).astype(np.int64) + 1
        if not len(ends) or (len(stops) and stops[-1] == len(ends)):
            return stops, True
        return np.append(stops, len(ends)), False

    def _streams(self, opened: contextlib.ExitStack) -> dict[str, NpyRows]:
        """Field -> its rows; what is not one row per step is reported."""
        num_rows = int(self._stops[-1]) if len(self._stops) else 0
        streams: dict[str, NpyRows] = {}
        for member in self._archive.namelist():
            old = member.removesuffix(".npy")
            if old == ENDS:
                continue
            with reading(f"{old} of {self._path}"):
                rows = NpyRows(opened.enter_context(self._archive.open(member)), old)
            if not rows.shape or rows.dtype.kind not in "biuf" or 0 in rows.shape[1:]:
                self.account.left_out[old] = "is not a number per step"
                continue
            if rows.shape[0] != num_rows:
                raise SourceError(
                    f"{old} of {self._path} has {rows.shape[0]:,} rows, but {ENDS} have "
                    f"{num_rows:,}; it was not written whole, or is not of OGBench"
                )
            check_member(self._archive, member, self._path)
            streams[NAMES.get(old, old)] = rows
        return streams

    def _episode(
        self, key: int, streams: dict[str, NpyRows], start: int, stop: int
    ) -> SourceEpisode:
        num_rows = stop - start
        rows = {name: stream.read(num_rows) for name, stream in streams.items()}
        data: dict[str, Any] = {}
        for name, values in rows.items():
            data[name] = values if name == "observation" else values[:-1]
            if name not in NAMES.values():  # of the state, like an observation
                data[f"next_{name}"] = values[1:]
        is_unfinished = stop == self._stops[-1] and not self._is_finished
        self.account.found(ENDS, not is_unfinished)
        self.account.drop(1, LAST_ACTION)
        if is_unfinished:
            text = "no end on the last rows, so they are kept as incomplete"
            self.account.remark(text, 1)
        return SourceEpisode(
            key=key,
            data=data,
            end_reason="incomplete" if is_unfinished else "cut",
            provenance={"format": FORMAT.name, "rows": [start, stop], **self._provenance.entries},
        )


def _is_ogbench(names: list[str]) -> bool:
    has_all = {f"{name}.npy" for name in (*NAMES, ENDS)} <= set(names)
    return has_all and not {f"{name}.npy" for name in NOT_HERE} & set(names)


def _sniff(path: Path) -> bool:
    if not is_zip(path):
        return False
    with open_zip(path) as archive:
        return _is_ogbench(archive.namelist())


FORMAT = Format(name="ogbench", looks_for=LOOKS_FOR, sniff=_sniff, open=OgbenchFile)
