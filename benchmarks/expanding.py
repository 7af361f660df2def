"""`Sequence.expand` alone, on a short and on a long store, beside TorchRL."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import expstore
from benchmarks.experience import Experience, flags
from benchmarks.measure import timed_in_turns
from benchmarks.results import Figure, Goal, Mismatch, Result
from benchmarks.run import Run

LIMIT_US = 80
EPISODE_STEPS = 1000
BURN_IN, LENGTH = 10, 50
DRAWS = 64  # sets of anchors that are taken in turns
ARRAYS, TENSORS, TORCHRL = "expstore, arrays", "expstore, tensors", "TorchRL, tensors"


@dataclass(frozen=True)
class Size:
    """Steps of the stores, and how often windows are laid on them."""

    num_steps: tuple[int, ...]
    batch_size: int
    rounds: int
    calls: int


SIZES = {
    "full": Size((200_000, 10_000_000), 64, rounds=60, calls=100),
    "quick": Size((200_000, 1_000_000), 64, rounds=15, calls=50),
    "tiny": Size((2_000, 3_000), 4, rounds=2, calls=1),
}


def run_expand(folder: Path, run: Run) -> Result:
    """Integers and masks only: nothing is read."""
    size = run.of(SIZES)
    figures, goals = [], []
    for num_steps in size.num_steps:
        at = f"{num_steps:,} steps"
        contestants = built(folder / f"{num_steps}.exp", num_steps, size.batch_size)
        seconds = timed_in_turns(contestants, rounds=size.rounds, calls=size.calls)
        found = {n: Figure.of(f"{n}, {at}", [s * 1e6 for s in v], "us") for n, v in seconds.items()}
        figures += found.values()
        goals += [
            Goal(f"{name}, {at}", found[name].median, LIMIT_US, unit="us")
            for name in (ARRAYS, TENSORS)
        ]
    about = (
        f"{size.batch_size} anchors x {BURN_IN} + {LENGTH} steps laid out and described, nothing "
        f"read; episodes of {EPISODE_STEPS:,}"
    )
    return Result("expand", about, figures, goals)


def built(path: Path, num_steps: int, batch_size: int) -> dict[str, Callable[[], Any]]:
    """What is timed, after all have given the same for the first anchors."""
    columns = {"reward": np.ones(num_steps, np.float32), **flags(num_steps, EPISODE_STEPS)}
    store = Experience(columns, EPISODE_STEPS).write(path)
    torch.set_num_threads(1)
    unit, (their_unit, storage) = expstore.Sequence(LENGTH, burn_in=BURN_IN), torchrl(columns)
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, num_steps, batch_size) for _ in range(DRAWS)]
    tensors = [torch.from_numpy(anchors) for anchors in arrays]
    ours, of_tensors, theirs = (itertools.cycle(given) for given in (arrays, tensors, tensors))
    contestants = {
        ARRAYS: lambda: unit.expand(next(ours), {}, store),
        TENSORS: lambda: unit.expand(next(of_tensors), {}, store),
        TORCHRL: lambda: their_unit.expand(next(theirs), {}, storage),
    }
    _, expected = contestants[TORCHRL]()
    for name in (ARRAYS, TENSORS):
        _, found = contestants[name]()
        for key, values in expected.items():
            if not np.array_equal(values.numpy(), np.asarray(found[key])):
                raise Mismatch(f"{name} does not return the {key} of TorchRL")
    return contestants


def torchrl(columns: dict[str, Any]) -> tuple[Any, Any]:
    """TorchRL's `Sequence`, and a storage with the flags only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its compiled part and about torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, ReplayBuffer, Sequence

        logging.getLogger("torchrl").setLevel(logging.WARNING)
        truncated = torch.from_numpy(columns["truncated"])
        buffer = ReplayBuffer(storage=LazyTensorStorage(len(truncated)), batch_size=1)
        buffer.extend(TensorDict({"truncated": truncated}, [len(truncated)]))
        return Sequence(length=LENGTH, burn_in=BURN_IN, done_key="truncated"), buffer.storage
