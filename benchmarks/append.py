"""Appending whole episodes: expstore beside bare files and Minari's HDF5."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import expstore
from benchmarks.experience import NEVER_S, Columns, cheetahs
from benchmarks.measure import timed_in_turns
from benchmarks.results import Figure, Goal, Mismatch, Result


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


SIZES = {
    "full": Size(50, 1000, rounds=10),
    "quick": Size(50, 1000, rounds=4),
    "tiny": Size(3, 20, rounds=1, commits=1),
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


class MinariHDF5:
    """Minari's own HDF5 storage, given buffers that are complete before the clock starts.

    Args:
        collected: as Minari's `DataCollector` does: one call per episode, whose steps are
            lists. Otherwise its fastest way: one call for all, with arrays.
    """

    def __init__(self, path: Path, episodes: list[Columns], *, collected: bool):
        from gymnasium.spaces import Box
        from minari.data_collector.episode_buffer import EpisodeBuffer
        from minari.dataset.minari_storage import MinariStorage

        path.mkdir()
        self.num_episodes = len(episodes)
        spaces = [Box(-np.inf, np.inf, (17,), np.float64), Box(-1, 1, (6,), np.float32)]
        self.storage = MinariStorage.new(path, *spaces, data_format="hdf5")
        as_given = list if collected else np.asarray
        buffers = [
            EpisodeBuffer(
                seed=seed,
                observations=as_given(episode["observation"]),
                actions=as_given(episode["action"]),
                rewards=as_given(episode["reward"]),
                terminations=as_given(episode["terminated"]),
                truncations=as_given(episode["truncated"]),
            )
            for seed, episode in enumerate(episodes)
        ]
        self.calls: list[list[Any]] = [[b] for b in buffers] if collected else [buffers]

    def append(self) -> None:
        for buffers in self.calls:
            self.storage.update_episodes(buffers)

    def first(self) -> Iterator[Columns]:
        for episode in self.storage.get_episodes(range(self.num_episodes)):
            yield {
                "observation": episode["observations"],
                "action": episode["actions"],
                "reward": episode["rewards"],
                "terminated": episode["terminations"],
                "truncated": episode["truncations"],
            }


def run_append(folder: Path, scale: str) -> Result:
    """Bytes per second, all on one file system."""
    size = SIZES[scale]
    episodes = cheetahs(size.num_episodes, size.episode_steps)
    contestants: dict[str, Appender] = {
        DURABLE: Expstore(folder / "durable.exp", episodes, durable=True),
        FAST: Expstore(folder / "fast.exp", episodes, durable=False),
        TOFILE: BareFile(folder / "bare", episodes),
        ARRAYS: MinariHDF5(folder / "arrays", episodes, collected=False),
        COLLECTED: MinariHDF5(folder / "collected", episodes, collected=True),
    }
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
    num_bytes = sum(rows.nbytes for episode in episodes for rows in episode.values())
    figures = [
        Figure.of(name, [num_bytes / s / 1e6 for s in values], "MB/s")
        for name, values in seconds.items()
    ]
    rate = {figure.contestant: figure.median for figure in figures}
    goals = [
        Goal("expstore / tofile + fsync", rate[DURABLE] / rate[TOFILE], 0.25, at_most=False),
        Goal("expstore / Minari as it collects", rate[DURABLE] / rate[COLLECTED], 10, False),
    ]
    about = (
        f"{size.num_episodes} episodes of {size.episode_steps:,} steps as HalfCheetah gives them "
        f"({num_bytes / 1e6:.1f} MB) appended and committed, again and again"
    )
    return Result("append", about, figures, goals)


def check_same_bytes(name: str, contestant: Appender, episodes: list[Columns]) -> None:
    """What was written comes back.

    Raises:
        Mismatch: names the contestant and the field.
    """
    for number, (found, expected) in enumerate(zip(contestant.first(), episodes, strict=True)):
        for field, rows in expected.items():
            if found[field].dtype != rows.dtype or found[field].tobytes() != rows.tobytes():
                raise Mismatch(f"{name} does not return field {field!r} of episode {number}")
