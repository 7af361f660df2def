"""Warm batches of windows: `Replay.sample` beside TorchRL and plain copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.experience import frames, vectors
from benchmarks.measure import timed_in_turns
from benchmarks.readers import (
    Expstore,
    Plain,
    TorchRL,
    WindowReader,
    check_same_bytes,
    mapped_copies,
)
from benchmarks.results import Figure, Result, ratio


@dataclass(frozen=True)
class Size:
    """How much is stored, and how often it is sampled."""

    num_steps: int
    episode_steps: int
    batch_size: int
    length: int
    rounds: int
    calls: int  # of a turn


VECTORS = {
    "full": Size(200_000, 1000, 64, 50, rounds=60, calls=20),
    "quick": Size(200_000, 1000, 64, 50, rounds=15, calls=10),
    "tiny": Size(2_000, 100, 4, 20, rounds=2, calls=1),
}
FRAMES = {
    "full": Size(24_000, 1000, 64, 50, rounds=25, calls=3),
    "quick": Size(6_000, 1000, 64, 50, rounds=7, calls=2),
    "tiny": Size(300, 100, 4, 20, rounds=2, calls=1),
}
EXPSTORE, TORCHRL = "expstore Replay.sample", "TorchRL LazyMemmapStorage + Sequence"
SLICES = "slice copies from mapped files, steps known"
TAKE = "numpy.take from memory, steps known"


def run_vectors(folder: Path, scale: str) -> Result:
    """17+6 floats, reward, two flags."""
    size = VECTORS[scale]
    experience = vectors(size.num_steps, size.episode_steps)
    store = experience.write(folder / "vectors.exp")
    at = size.batch_size, size.length
    contestants: dict[str, WindowReader] = {
        EXPSTORE: Expstore(store, *at, num_threads=1),
        TORCHRL: TorchRL(experience, folder / "torchrl", *at),
        TAKE: Plain(experience, experience.columns, *at, by_take=True),
    }
    check_same_bytes(contestants, experience, *at)
    figures = sampled(contestants, size, num_threads=1)
    goals = [ratio("one thread: expstore / TorchRL", figures, EXPSTORE, TORCHRL, 1 / 3)]
    return Result("windows-vectors", about(size, "17+6 float32, reward, two flags"), figures, goals)


def run_frames(folder: Path, scale: str) -> Result:
    """Frames of 64 x 64 x 3 bytes, mapped."""
    size = FRAMES[scale]
    experience = frames(size.num_steps, size.episode_steps)
    store = experience.write(folder / "frames.exp")
    at = size.batch_size, size.length
    torchrl = TorchRL(experience, folder / "torchrl", *at)
    plain = {
        SLICES: Plain(experience, mapped_copies(experience, folder / "plain"), *at),
        TAKE: Plain(experience, experience.columns, *at, by_take=True),
    }
    figures, goals = [], []
    for num_threads, words in ((1, "one thread"), (2, "two threads")):
        ours, theirs = f"{EXPSTORE}, {words}", f"{TORCHRL}, {words}"
        contestants: dict[str, WindowReader] = {
            ours: Expstore(store, *at, num_threads=num_threads),
            theirs: torchrl,
            **{f"{name}, one thread": reader for name, reader in plain.items() if num_threads == 1},
        }
        check_same_bytes(contestants, experience, *at)
        figures += sampled(contestants, size, num_threads)
        goals.append(ratio(f"{words}: expstore / TorchRL", figures, ours, theirs, 1 / 8))
    return Result("windows-frames", about(size, "64x64x3 uint8, mapped"), figures, goals)


def sampled(contestants: Mapping[str, WindowReader], size: Size, num_threads: int) -> list[Figure]:
    """Milliseconds per batch, with so many threads for torch as for us."""
    torch.set_num_threads(num_threads)
    calls: dict[str, Callable[[], object]] = {n: c.sample for n, c in contestants.items()}
    # torch's threads spin for some milliseconds after their turn; they must not weigh on the next.
    rest = partial(time.sleep, 0.01)
    seconds = timed_in_turns(calls, rounds=size.rounds, calls=size.calls, before=rest)
    return [Figure.of(n, [s * 1e3 for s in values], "ms") for n, values in seconds.items()]


def about(size: Size, fields: str) -> str:
    return (
        f"warm, {size.batch_size} windows x {size.length} steps, {fields}; "
        f"{size.num_steps:,} steps in episodes of {size.episode_steps:,}"
    )
