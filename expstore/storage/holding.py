"""Hold: which snapshots reach which files, so that those that none reaches are unmapped."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.storage.protocols import Column


class Hold:
    """Keeps what a snapshot reaches mapped, for as long as this object lives.

    The snapshot has it, and so has every array that was taken out of it with `kept`: unmapping
    what such an array shows would kill the process.

    Args:
        columns: the snapshot's columns by path.
        starts: the first live row of each.
    """

    def __init__(self, columns: Mapping[str, Column], starts: Mapping[str, int]) -> None:
        token = object()
        with _lock:  # a release that is under way may not know of these rows
            for name, column in columns.items():
                _holders.setdefault(column, {})[token] = starts[name]
        weakref.finalize(self, _release, token, tuple(columns.values())).atexit = False
        settle()

    def kept(self, array: NDArray[Any]) -> NDArray[Any]:
        """The same array, not copied, which keeps its rows mapped by itself."""
        return np.asarray(_Kept(array, self))


class _Kept:
    """What numpy needs to see an array's memory, and to keep more than its owner alive."""

    def __init__(self, array: NDArray[Any], hold: Hold) -> None:
        self.array, self.hold = array, hold
        self.__array_interface__ = array.__array_interface__


# Which snapshots reach which rows of a column: token of a hold -> its first live row.
_holders: weakref.WeakKeyDictionary[Column, dict[object, int]] = weakref.WeakKeyDictionary()
_released: deque[tuple[object, tuple[Column, ...]]] = deque()  # not looked at yet
_busy: weakref.WeakSet[Column] = weakref.WeakSet()  # were read when they were to let go
_lock = threading.RLock()  # a snapshot may become garbage in the middle of making another one


def _release(token: object, columns: tuple[Column, ...]) -> None:
    # It may come at any moment of any thread, so it never waits.
    _released.append((token, columns))
    settle()


def settle() -> None:
    """Unmap what no hold reaches any more, as far as nothing is in the way just now."""
    while (_released or _busy) and _lock.acquire(blocking=False):
        try:
            columns = {*_busy}
            _busy.clear()
            while _released:
                token, released = _released.popleft()
                for column in released:
                    _holders[column].pop(token)
                columns.update(released)
            for column in columns:
                held = _holders[column]
                if held and not column.let_go(min([*held.values()])):
                    _busy.add(column)
        finally:
            _lock.release()
        if not _released:  # else somebody came who could not get the lock
            return


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have had it


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forked)
