"""A D4RL file ingested, beside h5py reading the whole of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import expstore
from benchmarks.experience import Columns
from benchmarks.measure import timed_in_turns
from benchmarks.results import Figure, Mismatch, Result, ratio
from benchmarks.run import Run
from benchmarks.steps import transitions
from benchmarks.windows import named

THEIRS = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "timeouts",
    "next_observation": "next_observations",
}
INGEST = "expstore ingest, store included"
READ = "h5py: every dataset read whole"


@dataclass(frozen=True)
class Size:
    """Rows of the file, and how often it is read."""

    num_steps: int
    episode_steps: int
    rounds: int


SIZES = {
    "full": Size(1_000_000, 1000, rounds=5),
    "quick": Size(100_000, 1000, rounds=3),
    "tiny": Size(2_000, 100, rounds=1),
}


def run_d4rl(folder: Path, run: Run) -> Result:
    """Compressed by gzip, as D4RL's files are, and as plain datasets."""
    size = run.of(SIZES)
    about = (
        f"a D4RL HDF5 file of {size.num_steps:,} steps in episodes of {size.episode_steps:,}: "
        "17+6 float32, reward, two flags, next 17 float32"
    )
    if not run.wants("h5py"):
        return Result("d4rl", about, [], [])
    columns = transitions(size.num_steps, size.episode_steps)
    figures, goals = [], []
    for words, compression in (("gzip", "gzip"), ("uncompressed", None)):
        path = folder / f"{words}.hdf5"
        write(columns, path, compression)
        contestants = {INGEST: ingesting(path, folder), READ: lambda path=path: read(path)}
        check_same_bytes(contestants, columns, size)
        seconds = timed_in_turns(contestants, rounds=size.rounds)
        found = [Figure.of(n, values, "s") for n, values in seconds.items()]
        if compression:  # D4RL's are; else to read is to copy from the page cache
            goals += ratio("ingest / reading by h5py", found, INGEST, READ, 2)
        figures += named(found, words)
    return Result("d4rl", about, figures, goals)


def write(columns: Columns, path: Path, compression: str | None) -> None:
    """A file as D4RL lays it out."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, rows in columns.items():
            file.create_dataset(THEIRS[name], data=rows, compression=compression)


def read(path: Path) -> dict[str, Any]:
    """All of it, in memory."""
    import h5py

    with h5py.File(path, "r") as file:
        return {name: dataset[...] for name, dataset in file.items()}


def ingesting(source: Path, folder: Path) -> Callable[[], Path]:
    """A call that makes a new store of the file; the one before it is removed."""
    numbers = count()

    def ingest() -> Path:
        number = next(numbers)
        shutil.rmtree(folder / f"{number - 1}.exp", ignore_errors=True)
        path = folder / f"{number}.exp"
        expstore.ingest_from(source, path)
        return path

    return ingest


def check_same_bytes(
    contestants: dict[str, Callable[[], Any]], columns: Columns, size: Size
) -> None:
    """Both give every row back.

    Raises:
        Mismatch: names the contestant and the field.
    """
    store = expstore.open(contestants[INGEST]())
    found = {INGEST: store.read(np.arange(size.num_steps), fields=tuple(columns))}
    whole = contestants[READ]()
    found[READ] = {name: whole[theirs] for name, theirs in THEIRS.items()}
    for contestant, data in found.items():
        for field, rows in columns.items():
            if data[field].tobytes() != rows.tobytes():
                raise Mismatch(f"{contestant} does not return the bytes of field {field!r}")
