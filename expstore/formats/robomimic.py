"""robomimic HDF5, as of robosuite, MimicGen and others: a group `data/demo_<i>` per episode.

`actions[t]` was chosen on `obs[t]`; `rewards[t]` and `next_obs[t]` came of it. What `dones`
mean was decided when the file was made (`done_mode`) and is not written in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats import hdf5
from expstore.formats.provenance import FileProvenance
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode

NAMES = {"actions": "action", "rewards": "reward"}  # others keep theirs
GROUPS = {"obs": "observation", "next_obs": "next_observation"}
LARGE_ATTRIBUTES = ("model_file",)  # some 100 kB each, to build the simulation again
DONE_MODES = {
    0: "success",
    1: "the end of the demonstration",
    2: "success or the end of the demonstration",
}
LOOKS_FOR = "an HDF5 file with groups data/demo_0, data/demo_1, ... that have actions"
_DEMO = re.compile(r"demo_(\d+)")


class RobomimicFile:
    """The demonstrations of a file in the order of their numbers; their names are the keys."""

    def __init__(self, path: Path, *, done_mode: int | None = None, infos: bool = False) -> None:
        if done_mode not in (None, *DONE_MODES):
            raise SourceError(f"--done-mode (done_mode=) must be 0, 1 or 2, got {done_mode}")
        self.name = str(path.resolve())
        self.account = Account()
        self._done_mode, self._infos = done_mode, infos
        self._provenance = FileProvenance(path)
        self._file = hdf5.open_file(path)
        try:
            with hdf5.reading(path):
                self._demos = _demos(self._file)
                self._check(path)
                self._dataset = self._attributes(self._file["data"])
                self._masks = self._read_masks()
        except BaseException:
            self._file.close()
            raise
        self.boundary_rule = "each group demo_<i> is one episode"
        if done_mode is not None:
            self.boundary_rule += f"; dones mean {DONE_MODES[done_mode]} (done_mode {done_mode})"

    @property
    def num_episodes(self) -> int:
        return len(self._demos)

    @property
    def num_steps(self) -> int | None:
        total = self._dataset.get("total")
        return total if isinstance(total, int) else None

    def describe(self) -> str:
        return f"robomimic file {self.name}: {self.num_episodes:,} demonstrations"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        num_steps = imported.num_steps
        for name in self._demos:
            if name in imported.keys:
                continue
            try:
                with hdf5.reading("the group"):
                    episode = self._episode(name)
            except SourceError as error:
                self.account.fail(name, str(error))
                continue
            num_steps += len(episode.data["action"])
            yield episode
        if self.num_steps not in (None, num_steps):
            self.account.remark(f"data says {self.num_steps} steps in all, there are {num_steps}")

    def close(self) -> None:
        self._file.close()

    def _check(self, path: Path) -> None:
        if not self._demos:
            raise SourceError(f"{path} is not of robomimic; looked for {LOOKS_FOR}")
        has_dones = any("dones" in self._file["data"][name] for name in self._demos)
        if has_dones and self._done_mode is None:
            meanings = ", ".join(f"{mode} {meaning}" for mode, meaning in DONE_MODES.items())
            raise SourceError(
                f"{path} has dones, but does not say what they mean: {meanings}; give the mode "
                "with which it was made, as in --done-mode 0 (done_mode=0)"
            )
        if not has_dones and self._done_mode is not None:
            raise SourceError(f"{path} has no dones; leave out --done-mode (done_mode=)")

    def _episode(self, name: str) -> SourceEpisode:
        group = self._file["data"][name]
        if not hdf5.is_group(group) or not hdf5.is_dataset(hdf5.member(group, "actions")):
            raise SourceError("actions are missing: it was not written whole")
        attributes = self._attributes(group)
        num_steps = len(group["actions"])
        if attributes.pop("num_samples", num_steps) != num_steps:
            raise SourceError(
                f"num_samples says {group.attrs['num_samples']}, but there are {num_steps} "
                "actions: it was not written whole"
            )
        data = self._columns(group, num_steps)
        end = self._end(data)
        metadata: dict[str, Any] = {"dataset": self._dataset}
        if masks := [mask for mask, names in self._masks.items() if name in names]:
            metadata["masks"] = masks
        if attributes:
            metadata["attributes"] = attributes
        return SourceEpisode(
            key=name,
            data=data,
            end_reason=end if num_steps else None,
            metadata=metadata,
            provenance={"format": FORMAT.name, **self._provenance.entries},
        )

    def _columns(self, group: Any, num_steps: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for path, dataset in hdf5.datasets(group):
            first, *rest = path.split("/")
            name = "/".join([GROUPS.get(first, NAMES.get(first, first)), *rest])
            if dataset.dtype.kind not in "biuf" or not dataset.shape or 0 in dataset.shape[1:]:
                of = f"{dataset.dtype} and shape {dataset.shape}"
                self.account.left_out[path] = f"is of dtype {of}, which is not a number per step"
                continue
            if len(dataset) != num_steps:
                raise SourceError(
                    f"{path} has {len(dataset)} rows, but there are {num_steps} actions: it was "
                    "not written whole"
                )
            data[name] = hdf5.rows_of(dataset)
        reward = data.get("reward")
        if reward is not None and reward.ndim == 2 and reward.shape[1] == 1:
            self.account.shape_changes["reward"] = "(1,) to ()"
            data["reward"] = reward[:, 0]
        return data

    def _end(self, data: dict[str, Any]) -> str | None:
        """Flags out of `dones`, which stay as they are beside them, and why the episode ended."""
        dones = data.get("dones")
        if dones is None or not len(dones):
            return "cut"
        is_done: NDArray[np.bool_] = np.asarray(dones, bool).reshape(len(dones), -1).max(axis=1)
        self.account.found("dones", bool(is_done[-1]))
        if self._done_mode != 0:
            if not is_done[-1]:
                text = f"dones are not set on the last step, which done_mode {self._done_mode} says"
                self.account.remark(text, 1)
            self.account.remark("dones do not tell success from the end, so it is kept as cut", 1)
            return "cut"
        if is_done[:-1].any():
            self.account.remark("success before the last step, where no flag can be; see dones", 1)
        data["terminated"] = np.zeros(len(dones), bool)
        data["terminated"][-1] = is_done[-1]
        return None if is_done[-1] else "cut"

    def _attributes(self, group: Any) -> dict[str, Any]:
        """What a group says of itself; JSON in a text is read."""
        values: dict[str, Any] = {}
        for name, value in group.attrs.items():
            if name in LARGE_ATTRIBUTES and not self._infos:
                self.account.left_out[f"attribute {name}"] = "comes with --infos (infos=True)"
                continue
            try:
                plain = hdf5.plain_value(value)
            except ValueError as error:
                self.account.left_out[f"attribute {name}"] = str(error)
                continue
            values[name] = _parsed(plain)
        return values

    def _read_masks(self) -> Mapping[str, frozenset[str]]:
        """Filter key -> names of the demonstrations in it."""
        masks: dict[str, frozenset[str]] = {}
        group = hdf5.member(self._file, "mask")
        for name, dataset in hdf5.datasets(group) if hdf5.is_group(group) else ():
            names = hdf5.plain_value(dataset[()])
            masks[name] = frozenset(map(str, names if isinstance(names, list) else [names]))
        return masks


def _demos(file: Any) -> list[str]:
    """Names of the demonstrations; numbers may be missing, and are of any width."""
    data = hdf5.member(file, "data")
    if not hdf5.is_group(data):
        return []
    found = {
        name: int(match[1]) for name in hdf5.names_of(data) if (match := _DEMO.fullmatch(name))
    }
    return sorted(found, key=lambda name: (found[name], name))


def _parsed(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _sniff(path: Path) -> bool:
    if not hdf5.is_hdf5(path):
        return False
    with hdf5.open_file(path) as file, hdf5.reading(path):
        return any("actions" in file["data"][name] for name in _demos(file))


FORMAT = Format(
    name="robomimic",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=RobomimicFile,
    options=frozenset({"done_mode", "infos"}),
)
