"""Real Atari frames, compressed: sampled beside TorchRL's raw frames, and appended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import expstore
from benchmarks.experience import NEVER_S, Experience, atari
from benchmarks.measure import timed_in_turns
from benchmarks.readers import Expstore, TorchRL, WindowReader, check_same_bytes
from benchmarks.results import Figure, Goal, Result, ratio
from benchmarks.windows import EXPSTORE, TORCHRL, Size, about, sampled

SIZES = {
    "full": Size(24_000, 1000, 64, 50, rounds=15, calls=3),
    "quick": Size(8_000, 1000, 64, 50, rounds=7, calls=2),
    "tiny": Size(400, 100, 4, 20, rounds=2, calls=1),
}
FIELDS = "real Atari frames 64x64x3 uint8, coded"


def run_windows(folder: Path, scale: str) -> Result:
    """Warm windows of coded frames, and the bytes that they take on disk."""
    size = SIZES[scale]
    experience = atari(size.num_steps, size.episode_steps)
    store = experience.write(folder / "atari.exp", layout="auto")
    at = size.batch_size, size.length
    torchrl = TorchRL(experience, folder / "torchrl", *at)
    figures, goals = [], []
    for num_threads, words in ((1, "one thread"), (2, "two threads")):
        ours, theirs = f"{EXPSTORE}, {words}", f"{TORCHRL}, {words}"
        contestants: dict[str, WindowReader] = {
            ours: Expstore(store, *at, num_threads=num_threads),
            theirs: torchrl,
        }
        check_same_bytes(contestants, experience, *at)
        figures += sampled(contestants, size, num_threads)
        goals.append(ratio(f"{words}: expstore coded / TorchRL raw", figures, ours, theirs, 1 / 4))
    files = (folder / "atari.exp" / "steps" / "observation").glob("c.*")
    share = sum(f.stat().st_blocks * 512 for f in files) / experience.columns["observation"].nbytes
    goals.append(Goal("bytes on disk / raw bytes of the frames", share, 1 / 50))
    return Result("windows-atari", about(size, FIELDS), figures, goals)


def run_append(folder: Path, scale: str) -> Result:
    """Decoded bytes per second, on one core."""
    size = SIZES[scale]
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
    return Result("append-atari", about(size, FIELDS), figures, goals)


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
