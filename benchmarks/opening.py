"""Opening a store of many episodes, in a running process and in a new one.

The new process is this module: `python -m benchmarks.opening STORE` prints milliseconds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import expstore
from benchmarks.experience import NEVER_S, vectors
from benchmarks.measure import timed_in_turns
from benchmarks.results import Figure, Goal, Result
from benchmarks.run import Run

LIMIT_MS = 100
EPISODE_STEPS = 4
ANCHORS = np.arange(64)
OPEN, PLAN = "open", "open, num_steps, planning one batch"
FRESH = f"{PLAN}, in a new process"


@dataclass(frozen=True)
class Size:
    """Episodes of the store, and how often it is opened."""

    num_episodes: int
    rounds: int
    processes: int


SIZES = {
    "full": Size(100_000, rounds=50, processes=5),
    "quick": Size(5_000, rounds=15, processes=2),
    "tiny": Size(50, rounds=2, processes=1),
}


def run_opening(folder: Path, run: Run) -> Result:
    """All that a reader does before it copies its first row."""
    size = run.of(SIZES)
    path = folder / "many.exp"
    fill(path, size.num_episodes)
    open_and_plan(path)
    contestants = {OPEN: lambda: only_open(path), PLAN: lambda: open_and_plan(path)}
    seconds = timed_in_turns(contestants, rounds=size.rounds)
    figures = [Figure.of(n, [s * 1e3 for s in values], "ms") for n, values in seconds.items()]
    figures.append(Figure.of(FRESH, [fresh_ms(path) for _ in range(size.processes)], "ms"))
    medians = {figure.contestant: figure.median for figure in figures}
    goals = [Goal(name, medians[name], LIMIT_MS, unit="ms") for name in (PLAN, FRESH)]
    about = f"a store of {size.num_episodes:,} episodes with metadata, five fields"
    return Result("open", about, figures, goals)


def fill(path: Path, num_episodes: int) -> None:
    """Short episodes, each with a seed and metadata of its own."""
    episodes = list(vectors(1000 * EPISODE_STEPS, EPISODE_STEPS).episodes())
    with expstore.Writer(path, commit_interval_s=NEVER_S, durable=False) as writer:
        for number in range(num_episodes):
            episode = episodes[number % len(episodes)]
            writer.append(episode, seed=number, policy=f"policy-{number % 7}", success=True)


def only_open(path: Path) -> None:
    # The store is dropped at once: the next opening maps every file anew.
    expstore.open(path)


def open_and_plan(path: Path) -> None:
    store = expstore.open(path)
    plan = expstore.Sequence(length=50).plan(store.spans, ANCHORS * (store.num_steps // 64))
    assert plan.steps.max() < store.num_steps, plan


def fresh_ms(path: Path) -> float:
    """Milliseconds in a new process, imports and the loading of compiled code not counted."""
    command = [sys.executable, "-m", "benchmarks.opening", str(path)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def warmed_ms(path: Path) -> float:
    import torch  # noqa: F401  (as in a process that is going to train)

    from expstore.spans import Spans

    expstore.Sequence(length=50).plan(Spans.laid_out(np.array([0]), np.array([9])), np.array([0]))
    start = time.perf_counter()
    open_and_plan(path)
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    print(warmed_ms(Path(sys.argv[1])))
