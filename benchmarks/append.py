"""Appending whole episodes: expstore beside bare files and Minari's HDF5."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import expstore
from benchmarks.experience import NEVER_S, Columns, cheetahs
from benchmarks.measure import timed_in_turns
from benchmarks.results import Figure, Mismatch, Result, ratio
from benchmarks.run import Run
from benchmarks.windows import named


@dataclass(frozen=True)
class Size:
    """In one turn, a contestant appends and commits `num_episodes` again and again.

    Several times, as in a recording that goes on: what a store writes once a second for readers
    of single arrays would otherwise be part of every commit that is timed.
    """

    num_episodes: int
    episode_steps: int
    rounds: int
    commits: int = 4
    different_episodes: int = 590  # more are these again


SIZES = {
    "full": Size(50, 1000, rounds=10),
    "quick": Size(50, 1000, rounds=4),
    "tiny": Size(3, 20, rounds=1, commits=1),
}
LARGE = {  # with the share of the bare file's speed that is to be reached
    "full": (
        (Size(590, 1000, rounds=7, commits=1), 0.5),
        (Size(5_900, 1000, rounds=3, commits=1), 0.7),
    ),
    "quick": ((Size(590, 1000, rounds=3, commits=1), 0.5),),
    "tiny": ((Size(4, 20, rounds=1, commits=1, different_episodes=2), 0.5),),
}
DURABLE, FAST = "expstore, commit with fsync", "expstore, durable=False"
TOFILE = "numpy.tofile into one file, fsync"
ARRAYS = "Minari HDF5, 50 episodes of arrays per call, no fsync"
COLLECTED = "Minari HDF5, as its DataCollector writes, no fsync"


class Appender(Protocol):
    """One contestant."""

    def append(self) -> None:
        """Add the episodes once more and make them as safe as the contestant does."""
        ...

    def first(self) -> Iterator[Columns]:
        """The episodes that the first `append` wrote, read back."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


class Expstore:
    """`Writer.append` for each episode, then `commit`."""

    def __init__(self, path: Path, episodes: list[Columns], *, durable: bool):
        self.path, self.episodes = path, episodes
        self.writer = expstore.Writer(path, commit_interval_s=NEVER_S, durable=durable)

    def append(self) -> None:
        for seed, episode in enumerate(self.episodes):
            self.writer.append(episode, seed=seed)
        self.writer.commit()

    def first(self) -> Iterator[Columns]:
        store = expstore.open(self.path)
        return (store.episode(number) for number in range(len(self.episodes)))

    def close(self) -> None:
        self.writer.close()


class BareFile:
    """`tofile` of every array, one after the other, into one file that stays open."""

    def __init__(self, path: Path, episodes: list[Columns]):
        self.path, self.episodes = path, episodes
        self.file = path.open("ab", buffering=0)

    def append(self) -> None:
        for episode in self.episodes:
            for rows in episode.values():
                rows.tofile(self.file)
        os.fsync(self.file.fileno())

    def first(self) -> Iterator[Columns]:
        with self.path.open("rb") as file:
            for episode in self.episodes:
                yield {
                    name: np.fromfile(file, rows.dtype, rows.size).reshape(rows.shape)
                    for name, rows in episode.items()
                }

    def close(self) -> None:
        self.file.close()


class MinariHDF5:
    """Minari's own HDF5 storage, given buffers that are complete before the clock starts.

    Args:
        collected: as Minari's `DataCollector` does: one call per episode, whose steps are
            lists. Otherwise its fastest way: one call for all, with arrays.
    """

    def __init__(self, path: Path, episodes: list[Columns], *, collected: bool):
        from benchmarks.peers.minari import buffer_of, storage_of

        self.num_episodes = len(episodes)
        self.storage = storage_of(path, episodes[0])
        as_given = list if collected else np.asarray
        buffers = [buffer_of(episode, seed, as_given) for seed, episode in enumerate(episodes)]
        self.calls: list[list[Any]] = [[b] for b in buffers] if collected else [buffers]

    def append(self) -> None:
        for buffers in self.calls:
            self.storage.update_episodes(buffers)

    def first(self) -> Iterator[Columns]:
        from benchmarks.peers.minari import columns_of

        return map(columns_of, self.storage.get_episodes(range(self.num_episodes)))

    def close(self) -> None:
        pass  # it opens and closes its file in every call


def run_append(folder: Path, run: Run) -> Result:
    """Small commits, beside Minari."""
    size = run.of(SIZES)
    episodes = cheetahs(size.num_episodes, size.episode_steps)
    contestants: dict[str, Appender] = {
        DURABLE: Expstore(folder / "durable.exp", episodes, durable=True),
        FAST: Expstore(folder / "fast.exp", episodes, durable=False),
        TOFILE: BareFile(folder / "bare", episodes),
    }
    if run.wants("minari"):
        contestants[ARRAYS] = MinariHDF5(folder / "arrays", episodes, collected=False)
        contestants[COLLECTED] = MinariHDF5(folder / "collected", episodes, collected=True)
    figures = appended(contestants, episodes, size)
    goals = [
        *ratio("expstore / tofile + fsync", figures, DURABLE, TOFILE, 0.25, at_most=False),
        *ratio("expstore / Minari as it collects", figures, DURABLE, COLLECTED, 10, at_most=False),
    ]
    return Result("append", about(size, episodes), figures, goals)


def run_append_large(folder: Path, run: Run) -> Result:
    """Commits of 100 MB and of 1 GB, beside the bare file."""
    figures, goals, abouts = [], [], []
    for size, limit in run.of(LARGE):
        episodes = cheetahs(size.different_episodes, size.episode_steps)
        episodes = (episodes * -(-size.num_episodes // len(episodes)))[: size.num_episodes]
        # Of each size, the files are removed before the next one's are written.
        with tempfile.TemporaryDirectory(dir=folder) as own:
            contestants: dict[str, Appender] = {
                DURABLE: Expstore(Path(own) / "durable.exp", episodes, durable=True),
                TOFILE: BareFile(Path(own) / "bare", episodes),
            }
            found = appended(contestants, episodes, size)
        what = f"{num_bytes(episodes) / 1e6:,.0f} MB per commit"
        goals += ratio(f"{what}: expstore / tofile", found, DURABLE, TOFILE, limit, at_most=False)
        figures += named(found, what)
        abouts.append(about(size, episodes))
    return Result("append-large", "; and ".join(abouts), figures, goals)


def appended(contestants: dict[str, Appender], episodes: list[Columns], size: Size) -> list[Figure]:
    """Bytes per second, all on one file system, after what they wrote has been read back."""
    for name, contestant in contestants.items():
        contestant.append()
        check_same_bytes(name, contestant, episodes)
    # What one contestant left to be written back must not weigh on the next one's fsync.
    seconds = timed_in_turns(
        {name: contestant.append for name, contestant in contestants.items()},
        rounds=size.rounds,
        calls=size.commits,
        before=os.sync,
    )
    for contestant in contestants.values():
        contestant.close()
    return [
        Figure.of(name, [num_bytes(episodes) / s / 1e6 for s in values], "MB/s")
        for name, values in seconds.items()
    ]


def num_bytes(episodes: list[Columns]) -> int:
    return sum(rows.nbytes for episode in episodes for rows in episode.values())


def about(size: Size, episodes: list[Columns]) -> str:
    return (
        f"{size.num_episodes:,} episodes of {size.episode_steps:,} steps as HalfCheetah gives them "
        f"({num_bytes(episodes) / 1e6:,.1f} MB) appended and committed, again and again"
    )


def check_same_bytes(name: str, contestant: Appender, episodes: list[Columns]) -> None:
    """What was written comes back.

    Raises:
        Mismatch: names the contestant and the field.
    """
    for number, (found, expected) in enumerate(zip(contestant.first(), episodes, strict=True)):
        for field, rows in expected.items():
            if found[field].dtype != rows.dtype or found[field].tobytes() != rows.tobytes():
                raise Mismatch(f"{name} does not return field {field!r} of episode {number}")
