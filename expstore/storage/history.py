"""history: the commits of a store, as its log names them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.storage.commits import Commit, read_history
from expstore.storage.layout import DELETED, EPISODE, STEP
from expstore.storage.reading import Snapshot
from expstore.storage.store import absolute
from expstore.storage.tombstones import Tombstones, read_tombstones


@dataclass(frozen=True)
class CommitSummary:
    """What a store held as of one commit."""

    number: int
    time: float  # seconds since 1970, UTC
    num_episodes: int
    num_steps: int
    num_deleted: int  # episodes that this commit deleted
    num_evicted: int  # episodes that left with this commit, for lack of room


def history(path: str | os.PathLike[str]) -> list[CommitSummary]:
    """The commits of a store, oldest first; `expstore.open(path, at=number)` reads one of them.

    A commit may be missing here, if the writer was opened without `durable` and its machine
    lost power, or if its line was damaged; the newest one is always there.

    Raises:
        NotAStoreError: there is no store at `path`.
        FormatError: the store was made by a newer version, or its root is damaged.
        DamagedError: a file of the deleted episodes is missing.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     for length in (3, 5):
        ...         number = writer.append({"reward": np.ones(length)})
        ...         number = writer.commit()
        >>> [(commit.number, commit.num_steps) for commit in expstore.history(path)]
        [(0, 0), (1, 3), (2, 8)]
    """
    snapshot = Snapshot.of(absolute(path))
    newest = snapshot.root.commit
    entries = {entry["number"]: _commit(entry) for entry in read_history(snapshot.path)}
    known = [entries[number] for number in sorted(entries) if number < newest.number]
    stones = _all_tombstones(snapshot)
    found: list[CommitSummary] = []
    before = Commit(-1, 0.0, {})
    for commit in [*known, newest]:
        found.append(_summary(before, commit, stones))
        before = commit
    return found


def _commit(entry: dict[str, Any]) -> Commit:
    dims = {name: (int(start), int(stop)) for name, (start, stop) in entry["dims"].items()}
    return Commit(entry["number"], entry["time"], dims)


def _all_tombstones(snapshot: Snapshot) -> Tombstones:
    """Also those that a repair has written anew, of which older commits know the former rows."""
    dims = snapshot.root.commit.dims
    if DELETED not in dims:
        return read_tombstones({}, {})
    return read_tombstones(snapshot.columns, {**dims, DELETED: (0, dims[DELETED][1])})


def _summary(before: Commit, commit: Commit, stones: Tombstones) -> CommitSummary:
    first, stop = commit.dims[EPISODE]
    episode, length = _deleted(commit, stones)
    is_live = (first <= episode) & (episode < stop)
    num_episodes = stop - first - int(is_live.sum())
    num_steps = commit.dims[STEP][1] - commit.dims[STEP][0] - int(length[is_live].sum())
    known = _deleted(before, stones)[0]
    evicted = np.arange(before.dims.get(EPISODE, (0, 0))[0], first)
    return CommitSummary(
        number=commit.number,
        time=commit.time,
        num_episodes=num_episodes,
        num_steps=num_steps,
        num_deleted=len(np.setdiff1d(episode, known)),
        num_evicted=len(np.setdiff1d(evicted, known)),
    )


def _deleted(commit: Commit, stones: Tombstones) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(K,) which episodes a commit knows to be deleted, and their lengths."""
    start, stop = commit.dims.get(DELETED, (0, 0))
    return stones.episode[start:stop], stones.length[start:stop]
