"""The commit: one rename of the root's `zarr.json` publishes everything before it."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import filelock

from expstore.errors import FormatError, NotAStoreError, StepRangeError, StoreLockedError
from expstore.schema import Schema
from expstore.storage import files
from expstore.storage.layout import (
    DELETED,
    EPISODE,
    FORMAT,
    HISTORY_FILE,
    HOLDER_FILE,
    LOCK_FILE,
    METADATA_FILE,
    PRIVATE,
    ROOT_COPY,
    ROOT_KEY,
    STEP,
    TEMPORARY,
    WRITING_FILE,
    ArrayLayout,
    arrays_of,
    canonical_json,
    deleted_arrays,
    group_metadata,
    parents,
)
from expstore.storage.moved_column import with_moved_column

MOST_HISTORY_BYTES = 8 << 20  # a commit every five seconds writes 1 GB in a year


def now() -> float:
    """Seconds since 1970, to the microsecond.

    So every digit that is written counts. Of a seventh one, a flipped bit could give another
    spelling of the same number, which no checksum of what the document says would find.
    """
    return round(time.time(), 6)


@dataclass(frozen=True)
class Commit:
    """What one publication contains."""

    number: int
    time: float  # of `now`
    dims: dict[str, tuple[int, int]]  # live range [start, stop) of every dimension


@dataclass(frozen=True)
class Root:
    """The root's `zarr.json`: everything a reader has to know."""

    store_id: str
    schema: Schema
    commit: Commit
    arrays: dict[str, ArrayLayout] = field(default_factory=dict)

    @staticmethod
    def new() -> Root:
        """The root of a store without a schema yet."""
        dims = {STEP: (0, 0), EPISODE: (0, 0)}
        return Root(secrets.token_hex(16), Schema(), Commit(0, now(), dims))

    def documents(self) -> dict[str, dict[str, Any]]:
        """The `zarr.json` of every group and array by path; "" is the root."""
        inside = self._inside()
        documents = {path: inside[path] for path in self.arrays}
        for group in parents(self.arrays):
            prefix = f"{group}/"
            documents[group] = group_metadata(
                {p.removeprefix(prefix): d for p, d in inside.items() if p.startswith(prefix)}
            )
        documents[""] = self.document()
        return documents

    def _inside(self) -> dict[str, dict[str, Any]]:
        """What the root holds, each group as if it were empty."""
        groups = {group: group_metadata() for group in parents(self.arrays)}
        arrays = {
            path: layout.metadata(self.commit.dims[layout.dimension][1])
            for path, layout in self.arrays.items()
        }
        # Sorted, so that the members of a group stand together: zarr-python 3.1 loses others.
        return dict(sorted((groups | arrays).items()))

    def document(self) -> dict[str, Any]:
        """The root's own `zarr.json`."""
        document = group_metadata(self._inside())
        commit = {
            "number": self.commit.number,
            "time": self.commit.time,
            "dims": {name: list(bounds) for name, bounds in sorted(self.commit.dims.items())},
        }
        document["attributes"][ROOT_KEY] = {
            "format": FORMAT,
            "store_id": self.store_id,
            "schema": self.schema.to_json(),
            "commit": commit,
        }
        commit["crc32c"] = files.crc32c(canonical_json(document))
        return document


def read_root(path: Path) -> Root:
    """Read and check the root of the store at `path`.

    Raises:
        NotAStoreError: there is no directory, or it is no store.
        FormatError: made by a newer version, or its checksum does not hold.
        StorageError: a directory in it is a symbolic link.
    """
    data = _content(path / METADATA_FILE)
    if data is None:
        raise NotAStoreError(_no_store(path))
    root = root_of(path, data)
    # Of files, the opening itself refuses links.
    files.check_no_links(path, (PRIVATE, *parents(root.arrays), *root.arrays))
    return root


def root_of(path: Path, data: bytes) -> Root:
    """Check the root of the store at `path`, read from its `zarr.json` or from the copy of it.

    Raises:
        NotAStoreError: it is no store's.
        FormatError: made by a newer version, or its checksum does not hold.
    """
    try:
        document = json.loads(data)
        ours = document["attributes"][ROOT_KEY]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NotAStoreError(
            f"{path} has a {METADATA_FILE}, but not that of an expstore store; give the "
            "directory that a Writer created"
        ) from None
    return _checked_root(path, document, ours)


def _checked_root(path: Path, document: dict[str, Any], ours: Any) -> Root:
    version = ours.get("format") if isinstance(ours, dict) else None
    if type(version) is not int or version < 1:
        raise FormatError(f"{path}: the format must be a positive integer, got {version!r}")
    if version > FORMAT:
        raise FormatError(newer_format(path, version, ours.get("needs")))
    try:
        crc = ours["commit"].pop("crc32c")
        if crc != files.crc32c(canonical_json(document)):
            raise FormatError(
                f"{path}/{METADATA_FILE} fails its checksum: it was damaged or edited by hand; "
                "expstore repair may restore it"
            )
        commit = _checked_commit(ours["commit"])
        dims = commit.dims
        schema = Schema.from_json(ours["schema"])
        entries = document["consolidated_metadata"]["metadata"]
        expected = arrays_of(schema) | (deleted_arrays() if DELETED in dims else {})
        layouts = {
            name: _checked_layout(usual, entries[name], dims) for name, usual in expected.items()
        }
        if not layouts and any(stop for _, stop in dims.values()):
            raise ValueError("it has steps, but no fields")
        return Root(str(ours["store_id"]), schema, commit, layouts)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}/{METADATA_FILE} is not a valid root: {error!r}") from error


def newer_format(path: Path, version: int, needs: Any) -> str:
    """The text for a format of the future; `needs` is what the file says of who can read it."""
    known = isinstance(needs, str) and re.fullmatch(r"\d{1,6}(\.\d{1,6}){1,3}", needs)
    return (
        f"{path} has format {version}, but this version of expstore reads up to {FORMAT}; install "
        f"a newer expstore{f', {needs} or later' if known else ''}"
    )


def _checked_commit(entry: Any) -> Commit:
    """What the root or a line of the history says of a commit.

    Raises:
        FormatError, KeyError, TypeError, ValueError, AttributeError: that is no commit.
    """
    number, when = entry["number"], entry["time"]
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise FormatError(f"the number of the commit is not valid: {number!r}")
    if type(when) not in (int, float) or not 0 <= when < 1 << 62:
        raise FormatError(f"the time of the commit is not valid: {when!r}")
    dims = {name: _checked_range(name, *bounds) for name, bounds in entry["dims"].items()}
    if not {STEP, EPISODE} <= dims.keys():
        raise FormatError(f"the commit says nothing of {STEP!r} or {EPISODE!r}")
    return Commit(number, when, dims)


def _checked_range(name: str, start: Any, stop: Any) -> tuple[int, int]:
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop < 1 << 62:
        raise FormatError(f"the live range of {name!r} is not valid: [{start!r}, {stop!r}]")
    return start, stop


def _checked_layout(
    expected: ArrayLayout, entry: dict[str, Any], dims: dict[str, tuple[int, int]]
) -> ArrayLayout:
    """An array's layout, which may differ from the usual one in its chunks only."""
    layout = ArrayLayout.of_metadata(expected.path, entry)
    usual = replace(layout, chunk_rows=expected.chunk_rows, inner_rows=expected.inner_rows)
    if usual != expected or layout.is_coded != expected.is_coded:
        raise FormatError(f"array {expected.path!r} does not fit the schema")
    if entry["shape"][0] != dims[layout.dimension][1]:
        raise FormatError(f"array {expected.path!r} does not have the length that the commit says")
    return layout


def _no_store(path: Path) -> str:
    if not path.exists():
        return f"there is nothing at {path}; a Writer creates a store, expstore ingest fills one"
    return f"{path} is not an expstore store: it has no {METADATA_FILE}"


def publish(path: Path, root: Root, *, durable: bool) -> None:
    """Make `root` what readers see; all its rows must be durable already.

    The order is the promise: history, then the root (the commit), then, by `write_documents`,
    what readers of single groups and arrays look at, which so can lag behind but never lead.
    """
    thin_history(path, durable=durable)
    line, data = _history_line(root.commit), _spelled(root.document())
    _make(
        [
            partial(files.append_line, path / HISTORY_FILE, line, durable=durable),
            partial(files.prepare, path / METADATA_FILE, data, durable=durable),
        ],
        durable=durable,
    )
    _put_root(path, durable=durable)


def publish_root(path: Path, root: Root, *, durable: bool) -> None:
    """Put back a root that was damaged."""
    files.prepare(path / METADATA_FILE, _spelled(root.document()), durable=durable)
    _put_root(path, durable=durable)


def _put_root(path: Path, *, durable: bool) -> None:
    files.rename(files.temporary(path / METADATA_FILE), path / METADATA_FILE)
    if durable:
        files.sync_directory(path)


def write_documents(path: Path, root: Root, *, durable: bool) -> None:
    """Bring the `zarr.json` of groups and arrays up to the root."""
    stale, documents = {}, root.documents()
    targets = {path / name / METADATA_FILE: document for name, document in documents.items()}
    # In place of the root itself, which is there, a copy of it, should it be damaged one day.
    targets[path / ROOT_COPY] = targets.pop(path / METADATA_FILE)
    for target, document in targets.items():
        data = _spelled(document)
        if _content(target) != data:
            stale[target] = data
    calls = [partial(files.prepare, t, data, durable=durable) for t, data in stale.items()]
    _make(calls, durable=durable)
    for target in stale:
        files.rename(files.temporary(target), target)


def _make(calls: Iterable[Callable[[], None]], *, durable: bool) -> None:
    """Make calls that write files, side by side where they wait for the disk."""
    if durable:
        files.together(calls)
    else:
        for call in calls:
            call()


def documents_on_disk(path: Path, root: Root) -> Iterator[tuple[str, Any]]:
    """The `zarr.json` below the root as they are now, the one that a commit writes last first.

    A missing one is None, a broken one a FormatError.
    """
    names = list(root.documents())
    names.remove("")
    for name in reversed(names):
        data = _content(path / name / METADATA_FILE)
        try:
            yield name, None if data is None else json.loads(data)
        except (ValueError, RecursionError) as error:
            yield name, FormatError(f"{path / name / METADATA_FILE} is no JSON: {error}")


def _content(path: Path) -> bytes | None:
    try:
        return files.read(path)
    except FileNotFoundError:
        return None


def _spelled(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _history_line(commit: Commit) -> bytes:
    entry = {"number": commit.number, "time": commit.time, "dims": commit.dims}
    data = canonical_json(entry)
    return data + b" %08x\n" % files.crc32c(data)


def read_history(path: Path) -> list[dict[str, Any]]:
    """The commits that the history names, oldest first; torn lines are left out."""
    lines = history_lines(_content(path / HISTORY_FILE) or b"")
    return [entry for entry in map(_parsed_line, lines) if entry is not None]


def history_lines(data: bytes) -> list[bytes]:
    """The lines of a history, each with the line feed that ends it; a torn one has none."""
    return [line for line in re.split(rb"(?<=\n)", data) if line]


def damaged_history(path: Path) -> list[int]:
    """Lines of the history, from 1, that are damaged: not those that a kill has torn."""
    lines = history_lines(_content(path / HISTORY_FILE) or b"")
    bad = [number for number, line in enumerate(lines, 1) if _parsed_line(line) is None]
    is_torn = bool(lines) and not lines[-1].endswith(b"\n")
    return bad[:-1] if is_torn and bad else bad


def thin_history(path: Path, *, durable: bool) -> None:
    """Drop every second line of the older half of a history that has become long.

    So it never takes more than 8 MiB, which is 40,000 commits or more: all of the last thousands,
    and of older ones the fewer the older they are.
    """
    if (files.size(path / HISTORY_FILE) or 0) < MOST_HISTORY_BYTES:
        return
    lines = history_lines(files.read(path / HISTORY_FILE))
    half = len(lines) // 2
    data = b"".join([*lines[:half:2], *lines[half:]])
    files.write_whole(path / HISTORY_FILE, data, durable=durable)


def rewrite_history(path: Path, root: Root) -> None:
    """Keep the good lines up to the root's commit, and bring that one in if it is not there."""
    lines = history_lines(_content(path / HISTORY_FILE) or b"")
    entries = [(entry, line) for line in lines if (entry := _parsed_line(line)) is not None]
    kept = [line for entry, line in entries if entry["number"] < root.commit.number]
    data = b"".join([*kept, _history_line(root.commit)])
    files.write_whole(path / HISTORY_FILE, data, durable=True)


def root_at(path: Path, number: int) -> Root:
    """The root as of an older commit, by what the history says of it.

    Raises:
        StepRangeError: there is no such commit.
    """
    root = read_root(path)
    if root.commit.number == number:
        return root
    for entry in read_history(path):
        if entry["number"] == number < root.commit.number:
            dims = {name: _checked_range(name, *b) for name, b in entry["dims"].items()}
            schema = root.schema.as_of(number)
            known = arrays_of(schema) | deleted_arrays()
            _check_older(path, number, dims, root.commit.dims, arrays_of(schema))
            arrays = {
                p: a
                for p, a in root.arrays.items()
                if p in known and dims[STEP][1] and a.dimension in dims
            }
            schema = schema if arrays else Schema()
            return replace(
                root, schema=schema, arrays=arrays, commit=Commit(number, entry["time"], dims)
            )
    raise StepRangeError(
        f"{path} has no commit {number}; the newest one is {root.commit.number}, and commits "
        "have ascending numbers"
    )


def _check_older(
    path: Path,
    number: int,
    dims: dict[str, tuple[int, int]],
    newest: dict[str, tuple[int, int]],
    arrays: dict[str, ArrayLayout],
) -> None:
    """Refuse what no commit before the newest one can have held."""
    has_shrunk = any(dims[name][1] > newest.get(name, (0, 0))[1] for name in dims)
    lacks = dims[STEP][1] and {a.dimension for a in arrays.values()} - dims.keys()
    if has_shrunk or lacks or bool(dims[STEP][1]) != bool(dims[EPISODE][1]):
        raise FormatError(
            f"{path / HISTORY_FILE} does not fit the store at commit {number}; open another commit"
        )


def _parsed_line(line: bytes) -> dict[str, Any] | None:
    data, _, crc = line.rpartition(b" ")
    if b"%08x\n" % files.crc32c(data) != crc:
        return None
    try:
        entry = json.loads(data)
        _checked_commit(entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # a checksum that holds says nothing of who made it
    return dict(entry)


def copied_commit(path: Path, store_id: str) -> int | None:
    """Number of the commit that the copy of the root is of; None where there is no copy.

    It is -1 where the copy is damaged, or of another store.
    """
    data = _content(path / ROOT_COPY)
    if data is None:
        return None
    try:
        copy = root_of(path / PRIVATE, data)
    except FormatError:
        return -1
    return copy.commit.number if copy.store_id == store_id else -1


def restored_root(path: Path) -> Root:
    """The root, put together from its copy and the newest line of the history.

    The copy has what hardly ever changes, the history what changes with each commit.

    Raises:
        FormatError: they are not there, or damaged as well, or do not fit together.
    """
    data = _content(path / ROOT_COPY)
    if data is None:
        raise FormatError(f"{path / ROOT_COPY} is not there, so the root cannot be restored")
    root = root_of(path / PRIVATE, data)
    newest = max(read_history(path), key=lambda entry: entry["number"], default=None)
    if newest is None or newest["number"] <= root.commit.number:
        return root
    dims = {name: _checked_range(name, *b) for name, b in newest["dims"].items()}
    schema, arrays = root.schema, root.arrays
    if newest["number"] == root.commit.number + 1:
        schema, arrays = with_moved_column(
            path, root.store_id, schema, arrays, dims, newest["number"]
        )
    arrays = arrays | (deleted_arrays() if DELETED in dims else {})
    undecided = any(f.layout == "auto" for f in root.schema.fields.values()) and dims[STEP][1]
    if undecided or dims.keys() != {a.dimension for a in arrays.values()} | {STEP, EPISODE}:
        raise FormatError(
            f"{path / ROOT_COPY} is of commit {root.commit.number}, when the store had other "
            f"arrays than at commit {newest['number']}, so the root cannot be restored"
        )
    commit = Commit(newest["number"], newest["time"], dims)
    return replace(root, schema=schema, arrays=arrays, commit=commit)


# -- one writer at a time ------------------------------------------------------------------------


_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)


class WriterLock:
    """The operating system's lock on a store; it dies with its process.

    Args:
        path: the store's directory, or another one with a directory `__expstore` in it.
        advice: what to do about another one who holds the lock.
        detour: what to do where nothing can be locked.
    """

    def __init__(
        self,
        path: Path,
        advice: str = "close that writer first",
        detour: str = "write to a local disk, or open with lock=False if nothing else writes here",
    ) -> None:
        self._path, self._advice, self._detour = path, advice, detour
        # Where the system has no locks, a file that must be removed would outlive its process.
        self._lock = filelock.FileLock(
            path / LOCK_FILE, timeout=0, thread_local=False, fallback_to_soft=False
        )

    def acquire(self, timeout_s: float = 0.0) -> None:
        """Take the lock and leave our name for the error of the next one who tries.

        Raises:
            StoreLockedError: names the process that holds it, after `timeout_s`.
        """
        try:
            self._lock.acquire(timeout=timeout_s)
        except filelock.Timeout:
            raise StoreLockedError(
                f"{self._path} is being written by {_holder(self._path)}; {self._advice}"
            ) from None
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
                with files.explained("open for writing", self._path / LOCK_FILE):
                    raise
            raise StoreLockedError(
                f"{self._path} cannot be locked: {error}; {self._detour}"
            ) from error
        holder = {"pid": os.getpid(), "host": socket.gethostname()}
        try:
            files.write_whole(self._path / HOLDER_FILE, canonical_json(holder), durable=False)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> WriterLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _holder(path: Path) -> str:
    try:
        holder = json.loads(files.read(path / HOLDER_FILE))
        return f"process {holder['pid']} on {holder['host']}"
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return "another process"


# -- opening for writing -------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """What opening for writing found and mended."""

    lost_episodes: int = 0  # appended by the last writer, but never committed
    lost_steps: int = 0
    removed_files: int = 0


def is_free(path: Path) -> bool:
    """Whether a store can be created here: nothing there, or only what a killed creation left."""
    if path.exists() and not path.is_dir():
        return False
    ours = {PRIVATE, f"{METADATA_FILE}{TEMPORARY}"}
    return all(entry.name in ours for entry in files.list_directory(path))


def note_writing(file: Path, descriptor: int, episodes: int, steps: int) -> None:
    """Write down how much was appended so far, so that a later opening can say what was lost."""
    text = b'{"episodes":%d,"steps":%d}' % (episodes, steps)
    files.pwrite(descriptor, text.ljust(64), 0, file)


def recover(path: Path, root: Root, *, durable: bool) -> Recovery:
    """Finish what the last writer left half done; committed data is never touched."""
    lost = _lost(path, root)
    cut_history(path, root.commit.number)
    removed = remove_strays(path, root)
    for name in (*parents(root.arrays), *root.arrays):
        files.make_directory(path / name)
    write_documents(path, root, durable=durable)
    return Recovery(*lost, removed)


def _lost(path: Path, root: Root) -> tuple[int, int]:
    try:
        noted = json.loads(files.read(path / WRITING_FILE))
        episodes, steps = int(noted["episodes"]), int(noted["steps"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0, 0
    dims = root.commit.dims
    return max(0, episodes - dims[EPISODE][1]), max(0, steps - dims[STEP][1])


def cut_history(path: Path, newest: int) -> None:
    """Drop a torn end, and the lines of commits that were never published.

    Damaged lines before those that are good stay: verify names them.
    """
    data = _content(path / HISTORY_FILE) or b""
    kept = len(data)
    for line in reversed(history_lines(data)):
        entry = _parsed_line(line)
        if entry is not None and entry["number"] <= newest:
            break
        kept -= len(line)
    if kept < len(data):
        files.shorten(path / HISTORY_FILE, kept)


def remove_strays(path: Path, root: Root) -> int:
    """Remove half-made files, and chunk files that hold no live row of the commit."""
    strays = [e.path for e in files.list_directory(path) if e.name.endswith(TEMPORARY)]
    strays += [e.path for e in files.list_directory(path / PRIVATE) if e.name.endswith(TEMPORARY)]
    for top in ("steps", "next", "episodes", DELETED):
        strays += _strays_below(path, top, root)
    for stray in strays:
        files.unlink(Path(stray))
    return len(strays)


def _strays_below(path: Path, name: str, root: Root) -> list[str]:
    strays = []
    layout = root.arrays.get(name)
    for entry in files.list_directory(path / name):
        if entry.is_dir(follow_symlinks=False):
            strays += _strays_below(path, f"{name}/{entry.name}", root)
        elif entry.name.endswith(TEMPORARY) or (
            entry.name.startswith("c.") and not _is_live(layout, root, entry.name)
        ):
            strays.append(entry.path)
    return strays


def _is_live(layout: ArrayLayout | None, root: Root, name: str) -> bool:
    """Whether a chunk file of this name holds a live row."""
    number = name.split(".")[1]
    if layout is None or not number.isdecimal():
        return False
    start, stop = root.commit.dims[layout.dimension]
    is_spelled_so = layout.chunk_path(int(number)) == f"{layout.path}/{name}"
    return is_spelled_so and start // layout.chunk_rows <= int(number) < -(
        -stop // layout.chunk_rows
    )
