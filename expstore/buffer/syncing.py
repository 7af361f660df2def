"""Files made durable after the fact: those of a store that changed since the last time."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from expstore.storage import files

Seen = dict[str, tuple[int, int, int]]  # path -> inode, size, time of the last change


class FilesToSync:
    """The files and directories below `path`; `sync` syncs those that changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: Seen = {}

    def sync(self) -> int:
        """Sync what changed since the last call; returns how many files and directories."""
        found: Seen = {}
        directories: list[Path] = []
        self._look(self.path, found, directories)
        # Taken before the sync: a change during it is seen by the next one.
        changed = [path for path, state in found.items() if self._seen.get(path) != state]
        synced = set(map(str, directories))
        files.together(partial(_sync_file, Path(p)) for p in changed if p not in synced)
        files.together(partial(files.sync_directory, Path(p)) for p in changed if p in synced)
        self._seen = found
        return len(changed)

    def _look(self, path: Path, found: Seen, directories: list[Path]) -> None:
        directories.append(path)
        found[str(path)] = _state(os.stat(path))
        for entry in files.list_directory(path):
            try:
                if entry.is_dir(follow_symlinks=False):
                    self._look(Path(entry.path), found, directories)
                else:
                    found[entry.path] = _state(entry.stat(follow_symlinks=False))
            except FileNotFoundError:  # evicted meanwhile
                continue


def _state(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _sync_file(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # evicted meanwhile
        return
    with files.opened(descriptor):
        files.sync(descriptor, path)
