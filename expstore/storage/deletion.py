"""delete: a tombstone for each episode; its rows stay for older commits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.storage import files
from expstore.storage.commits import (
    Commit,
    Root,
    WriterLock,
    now,
    publish,
    read_root,
    recover,
    write_documents,
)
from expstore.storage.conditions import Condition
from expstore.storage.episodes import EpisodeRow
from expstore.storage.layout import DELETED, PRIVATE, deleted_arrays
from expstore.storage.mapped import MappedAppender
from expstore.storage.store import Store, absolute, open_store
from expstore.storage.tombstones import Tombstones

Which = str | Callable[[EpisodeRow], Any] | Iterable[bool] | Iterable[int]


@dataclass(frozen=True)
class Deletion:
    """What `delete` deleted, or would."""

    path: str
    commit: int  # number of the newest commit
    episodes: tuple[int, ...]  # numbers of the deleted episodes, ascending
    num_steps: int  # that they have
    kept_episodes: int  # in the store afterwards
    kept_steps: int


def delete(
    path: str | os.PathLike[str],
    where: Which,
    *,
    dry_run: bool = False,
    durable: bool = True,
) -> Deletion:
    """Delete episodes, in one commit: all of them or none.

    They are gone for everyone who opens the store from then on, or calls `latest()`, and so are
    their steps and priorities. Who has the store open keeps them, as does
    `expstore.open(path, at=...)` of an older commit. No number changes or is used again. Their
    space comes back with `compact`, or when a store with a capacity evicts them.

    Args:
        path: the store's directory; no writer may be open on it.
        where: a condition (`'return < 10 and policy == "sac"'`: names of the table's columns or
            keys of the metadata, `<`, `<=`, `>`, `>=`, `==`, `!=`, numbers, texts, true, false
            and null, joined by `and`), a function of an episode's row in the table, a boolean
            mask over `episodes`, or a list of episode numbers.
        dry_run: change nothing, and say what would be deleted.
        durable: as for `Writer`.

    Raises:
        StoreLockedError: a writer is open.
        StepRangeError: a number that is not in the store; nothing is deleted.
        SchemaError: `where` cannot be understood; nothing is deleted.
        FieldNotFoundError: a name in the condition that no episode has.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     numbers = [writer.append({"reward": np.ones(n)}) for n in (3, 5, 1)]
        >>> expstore.delete(path, "return < 4").episodes
        (0, 2)
        >>> expstore.open(path).episode_numbers.tolist()
        [1]
    """
    target = absolute(path)
    if dry_run:
        store = open_store(target)
        return _described(store, _chosen(store, where), store.snapshots[0].root)
    read_root(target)  # before anything is touched
    files.make_directory(target / PRIVATE)
    with WriterLock(target):
        root = read_root(target)
        recover(target, root, durable=durable)
        store = open_store(target)
        chosen = _chosen(store, where)
        if chosen.num_episodes:
            root = bury(target, root, chosen.episode_numbers, chosen.spans.length, durable=durable)
    return _described(store, chosen, root)


def bury(
    path: Path,
    root: Root,
    episodes: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    is_whole: bool = False,
    durable: bool,
) -> Root:
    """Append tombstones of episodes (K,) and publish them; the lock is held.

    Args:
        root: the newest one.
        lengths: (K,) steps of each episode.
        is_whole: these take the place of all tombstones there were, whose rows stay for older
            commits only.
    """
    start, stop = root.commit.dims.get(DELETED, (0, 0))
    stones = Tombstones.of(stop, episodes, lengths)
    layouts = {name: root.arrays.get(name, usual) for name, usual in deleted_arrays().items()}
    is_first = DELETED not in root.commit.dims
    with ExitStack() as stack:
        appenders = {}
        for name, layout in layouts.items():
            files.make_directory(path / name)
            appenders[name] = MappedAppender(path, layout, stop)
            stack.callback(appenders[name].close)
        for name, rows in stones.columns().items():
            appenders[name].append(rows)
            appenders[name].flush()
        if durable:
            files.together(call for a in appenders.values() for call in a.syncs())
            groups = [path, path / DELETED] if is_first else []
            changed = [path / name for name, appender in appenders.items() if appender.place()]
            files.together([partial(files.sync_directory, name) for name in (*groups, *changed)])
    live = stop if is_whole else start, stop + len(episodes)
    dims = {**root.commit.dims, DELETED: live}
    commit = Commit(root.commit.number + 1, now(), dims)
    new = replace(root, arrays={**root.arrays, **layouts}, commit=commit)
    publish(path, new, durable=durable)
    write_documents(path, new, durable=durable)
    return new


def _chosen(store: Store, where: Which) -> Store:
    if isinstance(where, str):
        return store.filter(Condition.parse(where).mask(store.episodes))
    return store.filter(where)


def _described(store: Store, chosen: Store, root: Root) -> Deletion:
    return Deletion(
        path=str(store.paths[0]),
        commit=root.commit.number,
        episodes=tuple(chosen.episode_numbers.tolist()),
        num_steps=chosen.num_steps,
        kept_episodes=store.num_episodes - chosen.num_episodes,
        kept_steps=store.num_steps - chosen.num_steps,
    )
