"""Warm batches of windows: `Replay.sample` beside its peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.experience import Experience, frames, vectors
from benchmarks.measure import timed_in_turns
from benchmarks.readers import Expstore, WindowReader, check_same_bytes
from benchmarks.results import Figure, Result, ratio
from benchmarks.run import Run


@dataclass(frozen=True)
class Size:
    """How much is stored, and how often it is sampled."""

    num_steps: int
    episode_steps: int
    batch_size: int
    length: int
    rounds: int
    calls: int  # of a turn

    @property
    def at(self) -> tuple[int, int]:
        return self.batch_size, self.length


VECTORS = {
    "full": Size(200_000, 1000, 64, 50, rounds=15, calls=20),
    "quick": Size(50_000, 1000, 64, 50, rounds=7, calls=10),
    "tiny": Size(2_000, 100, 4, 20, rounds=2, calls=1),
}
FRAMES = {
    "full": Size(24_000, 1000, 64, 50, rounds=9, calls=3),
    "quick": Size(6_000, 1000, 64, 50, rounds=7, calls=2),
    "tiny": Size(300, 100, 4, 20, rounds=2, calls=1),
}
EXPSTORE = "expstore Replay.sample"
TORCHRL = "TorchRL LazyMemmapStorage + Sequence"
SLICER = "TorchRL LazyMemmapStorage + SliceSampler"
SLICES = "numpy: slice copies from mapped files, steps known"
TAKE = "numpy: take from memory, steps known"
H5PY = "h5py: one selection per window, steps known"
ZARR = "zarr-python: one selection per window, steps known"
TENSORSTORE = "tensorstore: all windows at once, steps known"
MINARI = "Minari HDF5: the episode of each window"


def run_vectors(folder: Path, run: Run) -> Result:
    """17+6 floats, reward, two flags; one thread."""
    size = run.of(VECTORS)
    experience = vectors(size.num_steps, size.episode_steps)
    store = experience.write(folder / "vectors.exp")
    contestants: dict[str, WindowReader] = {
        EXPSTORE: Expstore(store, *size.at, num_threads=1),
        **torchrl(run, experience, folder, size),
        **from_files(run, experience, folder, size, num_threads=1),
    }
    if run.wants("minari"):
        from benchmarks.peers.minari import Episodes

        contestants[MINARI] = Episodes(experience, folder / "minari", *size.at)
    check_same_bytes(contestants, experience, *size.at)
    figures = sampled(contestants, size, num_threads=1)
    goals = ratio("one thread: expstore / TorchRL Sequence", figures, EXPSTORE, TORCHRL, 1 / 6)
    return Result("windows-vectors", about(size, "17+6 float32, reward, two flags"), figures, goals)


def run_frames(folder: Path, run: Run) -> Result:
    """Frames of 64 x 64 x 3 bytes, mapped."""
    size = run.of(FRAMES)
    experience = frames(size.num_steps, size.episode_steps)
    store = experience.write(folder / "frames.exp")
    theirs = torchrl(run, experience, folder, size)
    figures, goals = [], []
    for num_threads, words in ((1, "one thread"), (2, "two threads")):
        contestants: dict[str, WindowReader] = {
            EXPSTORE: Expstore(store, *size.at, num_threads=num_threads),
            **theirs,
            **from_files(run, experience, folder / words, size, num_threads),
        }
        check_same_bytes(contestants, experience, *size.at)
        found = sampled(contestants, size, num_threads)
        limit = {1: 1 / 12, 2: 1 / 8}[num_threads]
        goals += ratio(f"{words}: expstore / TorchRL Sequence", found, EXPSTORE, TORCHRL, limit)
        limit = {1: 1.25, 2: 0.8}[num_threads]
        goals += ratio(f"{words}: expstore / slice copies", found, EXPSTORE, SLICES, limit)
        figures += named(found, words)
    return Result("windows-frames", about(size, "64x64x3 uint8, mapped"), figures, goals)


def torchrl(run: Run, experience: Experience, folder: Path, size: Size) -> dict[str, WindowReader]:
    """TorchRL's two ways to windows, over one storage."""
    if not run.wants("torchrl"):
        return {}
    from benchmarks.peers.torchrl import Sequences, Slices

    sequences = Sequences(experience, folder / "torchrl", *size.at)
    return {TORCHRL: sequences, SLICER: Slices(sequences, experience, *size.at)}


def from_files(
    run: Run, experience: Experience, folder: Path, size: Size, num_threads: int
) -> dict[str, WindowReader]:
    """Array libraries that are told which rows to read; numpy's and HDF5's have one thread."""
    from benchmarks.peers import arrays

    folder.mkdir(exist_ok=True)
    found: dict[str, WindowReader] = {}
    if run.wants("numpy"):
        mapped = arrays.mapped_copies(experience, folder / "mapped")
        found[SLICES] = arrays.Plain(experience, mapped, *size.at)
        found[TAKE] = arrays.Plain(experience, experience.columns, *size.at, arrays.NO_ROW)
    if run.wants("h5py") and num_threads == 1:
        datasets = arrays.hdf5_copies(experience, folder / "copies.h5")
        found[H5PY] = arrays.Plain(experience, datasets, *size.at, arrays.EVERY_ROW)
    if run.wants("zarr"):
        zarrs = arrays.zarr_copies(experience, folder / "zarr", num_threads)
        found[ZARR] = arrays.Plain(experience, zarrs, *size.at, arrays.EVERY_ROW)
        if run.wants("tensorstore"):
            opened = arrays.tensorstore_of(experience, folder / "zarr", num_threads)
            plain = arrays.Tensorstore(experience, opened, *size.at, arrays.EVERY_ROW)
            found[TENSORSTORE] = plain
    return found


def sampled(contestants: Mapping[str, WindowReader], size: Size, num_threads: int) -> list[Figure]:
    """Milliseconds per batch, with so many threads for torch as for us."""
    torch.set_num_threads(num_threads)
    calls: dict[str, Callable[[], object]] = {n: c.sample for n, c in contestants.items()}
    # torch's threads spin for some milliseconds after their turn; they must not weigh on the next.
    rest = partial(time.sleep, 0.01)
    seconds = timed_in_turns(calls, rounds=size.rounds, calls=size.calls, before=rest)
    return [Figure.of(n, [s * 1e3 for s in values], "ms") for n, values in seconds.items()]


def named(figures: list[Figure], words: str) -> list[Figure]:
    """The figures with words after the contestant."""
    return [
        Figure(f"{f.contestant}, {words}", f.median, f.quartiles, f.unit, f.num_rounds)
        for f in figures
    ]


def about(size: Size, fields: str) -> str:
    return (
        f"warm, {size.batch_size} windows x {size.length} steps, {fields}; "
        f"{size.num_steps:,} steps in episodes of {size.episode_steps:,}"
    )
