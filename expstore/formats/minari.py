"""Minari data sets in their HDF5 form: one group of one file for each episode.

`observations` has a row more than the rest, the final observation; `actions[t]` was chosen on
`observations[t]`. Infos have that row, too: they come with the observations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import nest
from expstore.errors import SourceError
from expstore.formats import hdf5
from expstore.formats.jobs import check_jobs
from expstore.formats.minari_fields import (
    GROUPS,
    SCALARS,
    UNKNOWN,
    check_lengths,
    end_reason,
    fields_of,
    split_infos,
)
from expstore.formats.minari_metadata import MinariMetadata
from expstore.formats.minari_tables import FORMS, MinariTables
from expstore.formats.provenance import FileProvenance
from expstore.formats.source import NOTHING, Account, Format, Imported, Source, SourceEpisode

FILE_NAME = "main_data.hdf5"
LOOKS_FOR = (
    f"a Minari data set ({FILE_NAME} in the folder, or in its folder data) with groups episode_0, "
    "episode_1, ... that have observations, actions, rewards, terminations and truncations; or "
    "one in Arrow or Parquet form, whose metadata.json says so"
)
_EPISODE = re.compile(r"episode_(0|[1-9]\d*)")


class MinariDataset:
    """The episodes of one file, in the order of their numbers, which are their keys."""

    boundary_rule = "each group is one episode; terminations and truncations are kept as they are"

    def __init__(
        self,
        file: Path,
        metadata: MinariMetadata,
        account: Account,
        *,
        infos: bool = False,
        keep_encoded: bool = False,
        jobs: int = 1,
    ) -> None:
        self.name = str(file.resolve())
        self.account = account
        self._infos, self._keep_encoded, self._jobs = infos, keep_encoded, check_jobs(jobs)
        self._metadata = metadata
        self._provenance = FileProvenance(file)
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
        return self._metadata.num_steps

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
        self._metadata.compare(self._numbers, num_steps)

    def close(self) -> None:
        self._file.close()

    def _check_any(self, file: Path) -> None:
        """Refuse another format; a data set of which nothing was recorded yet is none."""
        if not _has_episodes(self._file) and self._metadata.values.get("total_episodes") != 0:
            found = hdf5.found_in(self._file)
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
            data |= fields_of(
                name,
                group[old],
                self._metadata.spaces[name],
                self.account,
                keep_encoded=self._keep_encoded,
                jobs=self._jobs,
            )
        check_lengths(data, num_steps, self.account)
        data |= self._info_fields(group, num_steps)
        return SourceEpisode(
            key=number,
            data=data,
            end_reason=end_reason(data, self.account) if num_steps else None,
            metadata=self._episode_metadata(attributes),
            provenance={"format": FORMAT.name, **self._provenance.entries},
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
        return split_infos(fields_of("infos", infos, UNKNOWN, self.account), num_steps)

    def _episode_metadata(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Seed and options of the reset, and whatever else the group says of itself."""
        values: dict[str, Any] = {}
        for name, value in attributes.items():
            try:
                values[name] = hdf5.plain_value(value)
            except ValueError as error:
                self.account.left_out[f"attribute {name}"] = str(error)
        values.pop("id", None)
        metadata: dict[str, Any] = (
            {"dataset": dataset} if (dataset := self._metadata.dataset) else {}
        )
        if (seed := values.pop("seed", None)) not in (None, "None"):
            metadata["seed"] = seed
        nested = nest(values)
        if "options" in nested:
            metadata["options"] = nested.pop("options")
        if nested:
            metadata["attributes"] = nested
        return metadata


def open_dataset(
    path: Path, *, infos: bool = False, keep_encoded: bool = False, jobs: int = 1
) -> Source:
    """The data set at its folder, its folder `data` or its file, in whichever form it is.

    Raises:
        SourceError: it is none, or of a form that is not known.
    """
    file, account = _main_file(path), Account()
    metadata = MinariMetadata(path if file is None else file.parent, account)
    options: dict[str, Any] = {"infos": infos, "keep_encoded": keep_encoded, "jobs": jobs}
    if metadata.form in FORMS:
        return MinariTables(path, metadata, account, **options)
    if metadata.form != "hdf5":
        forms = ", ".join(("hdf5", *FORMS))
        raise SourceError(f"{path} is in the form {metadata.form}; this reads {forms}")
    if file is None:
        raise SourceError(f"{path} has no {FILE_NAME}; looked for {LOOKS_FOR}")
    return MinariDataset(file, metadata, account, **options)


def _main_file(path: Path) -> Path | None:
    """The file with the episodes: itself, or in the folder of a data set."""
    if path.is_file():
        return path
    found = (folder / FILE_NAME for folder in (path / "data", path))
    return next((file for file in found if file.is_file()), None)


def _numbers(file: Any) -> Iterator[int]:
    for name in hdf5.names_of(file):
        if found := _EPISODE.fullmatch(name):
            yield int(found[1])


def _has_episodes(file: Any) -> bool:
    for number in _numbers(file):
        group = file[f"episode_{number}"]
        return hdf5.is_group(group) and "observations" in group and "terminations" in group
    return False


def _sniff(path: Path) -> bool:
    file = _main_file(path)
    if path.is_dir() and MinariMetadata(path, Account()).is_of_minari:
        return True
    if file is None or not hdf5.is_hdf5(file):
        return False
    with hdf5.open_file(file) as opened, hdf5.reading(file):
        return _has_episodes(opened)


FORMAT = Format(
    name="minari",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=open_dataset,
    options=frozenset({"infos", "keep_encoded", "jobs"}),
)
