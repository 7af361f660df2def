"""A page cache and a disk, simulated: what may be left of files after a power cut.

Only what was synced is certain. Of everything else the system may have brought some to the disk
by itself, in any order: of a file, each sector as of any moment since its last sync, and its
size likewise; of a directory, its names, where those that one rename connects go together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.torture.faults import Operation

SECTOR_BYTES = 512

Keep = Callable[[int], int]  # of n changes that were not synced, how many are on the disk


@dataclass
class File:
    """An inode: what is certain of it, and what was done to it since."""

    synced: bytes = b""
    changes: list[tuple[int, bytes] | int] = field(default_factory=list)  # a write, or a new size

    @property
    def num_bytes(self) -> int:
        """The size that a running system sees."""
        size = len(self.synced)
        for change in self.changes:
            size = change if isinstance(change, int) else max(size, change[0] + len(change[1]))
        return size

    def sync(self) -> None:
        self.synced = self.left(lambda count: count)
        self.changes = []

    def left(self, keep: Keep) -> bytes:
        """What a power cut may leave: sectors and size, each as of some moment."""
        if not self.changes:
            return self.synced
        sizes, pieces, size = [], {}, len(self.synced)
        for change in self.changes:
            if isinstance(change, int):
                # What is cut off comes back as zeros.
                change_pieces = _pieces(change, bytes(max(0, size - change)))
                size = change
            else:
                change_pieces = _pieces(*change)
                size = max(size, change[0] + len(change[1]))
            sizes.append(size)
            for sector, piece in change_pieces.items():
                pieces.setdefault(sector, []).append(piece)
        number = keep(len(sizes))
        size = sizes[number - 1] if number else len(self.synced)
        content = bytearray(max(size, len(self.synced), *sizes))
        content[: len(self.synced)] = self.synced
        for _, versions in sorted(pieces.items()):
            for offset, data in versions[: keep(len(versions))]:
                content[offset : offset + len(data)] = data
        return bytes(content[:size])


def _pieces(offset: int, data: bytes) -> dict[int, tuple[int, bytes]]:
    """A write, sector by sector: (offset in the file, bytes) of each."""
    found, end = {}, offset + len(data)
    for sector in range(offset // SECTOR_BYTES, -(-end // SECTOR_BYTES)):
        first = max(offset, sector * SECTOR_BYTES)
        last = min(end, (sector + 1) * SECTOR_BYTES)
        found[sector] = first, data[first - offset : last - offset]
    return found


@dataclass
class Directory:
    """Names that are certain, the names that a running system sees, and what differs."""

    synced: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)  # name -> inode, None: it is gone

    def change(self, changed: dict[str, Any]) -> None:
        self.changes.append(changed)
        _apply(self.names, changed)

    def sync(self) -> None:
        self.synced, self.changes = dict(self.names), []

    def left(self, keep: Keep) -> dict[str, Any]:
        """What a power cut may leave of the names."""
        left = dict(self.synced)
        for group in self._connected():
            for changed in group[: keep(len(group))]:
                _apply(left, changed)
        return left

    def _connected(self) -> list[list[dict[str, Any]]]:
        """Changes that have a name in common, in their order."""
        groups: list[tuple[set[str], list[int]]] = []
        for number, changed in enumerate(self.changes):
            touching = [group for group in groups if group[0] & changed.keys()]
            names = set(changed).union(*(group[0] for group in touching))
            numbers = [at for group in touching for at in group[1]]
            groups = [group for group in groups if group not in touching]
            groups.append((names, [*numbers, number]))
        return [[self.changes[at] for at in sorted(numbers)] for _, numbers in groups]


def _apply(names: dict[str, Any], changed: dict[str, Any]) -> None:
    for name, inode in changed.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


@dataclass(frozen=True)
class Done:
    """An operation that was done, with what was written."""

    operation: Operation
    data: bytes = b""
    offset: int = 0  # or a size; -1: at the end
    descriptor: int = -1
    is_emptied: bool = False  # of an `open`


def watched(log: list[Done]) -> Callable[[Operation, Callable[[], Any], tuple[Any, ...]], Any]:
    """The action that writes down what reaches the system, and never waits for the real disk."""

    def action(operation: Operation, perform: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        result = None if operation.call == "fsync" else perform()
        match operation.call:
            case "pwrite":
                done = Done(operation, bytes(arguments[1])[:result], arguments[2], arguments[0])
            case "write":
                done = Done(operation, bytes(arguments[1])[:result], -1, arguments[0])
            case "ftruncate" | "truncate":
                done = Done(operation, offset=arguments[1])
            case "open":
                done = Done(
                    operation, descriptor=result, is_emptied=bool(arguments[1] & os.O_TRUNC)
                )
            case _:
                done = Done(operation)
        log.append(done)
        return result

    return action


class Disk:
    """Everything below one directory, which itself is certain.

    Args:
        root: the directory; what lies there is taken to be synced.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _loaded(root)
        self._opened: dict[int, File] = {}

    def play(self, done: Done) -> None:
        """Do what was done."""
        operation, path = done.operation, done.operation.path
        match operation.call:
            case "makedirs":
                self._make(path)
            case "open":
                parent, name = self._place(path)
                if name not in parent.names:
                    parent.change({name: File()})
                inode = parent.names[name]
                if done.is_emptied and inode.num_bytes:
                    inode.changes.append(0)
                self._opened[done.descriptor] = inode
            case "pwrite" | "write":
                inode = self._opened[done.descriptor]
                offset = inode.num_bytes if done.offset < 0 else done.offset
                inode.changes.append((offset, done.data))
            case "ftruncate" | "truncate":
                self._find(path).changes.append(done.offset)
            case "fsync":
                self._find(path).sync()
            case "replace":
                parent, name = self._place(path)
                from_parent, source = self._place(operation.source)
                inode = from_parent.names[source]
                assert parent is from_parent, "a rename out of its directory is not simulated"
                parent.change({source: None, name: inode})
            case "unlink" | "rmdir":
                parent, name = self._place(path)
                if name in parent.names:
                    parent.change({name: None})

    def cut(self, keep: Keep, target: Path) -> None:
        """Write what a power cut would leave now to `target`, a directory that is not there."""
        _write(self.top, keep, target)

    def _parts(self, path: str) -> list[str]:
        return list(Path(path).relative_to(self.root).parts)

    def _find(self, path: str) -> Any:
        inode: Any = self.top
        for part in self._parts(path):
            inode = inode.names[part]
        return inode

    def _place(self, path: str) -> tuple[Directory, str]:
        return self._find(str(Path(path).parent)), Path(path).name

    def _make(self, path: str) -> None:
        inode = self.top
        for part in self._parts(path):
            if part not in inode.names:
                inode.change({part: Directory()})
            inode = inode.names[part]


def _loaded(path: Path) -> Directory:
    names: dict[str, Any] = {
        entry.name: _loaded(entry) if entry.is_dir() else File(entry.read_bytes())
        for entry in path.iterdir()
    }
    return Directory(names, dict(names))


def _write(directory: Directory, keep: Keep, target: Path) -> None:
    target.mkdir()
    for name, inode in directory.left(keep).items():
        if isinstance(inode, Directory):
            _write(inode, keep, target / name)
        else:
            (target / name).write_bytes(inode.left(keep))


def fates(rng: np.random.Generator) -> Iterator[Keep]:
    """How much of what was not synced is kept: nothing, all, or some, in turn."""
    while True:
        yield lambda count: 0
        yield lambda count: count
        for share in (0.5, 0.1, 0.9):
            yield _some(rng, share)


def _some(rng: np.random.Generator, share: float) -> Keep:
    def keep(count: int) -> int:
        draw = rng.random()
        if draw < share / 2:
            return count
        return 0 if draw > 0.5 + share / 2 else int(rng.integers(count + 1))

    return keep
