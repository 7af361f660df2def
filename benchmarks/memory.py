"""Memory of a process that does nothing but sample, at two sizes of store.

The process is this module: `python -m benchmarks.memory STORE BATCHES` prints its figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.experience import NEVER_S, vectors
from benchmarks.results import Figure, Goal, Result
from benchmarks.run import Run

LIMIT_MB = 400
BLOCK_STEPS = 100_000  # made once and appended again and again


@dataclass(frozen=True)
class Size:
    """The stores, and the batches that each process draws."""

    num_steps: tuple[int, int]
    batches: int


SIZES = {
    "full": Size((1_000_000, 8_000_000), batches=1000),
    "quick": Size((200_000, 1_000_000), batches=100),
    "tiny": Size((2_000, 4_000), batches=3),
}


def run_memory(folder: Path, run: Run) -> Result:
    """Anonymous and shared memory, without the pages of mapped files."""
    size = run.of(SIZES)
    figures, goals = [], []
    for num_steps in size.num_steps:
        path = folder / f"{num_steps}.exp"
        fill(path, num_steps)
        command = [sys.executable, "-m", "benchmarks.memory", str(path), str(size.batches)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        for when in ("imported", "sampling"):
            name = f"{num_steps:,} steps, {when}"
            figures.append(Figure.of(name, found[when], "MB"))
        most = max(found["sampling"])
        goals.append(Goal(f"most, {num_steps:,} steps", most, LIMIT_MB, unit="MB"))
    about = f"memory of a sampling process without file pages, {size.batches:,} batches of 64 x 50"
    return Result("memory", about, figures, goals)


def fill(path: Path, num_steps: int) -> None:
    """A store of so many steps, five columns, all written."""
    import expstore

    block = vectors(min(BLOCK_STEPS, num_steps), min(1000, num_steps))
    with expstore.Writer(path, layout="mapped", commit_interval_s=NEVER_S, durable=False) as writer:
        while writer.num_steps < num_steps:
            for episode in block.episodes():
                writer.append(episode)


def sample(path: str, batches: int) -> dict[str, list[float]]:
    """What this process holds before it samples and after each batch."""
    import torch

    import expstore

    torch.set_num_threads(1)
    unit = expstore.Sequence(length=50)
    found: dict[str, list[float]] = {"imported": [held_mb()], "sampling": []}
    replay = expstore.Replay(expstore.open(path), 64, unit=unit)
    for _ in range(batches):
        batch = replay.sample()
        assert batch.batch_size == 64, batch
        found["sampling"].append(held_mb())
    return found


def held_mb() -> float:
    """Resident memory of this process that is not a file's, in MB (Linux only)."""
    status = Path("/proc/self/status").read_text()
    kilobytes = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(kilobytes[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024 / 1e6


if __name__ == "__main__":
    print(json.dumps(sample(sys.argv[1], int(sys.argv[2]))))
