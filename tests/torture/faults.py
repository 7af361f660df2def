"""Between the store and the system: count, record, fail, shorten or end at any operation.

`storage/files` is the only module that changes files, and it does so through `os`. Its `os` is
replaced by an `Interposer`, so that one operation here is one call to the system.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pytest import MonkeyPatch

from expstore.storage import files, layout, mapped
from tests.torture.episodes import Chunks

# Calls that change something. `open` counts where it may create or write.
CALLS = (
    *("makedirs", "open", "ftruncate", "pwrite", "write", "fsync", "replace", "unlink"),
    *("truncate", "close", "rmdir"),
)


@dataclass(frozen=True)
class Operation:
    """One call to the system."""

    number: int  # from 1
    call: str  # one out of CALLS
    path: str  # the file it changes; the target of `replace`
    source: str = ""  # of `replace`


WRITES = ("pwrite", "write")
WITHOUT_TRACE = ("fsync", "close")

Action = Callable[[Operation, Callable[[], Any], tuple[Any, ...]], Any]


class Interposer:
    """Looks like the module `os`, and asks `action` about each call that changes something.

    `action(operation, perform, arguments)` returns what the call returns.
    """

    def __init__(self, action: Action) -> None:
        self.count = 0
        self._action = action
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}  # descriptor -> path
        for call in CALLS:
            setattr(self, call, self._wrapped(call))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _wrapped(self, call: str) -> Callable[..., Any]:
        real = getattr(os, call)

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if call == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                descriptor = real(*arguments)
                self._paths[descriptor] = os.fspath(arguments[0])
                return descriptor
            with self._lock:
                self.count += 1
                operation = self._operation(call, arguments)
            result = self._action(operation, lambda: real(*arguments, **keywords), arguments)
            if call == "open":
                self._paths[result] = operation.path
            return result

        return wrapped

    def _operation(self, call: str, arguments: tuple[Any, ...]) -> Operation:
        if call == "replace":
            source, target = map(os.fspath, arguments)
            return Operation(self.count, call, target, source)
        target = arguments[0]
        path = self._paths.get(target, "?") if isinstance(target, int) else os.fspath(target)
        return Operation(self.count, call, path)


@contextmanager
def interposed(action: Action) -> Iterator[Interposer]:
    """Put an action between `storage/files` and the system for a while."""
    interposer = Interposer(action)
    real = files.os
    files.os = interposer  # type: ignore[attr-defined]
    try:
        yield interposer
    finally:
        files.os = real  # type: ignore[attr-defined]


def through(_: Operation, perform: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
    """The action that lets everything through."""
    return perform()


def recorded(log: list[Operation], action: Action = through) -> Action:
    """Write down what was done, after it was done."""

    def recorded_action(
        operation: Operation, perform: Callable[[], Any], arguments: tuple[Any, ...]
    ) -> Any:
        result = action(operation, perform, arguments)
        log.append(operation)
        return result

    return recorded_action


def killed(at: int, when: str) -> Action:
    """End this process, as `kill -9` does, "before", "after" or "half" way through a call.

    Calls that a killed process leaves no trace of are not counted. Half way through a write is
    a part of the bytes; through anything else, after it.
    """
    counted = itertools.count(1)

    def action(operation: Operation, perform: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if operation.call in WITHOUT_TRACE or next(counted) != at:
            return perform()
        if when == "half" and operation.call in WRITES:
            _write_half(operation, arguments)
        elif when != "before":
            perform()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    return action


def frozen(look: Callable[[Operation], None]) -> Action:
    """Look at the directory as a kill would leave it, before each call and half way through it."""

    def action(operation: Operation, perform: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if operation.call in WITHOUT_TRACE:
            return None if operation.call == "fsync" else perform()
        look(operation)
        if operation.call not in WRITES:
            return perform()
        half = _write_half(operation, arguments)
        look(operation)
        descriptor, data, *offset = arguments
        rest = (memoryview(data)[half:], *(at + half for at in offset))
        return half + getattr(os, operation.call)(descriptor, *rest)

    return action


def _write_half(operation: Operation, arguments: tuple[Any, ...]) -> int:
    descriptor, data, *offset = arguments
    half = memoryview(data)[: len(data) // 2]
    return int(getattr(os, operation.call)(descriptor, half, *offset))


def failing(at: int, error: int, fired: list[Operation], *, lasting: bool = False) -> Action:
    """Raise an `OSError` instead of the call number `at`; also at all later ones if `lasting`.

    A failed `close` closes the file nevertheless, as Linux does, and is never refused for lack
    of space while the disk is full.
    """

    def action(operation: Operation, perform: Callable[[], Any], _: tuple[Any, ...]) -> Any:
        if operation.number < at or (fired and not lasting):
            return perform()
        if operation.call == "close":
            perform()
            if operation.number > at:
                return None
        fired.append(operation)
        raise OSError(error, os.strerror(error))

    return action


def unsynced(action: Action) -> Action:
    """The same, but a sync does nothing: for tests that count operations and are in a hurry."""

    def unsynced_action(
        operation: Operation, perform: Callable[[], Any], arguments: tuple[Any, ...]
    ) -> Any:
        is_sync = operation.call == "fsync"
        return action(operation, (lambda: None) if is_sync else perform, arguments)

    return unsynced_action


def shortened(choose: Callable[[int], int]) -> Action:
    """Write only a part of the bytes each time: `choose(n)` of n."""

    def action(operation: Operation, perform: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if operation.call not in WRITES:
            return perform()
        part = memoryview(arguments[1])[: choose(len(arguments[1]))]
        return getattr(os, operation.call)(arguments[0], part, *arguments[2:])

    return action


@contextmanager
def small_chunks(chunks: Chunks) -> Iterator[None]:
    """Stores created meanwhile have chunks of few rows in every array.

    Chunks that are no multiple of the real page make readers go file by file.
    """
    real_chunk_rows, real_shard_rows = layout.chunk_rows, layout.shard_rows

    def chunk_rows(row_bytes: int, most: int = chunks.rows) -> int:
        return real_chunk_rows(row_bytes, min(most, chunks.rows))

    def shard_rows(row_bytes: int, most: int = chunks.rows) -> tuple[int, int]:
        return real_shard_rows(row_bytes, min(most, chunks.rows))

    with MonkeyPatch.context() as patch:
        patch.setattr(layout, "chunk_rows", chunk_rows)
        patch.setattr(layout, "shard_rows", shard_rows)
        patch.setattr(layout, "inner_rows", lambda row_bytes: chunks.inner_rows)
        patch.setattr(layout, "PAGE_BYTES", chunks.page_bytes)
        patch.setattr(mapped, "WRITE_BYTES", chunks.write_bytes)
        patch.setattr(mapped, "DIRECT_BYTES", min(mapped.DIRECT_BYTES, chunks.write_bytes))
        yield
