"""Ctrl-C held back while an episode is being written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType


class Interrupts:
    """A block in which Ctrl-C waits for the next `allowed()` part, or for the end.

    An interrupt in the middle of a commit would leave a writer that does not know what is on
    disk; one that comes a moment later costs nothing. Outside of the main thread, and where
    Ctrl-C is ignored already, it does nothing.
    """

    def __init__(self) -> None:
        self._allowed = False
        self._pending = False
        self._before: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._arrive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if kind is None:
            self._deliver()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """The part that Ctrl-C may interrupt, at once if it came before."""
        self._allowed = True
        try:
            self._deliver()
            yield
        except KeyboardInterrupt:
            self._pending = False
            raise
        finally:
            self._allowed = False

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        if self._allowed:
            self._deliver(frame)

    def _deliver(self, frame: FrameType | None = None) -> None:
        if self._pending and self._before is not None:
            self._before(signal.SIGINT, frame)
            # Not reached when it raises: what was raised may be swallowed, as in a `__del__`
            # of somebody's environment, and has to come again.
            self._pending = False
