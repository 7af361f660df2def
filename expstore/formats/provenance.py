"""Provenance: which bytes an episode was read from, as size and hash of its file or folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20


class FileProvenance:
    """One file; it is hashed once, when the first episode of it is asked for."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self._path = path
        self._name = {} if name is None else {"file": name}  # where the source has many files

    @cached_property
    def entries(self) -> dict[str, Any]:
        """`file` where it has a name, `num_bytes` and `sha256`, for an episode's provenance.

        Raises:
            OSError: it cannot be read.
        """
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        return {
            **self._name,
            "num_bytes": self._path.stat().st_size,
            "sha256": digest.hexdigest(),
        }


class HashedFiles:
    """Files of one folder, each of which is hashed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, FileProvenance] = {}

    def entries(self, name: str) -> dict[str, Any]:
        """Of the file at that path from the folder."""
        if name not in self._files:
            self._files[name] = FileProvenance(self._folder / name, name)
        return self._files[name].entries

    def together(self, names: Sequence[str]) -> dict[str, Any]:
        """Of several files as one: `file` and `last_file`, and the hash of their hashes."""
        found = [self.entries(name) for name in names]
        if len(found) == 1:
            return found[0]
        hashes = "".join(entries["sha256"] for entries in found)
        return {
            "file": names[0],
            "last_file": names[-1],
            "num_bytes": sum(entries["num_bytes"] for entries in found),
            "sha256": hashlib.sha256(hashes.encode()).hexdigest(),
        }


def folder_provenance(folder: Path) -> dict[str, Any]:
    """Size and hash of all files under a folder.

    The hash is that of each file's path from the folder, a zero byte, its size in decimal, a
    zero byte and its content, in the order of the paths; so it changes with a name, too.
    """
    digest, num_bytes = hashlib.sha256(), 0
    for name, file in sorted((p.relative_to(folder).as_posix(), p) for p in _files(folder)):
        size = file.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as opened:
            while block := opened.read(BLOCK_BYTES):
                digest.update(block)
        num_bytes += size
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
