"""compact and merge: the episodes of one or several stores in a new one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from expstore.episode import encode_metadata
from expstore.errors import SchemaError, StorageError
from expstore.schema import Field, Schema
from expstore.storage import files
from expstore.storage.carrying import carry_priorities
from expstore.storage.commits import WriterLock, is_free, read_root
from expstore.storage.layout import LOCK_FILE, METADATA_FILE, PRIORITIES, PRIVATE, TEMPORARY
from expstore.storage.priorities import set_names
from expstore.storage.reading import Snapshot
from expstore.storage.store import Store, absolute, open_store
from expstore.storage.stored_episode import StoredEpisode
from expstore.storage.writer import Writer

SOURCE_KEY = "source"  # in the metadata of an episode that was imported
MERGED_KEY = "merged_from"  # in the metadata of an episode: where it was before
COMMIT_INTERVAL_S = 30.0  # nobody looks before the last commit


@dataclass(frozen=True)
class Copy:
    """What `compact` or `merge` wrote."""

    path: str
    store_id: str  # of the new store
    sources: tuple[str, ...]
    num_episodes: int
    num_steps: int
    left_out: int  # deleted episodes of the sources, which were not copied
    priorities: tuple[str, ...] = ()  # names of saved sets that came along
    priorities_left: Mapping[str, str] = field(default_factory=dict)  # name -> why it did not
    repeated: int = 0  # merged episodes that are in the target once before, from the same origin


def compact(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    layout: str | Mapping[str, str] | None = None,
    chunk_steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    durable: bool = True,
) -> Copy:
    """Write a new store without the deleted and evicted episodes of another one.

    Episodes and steps are numbered from 0 on in it, and it has an id of its own: sampler states
    of the source do not fit it. Everything else of every episode is the same to the bit, which is
    checked against its checksums on the way. Priorities saved beside the source come along, for
    the steps that are left; those of a view or a union do not. The source stays as it is, and may
    be written meanwhile: its newest commit is copied. The target is there in the end, whole, or
    not at all.

    Args:
        source: the store's directory.
        target: where the new store is to be; nothing may be there.
        layout: as for `Writer`, "auto" to decide anew; by default that of the source.
        chunk_steps: as for `Writer`; by default by the size of a step.
        progress: called with (episodes copied, episodes in all).
        durable: as for `Writer`.

    Raises:
        SchemaError: something is at `target`, or the layout is none.
        DamagedError: an episode fails its checksum; no target is left.
        StoreLockedError: another process is writing this target.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp()
        >>> with expstore.Writer(path + "/demo.exp") as writer:
        ...     numbers = [writer.append({"reward": np.ones(n)}) for n in (3, 5, 1)]
        >>> deleted = expstore.delete(path + "/demo.exp", [1])
        >>> copy = expstore.compact(path + "/demo.exp", path + "/small.exp")
        >>> copy.num_episodes, copy.num_steps, copy.left_out
        (2, 4, 1)
    """
    store = open_store(source)

    def episode(snapshot: Snapshot, number: int) -> StoredEpisode:
        return StoredEpisode(snapshot, number)

    return _copied(
        store, absolute(target), episode, layout, chunk_steps, progress, durable, carries=True
    )


def merge(
    sources: Iterable[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    layout: str | Mapping[str, str] | None = None,
    chunk_steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    durable: bool = True,
) -> Copy:
    """Write a new store with the episodes of several others, in their order.

    As `compact` does, it leaves deleted episodes out, checks every checksum, and gives a whole
    target or none. The metadata of each episode gets `merged_from`, a list that tells where it
    comes from: `store`, its `store_id`, and `episode`, its number there; an episode that is
    merged again gets a second entry. An episode that comes twice, since two sources have it from
    the same store or from the same file, is copied twice and counted as `repeated`.

    Args:
        sources: directories of stores with the same fields.
        target: where the new store is to be; nothing may be there.
        layout: as for `Writer`, "auto" to decide anew; by default that of the first source.
        chunk_steps: as for `Writer`.
        progress: called with (episodes copied, episodes in all).
        durable: as for `Writer`.

    Raises:
        SchemaError: names the field in which two stores differ; or something is at `target`.
        DamagedError: an episode fails its checksum; no target is left.
        StoreLockedError: another process is writing this target.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp()
        >>> for actor in ("a", "b"):
        ...     with expstore.Writer(f"{path}/{actor}.exp") as writer:
        ...         number = writer.append({"reward": np.ones(3)}, policy=actor)
        >>> copy = expstore.merge([f"{path}/a.exp", f"{path}/b.exp"], f"{path}/both.exp")
        >>> expstore.open(copy.path).episodes["policy"]
        ['a', 'b']
    """
    paths = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    store = open_store(paths)
    origins: set[str] = set()
    num_merged = 0

    def episode(snapshot: Snapshot, number: int) -> StoredEpisode:
        hop = {
            "store": snapshot.path.name,
            "store_id": snapshot.root.store_id,
            "episode": number,
        }
        nonlocal num_merged
        metadata = snapshot.index.metadata(number)
        num_merged += 1
        before = metadata.get(MERGED_KEY, [])
        metadata[MERGED_KEY] = [*(before if isinstance(before, list) else [before]), hop]
        origins.add(_origin(metadata))
        text = encode_metadata(metadata, f"in episode {number} of {snapshot.path}")
        return StoredEpisode(snapshot, number, text)

    copy = _copied(store, absolute(target), episode, layout, chunk_steps, progress, durable)
    return replace(copy, repeated=num_merged - len(origins))


def _origin(metadata: Mapping[str, Any]) -> str:
    """Where an episode was first: in the file that it was imported from, or in a store."""
    source = metadata.get(SOURCE_KEY)
    if isinstance(source, dict) and "episode" in source:
        known = source.get("sha256") or source.get("name")
        return json.dumps([known, source["episode"]], default=str)
    first = metadata[MERGED_KEY][0]
    return json.dumps(
        first if not isinstance(first, dict) else [first.get("store_id"), first.get("episode")]
    )


def _copied(
    store: Store,
    target: Path,
    episode: Callable[[Snapshot, int], StoredEpisode],
    layout: str | Mapping[str, str] | None,
    chunk_steps: int | None,
    progress: Callable[[int, int], None] | None,
    durable: bool,
    *,
    carries: bool = False,
) -> Copy:
    if os.path.lexists(target):
        raise SchemaError(f"there is something at {target} already; give a path that is free")
    if not target.parent.is_dir():
        raise SchemaError(f"there is no directory {target.parent}; make it, or give another path")
    temporary = target.with_name(target.name + TEMPORARY)
    _make_room(temporary)
    try:
        with Writer(
            temporary,
            schema=_schema_of(store.snapshots),
            layout=_layout_of(store.fields) if layout is None else layout,
            chunk_steps=chunk_steps,
            expected_steps=None if chunk_steps else store.num_steps,
            commit_interval_s=COMMIT_INTERVAL_S,
            durable=durable,
        ) as writer:
            done = 0
            for snapshot in store.snapshots:
                for number in _numbers(snapshot):
                    writer.append_blocks(episode(snapshot, number))
                    done += 1
                    if progress is not None:
                        progress(done, store.num_episodes)
        root = read_root(temporary)
        left = carry_priorities(store, temporary, target, root) if carries else {}
        carried = tuple(set_names(temporary / PRIORITIES))
        files.rename(temporary, target)
    except BaseException:
        with suppress(StorageError):  # what stays is removed by the next attempt
            files.remove_directory(temporary)
        raise
    if durable:
        files.sync_directory(target.parent)
    return Copy(
        path=str(target),
        store_id=root.store_id,
        sources=tuple(map(str, store.paths)),
        num_episodes=store.num_episodes,
        num_steps=store.num_steps,
        left_out=sum(len(snapshot.deleted) for snapshot in store.snapshots),
        priorities=carried,
        priorities_left=left,
    )


def _make_room(temporary: Path) -> None:
    """Remove what an attempt that was killed has left; nothing else is touched."""
    if not os.path.lexists(temporary):
        return
    is_ours = not temporary.is_symlink() and (temporary / LOCK_FILE).exists()
    if not is_ours or not (is_free(temporary) or _is_store(temporary)):
        raise SchemaError(f"{temporary} is in the way, and is no unfinished copy; move it away")
    with WriterLock(temporary, "wait for it, or give another target"):
        files.remove_directory(temporary)


def _is_store(path: Path) -> bool:
    return files.size(path / METADATA_FILE) is not None and (path / PRIVATE).is_dir()


def _numbers(snapshot: Snapshot) -> Iterable[int]:
    if snapshot.present is None:
        return range(snapshot.first_episode, snapshot.stop_episode)
    return map(int, snapshot.present)


def _schema_of(snapshots: Iterable[Snapshot]) -> Schema | None:
    """The fields of the copy: next values of those that have some in any of the stores."""
    schemas = [snapshot.schema for snapshot in snapshots]
    with_next = {name for schema in schemas for name in schema.next_fields}
    fields = schemas[0].fields
    if not fields:
        return None
    return Schema(
        {
            n: replace(f, layout="auto", has_next=n in with_next, added=None)
            for n, f in fields.items()
        }
    )


def _layout_of(fields: Mapping[str, Field]) -> dict[str, str]:
    return {name: field.layout for name, field in fields.items()}
