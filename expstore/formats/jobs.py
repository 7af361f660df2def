"""Work that several threads share, as if one did it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from expstore.errors import SourceError


def check_jobs(jobs: int) -> int:
    """The number of threads.

    Raises:
        SourceError: it is less than 1.
    """
    if jobs < 1:
        raise SourceError(f"--jobs (jobs=) must be >= 1, got {jobs}")
    return jobs


def in_order(work: Callable[[int], None], numbers: Iterable[int], jobs: int) -> None:
    """Do the work for each number; of several errors, that of the first number is raised."""
    if jobs == 1:
        for number in numbers:
            work(number)
        return
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(work, numbers):
            pass
