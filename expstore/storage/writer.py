"""Writer: whole episodes appended, published by commits."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from expstore.episode import Columns, Episode, check_end_reason, encode_metadata
from expstore.errors import ExpstoreError, SchemaError, WriterStateError
from expstore.schema import LAYOUTS, Schema
from expstore.storage import files
from expstore.storage.appenders import Appenders
from expstore.storage.capacity import Capacity, remove_evicted, starts_of
from expstore.storage.commits import (
    Commit,
    Recovery,
    Root,
    WriterLock,
    cut_history,
    is_free,
    note_writing,
    now,
    publish,
    read_root,
    recover,
    remove_strays,
    write_documents,
)
from expstore.storage.episodes import IndexRow
from expstore.storage.layout import (
    EPISODE,
    HISTORY_FILE,
    METADATA_FILE,
    NO_SEED,
    PRIVATE,
    STEP,
    WRITING_FILE,
    ArrayLayout,
    ChunkLimits,
    arrays_of,
    most_rows,
    parents,
)
from expstore.storage.open_episode import OpenEpisode
from expstore.storage.postprocessing import Function, Postprocess
from expstore.storage.reading import Snapshot
from expstore.storage.store import absolute
from expstore.storage.stored_episode import StoredEpisode
from expstore.storage.streaming import EpisodeStream, StreamCalls
from expstore.storage.undecided import is_undecided

# Single arrays' metadata follows the root's commits at most this often, since it takes longer
# than all the rest of a commit; closing brings it up, and so does opening.
DOCUMENTS_INTERVAL_S = 1.0


class Writer:
    """Appends episodes to a store, which it creates if there is none.

    One writer at a time holds a store's lock; readers need none. An appended episode is
    visible to readers after the next commit: one is made in `append` when
    `commit_interval_s` has passed since the last one, by `commit()`, and at the end of the
    block, also when an exception ends it.

    Args:
        path: the store's directory.
        schema: fields, shapes and dtypes; by default the first episode decides.
        layout: "auto", "mapped" (plain bytes) or "coded" (compressed), for all fields or as
            {field: layout}.
        cast: allow casts that lose nothing (float32 to float64); `casts` counts them.
        postprocess: runs on each episode before it is appended: from a `FinishedEpisode`, which
            is a nested dict of arrays, to the fields that are to be stored. What ran is in the
            episode's metadata. Ready ones are in `expstore.ingest.postprocess`.
        chunk_steps: steps per file, a power of two; by default by the size of a step. Small
            steps get more, so that a file fills whole pages.
        expected_steps: a size hint: with 10**8 steps or more to come, files are made larger.
        capacity_steps: how many steps the store may hold; the oldest episodes leave, whole.
        capacity_bytes: how many bytes its files may take on disk, likewise. Space comes back
            file by file, so up to a tenth more is taken.
        commit_interval_s: seconds between commits made by `append`.
        durable: sync before publishing, so that a commit survives a power cut. Without, it
            survives a kill of the process only.
        lock: False to write without the lock, where the file system has none.

    Raises:
        StoreLockedError: another writer is open.
        NotAStoreError: the directory holds something else.
        FormatError: the store was made by a newer version.
        SchemaError: `schema` differs from that of the store.
        StorageError: the directory cannot be written.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     writer.append({"observation": np.zeros((4, 2)), "reward": np.ones(3)}, policy="a")
        0
        >>> expstore.open(path).num_steps
        3
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        schema: Schema | None = None,
        layout: str | Mapping[str, str] = "auto",
        cast: bool = False,
        postprocess: Function | None = None,
        chunk_steps: int | None = None,
        expected_steps: int | None = None,
        capacity_steps: int | None = None,
        capacity_bytes: int | None = None,
        commit_interval_s: float = 5.0,
        durable: bool = True,
        lock: bool = True,
    ) -> None:
        _check_sizes(chunk_steps, expected_steps, commit_interval_s)
        _check_layouts(layout)
        self.path = absolute(path)
        self.casts: dict[str, int] = {}  # field -> rows that were cast
        self._cast = cast
        self._postprocess = Postprocess(postprocess) if postprocess is not None else None
        self._layout = layout
        self._most_rows = most_rows(chunk_steps, expected_steps)
        self._capacity = Capacity(capacity_steps, capacity_bytes)
        self._limits = ChunkLimits(self._most_rows)
        self._commit_interval_s = commit_interval_s
        self._durable = durable
        self._process = os.getpid()
        self._broken: str | None = None
        self._closed = True
        self._stream: EpisodeStream | None = None
        self._note_file = self.path / WRITING_FILE  # which says what was appended
        self._noted = -1  # its descriptor
        self._new_groups: list[Path] = []  # directories of a schema that is not committed yet
        self._appenders = Appenders(self.path, Schema(), {}, {}, self._limits, durable=durable)
        # Who forgets to close it loses nothing when the interpreter ends.
        atexit.register(_close_at_exit, weakref.ref(self))
        self._lock = WriterLock(self.path) if lock else None
        self._open(schema)

    # -- opening and closing ---------------------------------------------------------------------

    def _open(self, schema: Schema | None) -> None:
        fresh = not (self.path / METADATA_FILE).exists()
        if fresh and not is_free(self.path):
            read_root(self.path)  # raises, and says what is there instead
        if not fresh:
            read_root(self.path)  # before anything is touched
        # Whose names are new lie in these, besides the one that the store itself lies in.
        parents_of_new = [p.parent for p in self.path.parents if not p.exists()]
        files.make_directory(self.path / PRIVATE)
        if self._lock:
            self._lock.acquire()
        try:
            self._start(schema, parents_of_new)
        except BaseException:
            self._let_go()
            raise

    def _start(self, schema: Schema | None, parents_of_new: list[Path]) -> None:
        """With the lock: read or create the root, mend what the last writer left."""
        self.recovery = Recovery()
        if (self.path / METADATA_FILE).exists():
            self._root = read_root(self.path)
            _check_same_schema(self._root.schema, schema)
            self.recovery = recover(self.path, self._root, durable=self._durable)
        else:
            self._root = Root.new()
            cut_history(self.path, self._root.commit.number - 1)  # of creations that were killed
            if self._durable:
                # The history's name is durable before there is a root, which it must not lag.
                files.append_line(self.path / HISTORY_FILE, b"", durable=False)
                own = self.path / PRIVATE, self.path, self.path.parent
                for directory in (*own, *parents_of_new):
                    files.sync_directory(directory)
            publish(self.path, self._root, durable=self._durable)
        self._version = files.version(self.path / METADATA_FILE)
        self._noted = files.create(self._note_file)
        self._adopt(self._root)
        self._last_commit = self._last_documents = time.monotonic()
        self._documented = self._root.commit.number
        self._closed = False
        if schema is not None and not self._root.schema.fields:
            self._define(schema)
            self.commit()

    def _adopt(self, root: Root) -> None:
        """Continue after what `root` has committed."""
        before = self._appenders
        self._counts = {name: stop for name, (_, stop) in root.commit.dims.items()}
        self._appenders = self._new_appenders(root.schema, root.arrays)
        before.close()
        self._note(self._counts)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Commit what was appended and give the lock back; an open episode is dropped."""
        if self._closed:
            return
        try:
            if os.getpid() == self._process and self._trouble is None:
                if self._stream is not None:
                    self._stream.discard()
                self.commit()
                if self._is_lagging:
                    self._write_documents(self._root)
        finally:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        """Close all files and give the lock back."""
        with ExitStack() as stack:  # the last one first; all of them, whatever happens
            if self._lock and os.getpid() == self._process:
                stack.callback(self._lock.release)
            if self._noted >= 0:
                stack.callback(files.close, self._noted)
            stack.callback(self._appenders.close)

    # -- writing ---------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        """The fields; none until the first episode, unless `schema=` was given."""
        return self._appenders.schema

    @property
    def num_steps(self) -> int:
        """Steps committed or appended so far."""
        return self._counts[STEP]

    @property
    def num_episodes(self) -> int:
        """Episodes committed or appended so far."""
        return self._counts[EPISODE]

    def append(
        self, data: Mapping[str, Any], /, *, end_reason: str | None = None, **metadata: Any
    ) -> int:
        """Append one whole episode.

        Args:
            data: fields, nested as you like, each with one row per step (T, *shape): numpy
                arrays, torch tensors or lists. T is the length of `action`, else of `reward`,
                else of a flag, else of the shortest field. `observation` may have T + 1 rows,
                the last being the final observation; `next_<field>` may be given instead.
                The arrays may be reused at once.
            end_reason: "terminated", "truncated", "cut" or "incomplete"; by default from the
                flags, else "cut".
            **metadata: any JSON; `seed`, where it is a non-negative integer, gets a column.

        Returns:
            The number of the episode.

        Raises:
            SchemaError: the episode does not fit; nothing was written.
            PostprocessError: the function failed; nothing was written.
            CapacityError: it alone is more than the store may hold; nothing was written.
            StorageError: the system refused. If rows could not be written, the episode is not
                in the store. If it was the commit that was due, the text says so: the episode
                counts (see `num_episodes`) and comes with the next commit.
        """
        self._check_ready("append")
        where = f"in episode {self.num_episodes}"
        if self._postprocess:
            data, end_reason, metadata = self._postprocess(
                data, end_reason, metadata, where, self.schema.fields
            )
            where += f", as postprocess {self._postprocess.name} made it"
        columns = Columns.of(data, where, self.schema.fields)
        schema = self.schema if self.schema.fields else self._with_layout(columns.schema(where))
        casts: dict[str, int] | None = {} if self._cast else None
        episode = Episode.fit(columns, schema, where, end_reason, casts)
        self._capacity.check(
            episode.num_steps, sum(c.nbytes for c in episode.columns.values()), where
        )
        seed, text = _split_seed(metadata, where)
        if not self.schema.fields:
            self._define(schema)
        self._undone_on_error(lambda: self._write(episode, seed, text))
        self._count_casts(casts)
        self._commit_if_due()
        return self.num_episodes - 1

    def append_blocks(self, episode: StoredEpisode) -> int:
        """Append an episode out of another store, block by block, exactly as it is there.

        Returns:
            The number that it gets here.

        Raises:
            DamagedError: what was read is not what was written there; nothing was appended.
        """
        self._check_ready("append")
        writing = self._begin(None)

        def write() -> None:
            for columns, following in episode.blocks():
                writing.extend(columns, following)
            row = writing.finish(episode.final, episode.end_reason, episode.seed, episode.metadata)
            episode.check(row.checksums, writing.rows_checksums)
            self._count(row)

        self._undone_on_error(write)
        self._commit_if_due()
        return self.num_episodes - 1

    def episode(self, /, *, end_reason: str | None = None, **metadata: Any) -> EpisodeStream:
        """A block that appends one episode step by step, for those that do not fit in memory.

        Rows go to disk as they come and are invisible until the block ends; an exception in
        it, or `discard()`, drops the episode. One episode is open at a time, and nothing else
        can be appended meanwhile.

        Args:
            end_reason: as in `append`.
            **metadata: as in `append`.
        """
        self._check_ready("open an episode")
        if self._postprocess:
            raise WriterStateError(
                "a postprocess function needs the whole episode: append it in one call, or give "
                "this one to a Writer without postprocess="
            )
        where = f"in episode {self.num_episodes}"
        check_end_reason(end_reason, where)
        seed, text = _split_seed(metadata, where)
        casts: dict[str, int] | None = {} if self._cast else None

        def end(episode: OpenEpisode, final: Mapping[str, NDArray[Any]], reason: str) -> None:
            self._stream = None
            self._undone_on_error(lambda: self._finish(episode, final, reason, seed, text))
            self._count_casts(casts)
            self._commit_if_due()

        def drop() -> None:
            self._stream = None
            if self._trouble is None and os.getpid() == self._process:
                self._rewind()

        calls = StreamCalls(self._check_open, self._begin, end, drop)
        self._stream = EpisodeStream(calls, self.schema, end_reason, casts, where)
        return self._stream

    def commit(self) -> int:
        """Publish what was appended; returns the number of the newest commit.

        Raises:
            StorageError: the system refused. If rows could not be written, free some space
                and call it again; if they could not be synced or published, nobody knows what
                is on disk: the writer refuses to go on, and opening the store again finds
                exactly its last commit.
        """
        self._check_open()
        dims = {
            name: (self._root.commit.dims.get(name, (0, 0))[0], stop)
            for name, stop in self._counts.items()
        }
        is_provisional = self._stream is not None and self._is_undefined()
        if is_provisional or (dims == self._root.commit.dims and self._root.schema == self.schema):
            return self._root.commit.number
        self._check_own()
        self._appenders.decide()
        self._appenders.flush()
        self._broken = "a commit was interrupted"
        if self._durable:
            files.together([partial(files.sync_directory, group) for group in self._new_groups])
        self._appenders.place(durable=self._durable)
        commit = Commit(self._root.commit.number + 1, now(), dims)
        root = Root(self._root.store_id, self.schema, commit, dict(self._appenders.arrays))
        root = self._within_capacity(root)
        publish(self.path, root, durable=self._durable)
        self._version = files.version(self.path / METADATA_FILE)
        is_due = time.monotonic() - self._last_documents >= DOCUMENTS_INTERVAL_S
        if self._new_groups or root.schema != self._root.schema or is_due:
            self._write_documents(root)
        remove_evicted(self.path, self._root, root)
        self._root, self._broken, self._new_groups = root, None, []
        self._last_commit = time.monotonic()
        return commit.number

    @property
    def _is_lagging(self) -> bool:
        """Whether single arrays' metadata shows an older commit than the root."""
        return self._documented < self._root.commit.number

    def _check_own(self) -> None:
        """Refuse to publish over a store that somebody else has put in this one's place."""
        try:
            is_own = files.version(self.path / METADATA_FILE) == self._version
        except OSError:
            is_own = False
        if not is_own:
            self._broken = "the store was removed or replaced while this writer was open"
            self._check_open()

    def _write_documents(self, root: Root) -> None:
        write_documents(self.path, root, durable=self._durable)
        self._documented, self._last_documents = root.commit.number, time.monotonic()

    def discard(self) -> None:
        """Throw away what was appended since the last commit."""
        self._check_ready("discard")
        self._adopt(self._root)

    # -- inside ----------------------------------------------------------------------------------

    def _within_capacity(self, root: Root) -> Root:
        """The root with the live ranges that leave no more than the store may hold."""
        if not self._capacity.is_limited or not root.arrays:
            return root
        snapshot = Snapshot(self.path, root, fresh=True)  # the rows are in their places by now
        starts = starts_of(snapshot, self._capacity.first_to_keep(snapshot))
        dims = {name: (starts[name], stop) for name, (_, stop) in root.commit.dims.items()}
        return replace(root, commit=replace(root.commit, dims=dims))

    def _define(self, schema: Schema) -> None:
        """Create the arrays; they are published with the next commit."""
        schema = self._with_layout(schema)
        self._limits = self._capacity.chunk_limits(schema, self._most_rows)
        arrays = arrays_of(schema, self._limits)
        # Chunks of another schema, whose first episode was dropped, may be of another size.
        remove_strays(self.path, self._root)
        for path in arrays:
            files.make_directory(self.path / path)
        self._new_groups = [self.path / group for group in ("", *parents(arrays))]
        self._counts.update({a.dimension: 0 for a in arrays.values()})
        self._appenders = self._new_appenders(schema, arrays)

    def _new_appenders(self, schema: Schema, arrays: Mapping[str, ArrayLayout]) -> Appenders:
        return Appenders(
            self.path, schema, arrays, self._counts, self._limits, durable=self._durable
        )

    def _with_layout(self, schema: Schema) -> Schema:
        """The schema with the layouts asked for; "auto" stays where data must decide."""
        asked = self._layout
        if isinstance(asked, Mapping):
            for name in asked:
                schema[name]  # raises for a field that does not exist
        chosen = {
            name: asked.get(name, "auto") if isinstance(asked, Mapping) else asked
            for name in schema.fields
        }
        asked_for = {n: replace(f, layout=chosen[n]) for n, f in schema.fields.items()}
        return Schema(
            {
                n: replace(f, layout="mapped") if f.layout == "auto" and not is_undecided(f) else f
                for n, f in asked_for.items()
            }
        )

    def _begin(self, schema: Schema | None) -> OpenEpisode:
        if schema is not None and not self.schema.fields:
            self._define(schema)
        where = f"in episode {self.num_episodes}"
        return OpenEpisode(
            self.schema, self._appenders, self.num_steps, self.num_episodes,
            partial(self._capacity.check, where=where),
        )  # fmt: skip

    def _write(self, episode: Episode, seed: int, metadata: bytes) -> None:
        writing = self._begin(None)
        writing.extend(episode.columns, episode.following)
        self._finish(writing, episode.final, episode.end_reason, seed, metadata)

    def _finish(
        self,
        episode: OpenEpisode,
        final: Mapping[str, NDArray[Any]],
        end_reason: str,
        seed: int,
        metadata: bytes,
    ) -> None:
        self._count(episode.finish(final, end_reason, seed, metadata))

    def _count(self, row: IndexRow) -> None:
        """Add an episode, whose rows are there, to the index."""
        self._appenders.index.append(row)
        counts = self._appenders.counts()
        self._note(counts)
        self._counts = counts  # from here on the episode counts

    def _undone_on_error(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException:
            self._rewind()
            raise

    def _rewind(self) -> None:
        """Forget rows that belong to no whole episode, and a schema that only they defined."""
        if self._is_undefined():
            self._adopt(self._root)
        self._appenders.rewind(self._counts)

    def _is_undefined(self) -> bool:
        """Whether nothing but an episode that is not whole says what the fields are."""
        return not self.num_episodes and not self._root.schema.fields

    def _count_casts(self, casts: dict[str, int] | None) -> None:
        for name, count in (casts or {}).items():
            self.casts[name] = self.casts.get(name, 0) + count

    def _note(self, counts: Mapping[str, int]) -> None:
        note_writing(self._note_file, self._noted, counts[EPISODE], counts[STEP])

    def _commit_if_due(self) -> None:
        now = time.monotonic()
        try:
            if now - self._last_commit >= self._commit_interval_s:
                self.commit()
            elif self._is_lagging and now - self._last_documents >= DOCUMENTS_INTERVAL_S:
                self._write_documents(self._root)
        except ExpstoreError as error:
            error.args = (f"{self._fate_of_newest()}: {error}", *error.args[1:])
            raise

    def _fate_of_newest(self) -> str:
        """What a commit that failed means for the episode that it was due after."""
        fate = "comes with the next commit; do not append it again"
        if self._trouble is not None:
            fate = "may be lost; close this writer and open a new one, whose `num_episodes` tells"
        return f"episode {self.num_episodes - 1} was appended and {fate}. The commit due failed"

    def _check_ready(self, what: str) -> None:
        self._check_open()
        if self._stream is not None:
            raise WriterStateError(
                f"cannot {what} while an episode is open; end or discard that one first"
            )

    @property
    def _trouble(self) -> str | None:
        """Why nobody knows what is on disk, if so."""
        return "a sync failed" if self._appenders.has_failed else self._broken

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise WriterStateError(
                f"the writer of {self.path} belongs to process {self._process}; a forked child "
                "cannot write: give it a store of its own"
            )
        if self._closed:
            raise WriterStateError(f"the writer of {self.path} is closed; open a new one")
        if self._trouble is not None:
            raise WriterStateError(
                f"{self._trouble} at {self.path}, so what is on disk is not known; close this "
                "writer and open a new one, which finds the last commit"
            )


def _close_at_exit(reference: weakref.ref[Writer]) -> None:
    writer = reference()
    if writer is not None:
        writer.close()


def _split_seed(metadata: dict[str, Any], where: str) -> tuple[int, bytes]:
    """The seed's column and the JSON of the rest; a seed that is no such number stays in it."""
    seed = metadata.get("seed")
    plain: Any = seed
    if seed is not None and getattr(seed, "ndim", None) == 0:
        plain = seed.item()
    if type(plain) is int and 0 <= plain < 1 << 63:
        metadata = {key: value for key, value in metadata.items() if key != "seed"}
    else:
        plain = NO_SEED
        metadata = {k: v for k, v in metadata.items() if k != "seed" or v is not None}
    return plain, encode_metadata(metadata, where)


def _check_same_schema(ours: Schema, asked: Schema | None) -> None:
    if asked is None or not ours.fields:
        return
    for name in {**ours.fields, **asked.fields}:
        kept, wanted = (
            (f.shape, f.dtype) if (f := schema.fields.get(name)) else "missing"
            for schema in (ours, asked)
        )
        if kept != wanted:
            raise SchemaError(
                f"field {name!r} is {kept} in the store and {wanted} in the given schema; leave "
                "schema= out to append to this store, or write to a new one"
            )


def _check_layouts(layout: Any) -> None:
    of_fields = layout.items() if isinstance(layout, Mapping) else (("", layout),)
    for name, value in of_fields:
        if value not in LAYOUTS:
            what = f"layout of field {name!r}" if name else "layout"
            raise SchemaError(
                f"{what} must be one of {', '.join(LAYOUTS)}, got {value!r}"
                + ("" if name else "; or give a dict of one for each field")
            )


def _check_sizes(
    chunk_steps: int | None, expected_steps: int | None, commit_interval_s: float
) -> None:
    if chunk_steps is not None and (
        not isinstance(chunk_steps, int) or chunk_steps < 1 or chunk_steps & (chunk_steps - 1)
    ):
        raise SchemaError(f"chunk_steps must be a power of two, got {chunk_steps!r}")
    if expected_steps is not None and (not isinstance(expected_steps, int) or expected_steps < 0):
        raise SchemaError(f"expected_steps must be an integer >= 0, got {expected_steps!r}")
    if not commit_interval_s >= 0:
        raise SchemaError(f"commit_interval_s must be >= 0, got {commit_interval_s}")
