"""Threads: work that releases the interpreter's lock, shared out between a few threads."""

from __future__ import annotations

import os
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
        """Make all calls, the first one in this thread; the first error is raised at the end."""
        if self.num_threads == 1 or len(calls) < 2:
            for call in calls:
                call()
            return
        others = [self._helpers().submit(call) for call in calls[1:]]
        try:
            calls[0]()
        finally:
            for other in others:
                other.exception()  # waits: nobody may write into the caller's arrays later
        for other in others:
            other.result()

    def _helpers(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self.num_threads - 1, "expstore-read")
            self._process = os.getpid()
        return self._pool

    def __reduce__(self) -> Any:
        return Threads, (self.num_threads,)


ONE = Threads(1)


def parts_of(length: int, num_parts: int) -> list[slice]:
    """A range cut into about equal slices, without empty ones."""
    edges = [length * i // num_parts for i in range(num_parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]
