"""Quarantine: where a repair puts what it takes out of a store."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expstore.storage import files
from expstore.storage.layout import QUARANTINE, ArrayLayout
from expstore.storage.reading import Snapshot

REPORT_FILE = "report.json"
BLOCK_BYTES = 16 << 20  # of an episode's rows copied at a time


class Quarantine:
    """The directory of one repair; nothing in it is ever looked at, or written over.

    Args:
        store: the store's directory.
        number: of the commit that the repair is about to make.

    Attributes:
        path: of the directory, which is made when something is put there.
    """

    def __init__(self, store: Path, number: int) -> None:
        self.path = store / QUARANTINE / str(number)
        self._store = store
        self.is_used = False

    def take(self, name: str) -> None:
        """Move a file of the store, or a directory, under `files/`; one that is there."""
        if os.path.lexists(self._store / name):
            target = self._target("files", name)
            files.rename(self._store / name, target)
            files.sync_directory(target.parent)

    def keep(self, name: str, data: bytes) -> None:
        """Put bytes that are about to be written over under `bytes/`."""
        files.write_whole(self._target("bytes", name), data, durable=True)

    def copy(self, snapshot: Snapshot, number: int, start: int, stop: int) -> None:
        """What can be read of an episode, one `.npy` file for each array, under `episode-N/`.

        Args:
            snapshot: one that can be read, though rows may be damaged.
            number: of the episode.
            start: its first step.
            stop: the step after its last one.
        """
        home = self.path / f"episode-{number}"
        for name, low, high in _places(snapshot, number, start, stop):
            layout, file = snapshot.root.arrays[name], home / f"{name}.npy"
            self._make(file.parent)
            rows, header = max(1, BLOCK_BYTES // layout.row_bytes), _npy_header(layout, high - low)
            live = snapshot.root.commit.dims[layout.dimension]
            with files.opened(files.create(file)) as descriptor:
                files.pwrite(descriptor, header, 0, file)
                at = len(header)
                for first in range(low, high, rows):
                    part = snapshot.columns[name].slice(first, min(first + rows, high), *live)
                    data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                    files.pwrite(descriptor, data, at, file)
                    at += len(data)
                files.sync(descriptor, file)

    def report(self, document: Mapping[str, Any]) -> None:
        """Say what happened."""
        data = json.dumps(document, indent=2).encode()
        files.write_whole(self.path / REPORT_FILE, data, durable=True)
        files.sync_directory(self.path)

    def _make(self, directory: Path) -> None:
        files.make_directory(directory)
        self.is_used = True

    def _target(self, kind: str, name: str) -> Path:
        target = self.path / kind / name
        self._make(target.parent)
        while os.path.lexists(target):  # of a repair that was killed
            target = target.with_name(_next_name(target.name))
        return target


def _places(
    snapshot: Snapshot, number: int, start: int, stop: int
) -> Iterator[tuple[str, int, int]]:
    """The rows (first, stop) of each array that belong to an episode, as far as they are known."""
    dims = snapshot.root.commit.dims
    at = number - snapshot.first_episode
    for name, layout in snapshot.root.arrays.items():
        if layout.dimension == "step":
            yield name, start, stop
        elif layout.dimension == "episode":
            yield name, number, number + 1
    ends = snapshot.index.column("metadata/end")
    low = int(ends[at - 1]) if at else dims["episode/metadata/values"][0]
    yield from _if_possible(snapshot, "episodes/metadata/values", low, int(ends[at]))
    for name, reader in snapshot.following.items():
        first, last = reader.first_at(start), reader.first_at(stop)
        ragged = snapshot.schema[name].ragged
        for part in ("step", "present", "value/end" if ragged else "value"):
            yield from _if_possible(snapshot, f"next/{name}/{part}", first, last)
        if ragged:
            yield from _elements(snapshot, f"next/{name}/value", first, last)
    for name, about in snapshot.schema.fields.items():
        if about.ragged:
            yield from _elements(snapshot, f"steps/{name}", start, stop)


def _elements(
    snapshot: Snapshot, path: str, first: int, stop: int
) -> Iterator[tuple[str, int, int]]:
    if first < stop:
        layout = snapshot.root.arrays[f"{path}/end"]
        live = snapshot.root.commit.dims[layout.dimension]
        ends = snapshot.columns[f"{path}/end"].slice(max(first - 1, live[0]), stop, *live)
        elements = snapshot.root.arrays[f"{path}/values"].dimension
        low = int(ends[0]) if first > live[0] else snapshot.root.commit.dims[elements][0]
        yield from _if_possible(snapshot, f"{path}/values", low, int(ends[-1]))


def _if_possible(
    snapshot: Snapshot, name: str, low: int, high: int
) -> Iterator[tuple[str, int, int]]:
    """Bounds that were read from damaged rows may be anything."""
    start, stop = snapshot.root.commit.dims[snapshot.root.arrays[name].dimension]
    if start <= low <= high <= stop:
        yield name, low, high


def _npy_header(layout: ArrayLayout, num_rows: int) -> bytes:
    about = {
        "descr": layout.dtype.str,
        "fortran_order": False,
        "shape": (num_rows, *layout.row_shape),
    }
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, about)
    return header.getvalue()


def _next_name(name: str) -> str:
    found = re.fullmatch(r"(.*)~(\d+)", name)
    return f"{found[1]}~{int(found[2]) + 1}" if found else f"{name}~1"
