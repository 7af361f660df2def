"""Readers that are alive while writers are killed: one follows, one stays for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import expstore
from expstore.errors import EvictedError, NotAStoreError
from tests.torture.check import check_episode, check_steps
from tests.torture.episodes import Plan, known_episode

PAUSE_S = 0.005


class Readers:
    """Two threads that read a store whatever happens to it; a context manager.

    Leaving the block raises what one of them found wrong.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.num_reads = 0
        self._path, self._seed = path, seed
        self._errors: list[Exception] = []
        self._ended = threading.Event()
        self._awake = threading.Event()
        self._awake.set()
        self._threads = [
            threading.Thread(target=self._run, args=(stays,), daemon=True) for stays in (1, 20)
        ]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._awake.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While no writer is at work there is nothing to be found, and the check is faster."""
        self._awake.clear()
        yield
        self._awake.set()

    def _run(self, stays: int) -> None:
        rng, store = np.random.default_rng([self._seed, stays]), None
        try:
            while not self._ended.is_set():
                for _ in range(stays):
                    self._awake.wait()
                    self._look(store, rng)
                    time.sleep(PAUSE_S)
                try:
                    store = expstore.open(self._path) if store is None else store.latest()
                except NotAStoreError:
                    assert store is None, "the store was there"
        except Exception as error:
            self._errors.append(error)

    def _look(self, store: expstore.Store | None, rng: np.random.Generator) -> None:
        if store is None or not store.num_episodes:
            return
        plan, live = Plan.of(self._seed), store.episode_numbers
        chosen = int(rng.integers(len(live)))
        known = known_episode(self._seed, int(live[chosen]))
        offset = int(rng.integers(len(known)))
        step = int(store.episodes["start"][chosen]) + offset
        try:
            check_episode(store, known.number, known, plan)
            check_steps(store, np.array([step]), [(known, offset)], plan)
        except EvictedError:
            return
        self.num_reads += 1
