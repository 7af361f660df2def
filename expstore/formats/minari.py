"""Minari data sets in their HDF5 form: one group of one file for each episode.

`observations` has a row more than the rest, the final observation; `actions[t]` was chosen on
`observations[t]`. Infos have that row, too: they come with the observations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import nest
from expstore.errors import SourceError
from expstore.formats import hdf5
from expstore.formats.minari_fields import UNKNOWN, Space, fields_of
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode

FILE_NAME = "main_data.hdf5"
METADATA_NAME = "metadata.json"
SCALARS = {"reward": "rewards", "terminated": "terminations", "truncated": "truncations"}
GROUPS = {"observation": "observations", "action": "actions"}
OF_THE_DATASET = ("dataset_id", "algorithm_name", "minari_version")  # kept with each episode
LOOKS_FOR = (
    f"a Minari data set ({FILE_NAME} in the folder, or in its folder data) with groups episode_0, "
    "episode_1, ... that have observations, actions, rewards, terminations and truncations"
)
_EPISODE = re.compile(r"episode_(0|[1-9]\d*)")


class MinariDataset:
    """The episodes of a data set in the order of their numbers, which are their keys."""

    boundary_rule = "each group is one episode; terminations and truncations are kept as they are"

    def __init__(self, path: Path, *, infos: bool = False) -> None:
        file = _main_file(path)
        self.name = str((file or path).resolve())
        self.account = Account()
        self._infos = infos
        self._metadata = _metadata(path if file is None else file.parent, self.account)
        form = self._metadata.get("data_format", "hdf5")
        if form != "hdf5":
            raise SourceError(f"{path} is a Minari data set in its {form} form; this reads hdf5")
        if file is None:
            raise SourceError(f"{path} has no {FILE_NAME}; looked for {LOOKS_FOR}")
        self._spaces = {name: self._space(f"{name}_space") for name in GROUPS}
        self._dataset = self._dataset_metadata()
        self._file = hdf5.open_file(file)
        try:
            with hdf5.reading(file):
                self._numbers = sorted(_numbers(self._file))
                self._check_any(file)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_episodes(self) -> int:
        return len(self._numbers)

    @property
    def num_steps(self) -> int | None:
        steps = self._metadata.get("total_steps")
        return steps if isinstance(steps, int) else None

    def describe(self) -> str:
        return f"Minari data set {self.name}: {self.num_episodes:,} episodes"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        num_steps = imported.num_steps
        for number in self._numbers:
            if number in imported.keys:
                continue
            try:
                with hdf5.reading("the group"):
                    episode = self._episode(number)
            except SourceError as error:
                self.account.fail(f"episode_{number}", str(error))
                continue
            num_steps += len(episode.data["reward"])
            yield episode
        self._compare(num_steps)

    def close(self) -> None:
        self._file.close()

    def _check_any(self, file: Path) -> None:
        """Refuse another format; a data set of which nothing was recorded yet is none."""
        if not _has_episodes(self._file) and self._metadata.get("total_episodes") != 0:
            found = ", ".join(list(self._file)[:8]) or "nothing"
            raise SourceError(f"{file} is not of Minari; looked for {LOOKS_FOR}; found {found}")

    def _episode(self, number: int) -> SourceEpisode:
        group = self._file[f"episode_{number}"]
        for old in (*GROUPS.values(), *SCALARS.values()):
            if not hdf5.is_group(group) or hdf5.member(group, old) is None:
                raise SourceError(f"{old} are missing: it was not written whole")
        data: dict[str, Any] = {n: self._scalars(n, group[old]) for n, old in SCALARS.items()}
        num_steps = len(data["reward"])
        attributes = dict(group.attrs)
        if attributes.pop("total_steps", num_steps) != num_steps:
            raise SourceError(
                f"total_steps says {group.attrs['total_steps']}, but there are {num_steps} "
                "rewards: it was not written whole"
            )
        for name, old in GROUPS.items():
            data |= fields_of(name, group[old], self._spaces[name], self.account)
        self._check_lengths(data, num_steps)
        data |= self._info_fields(group, num_steps)
        return SourceEpisode(
            key=number,
            data=data,
            end_reason=self._end_reason(data) if num_steps else None,
            metadata=self._episode_metadata(attributes),
            provenance={"format": FORMAT.name},
        )

    def _scalars(self, name: str, dataset: Any) -> NDArray[Any]:
        """Rewards or flags, one number a step."""
        values: NDArray[Any] = np.asarray(dataset[()])
        if values.ndim == 2 and values.shape[1] == 1:
            self.account.shape_changes[name] = "(1,) to ()"
            values = values[:, 0]
        if not values.ndim:
            raise SourceError(f"{SCALARS[name]} must have one row per step, got a single value")
        return values

    def _info_fields(self, group: Any, num_steps: int) -> dict[str, Any]:
        infos = hdf5.member(group, "infos")
        if infos is None:
            return {}
        if not self._infos:
            self.account.left_out["infos"] = "come with --infos (infos=True)"
            return {}
        fields: dict[str, Any] = {}
        for name, values in fields_of("infos", infos, UNKNOWN, self.account).items():
            if len(values) not in (num_steps, num_steps + 1):
                raise SourceError(f"{name} must have {num_steps + 1} rows, got {len(values)}")
            fields[name] = values[:num_steps]
            if len(values) == num_steps + 1:  # that of the reset comes first
                fields[f"next_{name}"] = values[1:]
        return fields

    def _check_lengths(self, data: Mapping[str, Any], num_steps: int) -> None:
        has_final = True
        for name, values in data.items():
            allowed = {num_steps}
            if name.split("/")[0] == "observation":
                allowed.add(num_steps + 1)
                has_final &= len(values) == num_steps + 1
            if len(values) not in allowed:
                raise SourceError(
                    f"{name} has {len(values)} rows, but there are {num_steps} rewards: it was "
                    "not written whole"
                )
        if not has_final:
            self.account.remark("as many observations as actions, so no final observation", 1)

    def _end_reason(self, data: Mapping[str, NDArray[Any]]) -> str | None:
        ended = {name: bool(data[name][-1]) for name in ("terminated", "truncated")}
        for name, is_set in ended.items():
            self.account.found(SCALARS[name], is_set)
        if all(ended.values()):
            self.account.remark("both flags set, so it ended as terminated; both are kept", 1)
        if any(ended.values()):
            return None
        self.account.remark("no end flag is set, so it is kept as cut", 1)
        return "cut"

    def _episode_metadata(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Seed and options of the reset, and whatever else the group says of itself."""
        values: dict[str, Any] = {}
        for name, value in attributes.items():
            try:
                values[name] = hdf5.plain_value(value)
            except ValueError as error:
                self.account.left_out[f"attribute {name}"] = str(error)
        values.pop("id", None)
        metadata: dict[str, Any] = {"dataset": self._dataset} if self._dataset else {}
        if (seed := values.pop("seed", None)) not in (None, "None"):
            metadata["seed"] = seed
        nested = nest(values)
        if "options" in nested:
            metadata["options"] = nested.pop("options")
        if nested:
            metadata["attributes"] = nested
        return metadata

    def _dataset_metadata(self) -> dict[str, Any]:
        values = {key: self._metadata[key] for key in OF_THE_DATASET if key in self._metadata}
        spec = self._parsed("env_spec")
        if isinstance(spec, dict) and isinstance(spec.get("id"), str):
            values["env_id"] = spec["id"]
        return values

    def _space(self, key: str) -> Space:
        space = self._parsed(key)
        return space if isinstance(space, dict) else UNKNOWN

    def _parsed(self, key: str) -> Any:
        """What stands in the metadata as JSON in JSON."""
        text = self._metadata.get(key)
        if not isinstance(text, str):
            return text
        try:
            return json.loads(text)
        except ValueError:
            self.account.fail(METADATA_NAME, f"its {key} is no JSON")
            return None

    def _compare(self, num_steps: int) -> None:
        """Say where the file does not hold what the metadata announces."""
        highest = self._numbers[-1] + 1 if self._numbers else 0
        if missing := highest - len(self._numbers):
            self.account.remark(f"{missing:,} of the numbers up to {highest - 1:,} are missing")
        counts = {"total_episodes": self.num_episodes, "total_steps": num_steps}
        for key, found in counts.items():
            if (announced := self._metadata.get(key, found)) != found:
                of = key.removeprefix("total_")
                self.account.remark(f"{METADATA_NAME} says {announced} {of}, there are {found}")


def _main_file(path: Path) -> Path | None:
    """The file with the episodes: itself, or in the folder of a data set."""
    if path.is_file():
        return path
    found = (folder / FILE_NAME for folder in (path / "data", path))
    return next((file for file in found if file.is_file()), None)


def _metadata(folder: Path, account: Account) -> dict[str, Any]:
    for file in (folder / METADATA_NAME, folder / "data" / METADATA_NAME):
        if file.is_file():
            try:
                found = json.loads(file.read_bytes())
            except ValueError:
                account.fail(METADATA_NAME, "it is no JSON, so it was not written whole")
                return {}
            return found if isinstance(found, dict) else {}
    account.remark(f"there is no {METADATA_NAME}, so there is nothing to compare counts with")
    return {}


def _numbers(file: Any) -> Iterator[int]:
    for name in file:
        if found := _EPISODE.fullmatch(name):
            yield int(found[1])


def _has_episodes(file: Any) -> bool:
    for number in _numbers(file):
        group = file[f"episode_{number}"]
        return hdf5.is_group(group) and "observations" in group and "terminations" in group
    return False


def _sniff(path: Path) -> bool:
    file = _main_file(path)
    if path.is_dir():
        announced = _metadata(path, Account())
        if "data_format" in announced and "observation_space" in announced:
            return True
    if file is None or not hdf5.is_hdf5(file):
        return False
    with hdf5.open_file(file) as opened, hdf5.reading(file):
        return _has_episodes(opened)


FORMAT = Format(
    name="minari",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=MinariDataset,
    options=frozenset({"infos"}),
)
