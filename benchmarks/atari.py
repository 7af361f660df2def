"""Real Atari frames, compressed: sampled beside TorchRL's raw frames, and appended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import expstore
from benchmarks.experience import NEVER_S, Experience, atari
from benchmarks.measure import timed_in_turns
from benchmarks.readers import Expstore, WindowReader, check_same_bytes
from benchmarks.results import Figure, Goal, Result, ratio
from benchmarks.run import Run
from benchmarks.windows import EXPSTORE, TORCHRL, Size, about, named, sampled, torchrl

SIZES = {
    "full": Size(24_000, 1000, 64, 50, rounds=9, calls=3),
    "quick": Size(8_000, 1000, 64, 50, rounds=5, calls=2),
    "tiny": Size(400, 100, 4, 20, rounds=2, calls=1),
}
FIELDS = "real Atari frames 64x64x3 uint8, coded"


def run_windows(folder: Path, run: Run) -> Result:
    """Warm windows of coded frames, and the bytes that they take on disk."""
    size = run.of(SIZES)
    experience = atari(size.num_steps, size.episode_steps)
    store = experience.write(folder / "atari.exp", layout="auto")
    theirs = torchrl(run, experience, folder, size)
    figures, goals = [], []
    for num_threads, words in ((1, "one thread"), (2, "two threads")):
        contestants: dict[str, WindowReader] = {
            EXPSTORE: Expstore(store, *size.at, num_threads=num_threads),
            **theirs,
        }
        check_same_bytes(contestants, experience, *size.at)
        found = sampled(contestants, size, num_threads)
        what = f"{words}: expstore coded / TorchRL Sequence raw"
        goals += ratio(what, found, EXPSTORE, TORCHRL, 1 / 5)
        figures += named(found, words)
    files = (folder / "atari.exp" / "steps" / "observation").glob("c.*")
    share = sum(f.stat().st_blocks * 512 for f in files) / experience.columns["observation"].nbytes
    goals.append(Goal("bytes on disk / raw bytes of the frames", share, 1 / 50))
    return Result("windows-atari", about(size, FIELDS), figures, goals)


def run_append(folder: Path, run: Run) -> Result:
    """Decoded bytes per second, on one core."""
    size = run.of(SIZES)
    experience = atari(size.num_steps, size.episode_steps)
    writer = expstore.Writer(folder / "append.exp", layout="coded", commit_interval_s=NEVER_S)
    with writer, one_core():
        seconds = timed_in_turns(
            {"expstore append + commit": lambda: append(writer, experience)},
            rounds=size.rounds,
            before=os.sync,
        )
    num_bytes = sum(rows.nbytes for rows in experience.columns.values())
    figures = [
        Figure.of(name, [num_bytes / s / 1e6 for s in values], "MB/s")
        for name, values in seconds.items()
    ]
    goals = [Goal("decoded MB/s on one core", figures[0].median, 150, at_most=False, unit="MB/s")]
    what = f"{experience.num_steps:,} steps of {FIELDS}, appended and committed again and again"
    return Result("append-atari", what, figures, goals)


def append(writer: expstore.Writer, experience: Experience) -> None:
    for episode in experience.episodes():
        writer.append(episode)
    writer.commit()


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this process on one core, where the system allows it."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
