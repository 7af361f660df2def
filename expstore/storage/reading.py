"""Any steps of any columns of one store directory, as of one commit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError, FieldNotFoundError, NotAStoreError
from expstore.ragged import Ragged, Rows, spread
from expstore.schema import Field, Schema, unknown_field
from expstore.spans import Spans
from expstore.storage import files
from expstore.storage.advice import ReadAhead
from expstore.storage.boundaries import ends_of
from expstore.storage.coded import CodedColumn
from expstore.storage.commits import Root, read_root
from expstore.storage.contiguity import first_gap
from expstore.storage.episodes import EpisodeIndex
from expstore.storage.following import NextReader
from expstore.storage.holding import Hold, settle
from expstore.storage.layout import EPISODE, METADATA_FILE, STEP, ArrayLayout
from expstore.storage.mapping import MappedColumn
from expstore.storage.parallel import ONE, Threads
from expstore.storage.planning import BatchPlan
from expstore.storage.protocols import Column
from expstore.storage.ragged import RaggedColumn
from expstore.storage.tombstones import read_tombstones

STRIDE = 1 << 40  # in a union, store k's steps and episodes are numbered from k * STRIDE on
DERIVED = {
    "done": Field((), "bool", "mapped"),
    "episode": Field((), "int64", "mapped"),
    "has_next": Field((), "bool", "mapped"),
}


class Snapshot:
    """A store directory at a commit: numbers and maps, no rows in memory.

    Snapshots of a store in one process share what they have mapped, unless one is `fresh`: that
    looks at the files as they are now, also where one was replaced or damaged meanwhile.
    """

    def __init__(
        self,
        path: Path,
        root: Root,
        version: tuple[int, int, int] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self.path = path
        self.root = root
        self.version = version  # of the root file it was read from
        self.columns: dict[str, Column] = {
            name: column_of(path, layout) if fresh else shared_column(path, root.store_id, layout)
            for name, layout in root.arrays.items()
        }
        self.read_ahead = ReadAhead() if fresh else shared_read_ahead(path, root.store_id)
        dims = root.commit.dims
        self.first_step, self.stop_step = dims[STEP]
        self.first_episode, self.stop_episode = dims[EPISODE]
        self._ends: dict[str, NDArray[np.int64]] = {}
        starts = {name: dims[layout.dimension][0] for name, layout in root.arrays.items()}
        self._hold = Hold(self.columns, starts)
        self.index = EpisodeIndex(self.columns, dims, root.schema, self._hold.kept)

    @staticmethod
    def of(path: Path, *, fresh: bool = False) -> Snapshot:
        """The newest commit of the store at `path`."""
        # The version is taken first: a commit in between makes `is_newest` say no, never yes.
        try:
            version = files.version(path / METADATA_FILE)
        except OSError:
            version = None  # read_root explains
        return Snapshot(path, read_root(path), version, fresh=fresh)

    def is_newest(self) -> bool:
        """Whether no commit was published since; costs one `stat`."""
        settle()  # those who ask again and again are who lets go of evicted files
        try:
            return self.version == files.version(self.path / METADATA_FILE)
        except OSError:
            return False

    @property
    def schema(self) -> Schema:
        return self.root.schema

    @cached_property
    def following(self) -> dict[str, NextReader]:
        """The exceptions of each field that has next values."""
        return {
            name: NextReader(
                self.columns[f"next/{name}/step"],
                self.columns[f"next/{name}/present"],
                self._reader(f"next/{name}/value", name, f"next/{name}/values"),
                *self.root.commit.dims[f"next/{name}"],
            )
            for name in self.schema.next_fields
        }

    @cached_property
    def deleted(self) -> NDArray[np.int64]:
        """(K,) ascending numbers of the episodes in the live range that were deleted.

        Raises:
            DamagedError: a number that no episode has.
        """
        found = read_tombstones(self.columns, self.root.commit.dims).episode
        if len(found) and not 0 <= found.min() <= found.max() < self.stop_episode:
            raise DamagedError(
                f"{self.path} has tombstones of episodes that it never had; run expstore verify"
            )
        return np.unique(found[found >= self.first_episode])

    @cached_property
    def present(self) -> NDArray[np.int64] | None:
        """(E,) ascending numbers of the live episodes; None where none of them was deleted."""
        if not len(self.deleted):
            return None
        self.index.column("length")  # raises where files are missing: there may not be so many
        numbers = np.arange(self.first_episode, self.stop_episode)
        return np.delete(numbers, self.deleted - self.first_episode)

    def spans(self, episodes: NDArray[np.int64] | None = None) -> Spans:
        """The given episodes (numbers, ascending) as spans of this store's own step numbers.

        Raises:
            DamagedError: the index has them elsewhere than one after the other.
        """
        start, length = self.index.column("start"), self.index.column("length")
        self._check_contiguous(start, length)
        if episodes is not None:
            at = episodes - self.first_episode
            return Spans.laid_out(start[at], length[at])
        first = start if not self.first_step else start - self.first_step
        streams = np.array([0, self.stop_step - self.first_step])
        return Spans(start, first, length, streams)

    def _check_contiguous(self, start: NDArray[np.int64], length: NDArray[np.int64]) -> None:
        column = self.columns.get("episodes/length")
        episodes = self.first_episode, self.stop_episode
        steps = self.first_step, self.stop_step
        if column is None:  # of a store without fields, which has no steps
            return
        gap = first_gap(column, episodes, start, length, steps)
        if gap is not None:
            raise DamagedError(
                f"the index of {self.path} does not say where episode {gap} lies; run expstore "
                "verify"
            )

    def ends(self, name: str) -> NDArray[np.int64]:
        """(K,) ascending live steps at which a field of single numbers is not 0."""
        if self.first_step == self.stop_step:  # there may be no column yet
            return np.empty(0, np.int64)
        if name not in self._ends:
            column = self._column(name)
            ends = ends_of(column, self.schema[name])
            self._ends[name] = ends.between(column, self.first_step, self.stop_step)
        return self._ends[name]

    def take(
        self, name: str, steps: NDArray[np.int64], out: NDArray[Any], threads: Threads = ONE
    ) -> None:
        """Read one field at live steps (n,) in any order into `out` (n, *shape)."""
        self.read_into(steps, {name: out}, threads)

    def read_into(
        self, steps: NDArray[np.int64], out: dict[str, NDArray[Any]], threads: Threads = ONE
    ) -> None:
        """Read fields at live steps (n,) in any order, each into its array (n, *shape)."""
        if not len(steps):  # a store without steps has no columns
            return
        live = self.first_step, self.stop_step
        plan = BatchPlan(threads, self.read_ahead)
        after: NDArray[np.int64] | None = None
        corrections: list[Callable[[], None]] = []
        for name, array in out.items():
            if name == "has_next":
                corrections.append(partial(self._take_has_next, steps, array))
            elif name.startswith("next_"):
                name = name.removeprefix("next_")
                after = np.minimum(steps + 1, self.stop_step - 1) if after is None else after
                plan.add(self._column(name), after, array, *live)
                corrections.append(self._correction(plan, name, steps, array))
            else:
                plan.add(self._column(name), steps, array, *live)
        plan.run()
        for correct in corrections:
            correct()

    def take_ragged(self, name: str, steps: NDArray[np.int64]) -> Ragged:
        """Read one ragged field, or `next_` of it, at live steps (n,) in any order."""
        live = self.first_step, self.stop_step
        if not name.startswith("next_"):
            return self._ragged(name).read(steps, *live)
        name = name.removeprefix("next_")
        after = self._ragged(name).read(np.minimum(steps + 1, self.stop_step - 1), *live)
        if name in self.following:
            return self.following[name].corrected(steps, after)
        kept = np.where(self._done(steps), 0, after.lengths)
        return Ragged(after.values[spread(after.ends - after.lengths, kept)], kept)

    def rows(self, name: str, first: int, last: int) -> Rows:
        """Consecutive rows of a stored field, where possible without a copy."""
        if name in self.schema.fields and self.schema[name].ragged:
            return self._ragged(name).slice(first, last, self.first_step, self.stop_step)
        rows = self._column(name).slice(first, last, self.first_step, self.stop_step)
        return self._hold.kept(rows)

    def _column(self, name: str) -> Column:
        return self.columns[f"steps/{name}"]

    def _ragged(self, name: str) -> RaggedColumn:
        reader = self._reader(f"steps/{name}", name, f"{name}/values")
        assert isinstance(reader, RaggedColumn), name
        return reader

    def _reader(self, path: str, name: str, dimension: str) -> Column | RaggedColumn:
        """What reads the values of a field at `path`; `dimension` is that of its elements."""
        field = self.schema[name]
        if not field.ragged:
            return self.columns[path]
        values, end = self.columns[f"{path}/values"], self.columns[f"{path}/end"]
        live = self.root.commit.dims[dimension]
        return RaggedColumn(values, end, field.shape, field.stored_dtype, *live)

    def _correction(
        self, plan: BatchPlan, name: str, steps: NDArray[np.int64], out: NDArray[Any]
    ) -> Callable[[], None]:
        """What puts next values into `out` that the following step does not hold."""
        if name in self.following:
            return self.following[name].planned(plan, steps, out)

        def correct() -> None:
            out[self._done(steps)] = 0

        return correct

    def _take_has_next(self, steps: NDArray[np.int64], out: NDArray[Any]) -> None:
        readers = self.following.values()
        out[...] = True if readers else ~self._done(steps)
        for reader in readers:
            out &= reader.has_next(steps)

    def _done(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        done = np.empty(len(steps), bool)
        self.take("done", steps, done)
        return done


_columns: weakref.WeakValueDictionary[tuple[str, str, str, int, int], Column] = (
    weakref.WeakValueDictionary()
)


def shared_column(root: Path, store_id: str, layout: ArrayLayout) -> Column:
    """The column of this store that all its snapshots in this process read."""
    key = (str(root), store_id, layout.path, layout.chunk_rows, layout.inner_rows)
    column = _columns.get(key)
    if column is None:
        column = _columns[key] = column_of(root, layout)
    return column


_read_aheads: weakref.WeakValueDictionary[tuple[str, str], ReadAhead] = (
    weakref.WeakValueDictionary()
)


def shared_read_ahead(root: Path, store_id: str) -> ReadAhead:
    """What all snapshots of this store in this process know about what is in memory."""
    return _read_aheads.setdefault((str(root), store_id), ReadAhead())


def column_of(root: Path, layout: ArrayLayout) -> Column:
    """A column that shares nothing."""

    def live_start() -> int:
        try:
            return read_root(root).commit.dims.get(layout.dimension, (0, 0))[0]
        except NotAStoreError:
            raise NotAStoreError(
                f"{root} was moved or deleted while it was open for reading; open it again where "
                "it is, or put it back"
            ) from None

    kind = CodedColumn if layout.is_coded else MappedColumn
    return kind(root, layout, live_start)


def resolve(schema: Schema, names: Iterable[str] | None) -> dict[str, Field]:
    """The fields that the given names stand for, in order.

    Args:
        names: fields, groups of fields (`observation` for everything under it), `next_` of
            either, `done`, `episode`, `has_next`; None for every field of the schema.

    Raises:
        FieldNotFoundError: a name that stands for nothing.
    """
    if names is None:
        return dict(schema.fields)
    if isinstance(names, str):
        names = (names,)
    found: dict[str, Field] = {}
    for name in names:
        found.update(_resolve_one(schema, name))
    return found


def _resolve_one(schema: Schema, name: str) -> dict[str, Field]:
    if name in DERIVED:
        return {name: DERIVED[name]}
    if not isinstance(name, str):
        raise FieldNotFoundError(unknown_field(name, {**schema.fields, **DERIVED}))
    prefix = "next_" if name.startswith("next_") else ""
    wanted = name.removeprefix(prefix)
    found = {
        f"{prefix}{known}": replace(f, has_next=False)
        for known, f in schema.fields.items()
        if known == wanted or known.startswith(f"{wanted}/")
    }
    if not found:
        raise FieldNotFoundError(unknown_field(name, {**schema.fields, **DERIVED}))
    return found
