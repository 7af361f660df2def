"""Stores made to do harm, one way each: names, links, sizes and files that are none."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import (
    DamagedError,
    ExpstoreError,
    FormatError,
    NotAStoreError,
    SchemaError,
    StorageError,
)
from expstore.storage.priorities import load_state
from tests.fuzz import made
from tests.fuzz.limits import limited_time
from tests.fuzz.made import make_priorities, make_store
from tests.fuzz.targets import sealed_pointer, sealed_root
from tests.storage.made import digest, episode, store, writer

OPENERS: list[Callable[[Path], Any]] = [
    expstore.open,
    expstore.verify,
    expstore.repair,
    expstore.Writer,
    lambda path: expstore.delete(path, [0], durable=False),
]
BAD_NAMES = {
    "parent": "../x",
    "far above": "../" * 10 + "etc/passwd",
    "absolute": "/etc/passwd",
    "parent inside": "a/../../x",
    "dots": "..",
    "NUL": "a\0b",
    "private": "__expstore/lock",
    "metadata file": "zarr.json",
    "backslash": "a\\..\\b",
    "empty part": "a//b",
    "deep": "/".join("a" * 1000),
    "long": "a" * 300,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_store(tmp_path / "a.exp")


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the root as one can who knows how its checksum is made."""
    document = json.loads((path / "zarr.json").read_bytes())
    (path / "zarr.json").write_text(json.dumps(sealed_root(change(document) or document)))


def entries(document: Any) -> Any:
    return document["consolidated_metadata"]["metadata"]


def lengthened(document: Any, dimension: str, stop: int) -> None:
    """The commit and all arrays say that there are so many rows."""
    document["attributes"]["expstore"]["commit"]["dims"][dimension][1] = stop
    for entry in entries(document).values():
        if entry["node_type"] == "array" and entry["dimension_names"][0] == dimension:
            entry["shape"][0] = stop


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_root_with_a_field_of_a_bad_name_is_refused(path: Path, name: str) -> None:
    def renamed(document: Any) -> Any:
        return json.loads(
            json.dumps(document)
            .replace('"action"', json.dumps(name))
            .replace("/action", f"/{json.dumps(name)[1:-1]}")
            .replace("action[", f"{json.dumps(name)[1:-1]}[")
        )

    edit(path, renamed)
    before = digest(path.parent)
    for opener in OPENERS:
        if opener is not expstore.repair:  # which finds the name in the copy of the root
            with pytest.raises(FormatError):
                opener(path)
    assert digest(path.parent).keys() - before.keys() <= {"a.exp/__expstore/lock"}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_an_episode_with_a_field_of_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with writer(tmp_path / "a.exp") as out:
        with pytest.raises(SchemaError):
            out.append({"reward": np.ones(2), name: np.ones(2)})
        assert out.num_episodes == 0
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.exp"]


def test_nesting_of_a_thousand_levels_is_refused(tmp_path: Path) -> None:
    data: Any = np.ones(2)
    for _ in range(1000):
        data = {"a": data}
    with writer(tmp_path / "a.exp") as out:
        with pytest.raises(SchemaError):
            out.append({"reward": np.ones(2), "x": data})
        nested: Any = 0
        for _ in range(100_000):
            nested = [nested]
        with pytest.raises(ExpstoreError):
            out.append({"reward": np.ones(2)}, note=nested)
        assert out.num_episodes == 0


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_metadata_nested_so_deeply_is_damage(tmp_path: Path, depth: int) -> None:
    store(tmp_path / "a.exp", episode(3))
    with writer(tmp_path / "b.exp") as out:
        out.append(episode(3), note="x" * (2 * depth + 20))
    values = tmp_path / "b.exp/episodes/metadata/values/c.0"
    data = values.read_bytes().replace(b'"note":"' + b"x" * 2 * depth, b'"note":' + b"[" * depth)
    values.unlink()
    values.write_bytes(data.ljust(4 << 20, b"\0")[: 4 << 20])
    with pytest.raises(DamagedError, match="metadata of episode 0 is not JSON"):
        dict(expstore.open(tmp_path / "b.exp").episodes[0])


# -- links and files that are none -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["steps", "steps/reward", "next/observation", "episodes/crc32c", "__expstore"],
)
def test_symbolic_links_are_refused_and_nothing_is_written_behind_them(
    path: Path, name: str
) -> None:
    outside = path.parent / "outside"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    before = digest(outside)
    for opener in OPENERS:
        with pytest.raises(StorageError, match="there must be no symbolic links in a store"):
            opener(path)
    assert digest(outside) == before


def test_a_chunk_file_that_is_a_link_is_neither_read_nor_written(path: Path) -> None:
    outside, file = path.parent / "outside", path / "steps/reward/c.0"
    file.rename(outside)
    file.symlink_to(outside)
    before = outside.read_bytes()
    for use in (lambda path: expstore.open(path).read([0], ["reward"]), expstore.verify):
        with pytest.raises(StorageError, match="there must be no symbolic links in a store"):
            use(path)
    with pytest.raises(StorageError, match="no symbolic links"), writer(path) as out:
        out.append(made.episode(2))
    assert outside.read_bytes() == before


def test_a_root_that_is_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "b.exp").mkdir()
    (tmp_path / "b.exp/zarr.json").symlink_to(path / "zarr.json")
    with pytest.raises(StorageError, match="no symbolic links in a store"):
        expstore.open(tmp_path / "b.exp")


@pytest.mark.parametrize("name", ["zarr.json", "__expstore/commits", "steps/reward/zarr.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)
    with limited_time(), pytest.raises(StorageError, match="it is no regular file"):
        expstore.open(path)
        expstore.history(path)
        expstore.verify(path)


@pytest.mark.parametrize("name", ["zarr.json", "__expstore/commits", "__expstore/root"])
def test_a_huge_file_is_refused_before_it_is_read(path: Path, name: str) -> None:
    os.truncate(path / name, 10**12)
    with pytest.raises(StorageError, match="it has 1,000,000,000,000 bytes; no file of this kind"):
        expstore.open(path)
        expstore.history(path)
        expstore.verify(path)


# -- sizes -----------------------------------------------------------------------------------------

SIZES = [-1, 0, 1.0, "16", None, (1 << 31) - 1, 1 << 61, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 200]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("what", ["rows", "row", "chunk", "inner chunk", "commit"])
def test_sizes_that_overflow_are_refused_before_there_is_room_for_them(
    path: Path, what: str, size: Any
) -> None:
    def change(document: Any) -> None:
        array = entries(document)["steps/observation/frame"]
        grid = array["chunk_grid"]["configuration"]["chunk_shape"]
        inner = array["codecs"][0]["configuration"]["chunk_shape"]
        if what == "commit":
            lengthened(document, "step", size)
        elif what == "rows":
            array["shape"][0] = size
        elif what == "row":
            for shape in (array["shape"], grid, inner):
                shape[1] = size
            shape = document["attributes"]["expstore"]["schema"]["fields"]["observation/frame"]
            shape["shape"][0] = size
        else:
            (grid if what == "chunk" else inner)[0] = size

    edit(path, change)
    tracemalloc.start()
    try:
        with pytest.raises((FormatError, DamagedError)):
            expstore.open(path).read([0, 3])
            expstore.verify(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_ten_terabytes_of_steps_open_in_constant_memory_and_are_refused_where_files_are_missing(
    path: Path,
) -> None:
    num_steps = 10 * 10**12 // 8
    edit(path, lambda document: lengthened(document, "step", num_steps))
    tracemalloc.start()
    try:
        with limited_time():
            opened = expstore.open(path)
            snapshot = opened.snapshots[0]
            assert snapshot.stop_step == num_steps
            out = {"reward": np.empty(1)}
            with pytest.raises(DamagedError, match="is missing, but the commit counts rows in it"):
                opened.read_into(np.array([num_steps - 1]), out)
            with pytest.raises(DamagedError, match=r"lacks [\d,]+ of the files that its commit"):
                expstore.verify(path)
            with pytest.raises(DamagedError, match=r"lacks [\d,]+ of the files that its commit"):
                expstore.repair(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(DamagedError), limited_time(), writer(path) as writing:
        writing.append(made.episode(1))


def test_a_trillion_episodes_are_refused_where_files_are_missing(path: Path) -> None:
    edit(path, lambda document: lengthened(document, "episode", 10**12))
    tracemalloc.start()
    try:
        for look in (lambda s: s.episode_numbers, lambda s: s.num_steps, repr):
            with pytest.raises(DamagedError):
                look(expstore.open(path))
        with pytest.raises(DamagedError):
            expstore.verify(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_priorities_of_many_steps_are_refused_before_there_is_room_for_them(tmp_path: Path) -> None:
    path = make_priorities(tmp_path / "per", ["0" * 32])
    document = json.loads((path / "zarr.json").read_bytes())
    for name, entry in entries(document).items():
        if name.endswith("raw"):
            entry["shape"][0] = 10**13
    (path / "zarr.json").write_text(json.dumps(sealed_pointer(document)))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match="is missing, a part of saved priorities"):
            load_state(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_says_it_is_larger_than_its_rows_is_damage(path: Path) -> None:
    from random import Random

    from tests.fuzz.targets import hostile_bomb

    (file, *_) = sorted((path / "steps/observation/frame").glob("c.*"))
    data = hostile_bomb(Random(3), file.read_bytes())
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(DamagedError):
        expstore.open(path).read([0], ["observation/frame"])


def test_what_is_no_store_at_all_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_bytes(b"{" * 100_000)
    with pytest.raises(NotAStoreError):
        expstore.open(tmp_path)
