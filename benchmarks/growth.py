"""What a larger store costs: planning a batch, and reading one, at up to 100 million steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

import expstore
from benchmarks.experience import Experience, scalars, vectors
from benchmarks.measure import timed_in_turns
from benchmarks.readers import Expstore, WindowReader, check_same_bytes
from benchmarks.results import Figure, Goal, Result, ratio
from benchmarks.run import Run
from benchmarks.windows import EXPSTORE as SAMPLE
from benchmarks.windows import TAKE, TORCHRL

EPISODE_STEPS = 1000
BATCH_SIZE, LENGTH = 64, 50
PLAN = "expstore: planning 64 x 50"


@dataclass(frozen=True)
class Size:
    """Steps of the stores, and how often they are sampled; the largest has small fields only."""

    num_steps: tuple[int, ...]
    most: int
    rounds: int
    calls: int


SIZES = {
    "full": Size((100_000, 1_000_000, 10_000_000), 100_000_000, rounds=15, calls=20),
    "quick": Size((100_000, 500_000), 2_000_000, rounds=7, calls=10),
    "tiny": Size((2_000,), 4_000, rounds=2, calls=1),
}


def run_growth(folder: Path, run: Run) -> Result:
    """One thread; a plan is integers only."""
    size = run.of(SIZES)
    figures: list[Figure] = []
    for num_steps in size.num_steps:
        experience = vectors(num_steps, EPISODE_STEPS)
        figures += measured(experience, folder / f"{num_steps}", size, run, "")
    experience = scalars(size.most, EPISODE_STEPS)
    figures += measured(experience, folder / f"{size.most}", size, run, ", small fields")
    least = f"{PLAN}, {size.num_steps[0]:,} steps"
    most = f"{PLAN}, {size.most:,} steps, small fields"
    goals: list[Goal] = ratio(
        f"planning at {size.most:,} / at {size.num_steps[0]:,} steps", figures, most, least, 1.3
    )
    for num_steps in size.num_steps:
        at = f"{num_steps:,} steps"
        goals += ratio(
            f"{at}: sample / numpy.take", figures, f"{SAMPLE}, {at}", f"{TAKE}, {at}", 1.5
        )
    at = f"{size.most:,} steps, small fields"
    goals += ratio(f"{at}: sample / numpy.take", figures, f"{SAMPLE}, {at}", f"{TAKE}, {at}", 1.5)
    about = (
        f"warm, one thread, {BATCH_SIZE} windows x {LENGTH} steps; 17+6 float32, reward, two "
        f"flags, or (small fields) one float32, reward, two flags; episodes of {EPISODE_STEPS:,}"
    )
    return Result("growth", about, figures, goals)


def measured(
    experience: Experience, folder: Path, size: Size, run: Run, words: str
) -> list[Figure]:
    """Planning and sampling at one size."""
    folder.mkdir()
    store = experience.write(folder / "store.exp", durable=False)
    at = BATCH_SIZE, LENGTH
    contestants: dict[str, WindowReader] = {SAMPLE: Expstore(store, *at, num_threads=1)}
    if run.wants("numpy"):
        from benchmarks.peers.arrays import NO_ROW, Plain

        contestants[TAKE] = Plain(experience, experience.columns, *at, NO_ROW)
    if run.wants("torchrl") and not words:
        from benchmarks.peers.torchrl import Sequences

        contestants[TORCHRL] = Sequences(experience, folder / "torchrl", *at)
    torch.set_num_threads(1)
    check_same_bytes(contestants, experience, *at)
    calls: dict[str, Callable[[], Any]] = {n: c.sample for n, c in contestants.items()}
    calls[PLAN] = planning(store)
    seconds = timed_in_turns(calls, rounds=size.rounds, calls=size.calls)
    name = f"{experience.num_steps:,} steps{words}"
    return [Figure.of(f"{n}, {name}", [s * 1e6 for s in v], "us") for n, v in seconds.items()]


def planning(store: expstore.Store) -> Callable[[], Any]:
    """Lays windows over other anchors in every call."""
    unit, spans = expstore.Sequence(length=LENGTH), store.spans
    drawn = np.random.default_rng(4).integers(0, store.num_steps, (64, BATCH_SIZE))
    anchors = cycle(list(drawn))
    return partial(_next_plan, unit, spans, anchors)


def _next_plan(unit: Any, spans: Any, anchors: Any) -> Any:
    return unit.plan(spans, next(anchors))
