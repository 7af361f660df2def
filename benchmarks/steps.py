"""Warm batches of single steps with the next observation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import expstore
from benchmarks.experience import NEVER_S, Columns, vectors
from benchmarks.measure import timed_in_turns
from benchmarks.results import Figure, Mismatch, Result, ratio
from benchmarks.run import Run
from benchmarks.windows import named


@dataclass(frozen=True)
class Size:
    """How much is stored, and how often it is sampled."""

    num_steps: int
    episode_steps: int
    batch_size: int
    rounds: int
    calls: int


SIZES = {
    "full": Size(1_000_000, 1000, 256, rounds=20, calls=50),
    "quick": Size(50_000, 1000, 256, rounds=7, calls=20),
    "tiny": Size(2_000, 100, 16, rounds=2, calls=1),
}
EXPSTORE = "expstore Replay.sample, single steps"
TORCHRL = "TorchRL LazyMemmapStorage + RandomSampler, next stored beside"
CPPRB = "cpprb ReplayBuffer in memory, next stored beside"
TAKE = "numpy: take from memory, steps known, next stored beside"


class StepReader(Protocol):
    """One contestant."""

    def sample(self) -> Any:
        """A batch of random steps: what is timed."""
        ...

    def rows(self, batch: Any) -> NDArray[np.int64]:
        """(B,) the steps of a batch."""
        ...

    def columns(self, batch: Any) -> Columns:
        """What a batch holds, each field with B rows in whatever shape."""
        ...


class Expstore:
    """A `Replay` of single steps; the next observation is the one of the following step."""

    def __init__(self, store: expstore.Store, batch_size: int, fields: list[str], threads: int):
        self.replay = expstore.Replay(store, batch_size, fields=fields, num_threads=threads)
        self.sample = self.replay.sample

    def rows(self, batch: Any) -> NDArray[np.int64]:
        return np.asarray(batch.info.index)

    def columns(self, batch: Any) -> Columns:
        return {name: tensor.numpy() for name, tensor in batch.fields.items()}


class TorchRL:
    """A `ReplayBuffer` of transitions, with its default sampler."""

    def __init__(self, columns: Columns, folder: Path, batch_size: int):
        from benchmarks.peers.torchrl import filled

        theirs = {name.replace("next_", "next/"): rows for name, rows in columns.items()}
        self.buffer = filled(theirs, folder, batch_size)

    def sample(self) -> Any:
        return self.buffer.sample(return_info=True)

    def rows(self, batch: Any) -> NDArray[np.int64]:
        return np.asarray(batch[1]["index"])

    def columns(self, batch: Any) -> Columns:
        found = batch[0].flatten_keys("_").items()
        return {str(name): t.numpy() for name, t in found if isinstance(t, torch.Tensor)}


class Take:
    """Copies into arrays that are used again, of steps that are known beforehand."""

    def __init__(self, columns: Columns, batch_size: int):
        self.arrays = columns
        self.out = {n: np.empty((batch_size, *c.shape[1:]), c.dtype) for n, c in columns.items()}
        self.drawn = np.random.default_rng(1).integers(0, len(columns["reward"]), (64, batch_size))
        self.number = 0

    def sample(self) -> Any:
        self.number = (self.number + 1) % len(self.drawn)
        rows = self.drawn[self.number]
        for name, array in self.arrays.items():
            array.take(rows, 0, self.out[name], mode="clip")
        return rows, self.out

    def rows(self, batch: Any) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = batch[0]
        return rows

    def columns(self, batch: Any) -> Columns:
        columns: Columns = batch[1]
        return columns


def run_steps(folder: Path, run: Run) -> Result:
    """17+6 floats, reward, two flags and the next 17 floats."""
    size = run.of(SIZES)
    columns = transitions(size.num_steps, size.episode_steps)
    store = write(columns, size.episode_steps, folder / "steps.exp")
    theirs: dict[str, StepReader] = {}
    if run.wants("torchrl"):
        theirs[TORCHRL] = TorchRL(columns, folder / "torchrl", size.batch_size)
    if run.wants("cpprb"):
        from benchmarks.peers.cpprb import Transitions

        theirs[CPPRB] = Transitions(columns, size.batch_size)
    if run.wants("numpy"):
        theirs[TAKE] = Take(columns, size.batch_size)
    figures, goals = [], []
    for num_threads, words in ((1, "one thread"), (2, "two threads")):
        torch.set_num_threads(num_threads)
        ours = Expstore(store, size.batch_size, list(columns), num_threads)
        contestants: dict[str, StepReader] = {EXPSTORE: ours, **theirs}
        check_same_rows(contestants, columns)
        calls = {name: contestant.sample for name, contestant in contestants.items()}
        seconds = timed_in_turns(calls, rounds=size.rounds, calls=size.calls)
        found = [Figure.of(n, [s * 1e6 for s in values], "us") for n, values in seconds.items()]
        goals += ratio(f"{words}: expstore / TorchRL", found, EXPSTORE, TORCHRL, 1 / 3)
        figures += named(found, words)
    about = (
        f"warm, {size.batch_size} single steps, 17+6 float32, reward, two flags, next 17 float32; "
        f"{size.num_steps:,} steps in episodes of {size.episode_steps:,}"
    )
    return Result("steps", about, figures, goals)


def transitions(num_steps: int, episode_steps: int) -> Columns:
    """Steps with their next observation: the following row's, a row of its own at an end."""
    columns = vectors(num_steps, episode_steps).columns
    following = np.roll(columns["observation"], -1, axis=0)
    finals = np.random.default_rng(3).standard_normal((num_steps // episode_steps, 17), np.float32)
    following[episode_steps - 1 :: episode_steps] = finals
    return {**columns, "next_observation": following}


def write(columns: Columns, episode_steps: int, path: Path) -> expstore.Store:
    """A store of them, in which no next observation but the final ones is written."""
    with expstore.Writer(path, layout="mapped", commit_interval_s=NEVER_S) as writer:
        for start in range(0, len(columns["reward"]), episode_steps):
            episode = {n: c[start : start + episode_steps] for n, c in columns.items()}
            final = episode.pop("next_observation")[-1:]
            writer.append({**episode, "observation": np.append(episode["observation"], final, 0)})
    return expstore.open(path)


def check_same_rows(contestants: Mapping[str, StepReader], columns: Columns) -> None:
    """Every contestant samples rows as they stand in the data.

    Raises:
        Mismatch: names the contestant and the field.
    """
    for name, contestant in contestants.items():
        batch = contestant.sample()
        rows, found = contestant.rows(batch), contestant.columns(batch)
        for field, column in columns.items():
            if field not in found or found[field].tobytes() != column[rows].tobytes():
                raise Mismatch(f"{name} does not return the bytes of field {field!r}")
