"""What a parser may take: memory and time, so that a hang or a huge allocation is a failure."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator

MOST_MEMORY = 3 << 30  # that can be written to; address space that is only reserved is not counted
MOST_SECONDS = 60


class TooLongError(BaseException):
    """Not an Exception, so that nothing takes it for an ordinary failure."""


def limit_memory(num_bytes: int = MOST_MEMORY) -> None:
    """From here on this process gets a MemoryError for more."""
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


@contextlib.contextmanager
def limited_time(seconds: int = MOST_SECONDS) -> Iterator[None]:
    """Raise `TooLongError` in what takes longer; for the main thread only."""

    def stop(*_: object) -> None:
        raise TooLongError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)  # pytest may have set one for the test
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)
