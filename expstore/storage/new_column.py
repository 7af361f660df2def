"""NewColumn: the files of a column that is being added to a store that has steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from expstore.episode import Columns, Episode
from expstore.errors import SchemaError, StateError
from expstore.ragged import Ragged, Rows
from expstore.schema import Field, Schema
from expstore.storage import files
from expstore.storage.coded import CodedAppender
from expstore.storage.commits import Commit, Root, now, publish, write_documents
from expstore.storage.layout import (
    ADDING,
    EPISODE,
    ArrayLayout,
    canonical_json,
)
from expstore.storage.mapped import MappedAppender
from expstore.storage.moved_column import PROGRESS_FILE, column_arrays, noted_column
from expstore.storage.protocols import Appender
from expstore.storage.ragged import RaggedAppender, rows_checksum
from expstore.storage.reading import Snapshot
from expstore.storage.undecided import choose, is_undecided

NOTE_BYTES, NOTE_S = 64 << 20, 10.0  # of values, and of time, that a kill may cost


class NewColumn:
    """The files of a new column while they are made, in a place that readers do not look at.

    They lie under `__expstore/adding` as they will in the store, and are moved there, a directory
    at a time, right before the commit.
    """

    def __init__(self, path: Path, root: Root, name: str, layout: str, *, durable: bool) -> None:
        self._path, self._root, self._name = path, root, name
        self._layout, self._durable = layout, durable
        self._place = path / ADDING
        self._index = Snapshot(path, root).index
        first, self.stop_episode = root.commit.dims[EPISODE]
        self._first_episode = self.next_episode = first
        self._field: Field | None = None  # unknown until there is a value
        self._skipped: list[int] = []  # deleted episodes before the first value
        self._appenders: dict[str, Appender] = {}
        self._arrays: dict[str, ArrayLayout] = {}
        self._unnoted, self._noted_at = 0, time.monotonic()

    def __len__(self) -> int:
        return self.stop_episode - self._first_episode

    def length(self, episode: int) -> int:
        return int(self._index.column("length")[episode - self._first_episode])

    # -- from call to call -----------------------------------------------------------------------

    def begin(self, resume: bool) -> None:
        """Clear the place, or check that it has what is to be continued."""
        noted = noted_column(self._path) if resume else None
        if noted is None:
            files.remove_directory(self._place)
            return
        if (noted["name"], noted["store_id"]) != (self._name, self._root.store_id):
            raise StateError(
                f"what was not finished is field {noted['name']!r} of store {noted['store_id']}, "
                f"not {self._name!r} of {self._root.store_id}; call without resume=True to drop it"
            )
        # A kill between the moves and the commit leaves directories where the next opening
        # would take them for strays.
        for array in noted["rows"]:
            moved, place = self._path / array, self._place / array
            if not place.exists() and moved.exists():
                files.rename(moved, place)

    def take_up(self) -> int:
        """Continue after the episodes that are done; returns how many."""
        noted = noted_column(self._path)
        if noted is None or noted["next_episode"] <= self._first_episode:
            return self._start_anew()
        self._field = Schema.from_json({"fields": {self._name: noted["field"]}})[self._name]
        arrays = column_arrays(self._name, self._field, self._root.arrays)
        if not all(self._has_files(a, noted["rows"][p]) for p, a in arrays.items()):
            return self._start_anew()
        self._open(noted["rows"])
        self.next_episode = noted["next_episode"]
        return self.next_episode - self._first_episode

    def _start_anew(self) -> int:
        files.remove_directory(self._place)
        files.make_directory(self._place)
        self._field = None
        return 0

    def _has_files(self, layout: ArrayLayout, num_rows: int) -> bool:
        """Whether all files are there that hold rows up to this one; an opening may remove some."""
        first = self._first_row(layout) // layout.chunk_rows
        chunks = range(first, -(-num_rows // layout.chunk_rows))
        return all(files.size(self._place / layout.chunk_path(c)) is not None for c in chunks)

    # -- values ----------------------------------------------------------------------------------

    def fitted(self, values: Any, length: int, where: str) -> Rows:
        """One episode's values as they are stored.

        Raises:
            SchemaError: another length, or another shape or dtype than those before.
        """
        if not hasattr(values, "__len__") or len(values) != length:
            got = len(values) if hasattr(values, "__len__") else type(values).__name__
            raise SchemaError(
                f"field {self._name!r} must have {length} rows {where}, got {got}; return one "
                "value for each step"
            )
        known = {} if self._field is None else {self._name: self._field}
        columns = Columns.of({self._name: values}, where, known)
        schema = columns.schema(where) if self._field is None else Schema(known)
        rows = Episode.fit(columns, schema, where).columns[self._name]
        if self._field is None:
            self._decide(schema[self._name], rows)
        return rows

    def append(self, rows: Rows | None) -> None:
        """Add the rows of the next episode; None for zeros."""
        number, self.next_episode = self.next_episode, self.next_episode + 1
        if self._field is None:
            self._skipped.append(number)
            return
        self._write(self._zeros(self.length(number)) if rows is None else rows)
        if self._unnoted >= NOTE_BYTES or time.monotonic() - self._noted_at >= NOTE_S:
            self.note()

    def _write(self, rows: Rows) -> None:
        steps, name = f"steps/{self._name}", self._name
        if isinstance(rows, Ragged):
            values, end = self._appenders[f"{steps}/values"], self._appenders[f"{steps}/end"]
            RaggedAppender(values, end).append(rows)
        else:
            self._appenders[steps].append(rows)
        checksum = np.array([rows_checksum(rows)], "<u4")
        self._appenders[f"episodes/crc32c/{name}"].append(checksum)
        self._unnoted += rows.nbytes

    def _zeros(self, length: int) -> Rows:
        assert self._field is not None
        shape, dtype = self._field.shape, self._field.stored_dtype
        if self._field.ragged:
            return Ragged(np.empty((0, *shape), dtype), np.zeros(length, np.int64))
        return np.zeros((length, *shape), dtype)

    def _decide(self, field: Field, rows: Rows) -> None:
        """Settle the field by its first values, and write what comes before them."""
        field = replace(field, layout=self._layout)
        if is_undecided(field):
            assert not isinstance(rows, Ragged)
            field = replace(field, layout=choose(field, rows))
        elif field.layout == "auto":
            field = replace(field, layout="mapped")
        self._field = replace(field, added=self._root.commit.number + 1)
        self._open({})
        for number in self._skipped:
            self._write(self._zeros(self.length(number)))
        self._skipped = []

    # -- files -----------------------------------------------------------------------------------

    def note(self) -> None:
        """Make what is done survive a kill, and write down how far it goes."""
        if self._field is None:
            if not self._skipped:
                return
            raise SchemaError(f"there is no value for field {self._name!r}: all are deleted")
        for appender in self._appenders.values():
            appender.flush()
        if self._durable:
            files.together(c for appender in self._appenders.values() for c in appender.syncs())
        changed = [path for path, appender in self._appenders.items() if appender.place()]
        if self._durable:
            files.together([partial(files.sync_directory, self._place / p) for p in changed])
        noted = {
            "name": self._name,
            "store_id": self._root.store_id,
            "field": Schema({self._name: self._field}).to_json()["fields"][self._name],
            "rows": {path: appender.num_rows for path, appender in self._appenders.items()},
            "next_episode": self.next_episode,
        }
        data = canonical_json(noted)
        files.write_whole(self._path / PROGRESS_FILE, data, durable=self._durable)
        self._unnoted, self._noted_at = 0, time.monotonic()

    def publish(self) -> Root:
        """Move everything to its place and commit; all of it was noted."""
        new = self._new_root()
        parents = {self._path}
        for array in self._arrays:
            target = self._path / array
            files.make_directory(target.parent)
            if target.exists():  # empty, left by an attempt that was killed here
                files.remove_directory(target)
            files.rename(self._place / array, target)
            depth = len(Path(array).parts) - 1
            parents.update(list(target.parents)[:depth])
        if self._durable:
            files.together([partial(files.sync_directory, parent) for parent in sorted(parents)])
        publish(self._path, new, durable=self._durable)
        write_documents(self._path, new, durable=self._durable)
        files.remove_directory(self._place)
        return new

    def _new_root(self) -> Root:
        assert self._field is not None
        number = self._root.commit.number + 1
        field = replace(self._field, added=number)
        schema = Schema({**self._root.schema.fields, self._name: field})
        dims = dict(self._root.commit.dims)
        for path, layout in self._arrays.items():
            if layout.dimension not in dims:
                dims[layout.dimension] = (0, self._appenders[path].num_rows)
        arrays = {**self._root.arrays, **self._arrays}
        return Root(self._root.store_id, schema, Commit(number, now(), dims), arrays)

    def close(self) -> None:
        with ExitStack() as stack:
            for appender in self._appenders.values():
                stack.callback(appender.close)

    def _open(self, rows: Mapping[str, int]) -> None:
        """Open the arrays after so many rows of each, by path; by default before the first."""
        assert self._field is not None
        self._arrays = column_arrays(self._name, self._field, self._root.arrays)
        for path, layout in self._arrays.items():
            files.make_directory(self._place / path)
            first = self._first_row(layout)
            # A file begins with its first row, which here may have left the store.
            at = rows.get(path, first - first % layout.chunk_rows)
            kind = CodedAppender if layout.is_coded else MappedAppender
            appender: Appender = kind(self._place, layout, at)
            if at < first and path not in rows:
                appender.append(np.zeros((first - at, *layout.row_shape), layout.dtype))
            self._appenders[path] = appender

    def _first_row(self, layout: ArrayLayout) -> int:
        return self._root.commit.dims.get(layout.dimension, (0, 0))[0]
