"""Stable-Baselines3's replay buffers, pickled by `save_replay_buffer`.

`actions`, `rewards` and `dones` of a row belong to its observation. Each environment writes rows
of its own, in a ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats import pickles
from expstore.formats.keyed import flags
from expstore.formats.provenance import FileProvenance
from expstore.formats.rings import Cut, Lane, RingSource, gather, ring
from expstore.formats.source import Account, Format, SourceEpisode

PACKAGES = ("stable_baselines3", "sb3_contrib", "gymnasium", "gym", "torch")
MODULES = ("stable_baselines3.", "sb3_contrib.")
REQUIRED = ("observations", "actions", "rewards", "dones", "timeouts", "pos", "full", "n_envs")
TRUSTED = "it was unpickled as trusted, which may have run code"
OVERWRITTEN_ROW = "the oldest row, whose observation was overwritten by the newest one"
DONES = "dones do not tell terminated from truncated there, so they are kept as they are"
LOOKS_FOR = "a pickle of a replay buffer of Stable-Baselines3"


class Sb3Buffer(RingSource):
    """The episodes of a buffer, the oldest first; keys count from 0, `env/number` for several."""

    boundary_rule = (
        "an episode ends with the row that has dones set; it was truncated where timeouts are"
    )

    def __init__(self, path: Path, *, trust: bool = False) -> None:
        super().__init__(str(path.resolve()))
        self._path, self._provenance = path, FileProvenance(path)
        if not path.is_file():
            raise SourceError(f"{path} is no file; looked for {LOOKS_FOR}")
        if trust:
            self.account.remark(TRUSTED)
        found = pickles.run_pickle(path) if trust else pickles.read_pickle(path, PACKAGES)
        self._buffer: Mapping[str, Any] = vars(found) if hasattr(found, "__dict__") else {}
        missing = [name for name in REQUIRED if name not in self._buffer]
        if missing:
            raise SourceError(
                f"{path} is no replay buffer of Stable-Baselines3: {', '.join(missing)} missing; "
                f"looked for {LOOKS_FOR}"
            )
        self._knows_timeouts = bool(self._buffer.get("handle_timeout_termination", False))
        self._is_compact = bool(self._buffer.get("optimize_memory_usage", False))
        self._columns = self._find_columns()
        self._check_lengths()
        if not self._knows_timeouts:
            self.account.remark(DONES)
            self.boundary_rule = "an episode ends with the row that has dones set"
        if "infos" in self._buffer:
            self.account.left_out["infos"] = "are of any kind, not one number a step"
        self.cut(self._lanes(), self._end_rows)

    def describe(self) -> str:
        counts = f"{len(self.keys):,} episodes, {self.num_steps:,} steps"
        return f"Stable-Baselines3 buffer {self.name}: {counts}"

    def read(self, key: int | str) -> SourceEpisode:
        cut = self._cuts[key]
        data: dict[str, Any] = {}
        for name, column in self._columns.items():
            data[name] = _rows(column, cut)
        dones, timeouts = (self._flags(name, cut) for name in ("dones", "timeouts"))
        self.account.found("dones", bool(dones[-1]))
        if self._knows_timeouts:
            self.account.found("timeouts", bool(timeouts[-1]))
            data |= {"terminated": dones & ~timeouts, "truncated": dones & timeouts}
        else:
            data["dones"] = dones
        if self._is_compact:
            self._add_final(data, cut)
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

    @property
    def _capacity(self) -> int:
        return len(self._buffer["dones"])

    def _find_columns(self) -> dict[str, Any]:
        """Field -> array of (rows, environments, ...)."""
        columns: dict[str, Any] = {}
        for old, name in (
            ("observations", "observation"),
            ("next_observations", "next_observation"),
        ):
            found = self._buffer.get(old)
            if isinstance(found, Mapping):
                columns |= {f"{name}/{key}": array for key, array in found.items()}
            elif found is not None and not (old.startswith("next") and self._is_compact):
                columns[name] = found
        return columns | {"action": self._buffer["actions"], "reward": self._buffer["rewards"]}

    def _check_lengths(self) -> None:
        lead = self._capacity, int(self._buffer["n_envs"])
        arrays = {**self._columns, "timeouts": self._buffer["timeouts"]}
        for name, array in arrays.items():
            shape = getattr(array, "shape", ())
            if getattr(array, "objects", None) is not None or shape[:2] != lead:
                raise SourceError(
                    f"{name} of {self._path} must have the shape {lead} of dones at least, got "
                    f"{shape}"
                )

    def _lanes(self) -> list[Lane]:
        pos, is_full = int(self._buffer["pos"]), bool(self._buffer["full"])
        num_envs = int(self._buffer["n_envs"])
        if not 0 <= pos <= self._capacity:
            raise SourceError(f"pos of {self._path} is {pos}, of {self._capacity} rows: damaged")
        stretches = ring(self._capacity if is_full else pos, self._capacity, pos)
        if is_full and self._is_compact:
            self.account.drop(num_envs, OVERWRITTEN_ROW)
            (start, stop), *others = stretches
            stretches = ((start + 1, stop), *others) if start + 1 < stop else tuple(others)
        names = [str(number) if num_envs > 1 else "" for number in range(num_envs)]
        return [Lane(name, number, stretches, is_full) for number, name in enumerate(names)]

    def _end_rows(self, lane: Lane) -> NDArray[np.bool_]:
        cut = Cut(lane, 0, lane.num_rows, is_finished=False)
        if not lane.num_rows:
            return np.zeros(0, bool)
        return flags("dones", _rows(self._buffer["dones"], cut), Account())

    def _flags(self, name: str, cut: Cut) -> NDArray[np.bool_]:
        return flags(name, _rows(self._buffer[name], cut), self.account)

    def _add_final(self, data: dict[str, Any], cut: Cut) -> None:
        """The newest row's next observation, the only one that a compact buffer has."""
        if cut.stop != cut.lane.num_rows:
            return
        pos = int(self._buffer["pos"]) % self._capacity
        last = Cut(Lane("", cut.lane.number, ((pos, pos + 1),)), 0, 1, is_finished=False)
        for name in [n for n in data if n.split("/")[0] == "observation"]:
            data[name] = np.concatenate([data[name], _rows(self._columns[name], last)])


def _rows(column: Any, cut: Cut) -> NDArray[Any]:
    """The rows of one environment."""
    return np.ascontiguousarray(gather(column, cut.slices)[:, cut.lane.number])


def _sniff(path: Path) -> bool:
    found = pickles.first_class(path) if path.is_file() else None
    return found is not None and found[0].startswith(MODULES) and found[1].endswith("Buffer")


FORMAT = Format(
    name="sb3",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=Sb3Buffer,
    options=frozenset({"trust"}),
)
