"""ingest_from: episodes of a source appended to a store, and a report of every row."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from importlib import metadata as packages
from pathlib import Path
from typing import Any

from expstore.episode import Columns, encode_metadata, flatten
from expstore.errors import DamagedError, PostprocessError, SchemaError, SourceError
from expstore.formats.source import Imported, Source, SourceEpisode, open_source
from expstore.ingest.chosen_episodes import ChosenEpisodes
from expstore.ingest.chosen_fields import ChosenFields
from expstore.ingest.environments import PREFIX, Policy
from expstore.ingest.interrupts import Interrupts
from expstore.ingest.pieces import append_in_pieces, is_lazy, read_whole
from expstore.ingest.postprocess import postprocess_of
from expstore.ingest.recorder import GymSource
from expstore.ingest.report import IngestInterrupted, IngestProgress, IngestReport
from expstore.schema import is_observation
from expstore.storage.postprocessing import POSTPROCESS_KEY, Function, Postprocess
from expstore.storage.store import open_store
from expstore.storage.writer import Writer

GYM = PREFIX.removesuffix(":")  # as a name of a format
SOURCE_KEY = "source"  # of each episode's metadata: name, episode, importer, provenance


def ingest_from(
    source: str | os.PathLike[str] | Source,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    resume: bool = False,
    episodes: int | slice | None = None,
    map: Mapping[str, str] | None = None,
    drop: Collection[str] = (),
    steps: int | None = None,
    seed: int | None = None,
    policy: str | Policy | None = None,
    max_episode_steps: int | None = None,
    infos: bool = False,
    keep_encoded: bool = False,
    done_mode: int | None = None,
    alignment: str | None = None,
    trust: bool = False,
    jobs: int | None = None,
    postprocess: str | Function | None = None,
    cast: bool = False,
    layout: str | Mapping[str, str] = "auto",
    progress: Callable[[IngestProgress], None] | None = None,
) -> IngestReport:
    """Append the episodes of a source to a store, which is created if there is none.

    Args:
        source: a file or directory in a known format, `gym:ENV_ID` to roll episodes out, or an
            object with the methods of `expstore.formats.Source`.
        path: the store's directory.
        format: name of the source's format; by default its content decides.
        resume: append what the store does not have of this source yet. Without, a store that
            has episodes of it already is refused.
        episodes: the store is to have that many of this source, counted from its beginning; or
            `slice(50, 100)`, those from number 50 of the source on and before number 100.
        map: fields to be renamed, name in the store without it -> name in the store with it.
            What lies under a field and its next values go with it.
        drop: fields to be left out, likewise, and what lies under them.
        steps: for `gym:`, likewise in steps; the last episode is cut there.
        seed: for `gym:`, episode k is reset with `seed + k`; 0 by default.
        policy: for `gym:`, "random" (the default), "module:function", or a function from
            observation to action.
        max_episode_steps: for D4RL files without `timeouts`: longer episodes were cut there.
        infos: import `infos`, too, as fields `infos/...`, where the format has such.
        keep_encoded: keep JPEG and PNG images as the bytes of their files, one run of bytes a
            step; by default they are decoded. Nothing is ever encoded again.
        done_mode: for robomimic, what its `dones` mean: 0 success, 1 the end of the
            demonstration, 2 either.
        alignment: for vaults of Flashbax, what a row is: "step" where its action and reward
            belong to its observation, "arrival" where its reward is of arriving there, "previous"
            where its action is, too.
        trust: let pickles run the code that they name, which may be anything. Without, they are
            read as data, and those that need more are refused.
        jobs: threads that decode images, for formats that have such; episodes, their order and
            every byte are those of one.
        postprocess: runs on each episode, held whole in memory, before it is appended: a function
            as for `Writer`, "module:function", or a ready one with its parameters, such as
            "gae:gamma=0.99,lambda=0.95", "returns", "n_step:n=3" or "reward_scaling" (see
            `expstore.ingest.postprocess`). It sees the fields that `drop` and `map` leave.
        cast: as for `Writer`.
        layout: as for `Writer`.
        progress: called after each episode, and now and then in it.

    Returns:
        The report. Parts that could not be read, or did not fit, are in its `failures`; all
        others were appended.

    Raises:
        SourceError: the source cannot be read, or the store has episodes of it already, or some
            that another function than `postprocess` ran on.
        PostprocessError: the function failed on the first episode. Later ones are in `failures`.
        SchemaError: the source's episodes do not fit the store at all.
        KeyboardInterrupt: Ctrl-C; every whole episode was kept, and the exception's `report`
            says which. Errors that end an import later keep whole episodes likewise.

    Example:
        >>> import numpy as np, os, tempfile, expstore
        >>> os.chdir(tempfile.mkdtemp())
        >>> os.mkdir("recorded")
        >>> np.savez("recorded/ep0.npz", observation=np.zeros((4, 2)), action=np.zeros((3, 1)))
        >>> report = expstore.ingest_from("recorded", "demo.exp")
        >>> report.num_episodes, report.num_steps, report.final_observations
        (1, 3, 1)
    """
    options = _given(
        max_episode_steps=max_episode_steps,
        infos=infos or None,
        keep_encoded=keep_encoded or None,
        done_mode=done_mode,
        alignment=alignment,
        trust=trust or None,
        jobs=jobs,
    )
    recording = _given(num_steps=steps, seed=seed, policy=policy)
    fields = ChosenFields(drop, map)
    chosen = ChosenEpisodes.of(episodes)
    function = Postprocess(postprocess_of(postprocess)) if postprocess is not None else None
    opened = _opened(source, format, chosen.stop, recording, options, fields.dropped)
    with contextlib.closing(opened), Interrupts() as interrupts:
        with Writer(path, cast=cast, layout=layout) as writer:
            run = _Run(opened, writer, fields, chosen, function, resume=resume, progress=progress)
            interrupted = False
            try:
                run.append_all(interrupts)
            except KeyboardInterrupt:
                interrupted = True
            except Exception as error:
                run.explain(error)
                raise
            run.commit()
        report = run.report(interrupted)
    if interrupted:
        raise IngestInterrupted(report)
    return report


class _Run:
    """One import while it runs."""

    def __init__(
        self,
        source: Source,
        writer: Writer,
        fields: ChosenFields,
        chosen: ChosenEpisodes,
        postprocess: Postprocess | None,
        *,
        resume: bool,
        progress: Callable[[IngestProgress], None] | None,
    ) -> None:
        self._source, self._writer, self._fields, self._chosen = source, writer, fields, chosen
        self._postprocess = postprocess
        self._progress = progress or (lambda _: None)
        self._started = time.monotonic()
        self._imported, ran = _imported(writer.path, source.name)
        if self._imported.num_episodes and not resume:
            raise SourceError(
                f"{writer.path} has {self._imported.num_episodes} episodes of {source.name} "
                "already; continue after them with --resume (resume=True), or give another store"
            )
        if not ran <= {self._ran}:
            other = next(iter(ran - {self._ran}))
            raise SourceError(
                f"{writer.path} has episodes of {source.name} with postprocess {other}, but now it "
                f"is {self._ran}; give the same one, or another store"
            )
        if resume and not self._imported.num_episodes:
            _check_family(writer.path, source)
        self._before = writer.num_episodes, writer.num_steps
        self._had_schema = bool(writer.schema.fields)
        self._room = _less(chosen.stop, self._imported.num_episodes)
        self._num_bytes = self._final_observations = self._commit = 0
        self._provenance = {"name": source.name, "importer": f"expstore {_version()}"}
        source.account.listener = self._report_progress

    @property
    def _ran(self) -> str | None:
        """What runs on each episode, as their metadata says it."""
        return self._postprocess.name if self._postprocess else None

    @property
    def _num_episodes(self) -> int:
        return self._writer.num_episodes - self._before[0]

    @property
    def _num_steps(self) -> int:
        return self._writer.num_steps - self._before[1]

    def append_all(self, interrupts: Interrupts) -> None:
        """Append episode after episode; Ctrl-C ends it only while the source is read."""
        episodes = self._chosen.among(self._source, self._imported)
        while self._chosen.start or self._num_episodes != self._room:
            with interrupts.allowed():
                episode = next(episodes, None)
            if episode is None:
                return
            self._append(episode, interrupts.allowed)
            del episode  # not to be held while the next one is read
            self._report_progress()

    def commit(self) -> None:
        """Publish all of it, so that the report can say so."""
        self._commit = self._writer.commit()

    def explain(self, error: Exception) -> None:
        """Add to an error what it leaves behind."""
        if self._num_episodes:
            kept = f"{self._num_episodes} whole episodes were kept in {self._writer.path}"
            error.add_note(f"{kept}; continue after them with --resume (resume=True)")

    def report(self, is_interrupted: bool) -> IngestReport:
        store, account = open_store(self._writer.path), self._source.account
        reasons = store.episodes["end_reason"][self._before[0] :]
        return IngestReport(
            source=self._source.name,
            description=self._source.describe(),
            store=str(self._writer.path),
            num_episodes=self._num_episodes,
            num_steps=self._num_steps,
            num_bytes=self._num_bytes,
            duration_s=time.monotonic() - self._started,
            episodes_before=self._imported.num_episodes,
            store_episodes=store.num_episodes,
            store_steps=store.num_steps,
            commit=self._commit,
            end_reasons=dict(Counter(reasons.tolist())),
            boundary_rule=self._source.boundary_rule,
            final_observations=self._final_observations,
            dropped_steps=dict(account.dropped_steps),
            skipped_episodes=dict(account.skipped_episodes),
            failures=tuple(account.failures),
            dtype_changes=dict(account.dtype_changes),
            shape_changes=dict(account.shape_changes),
            left_out=dict(account.left_out),
            flags=dict(account.flags),
            remarks=dict(account.remarks),
            postprocess=self._ran,
            casts=dict(self._writer.casts),
            lost_episodes=self._writer.recovery.lost_episodes,
            is_interrupted=is_interrupted,
        )

    def _append(
        self, episode: SourceEpisode, allowed: Callable[[], AbstractContextManager[None]]
    ) -> None:
        account = self._source.account
        account.unfinished_steps = 0
        if _is_empty(episode.data):
            account.skip("no steps in it")
            return
        if SOURCE_KEY in episode.metadata:
            account.fail(episode.key, f"metadata {SOURCE_KEY!r} is written by ingest; rename it")
            return
        flat = self._fields.apply(flatten(episode.data, "here"), account.left_out)
        for name in self._fields.dropped:
            account.left_out.setdefault(name, "as asked for")
        found = {**self._provenance, "episode": episode.key, **episode.provenance}
        metadata, end_reason = {SOURCE_KEY: found, **episode.metadata}, episode.end_reason
        try:
            if self._postprocess:
                with allowed():
                    whole = read_whole(flat)
                data, end_reason, metadata = self._postprocess(
                    whole, end_reason, metadata, f"in episode {episode.key}"
                )
                flat = flatten(data, "here")
        except (SchemaError, SourceError, PostprocessError) as error:
            if isinstance(error, PostprocessError) and not self._num_episodes:
                raise  # it will fail on the others, too
            account.fail(episode.key, str(error))
            return
        try:
            columns = None if is_lazy(flat) else Columns.of(flat, "here")
        except SchemaError as error:
            account.fail(episode.key, str(error))
            return
        try:
            if columns is None:
                num_bytes, has_final = append_in_pieces(
                    self._writer, flat, end_reason, metadata, allowed, account.reached
                )
            else:
                self._writer.append(flat, end_reason=end_reason, **metadata)
                num_bytes, has_final = _size_of(columns)
        except SourceError as error:
            account.fail(episode.key, str(error))
        except SchemaError as error:
            # The first one does not fit what the store had before: no other will.
            if self._had_schema and not self._num_episodes:
                raise
            account.fail(episode.key, str(error))
        else:
            self._num_bytes += num_bytes
            self._final_observations += has_final
        account.unfinished_steps = 0

    def _report_progress(self) -> None:
        imported = self._imported
        num_episodes = self._chosen.count(self._source.num_episodes)
        num_steps = self._num_steps + self._source.account.unfinished_steps
        self._progress(
            IngestProgress(
                num_episodes=self._num_episodes,
                num_steps=num_steps,
                num_bytes=self._num_bytes,
                remaining_episodes=_less(num_episodes, imported.num_episodes),
                remaining_steps=_less(self._source.num_steps, imported.num_steps),
            )
        )


def _opened(
    source: str | os.PathLike[str] | Source,
    format: str | None,
    episodes: int | None,
    recording: Mapping[str, Any],
    options: Mapping[str, Any],
    drop: Collection[str],
) -> Source:
    """The source; `recording` is for environments, `options` for the formats that know them."""
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    is_recording = name.startswith(PREFIX) and format in (None, GYM)
    if not is_recording:
        for option in recording:
            called = option.removeprefix("num_")
            raise SourceError(
                f"--{called} ({called}=) is for {PREFIX}ENV_ID; leave it out for other sources"
            )
        if isinstance(source, (str, os.PathLike)):
            return open_source(source, format, drop=drop, **options)
    for option in options:
        flag = f"--{option.replace('_', '-')} ({option}=)"
        raise SourceError(f"{flag} is for files of some formats; leave it out here")
    if is_recording:
        return GymSource(name.removeprefix(PREFIX), num_episodes=episodes, **recording)
    assert not isinstance(source, (str, os.PathLike)), source
    return source


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _imported(path: Path, name: str) -> tuple[Imported, set[str | None]]:
    """What the store at `path` has of the source of that name, or had before it was deleted.

    Returns:
        That, and what ran on these episodes before they were appended.
    """
    snapshot = open_store(path).snapshots[0]
    index, deleted = snapshot.index, set(snapshot.deleted.tolist())
    length = index.column("length")
    mark = encode_metadata({"name": name}, "")[1:-1]
    lengths: dict[int | str, int] = {}
    ran: set[str | None] = set()
    for at in range(len(index)):
        # Parsing all metadata of a large store would take longer than the import.
        if mark not in index.metadata_bytes(index.first + at):
            continue
        try:
            metadata = index.metadata(index.first + at)
            found = metadata.get(SOURCE_KEY)
        except DamagedError:
            if index.first + at in deleted:  # by a repair: it may come again
                continue
            raise
        if isinstance(found, dict) and found.get("name") == name:
            lengths[found["episode"]] = int(length[at])
            ran.add(metadata.get(POSTPROCESS_KEY))
    return Imported(frozenset(lengths), sum(lengths.values()), lengths), ran


def _check_family(path: Path, source: Source) -> None:
    """Refuse to go on with a recording of another seed or policy, which is none of this one."""
    family = getattr(source, "family", None)
    if family is None:
        return
    index = open_store(path).snapshots[0].index
    mark = encode_metadata({"name": family}, "")[1:-2]  # without the quote after it
    for number in range(index.first, index.first + len(index)):
        if mark in index.metadata_bytes(number):
            found = index.metadata(number)[SOURCE_KEY]["name"]
            raise SourceError(
                f"{path} has no episodes of {source.name} to go on after, but of {found}; give "
                "its seed and policy, or record more beside it without --resume (resume=True)"
            )


def _is_empty(data: Mapping[str, Any]) -> bool:
    """Whether an episode has no step: empty columns, and at most the observation of a reset."""
    lengths = {name: len(column) for name, column in flatten(data, "here").items()}
    return 0 in lengths.values() and all(
        length == 0 or (length == 1 and is_observation(name)) for name, length in lengths.items()
    )


def _size_of(columns: Columns) -> tuple[int, bool]:
    """The bytes of an episode's arrays, and whether its final observation is there."""
    arrays = (*columns.arrays.values(), *columns.following.values(), *columns.final.values())
    has_final = columns.final or any(map(is_observation, columns.following))
    return sum(array.nbytes for array in arrays), bool(has_final)


def _less(total: int | None, imported: int) -> int | None:
    return None if total is None else max(0, total - imported)


def _version() -> str:
    try:
        return packages.version("expstore")
    except packages.PackageNotFoundError:  # run from its sources
        return "unknown"
