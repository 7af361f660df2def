"""A torch DataLoader whose workers read a store while its writers are killed.

`python -m tests.torture.loaders` takes a line of JSON `[path, seed]`, reads that store until the
next line, which is empty, and answers with a line: how many steps it read, and what was wrong.
"""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import expstore
from expstore.errors import EvictedError, NotAStoreError
from tests.torture.episodes import TEXT, Plan, known_episode
from tests.torture.nursery import ROOT

BATCH_STEPS, BATCHES, PAUSE_S = 16, 20, 0.03


class Loaders:
    """The parent's side: one process for all stores of a job; a context manager."""

    def __enter__(self) -> Loaders:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.loaders"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def begin(self, path: Path, seed: int) -> None:
        """Have a store read from now on, also if it is not there yet."""
        self._say(json.dumps([str(path), seed]))

    def end(self) -> int:
        """Have it read no more; returns how many steps were read and found right.

        Raises:
            AssertionError: something was wrong; the text has the traceback.
        """
        self._say("")
        assert self._process.stdout is not None
        num_steps, error = json.loads(self._process.stdout.readline())
        assert error is None, error
        return int(num_steps)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


@dataclass(frozen=True)
class Checked:
    """Runs in the worker: compares each step of a batch with what is known of it."""

    store: expstore.Store
    seed: int

    def __call__(self, batch: Any) -> int:
        starts, plan = self.store.episodes["start"], Plan.of(self.seed)
        for row, step in enumerate(batch.info.index.tolist()):
            at = int(np.searchsorted(starts, step, "right")) - 1
            known = known_episode(self.seed, int(self.store.episode_numbers[at]))
            for name, (_, dtype) in plan.fields.items():
                expected = known.columns[name][step - int(starts[at])]
                if dtype == TEXT:
                    assert batch.text(name)[row] == expected, (name, step)
                else:
                    found = batch.fields[name][row].numpy()
                    assert found.tobytes() == expected.tobytes(), (name, step)
        return batch.batch_size


def read(path: str, seed: int) -> int:
    """Load batches, with a new worker every few of them, until there is another line."""
    num_steps, store = 0, None
    while not is_told():
        time.sleep(PAUSE_S)
        try:
            store = expstore.open(path) if store is None else store.latest()
            if store.num_steps:
                num_steps += load(store, seed, num_steps)
        except NotAStoreError:
            assert store is None, "the store was there"
        except EvictedError:
            pass  # while it was read, which the newest commit does not say
    return num_steps


def load(store: expstore.Store, seed: int, order: int) -> int:
    """Load a few batches with one worker; returns how many steps they had."""
    gc.collect()  # torch complains in the next worker of loaders that are forgotten there
    loader = expstore.sequence_loader(
        expstore.SequenceDataset(store, fields=list(Plan.of(seed).fields)),
        BATCH_STEPS,
        shuffle=True,
        seed=order,
        num_workers=1,
        multiprocessing_context="fork",
        transform=Checked(store, seed),
    )
    num_steps = 0
    for at, num_read in enumerate(loader):
        num_steps += num_read
        if at == BATCHES or is_told():
            break
        time.sleep(PAUSE_S)
    return num_steps


def is_told() -> bool:
    """Whether there is a line, or the end, to be read."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main() -> None:
    while line := sys.stdin.buffer.raw.readline():
        if not line.strip():
            continue
        answer: list[Any]
        try:
            answer = [read(*json.loads(line)), None]
        except BaseException:
            answer = [0, traceback.format_exc()]
        while not is_told():
            time.sleep(PAUSE_S)
        sys.stdin.buffer.raw.readline()  # the empty line
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
