"""RLlib's episodes as Parquet files of one row per step, with `eps_id` and `agent_id`.

`actions[t]` was chosen on `obs[t]`; `rewards[t]`, `new_obs[t]` and both flags came of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from expstore.errors import SourceError
from expstore.formats import arrow
from expstore.formats.keyed import flags, scalars, stretches
from expstore.formats.ordering import natural
from expstore.formats.provenance import HashedFiles
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode

FIELDS = {
    "obs": "observation",
    "actions": "action",
    "rewards": "reward",
    "terminateds": "terminated",
    "truncateds": "truncated",
    "new_obs": "next_observation",
}
REQUIRED = ("eps_id", "obs", "actions", "rewards")
FLAGS = ("terminateds", "truncateds")
IDS = ("eps_id", "agent_id", "module_id")  # they name the episode
EPISODES = "item"  # the column of files that hold whole episodes
REPEATED = "rows of an episode that RLlib had written before"  # it keeps what it has written
LOOKS_FOR = f"Parquet files, or a folder of such, with the columns {', '.join(REQUIRED)}"


@dataclass
class Stretch:
    """Rows of one episode that follow one another."""

    ids: dict[str, Any]
    parts: list[Any] = field(default_factory=list)  # tables
    files: list[str] = field(default_factory=list)
    is_broken: bool = False  # what follows cannot be read

    @property
    def key(self) -> str:
        agent = self.ids.get("agent_id")
        return str(self.ids["eps_id"]) if agent is None else f"{self.ids['eps_id']}/{agent}"

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def has_ended(self) -> bool:
        """Whether the last row has an end flag set, so that none can follow."""
        last = self.parts[-1]
        return any(flag in last.column_names and bool(last[flag][-1].as_py()) for flag in FLAGS)

    def add(self, ids: dict[str, Any], rows: Any, file: str) -> None:
        self.ids = ids
        self.parts.append(rows)
        if file not in self.files[-1:]:
            self.files.append(file)


class RllibTables:
    """The episodes of a folder of Parquet files, or of one, in the order of their rows.

    Their keys are `eps_id`, with `/agent_id` where there is one.
    """

    boundary_rule = "an episode ends where eps_id or agent_id changes, or a flag is set"
    num_episodes = None  # all rows would have to be read

    def __init__(self, path: Path, *, infos: bool = False) -> None:
        self.name = str(path.resolve())
        self.account = Account()
        self._path, self._infos = path, infos
        self._folder = path if path.is_dir() else path.parent
        self._hashes = HashedFiles(self._folder)
        self._files = _files(path)
        if not self._files:
            raise SourceError(f"there are no Parquet files in {path}; looked for {LOOKS_FOR}")
        self._rows = self._check()

    @property
    def num_steps(self) -> int:
        return self._rows

    def describe(self) -> str:
        files = "file" if len(self._files) == 1 else "files"
        return f"{len(self._files):,} RLlib {files} in {self.name}: {self._rows:,} steps"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        seen: dict[str, bytes] = {}  # key -> digest of its rows, the first time
        for stretch in self._stretches():
            key, num_rows = stretch.key, stretch.num_rows
            try:
                with arrow.reading("its rows"):
                    if stretch.is_broken:
                        raise SourceError("what follows of it cannot be read")
                    data = self._columns(stretch)
            except SourceError as error:
                seen.setdefault(key, b"")
                self.account.fail(key, str(error))
                continue
            digest = _digest(data)
            if key not in seen:
                seen[key] = digest
                if key not in imported.keys:
                    yield self._episode(stretch, data)
            elif seen[key] == digest:
                self.account.drop(num_rows, REPEATED)
            else:
                self.account.fail(key, f"{num_rows:,} more rows of it lie apart from the first")

    def close(self) -> None:
        pass

    def _check(self) -> int:
        """Rows in all files that can be opened; those that cannot are found again later.

        Raises:
            SourceError: none can, or the first that can is not of RLlib.
        """
        rows, problem = 0, None
        for file in self._files:
            try:
                with arrow.open_parquet(file) as opened:
                    if not rows:
                        self._check_columns(file, opened.schema_arrow.names)
                    rows += opened.metadata.num_rows
            except SourceError as error:
                if not file.is_file() or arrow.has_footer(file):
                    raise
                problem = problem or error
        if not rows and problem:
            raise problem
        return rows

    def _check_columns(self, file: Path, columns: list[str]) -> None:
        if EPISODES in columns:
            raise SourceError(
                f"{file} holds whole episodes in its column {EPISODES}; let RLlib write columns, "
                "with output_write_episodes=False"
            )
        if missing := [name for name in REQUIRED if name not in columns]:
            raise SourceError(
                f"{file} is not of RLlib: {', '.join(missing)} missing; looked for {LOOKS_FOR}"
            )

    def _stretches(self) -> Iterator[Stretch]:
        """Rows of one episode that follow one another, also across files."""
        begun = Stretch({})
        for file in self._files:
            name = file.relative_to(self._folder).as_posix()
            try:
                with arrow.open_parquet(file) as opened:
                    names = [n for n in IDS if n in opened.schema_arrow.names]
                    for table in arrow.batches(opened):
                        for ids, rows in self._runs(table, names):
                            if begun.parts and (ids != begun.ids or begun.has_ended):
                                yield begun
                                begun = Stretch(ids)
                            begun.add(ids, rows, name)
                            self.account.reached(begun.num_rows)
            except SourceError as error:
                self.account.fail(file.name, str(error))
                if begun.parts:
                    begun.is_broken = not begun.has_ended
                    yield begun
                    begun = Stretch({})
        if begun.parts:
            yield begun

    def _runs(self, table: Any, names: list[str]) -> Iterator[tuple[dict[str, Any], Any]]:
        """Rows with the same ids, and of these none after a flag."""
        for values, rows in arrow.runs(table, *names):
            ended = np.zeros(rows.num_rows, bool)
            for flag in FLAGS:
                if flag in rows.column_names:
                    ended |= np.asarray(rows[flag].to_numpy(), bool)
            for start, stop in stretches(ended):
                yield dict(zip(names, values, strict=True)), rows.slice(start, stop - start)

    def _episode(self, stretch: Stretch, data: dict[str, Any]) -> SourceEpisode:
        ended = self._flags(data)
        return SourceEpisode(
            key=stretch.key,
            data=data,
            end_reason=None if ended else "cut",
            metadata={name: value for name, value in stretch.ids.items() if value is not None},
            provenance={"format": FORMAT.name, **self._hashes.together(stretch.files)},
        )

    def _columns(self, stretch: Stretch) -> dict[str, Any]:
        table = arrow.load_pyarrow().concat_tables(stretch.parts)
        data: dict[str, Any] = {}
        for column in table.schema:
            if column.name in IDS:
                continue
            name = FIELDS.get(column.name, f"infos/{column.name}")
            if name.startswith("infos/") and not self._infos:
                self.account.left_out[column.name] = "comes with --infos (infos=True)"
                continue
            for path, array, leaf in arrow.members_of(name, table[column.name], column):
                data[path] = self._values(path, array, leaf)
        return data

    def _values(self, name: str, array: Any, leaf: Any) -> Any:
        values = arrow.values_of(array, name, arrow.shape_of(leaf))
        if isinstance(values, list) and name.split("/")[0] in FIELDS.values():
            raise SourceError(
                f"{name} is text or bytes, so it was packed (lz4 of a pickle), or its rows "
                "differ in length; let RLlib write it with output_compress_columns=[]"
            )
        return scalars(name, values, self.account) if name == "reward" else values

    def _flags(self, data: dict[str, Any]) -> bool:
        """Make booleans of the flags; whether one is set at the end."""
        ended = False
        for old in FLAGS:
            if (name := FIELDS[old]) in data:
                data[name] = flags(name, data[name], self.account)
                self.account.found(old, bool(data[name][-1]))
                ended |= bool(data[name][-1])
        if not ended:
            self.account.remark("no end flag is set, so it is kept as cut", 1)
        return ended


def _digest(data: dict[str, Any]) -> bytes:
    digest = hashlib.sha256()
    for name, values in data.items():
        content = repr(values).encode() if isinstance(values, list) else values.tobytes()
        digest.update(name.encode() + content)
    return digest.digest()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = (p for p in path.rglob("*.parquet") if p.is_file() and not p.name.startswith("."))
    return sorted(found, key=lambda p: [natural(part) for part in p.relative_to(path).parts])


def _sniff(path: Path) -> bool:
    """By the first table with a footer that lies no deeper than RLlib puts one."""
    depths = ("*.parquet", "*/*.parquet", "*/*/*.parquet")
    found = [path] if path.is_file() else (file for depth in depths for file in path.glob(depth))
    for file in found:
        if arrow.has_footer(file):
            with arrow.open_parquet(file) as opened:
                names = set(opened.schema_arrow.names)
            return {"eps_id", "obs"} <= names or names == {EPISODES}
    return False


FORMAT = Format(
    name="rllib",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=RllibTables,
    options=frozenset({"infos"}),
)
