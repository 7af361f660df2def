"""Minari data sets in their Arrow and Parquet forms: one folder of tables for each episode.

The tables have a row for each observation; actions, rewards and flags are filled up with rows
that mean nothing, so `total_steps` of the episode's own `metadata.json` says what to take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expstore.errors import SourceError
from expstore.formats import arrow
from expstore.formats.jobs import check_jobs
from expstore.formats.minari_fields import (
    GROUPS,
    SCALARS,
    UNKNOWN,
    Space,
    check_lengths,
    end_reason,
    jpegs,
    shape_in,
    split_infos,
    subspace,
)
from expstore.formats.minari_metadata import METADATA_NAME, MinariMetadata
from expstore.formats.provenance import folder_provenance
from expstore.formats.source import NOTHING, Account, Imported, SourceEpisode

FORMS = ("arrow", "parquet")
KNOWN = (*GROUPS.values(), *SCALARS.values(), "infos", "episode_id")


class MinariTables:
    """The episodes of a data set in the order of their numbers, which are their keys."""

    boundary_rule = "each folder is one episode; terminations and truncations are kept as they are"

    def __init__(
        self,
        path: Path,
        metadata: MinariMetadata,
        account: Account,
        *,
        infos: bool = False,
        keep_encoded: bool = False,
        jobs: int = 1,
    ) -> None:
        arrow.load_pyarrow()
        folder = path / "data" if (path / "data").is_dir() else path
        self.name = str(folder.resolve())
        self.account = account
        self._folder, self._metadata = folder, metadata
        self._infos, self._keep_encoded, self._jobs = infos, keep_encoded, check_jobs(jobs)
        self._numbers = sorted(int(p.name) for p in folder.iterdir() if _is_episode(p))
        if not self._numbers and metadata.values.get("total_episodes") != 0:
            raise SourceError(
                f"{folder} has no episodes: it needs a folder 0 with part-0.{metadata.form} and "
                f"{METADATA_NAME}; it was not copied whole, or its recording was killed"
            )

    @property
    def num_episodes(self) -> int:
        return len(self._numbers)

    @property
    def num_steps(self) -> int | None:
        return self._metadata.num_steps

    def describe(self) -> str:
        form, count = self._metadata.form, self.num_episodes
        return f"Minari data set {self.name} in {form} form: {count:,} episodes"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        num_steps = imported.num_steps
        for number in self._numbers:
            if number in imported.keys:
                continue
            try:
                episode = self._episode(number)
            except SourceError as error:
                self.account.fail(f"episode {number}", str(error))
                continue
            num_steps += len(episode.data["reward"])
            yield episode
        self._metadata.compare(self._numbers, num_steps)

    def close(self) -> None:
        pass

    def _episode(self, number: int) -> SourceEpisode:
        folder = self._folder / str(number)
        own = self._own_metadata(folder)
        with arrow.reading(f"the folder {number}"):
            table = self._table(folder)
            num_steps = own.pop("total_steps")
            data = self._steps(table, num_steps)
            check_lengths(data, num_steps, self.account)
            data |= self._info_fields(table, num_steps)
            provenance = folder_provenance(folder)
        return SourceEpisode(
            key=number,
            data=data,
            end_reason=end_reason(data, self.account) if num_steps else None,
            metadata=self._episode_metadata(own),
            provenance={"format": "minari", "form": self._metadata.form, **provenance},
        )

    def _table(self, folder: Path) -> Any:
        """All tables of an episode, one after the other: a long one is in several batches."""
        pa, form = arrow.load_pyarrow(), self._metadata.form
        parts = sorted(folder.glob(f"part-*.{form}"), key=lambda p: (len(p.name), p.name))
        if not parts:
            raise SourceError(f"there is no part-0.{form}: it was not written whole")
        if form == "parquet":
            tables = []
            for part in parts:
                with arrow.open_parquet(part) as file:
                    tables.append(file.read())
        else:
            tables = [_arrow_table(part) for part in parts]
        table = pa.concat_tables(tables)
        missing = [old for old in KNOWN[:5] if old not in table.column_names]
        if missing:
            raise SourceError(f"{', '.join(missing)} are missing: it was not written whole")
        for name in table.column_names:
            if name not in KNOWN:
                self.account.left_out[name] = "is no part of Minari"
        return table

    def _steps(self, table: Any, num_steps: int) -> dict[str, Any]:
        if not num_steps <= table.num_rows <= num_steps + 1:
            raise SourceError(
                f"total_steps says {num_steps}, but there are {table.num_rows} rows: it was not "
                "written whole"
            )
        data: dict[str, Any] = {}
        steps = table.slice(0, num_steps)
        for name, old in SCALARS.items():
            data[name] = arrow.values_of(steps[old].combine_chunks(), old)
        for name, old in GROUPS.items():
            rows = table if name == "observation" else steps
            space = self._metadata.spaces[name]
            data |= self._fields(name, rows[old], rows.schema.field(old), space)
        return data

    def _fields(self, name: str, column: Any, field: Any, space: Space) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for path, array, leaf in arrow.members_of(name, column, field):
            below = space
            for called in path.split("/")[1:]:
                below = subspace(below, called)
            shape = shape_in(below)
            shape = arrow.shape_of(leaf) if shape is None else shape
            values = arrow.values_of(array, path, None if _is_file(array) else shape)
            if isinstance(values, list) and values and isinstance(values[0], bytes):
                values = jpegs(path, values, shape, self.account, self._keep_encoded, self._jobs)
            if not isinstance(values, list) and 0 in values.shape[1:]:
                self.account.left_out[path] = "has no elements"
                continue
            fields[path] = values
        return fields

    def _info_fields(self, table: Any, num_steps: int) -> dict[str, Any]:
        if "infos" not in table.column_names:
            return {}
        if not self._infos:
            self.account.left_out["infos"] = "come with --infos (infos=True)"
            return {}
        fields = self._fields("infos", table["infos"], table.schema.field("infos"), UNKNOWN)
        return split_infos(fields, num_steps)

    def _own_metadata(self, folder: Path) -> dict[str, Any]:
        """What the episode's folder says of it; it is written after the table."""
        try:
            found = json.loads((folder / METADATA_NAME).read_bytes())
        except FileNotFoundError:
            raise SourceError(f"there is no {METADATA_NAME}: it was not written whole") from None
        except ValueError:
            raise SourceError(f"its {METADATA_NAME} is no JSON: it was not written whole") from None
        except OSError as error:
            raise SourceError(f"its {METADATA_NAME} cannot be read: {error}") from error
        if not isinstance(found, dict) or not isinstance(found.get("total_steps"), int):
            raise SourceError(f"its {METADATA_NAME} has no total_steps: it was not written whole")
        return found

    def _episode_metadata(self, own: Mapping[str, Any]) -> dict[str, Any]:
        values = {key: value for key, value in own.items() if key != "id"}
        metadata: dict[str, Any] = {}
        if self._metadata.dataset:
            metadata["dataset"] = self._metadata.dataset
        if (seed := values.pop("seed", None)) not in (None, "None"):
            metadata["seed"] = seed
        if "options" in values:
            metadata["options"] = values.pop("options")
        if values:
            metadata["attributes"] = values
        return metadata


def _arrow_table(path: Path) -> Any:
    pa = arrow.load_pyarrow()
    # Its whole batches could be found without the footer, but Minari writes it in one go.
    with pa.OSFile(str(path)) as opened, pa.ipc.open_file(opened) as file:
        return file.read_all()


def _is_episode(path: Path) -> bool:
    return path.name.isdecimal() and str(int(path.name)) == path.name and path.is_dir()


def _is_file(array: Any) -> bool:
    """Whether its rows are runs of bytes, whose shape is not that of the image in them."""
    types = arrow.load_pyarrow().types
    return bool(types.is_binary(array.type) or types.is_large_binary(array.type))
