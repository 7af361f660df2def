"""Prioritized batches: drawn, read, and given new priorities, as in every training step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import expstore
from benchmarks.experience import Columns
from benchmarks.measure import timed_in_turns
from benchmarks.results import Figure, Result
from benchmarks.run import Run
from benchmarks.steps import StepReader, check_same_rows, transitions, write


@dataclass(frozen=True)
class Size:
    """How much is stored, and how often it is sampled."""

    num_steps: int
    episode_steps: int
    num_windows: int
    length: int
    batch_size: int  # of single steps
    rounds: int
    calls: int


SIZES = {
    "full": Size(1_000_000, 1000, 64, 50, 256, rounds=15, calls=20),
    "quick": Size(50_000, 1000, 64, 50, 256, rounds=7, calls=10),
    "tiny": Size(2_000, 100, 4, 10, 16, rounds=2, calls=1),
}
ALPHA, BETA = 0.6, 0.4
STEPS = "expstore Prioritized, single steps, with update"
WINDOWS = "expstore Prioritized, windows, with update"
UNIFORM = "expstore Uniform, windows"
CPPRB = "cpprb PrioritizedReplayBuffer in memory, single steps, with update"
TORCHRL_STEPS = "TorchRL PrioritizedSampler, single steps, with update"
TORCHRL_WINDOWS = "TorchRL PrioritizedSampler + Sequence, windows, with update"


class Expstore:
    """A `Replay` whose batches get new priorities when they have been read."""

    def __init__(
        self, store: expstore.Store, batch_size: int, fields: list[str], unit: Any, seed: int = 0
    ):
        sampler = expstore.Prioritized(alpha=ALPHA, beta=BETA)
        self.replay = expstore.Replay(
            store, batch_size, unit=unit, sampler=sampler, fields=fields, num_threads=1
        )
        self.priorities = new_priorities(batch_size)

    def sample(self) -> Any:
        batch = self.replay.sample()
        self.replay.update_priority(batch, self.priorities)
        return batch

    def rows(self, batch: Any) -> Any:
        return np.asarray(batch.info.index).reshape(-1)

    def columns(self, batch: Any) -> Columns:
        return {name: tensor.numpy() for name, tensor in batch.fields.items()}


class TorchRL:
    """A `ReplayBuffer` with its `PrioritizedSampler`, which needs TorchRL's compiled part.

    Raises:
        RuntimeError: that part does not load.
    """

    def __init__(self, columns: Columns, folder: Path, batch_size: int, length: int | None):
        from benchmarks.peers.torchrl import filled, quiet

        with quiet():
            from torchrl.data import PrioritizedSampler, Sequence

            sampler = PrioritizedSampler(len(columns["reward"]), alpha=ALPHA, beta=BETA)
            unit = {} if length is None else {"sample_unit": Sequence(length, done_key="truncated")}
        theirs = {name.replace("next_", "next/"): rows for name, rows in columns.items()}
        self.buffer = filled(theirs, folder, batch_size, sampler=sampler, **unit)
        self.priorities = torch.from_numpy(new_priorities(batch_size))
        self.length = length or 1

    def sample(self) -> Any:
        batch, info = self.buffer.sample(return_info=True)
        self.buffer.update_priority(info["index"][:: self.length], self.priorities)
        return batch, info

    def rows(self, batch: Any) -> Any:
        return np.asarray(batch[1]["index"])

    def columns(self, batch: Any) -> Columns:
        found = batch[0].flatten_keys("_").items()
        return {str(name): t.numpy() for name, t in found if isinstance(t, torch.Tensor)}


def run_prioritized(folder: Path, run: Run) -> Result:
    """Single steps and windows, one thread."""
    size = run.of(SIZES)
    columns = transitions(size.num_steps, size.episode_steps)
    store = write(columns, size.episode_steps, folder / "steps.exp")
    fields, unit = list(columns), expstore.Sequence(length=size.length)
    contestants: dict[str, StepReader] = {
        STEPS: Expstore(store, size.batch_size, fields, None),
        WINDOWS: Expstore(store, size.num_windows, fields, unit),
        **peers(run, columns, folder, size),
    }
    torch.set_num_threads(1)
    check_same_rows(contestants, columns)
    uniform = expstore.Replay(store, size.num_windows, unit=unit, fields=fields, num_threads=1)
    calls: dict[str, Callable[[], Any]] = {n: c.sample for n, c in contestants.items()}
    seconds = timed_in_turns(
        {**calls, UNIFORM: uniform.sample}, rounds=size.rounds, calls=size.calls
    )
    figures = [Figure.of(n, [s * 1e6 for s in values], "us") for n, values in seconds.items()]
    about = (
        f"warm, one thread, {size.batch_size} single steps or {size.num_windows} windows x "
        f"{size.length} steps by priority, 17+6 float32, reward, two flags, next 17 float32; "
        f"{size.num_steps:,} steps"
    )
    return Result("prioritized", about, figures, [])


def peers(run: Run, columns: Columns, folder: Path, size: Size) -> dict[str, StepReader]:
    found: dict[str, StepReader] = {}
    if run.wants("cpprb"):
        from benchmarks.peers.cpprb import Transitions

        priorities = new_priorities(size.batch_size)
        found[CPPRB] = Transitions(columns, size.batch_size, priorities)
    if run.wants("torchrl"):
        try:
            found[TORCHRL_STEPS] = TorchRL(columns, folder / "a", size.batch_size, None)
            found[TORCHRL_WINDOWS] = TorchRL(columns, folder / "b", size.num_windows, size.length)
        except RuntimeError as error:
            print(f"  TorchRL PrioritizedSampler left out: {error}", file=sys.stderr)
    return found


def new_priorities(batch_size: int) -> Any:
    """(B,) float32, the same for every batch."""
    return np.random.default_rng(5).random(batch_size, np.float32) + 0.01
