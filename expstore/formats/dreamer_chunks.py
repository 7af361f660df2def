"""Chunks of Dreamer V3's replay: streams of rows over many files, cut where `is_first` is set.

The action of a row was chosen on its observation; its reward, `is_last` and `is_terminal` are
of arriving there. So the last row of an episode is its final observation, and `reward` moves up
by one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.keyed import flags, last_only, scalars
from expstore.formats.npz import read_episode
from expstore.formats.provenance import HashedFiles
from expstore.formats.source import NOTHING, Account, Imported, SourceEpisode

FLAGS = ("is_first", "is_last", "is_terminal")
REQUIRED = ("reward", *FLAGS)
COUNTS = ("stepid", "consec", "reset")
LOGS = ("log/", "log_")
NOT_OF_THE_ENVIRONMENT = ("enc/", "dyn/", "dec/", *LOGS)
END = "0" * 22  # the successor of the last chunk of a stream
LAST_ROW = "the last row of an episode: its observation is the final one, its action led nowhere"
OLDER = "chunks that were saved again, with more rows or a successor"
_NAME = re.compile(r"[0-9TF]+-([0-9a-zA-Z]{22})-([0-9a-zA-Z]{22})-(\d+)\.npz")


@dataclass(frozen=True)
class Chunk:
    """One file, by what its name says."""

    name: str
    uuid: str
    successor: str
    length: int


@dataclass
class Begun:
    """The rows of an episode that is not read to its end yet."""

    key: str
    parts: list[Mapping[str, NDArray[Any]]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    is_headless: bool = False  # what was before its first row is not there

    def column(self, name: str) -> NDArray[Any]:
        return np.concatenate([part[name] for part in self.parts])

    @property
    def num_rows(self) -> int:
        return sum(len(part["reward"]) for part in self.parts)


class DreamerChunks:
    """The episodes of a folder, stream after stream; keys are `<chunk>/<row>` of their start."""

    boundary_rule = (
        "an episode starts with the row that has is_first set; is_terminal terminated it, and "
        "is_last alone truncated it"
    )
    num_episodes = None  # all rows would have to be read

    def __init__(self, path: Path, format: str) -> None:
        self.name = str(path.resolve())
        self.account = Account()
        self._format = format
        self._folder = path if path.is_dir() else path.parent
        self._hashes = HashedFiles(self._folder)
        self._chunks = self._find([path.name] if path.is_file() else _names(path))

    @property
    def num_steps(self) -> None:
        return None

    def describe(self) -> str:
        files = "chunk" if len(self._chunks) == 1 else "chunks"
        rows = sum(chunk.length for chunk in self._chunks.values())
        return f"{len(self._chunks):,} {files} of Dreamer V3 in {self.name}: {rows:,} rows"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        followed = {chunk.successor for chunk in self._chunks.values()}
        for first in [c for c in self._chunks.values() if c.uuid not in followed]:
            for begun, is_whole in self._stream(first):
                if begun.key in imported.keys:
                    self._check_length(begun, imported)
                    continue
                try:
                    episode = self._episode(begun, is_whole)
                except SourceError as error:
                    self.account.fail(begun.key, str(error))
                else:
                    yield episode

    def close(self) -> None:
        pass

    def _find(self, names: list[str]) -> dict[str, Chunk]:
        """uuid -> chunk, in the order of the names, which begin with the time."""
        chunks: dict[str, Chunk] = {}
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                self.account.fail(name, "its name is not that of a chunk")
                continue
            chunk = Chunk(name, match[1], match[2], int(match[3]))
            older = chunks.get(chunk.uuid)
            if older is not None:
                self.account.skip(OLDER)
                if _state(older) > _state(chunk):
                    chunk = older
            chunks[chunk.uuid] = chunk
        return chunks

    def _stream(self, first: Chunk) -> Iterator[tuple[Begun, bool]]:
        """Episodes of chunks that follow one another, and whether what follows them is there."""
        begun: Begun | None = None
        chunk: Chunk | None = first
        seen: set[str] = set()
        while chunk is not None and chunk.uuid not in seen:
            seen.add(chunk.uuid)
            try:
                rows = self._read(chunk)
            except SourceError as error:
                self.account.fail(chunk.name, str(error))
                if begun is not None:
                    yield begun, False
                begun = None
            else:
                starts = np.flatnonzero(rows["is_first"]).tolist()
                bounds = sorted({0, *starts, len(rows["reward"])})
                for start, stop in itertools.pairwise(bounds):
                    if rows["is_first"][start] and begun is not None:
                        yield begun, True
                        begun = None
                    if begun is None:
                        is_headless = not rows["is_first"][start]
                        begun = Begun(f"{chunk.uuid}/{start}", is_headless=is_headless)
                    begun.parts.append({name: v[start:stop] for name, v in rows.items()})
                    if chunk.name not in begun.files:
                        begun.files.append(chunk.name)
            if chunk.successor != END and chunk.successor not in self._chunks:
                self.account.remark(f"the chunk {chunk.successor} after another is not there")
            chunk = self._chunks.get(chunk.successor)
        if begun is not None:
            yield begun, False

    def _read(self, chunk: Chunk) -> dict[str, NDArray[Any]]:
        """The rows of a chunk; what is not of the environment is left out."""
        found = read_episode(self._folder / chunk.name).data
        if missing := [name for name in REQUIRED if name not in found]:
            raise SourceError(f"{', '.join(missing)} are missing, so it is no chunk of Dreamer V3")
        rows: dict[str, NDArray[Any]] = {}
        for name, values in found.items():
            if name in COUNTS:
                self.account.left_out[name] = "only counts"
            elif name.startswith(NOT_OF_THE_ENVIRONMENT):
                self.account.left_out[name] = "is of the agent or its log"
            elif len(values) != len(found["reward"]):
                raise SourceError(f"{name} has {len(values)} rows, reward {len(found['reward'])}")
            else:
                rows[name] = flags(name, values, Account()) if name in FLAGS else values
        return rows

    def _episode(self, begun: Begun, is_whole: bool) -> SourceEpisode:
        names = set(begun.parts[0])
        if any(set(part) != names for part in begun.parts):
            raise SourceError("its chunks do not have the same keys")
        num_steps = begun.num_rows - 1
        self.account.drop(1, LAST_ROW)
        is_last, is_terminal = (begun.column(name) for name in FLAGS[1:])
        data: dict[str, Any] = {
            "reward": scalars("reward", begun.column("reward"), self.account)[1:]
        }
        for name in names - {*REQUIRED}:
            values = begun.column(name)
            data |= {name: values[:-1]} if _is_action(name) else {f"observation/{name}": values}
        data["terminated"] = last_only(bool(is_terminal[-1]), num_steps)
        data["truncated"] = last_only(bool(is_last[-1] and not is_terminal[-1]), num_steps)
        for name, column in zip(FLAGS[1:], (is_last, is_terminal), strict=True):
            self.account.found(name, bool(column[-1]))
        if (is_last[:-1] | is_terminal[:-1]).any():
            raise SourceError("is_last or is_terminal is set before its last row")
        if begun.is_headless:
            self.account.remark("what was before the first row is not there", 1)
        return SourceEpisode(
            key=begun.key,
            data=data,
            end_reason=self._end(bool(is_last[-1] or is_terminal[-1]), is_whole, num_steps),
            provenance={"format": self._format, **self._hashes.together(begun.files)},
        )

    def _end(self, has_flag: bool, is_whole: bool, num_steps: int) -> str | None:
        """Why an episode ended: the next one started, or nothing is there after it."""
        if has_flag or not num_steps:
            return None
        self.account.remark("no end flag on the last row", 1)
        return "cut" if is_whole else "incomplete"

    def _check_length(self, begun: Begun, imported: Imported) -> None:
        length = imported.lengths.get(begun.key, begun.num_rows - 1)
        if length != begun.num_rows - 1:
            raise SourceError(
                f"episode {begun.key} of {self.name} has {begun.num_rows - 1} steps, but had "
                f"{length} when it was imported: it went on; import it to a new store"
            )


def is_chunk(keys: Collection[str], name: str) -> bool:
    """Whether a file with these keys is a chunk; the first releases wrote no `stepid`."""
    is_named = _NAME.fullmatch(name) is not None and "discount" not in keys
    return {*REQUIRED} <= set(keys) and ("stepid" in keys or is_named)


def _is_action(name: str) -> bool:
    return name == "action" or name.startswith("action/")


def _state(chunk: Chunk) -> tuple[int, bool]:
    return chunk.length, chunk.successor != END


def _names(folder: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.suffix == ".npz" and not entry.name.startswith(".")
    )
