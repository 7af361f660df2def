"""Locks that are free in a forked child, whichever of the parent's threads had them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class HasLock(Protocol):
    """Something with a lock of its own."""

    _lock: threading.Lock


def freed_after_fork(owner: HasLock) -> threading.Lock:
    """A lock for `owner._lock`, which a forked child replaces: its holder stays in the parent.

    What it protects must be whole at any moment as seen from a child, or be put right in the
    method `_after_fork` of the owner.
    """
    _owners.add(owner)
    return threading.Lock()


_owners: weakref.WeakSet[HasLock] = weakref.WeakSet()


def _forked() -> None:
    for owner in list(_owners):
        owner._lock = threading.Lock()
        put_right = getattr(owner, "_after_fork", None)
        if put_right is not None:
            put_right()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forked)
