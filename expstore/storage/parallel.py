"""Threads: work that releases the interpreter's lock, shared out between a few threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any


class Threads:
    """A pool that is made when first needed, again after a fork, and pickles as its size."""

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Make all calls, in this thread and others, each taking the next one when it is free.

        After an error, calls that nobody has begun are left out; it is raised at the end.
        """
        if self.num_threads == 1 or len(calls) < 2:
            for call in calls:
                call()
            return
        waiting = deque(calls)
        others = [
            self._helpers().submit(_work_off, waiting)
            for _ in range(min(self.num_threads, len(calls)) - 1)
        ]
        try:
            _work_off(waiting)
        finally:
            for other in others:
                other.exception()  # waits: nobody may write into the caller's arrays later
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads; they are made again if there is more to do."""
        pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown()

    def _helpers(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self.num_threads - 1, "expstore-read")
            self._process = os.getpid()
        return self._pool

    def __reduce__(self) -> Any:
        return Threads, (self.num_threads,)


def _work_off(waiting: deque[Callable[[], Any]]) -> None:
    """Make calls until none is left, or, for all threads, until one fails."""
    while True:
        try:
            call = waiting.popleft()
        except IndexError:
            return
        try:
            call()
        except BaseException:
            waiting.clear()
            raise


ONE = Threads(1)


def parts_of(length: int, num_parts: int) -> list[slice]:
    """A range cut into about equal slices, without empty ones."""
    edges = [length * i // num_parts for i in range(num_parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]
