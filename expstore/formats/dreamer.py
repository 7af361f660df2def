"""Dreamer V1 and V2 and DrQ-v2: an `.npz` file per episode; and the chunks of Dreamer V3.

In V1, V2 and DrQ-v2 the action of a row led to its observation: row 0 is the reset, whose
action and reward are dummies, and `action[t + 1]` was chosen on `observation[t]`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.archive import UNREADABLE, is_zip
from expstore.formats.dreamer_chunks import LOGS, DreamerChunks, is_chunk
from expstore.formats.keyed import KeyedSource, flags, last_only, scalars
from expstore.formats.npz import read_episode
from expstore.formats.ordering import natural
from expstore.formats.source import Account, Format, Source, SourceEpisode

REQUIRED = ("action", "reward")
TERMINAL = ("discount", "is_terminal")  # one of them at least
FLAGS = ("is_first", "is_last", "is_terminal")
TRIED = 8  # files of a folder that are looked into, where some are damaged
DUMMY = "row 0 of an episode, whose action and reward are dummies"
NOT_TERMINAL = "not terminal, and the file has no is_last, so it is kept as cut"
LOOKS_FOR = (
    "a folder of .npz files, or one, with equally many rows of action, reward, discount or "
    "is_terminal, and image or observation, of which row 0 is a dummy (Dreamer V1 and V2, DrQ-v2); "
    "or one with is_first, is_last and stepid (Dreamer V3)"
)


class DreamerEpisodes(KeyedSource):
    """The files of a folder in the order of their names, which are their keys."""

    boundary_rule = (
        "each file is one episode; is_terminal, or a last discount of 0, terminated it, and "
        "is_last alone truncated it"
    )

    def __init__(self, path: Path) -> None:
        super().__init__(str(path.resolve()))
        self._files = {file.name: file for file in _files(path)}
        self.keys = list(self._files)

    def describe(self) -> str:
        files = "file" if len(self.keys) == 1 else "files"
        return f"{len(self.keys):,} Dreamer or DrQ-v2 {files} in {self.name}"

    def read(self, key: int | str) -> SourceEpisode:
        found = read_episode(self._files[str(key)])
        rows = dict(found.data)
        if not _is_episode(rows):
            raise SourceError(f"it is not of Dreamer or DrQ-v2; looked for {LOOKS_FOR}")
        lengths = {name: len(values) for name, values in rows.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise SourceError(f"its arrays must have equally many rows, got {listed}")
        data, end = self._columns(rows)
        return SourceEpisode(
            key=key,
            data=data,
            end_reason=end,
            metadata=dict(found.metadata),
            provenance={**found.provenance, "format": FORMAT.name, "file": key},
        )

    def _columns(self, rows: dict[str, NDArray[Any]]) -> tuple[dict[str, Any], str | None]:
        if np.any(rows["action"][:1]) or np.any(rows["reward"][:1]):
            self.account.remark("row 0 has an action or a reward that is not zero", 1)
        self.account.drop(min(1, len(rows["action"])), DUMMY)
        given = {name: flags(name, rows.pop(name), Account()) for name in FLAGS if name in rows}
        if "is_first" in given and given["is_first"][1:].any():
            raise SourceError("is_first is set after row 0, so it is more than one episode")
        numbers = [name for name in ("reward", "discount") if name in rows]
        data: dict[str, Any] = {
            name: scalars(name, rows.pop(name), self.account)[1:] for name in numbers
        }
        data["action"] = rows.pop("action")[1:]
        for name in [name for name in rows if name.startswith(LOGS)]:
            self.account.left_out[name] = "is of the log"
            del rows[name]
        alone = rows.keys() == {"observation"}
        data |= {n if alone else f"observation/{n}": values for n, values in rows.items()}
        num_steps = len(data["reward"])
        if not num_steps:
            return data, None
        terminal = given.get("is_terminal")
        is_terminal = bool(data["discount"][-1] == 0 if terminal is None else terminal[-1])
        data["terminated"] = last_only(is_terminal, num_steps)
        self.account.found("discount is 0" if terminal is None else "is_terminal", is_terminal)
        if "is_last" not in given:
            if not is_terminal:
                self.account.remark(NOT_TERMINAL, 1)
            return data, None if is_terminal else "cut"
        is_last = bool(given["is_last"][-1])
        self.account.found("is_last", is_last)
        data["truncated"] = last_only(is_last and not is_terminal, num_steps)
        return data, None if is_last or is_terminal else "incomplete"


def open_folder(path: Path) -> Source:
    """The episodes of a folder or a file, of whichever version they are.

    Raises:
        SourceError: there are no such files.
    """
    first = _first(path)
    if first is None:
        raise SourceError(f"{path} is not of Dreamer or DrQ-v2; looked for {LOOKS_FOR}")
    return DreamerChunks(path, FORMAT_NAME) if is_chunk(*first) else DreamerEpisodes(path)


def _is_episode(names: Mapping[str, Any]) -> bool:
    others = names.keys() - {*REQUIRED, *TERMINAL, *FLAGS}
    has_terminal = any(name in names for name in TERMINAL)
    return set(REQUIRED) <= names.keys() and has_terminal and bool(others)


def _first(path: Path) -> tuple[list[str], str] | None:
    """Keys and name of the first file that can be read."""
    for file in _files(path)[:TRIED]:
        try:
            with zipfile.ZipFile(file) as archive:
                keys = [name.removesuffix(".npy") for name in archive.namelist()]
                return keys, file.name
        except UNREADABLE:
            continue
    return None


def _files(path: Path) -> list[Path]:
    """Those of a folder, those being written left out; or the file itself."""
    if path.is_file():
        return [path]
    found = (entry for entry in path.iterdir() if entry.suffix == ".npz" and entry.is_file())
    visible = [entry for entry in found if not entry.name.startswith(".")]
    return sorted(visible, key=lambda file: natural(file.name))


def _begins_with_a_dummy(file: Path) -> bool:
    """Whether a file is an episode of which row 0 is that of a reset."""
    rows = dict(read_episode(file).data)
    if not _is_episode(rows) or len({len(values) for values in rows.values()}) != 1:
        return False
    is_zero = not any(np.any(rows[name][:1]) for name in REQUIRED)
    is_start = bool(np.all(rows["discount"][:1] == 1) if "discount" in rows else True)
    if "is_first" in rows:
        is_start &= bool(np.all(rows["is_first"][:1]))
    return len(rows["action"]) > 0 and is_zero and is_start


def _sniff(path: Path) -> bool:
    first = _first(path)
    if first is None:
        return False
    if is_chunk(*first):
        return True
    if not _is_episode(dict.fromkeys(first[0])):
        return False
    for file in _files(path)[:TRIED]:
        try:
            if is_zip(file):
                return _begins_with_a_dummy(file)
        except SourceError:  # damaged; another one may tell
            continue
    return False


FORMAT_NAME = "dreamer"
FORMAT = Format(name=FORMAT_NAME, looks_for=LOOKS_FOR, sniff=_sniff, open=open_folder)
