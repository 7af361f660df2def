"""The appenders of all arrays of a store, which go forward and back together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from expstore.schema import Schema
from expstore.storage import files
from expstore.storage.coded import CodedAppender
from expstore.storage.episodes import IndexAppender
from expstore.storage.layout import ArrayLayout, ChunkLimits, arrays_of
from expstore.storage.mapped import MappedAppender
from expstore.storage.protocols import Appender
from expstore.storage.undecided import UndecidedAppender, choose, is_undecided


class Appenders(Mapping[str, Appender]):
    """One appender for each array, by path.

    Attributes:
        schema: with the layouts decided so far.
        arrays: every array's layout.
        index: adds to the arrays under `episodes/`.
        has_failed: rows could not be synced. The system reports this once, then forgets the
            rows: no commit may follow.
    """

    def __init__(
        self,
        root: Path,
        schema: Schema,
        arrays: Mapping[str, ArrayLayout],
        counts: Mapping[str, int],
        limits: ChunkLimits,
        *,
        durable: bool,
    ) -> None:
        self.schema = schema
        self.arrays = dict(arrays)
        self.has_failed = False
        self._root, self._limits, self._durable = root, limits, durable
        self._undecided = {n for n, f in schema.fields.items() if is_undecided(f)}
        waiting = {path for name in self._undecided for path in _arrays_of_field(schema, name)}
        self._appenders: dict[str, Appender] = {
            path: UndecidedAppender(self.decide)
            if path in waiting
            else self._appender(layout, counts[layout.dimension])
            for path, layout in self.arrays.items()
        }
        self.index = IndexAppender(self._appenders)
        # One array for each dimension, since all of one have the same number of rows.
        self._one_of = {
            layout.dimension: self._appenders[path]
            for path, layout in self.arrays.items()
            if not path.startswith("episodes/")
        }

    def __getitem__(self, path: str) -> Appender:
        return self._appenders[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._appenders)

    def __len__(self) -> int:
        return len(self._appenders)

    def counts(self) -> dict[str, int]:
        """Rows appended along each dimension; all arrays of one agree."""
        rows = {dimension: appender.num_rows for dimension, appender in self._one_of.items()}
        return rows | self.index.counts()

    def decide(self) -> None:
        """Choose the layout of the fields that waited for data, if there is some by now."""
        for name in sorted(self._undecided):
            step_array = self._waiting(f"steps/{name}")
            if step_array.num_rows:
                self._settle(name, choose(self.schema[name], step_array.rows()))

    def flush(self) -> None:
        """Hand all rows to the operating system; can be called again when that failed."""
        self.index.flush()
        for appender in self._appenders.values():
            appender.flush()

    def place(self, *, durable: bool) -> None:
        """Put what was flushed where the next commit will look for it."""
        if durable:
            files.together(c for appender in self._appenders.values() for c in appender.syncs())
        changed = [path for path, appender in self._appenders.items() if appender.place()]
        if durable:
            files.together([partial(files.sync_directory, self._root / path) for path in changed])

    def rewind(self, counts: Mapping[str, int]) -> None:
        """Forget the rows that go beyond `counts` of each dimension."""
        self.index.rewind(counts)
        for path, layout in self.arrays.items():
            if not path.startswith("episodes/"):
                self._appenders[path].rewind(counts[layout.dimension])

    def close(self) -> None:
        with ExitStack() as stack:  # all of them, also when one reports an error
            for appender in self._appenders.values():
                stack.callback(appender.close)

    def _settle(self, name: str, layout: str) -> None:
        field = replace(self.schema[name], layout=layout)
        schema = Schema({**self.schema.fields, name: field})
        settled, paths = arrays_of(schema, self._limits), _arrays_of_field(schema, name)
        ready = {path: self._appender(settled[path], 0) for path in paths}
        try:
            for path, appender in ready.items():
                self._waiting(path).hand_over(appender)
        except BaseException:  # nothing is decided yet: it is tried again with the next commit
            for appender in ready.values():
                appender.close()
            raise
        self.schema = schema
        self._undecided.remove(name)
        for path, appender in ready.items():
            self.arrays[path] = settled[path]
            self._waiting(path).become(appender)

    def _waiting(self, path: str) -> UndecidedAppender:
        appender = self._appenders[path]
        assert isinstance(appender, UndecidedAppender), path
        return appender

    def _sync(self, calls: list[Callable[[], None]]) -> None:
        if self._durable:
            try:
                files.together(calls)
            except BaseException:
                self.has_failed = True
                raise

    def _appender(self, layout: ArrayLayout, num_rows: int) -> Appender:
        if layout.is_coded:
            return CodedAppender(self._root, layout, num_rows)
        return MappedAppender(self._root, layout, num_rows, self._sync, early=self._durable)


def _arrays_of_field(schema: Schema, name: str) -> list[str]:
    """The arrays whose layout is that of the field."""
    return [f"steps/{name}", *([f"next/{name}/value"] if schema[name].has_next else [])]
