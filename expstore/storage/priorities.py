"""Saved priorities: what a sampler needs to go on, as Zarr arrays behind one pointer.

A set is a directory. Its `zarr.json` is the pointer: a Zarr group that holds the numbers of the
state and names the newest generation, a directory beside it with the arrays. So the rename of
that one file publishes a set, for us and for every reader of Zarr.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError, FormatError, SchemaError, StateError, StorageError
from expstore.schema import MAX_PART_BYTES
from expstore.storage import files
from expstore.storage.commits import WriterLock, now
from expstore.storage.layout import (
    METADATA_FILE,
    PRIORITIES_KEY,
    PRIVATE,
    TEMPORARY,
    canonical_json,
)
from expstore.storage.pointer import GENERATION, Pointer, SavedArray
from expstore.storage.states import put_together, taken_apart

WAIT_S = 10.0  # for another process that saves the same set, which takes about a second


def check_set_name(name: Any) -> str:
    """The name of a set, which is that of a directory.

    Raises:
        SchemaError: it cannot be one.
    """
    if not isinstance(name, str):
        raise SchemaError(f"the name of saved priorities must be a string, got {name!r}")
    is_safe = name.strip(".") and not name.startswith(("__", METADATA_FILE))
    is_safe = is_safe and not name.endswith(TEMPORARY)
    if not is_safe or any(ord(c) < 32 or c in "/\\\x7f" or 0xD800 <= ord(c) < 0xE000 for c in name):
        raise SchemaError(
            f"the name of saved priorities must be that of a directory, not {name!r}: without "
            f"slashes, not beginning with __ or {METADATA_FILE} nor ending in {TEMPORARY}; choose "
            "another one"
        )
    if len(name.encode()) > MAX_PART_BYTES:
        raise SchemaError(
            f"the name of saved priorities {name[:80]!r}... is longer than {MAX_PART_BYTES} bytes; "
            "shorten it"
        )
    return name


# -- saving --------------------------------------------------------------------------------------


def save_state(path: Path, state: Mapping[str, Any], store_ids: Sequence[str]) -> None:
    """Save a state as the newest generation of the set at `path`, durably.

    A kill at any moment, or an error, leaves the set as it was or as it is to be.

    Args:
        path: the set's directory; it is made if need be.
        state: what `put_together` gives back, see `taken_apart`.
        store_ids: of the stores that the state is about, in the order of the union.

    Raises:
        StateError: the state cannot be saved, or the set at `path` belongs to other stores.
        StoreLockedError: another process is saving this set.
    """
    document, arrays = taken_apart(state)
    generation = secrets.token_hex(8)
    saved = {place: SavedArray.of(generation, place, rows) for place, rows in arrays.items()}
    pointer = Pointer(generation, now(), tuple(store_ids), document, saved)
    documents = {name: canonical_json(about) for name, about in pointer.documents().items()}
    data = documents.pop("")
    _check_owner(path, pointer.store_ids)  # before anything is made there
    with _locked(path):
        _check_owner(path, pointer.store_ids)
        try:
            _write_generation(path, documents, saved, arrays)
            files.prepare(path / METADATA_FILE, data, durable=True)
        except BaseException:
            with contextlib.suppress(StorageError):  # what stays is removed by the next one
                files.remove_directory(path / generation)
            raise
        files.rename(files.temporary(path / METADATA_FILE), path / METADATA_FILE)
        files.sync_directory(path)
        _remove_others(path, generation)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The set to ourselves. Making its directories durable is part of it."""
    fresh = [p for p in (path, *path.parents) if not os.path.exists(p)]
    files.make_directory(path / PRIVATE)
    for parent in dict.fromkeys([path.parent, *(p.parent for p in fresh)]):
        files.sync_directory(parent)
    lock = WriterLock(
        path,
        "wait for it, or save under another name",
        "give priorities_path= a directory on a local disk",
    )
    lock.acquire(WAIT_S)
    try:
        yield
    finally:
        lock.release()


def _check_owner(path: Path, store_ids: tuple[str, ...]) -> None:
    try:
        found = read_pointer(path)
    except DamagedError:  # nothing is lost by saving over it
        return
    if found is not None and found.store_ids != store_ids:
        raise StateError(
            f"{path} holds priorities of the stores {', '.join(found.store_ids)}, not of "
            f"{', '.join(store_ids)}; save under another name, or remove that directory"
        )


def _write_generation(
    path: Path,
    documents: Mapping[str, bytes],
    saved: Mapping[str, SavedArray],
    arrays: Mapping[str, NDArray[Any]],
) -> None:
    """A generation with everything in it, synced; nothing refers to it yet."""
    for name in documents:
        files.make_directory(path / name)
    calls = [
        partial(_write_file, path / name / METADATA_FILE, about, len(about))
        for name, about in documents.items()
    ]
    for place, array in saved.items():
        rows = np.ascontiguousarray(arrays[place])
        for chunk in array.chunks:
            data = rows[array.rows_of(chunk)].reshape(-1).view(np.uint8)
            file = path / array.layout.chunk_path(chunk)
            calls.append(partial(_write_file, file, data, array.layout.chunk_bytes))
    files.together(calls)
    files.together([partial(files.sync_directory, path / name) for name in (*documents, "")])


def _write_file(path: Path, data: bytes | NDArray[np.uint8], num_bytes: int) -> None:
    """A new file, synced; a chunk has its whole size even if its rows have not."""
    with files.opened(files.create(path)) as descriptor:
        if len(data) < num_bytes:
            files.set_size(descriptor, num_bytes, path)
        files.pwrite(descriptor, data, 0, path)
        files.sync(descriptor, path)


def _remove_others(path: Path, generation: str) -> None:
    """Remove former generations, and what killed or failed savings have left."""
    for entry in files.list_directory(path):
        if GENERATION.fullmatch(entry.name) and entry.name != generation:
            files.remove_directory(Path(entry.path))


# -- loading -------------------------------------------------------------------------------------


def read_pointer(path: Path) -> Pointer | None:
    """What the set at `path` says of itself; None where none was saved.

    Raises:
        DamagedError: its pointer is damaged.
        FormatError: made by a newer version, or something else lies there.
    """
    try:
        data = files.read(path / METADATA_FILE)
    except FileNotFoundError:
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    attributes = document.get("attributes", {}) if isinstance(document, dict) else None
    if isinstance(attributes, dict) and PRIORITIES_KEY not in attributes:
        raise FormatError(
            f"{path} is a part of a Zarr hierarchy, but holds no saved priorities; choose another "
            "name or another priorities_path="
        )
    return Pointer.from_json(path, document)


def load_state(path: Path) -> dict[str, Any] | None:
    """The state that was saved last at `path`; None where none was.

    It may be saved anew meanwhile: what comes is one generation, whole.

    Raises:
        DamagedError: a file of it is missing, has the wrong size or fails its checksum.
        FormatError: made by a newer version.
    """
    while (found := read_pointer(path)) is not None:
        try:
            arrays = {place: _read_array(path, saved) for place, saved in found.arrays.items()}
        except FileNotFoundError as missing:
            now = read_pointer(path)
            if now is None or now.generation != found.generation:
                continue  # it was saved anew, and this generation removed
            raise DamagedError(
                f"{missing} is missing, a part of saved priorities; restore it from a copy, or "
                f"remove {path} to begin anew"
            ) from None
        try:
            return put_together(found.document, arrays)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DamagedError(
                f"{path} has arrays that do not belong to its state: {error!r}; restore it from a "
                "copy, or remove the directory to begin anew"
            ) from error
    return None


def check_documents(path: Path) -> None:
    """Whether the metadata in a set, which other readers look at, is what its pointer says.

    Raises:
        DamagedError: names the file that is not.
    """
    while (found := read_pointer(path)) is not None:
        for name, expected in found.documents().items():
            file = path / name / METADATA_FILE
            try:
                is_sound = json.loads(files.read(file)) == expected
            except (FileNotFoundError, ValueError, RecursionError):
                is_sound = False
            if not is_sound:
                break
        else:
            return
        now = read_pointer(path)
        if now is None or now.generation == found.generation:
            raise DamagedError(
                f"{file} is not as the pointer of the saved priorities says; save them again, or "
                f"remove {path} to begin anew"
            )


def _read_array(path: Path, saved: SavedArray) -> NDArray[Any]:
    layout, hint = saved.layout, f"restore it from a copy, or remove {path} to begin anew"
    for chunk in saved.chunks:  # all of them, before there is room for what they may not have
        file = path / layout.chunk_path(chunk)
        size = files.size(file)
        if size is None:
            raise FileNotFoundError(os.fspath(file))
        if size != layout.chunk_bytes:
            raise DamagedError(f"{file} must have {layout.chunk_bytes} bytes, got {size}; {hint}")
    rows = np.empty((saved.num_rows, *layout.row_shape), layout.dtype)
    for chunk in saved.chunks:
        data = np.frombuffer(files.read(path / layout.chunk_path(chunk)), np.uint8)
        part = rows[saved.rows_of(chunk)]
        part.reshape(-1).view(np.uint8)[:] = data[: part.nbytes]
    if files.crc32c(rows) != saved.crc32c:
        raise DamagedError(
            f"the saved priorities in {path / layout.path} fail their checksum; {hint}"
        )
    return rows


def set_names(directory: Path) -> list[str]:
    """The names of the sets in a directory, damaged ones too."""
    return [
        entry.name
        for entry in files.list_directory(directory)
        if entry.is_dir() and files.size(Path(entry.path) / METADATA_FILE) is not None
    ]
