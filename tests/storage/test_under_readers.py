"""A store that is moved, deleted, truncated or forked away under a reader: an error, no crash."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import expstore
from expstore.errors import DamagedError, ExpstoreError, NotAStoreError, StorageError
from expstore.storage import files
from expstore.storage.boundaries import ends_of
from expstore.storage.coded import CodedColumn, encode, shard_bytes
from expstore.storage.layout import ArrayLayout
from expstore.storage.mapping import MappedColumn
from expstore.storage.salvage import salvaged_shard
from tests.storage.made import episode, store, writer

FIELD = {"mapped": "observation", "coded": "action"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three episodes in chunks of 16 steps; observations are mapped, actions coded."""
    layouts = {"observation": "mapped", "action": "coded"}
    store(tmp_path / "a.exp", *(episode(40, k) for k in range(3)), layout=layouts, chunk_steps=16)
    return tmp_path / "a.exp"


@pytest.mark.parametrize("layout", FIELD)
def test_a_store_that_was_deleted_says_so(path: Path, layout: str) -> None:
    opened = expstore.open(path)
    shutil.rmtree(path)

    with pytest.raises(NotAStoreError, match=f"{path} was moved or deleted while it was open"):
        opened.read([3], FIELD[layout])
    with pytest.raises(NotAStoreError, match=f"there is nothing at {path}"):
        opened.latest()


@pytest.mark.parametrize("layout", FIELD)
def test_a_store_that_was_moved_is_read_where_it_is(path: Path, layout: str) -> None:
    opened = expstore.open(path)
    path.rename(path.with_name("b.exp"))

    with pytest.raises(NotAStoreError, match="open it again where it is, or put it back"):
        opened.read([3], FIELD[layout])
    moved = expstore.open(path.with_name("b.exp")).read([3], FIELD[layout])
    path.with_name("b.exp").rename(path)
    np.testing.assert_array_equal(
        opened.read([3], FIELD[layout])[FIELD[layout]], moved[FIELD[layout]]
    )


@pytest.mark.parametrize("layout", FIELD)
def test_what_was_read_before_is_still_there_when_the_store_is_gone(
    path: Path, layout: str
) -> None:
    opened = expstore.open(path)
    before = opened.read(range(120), FIELD[layout])[FIELD[layout]]
    shutil.rmtree(path)

    np.testing.assert_array_equal(opened.read(range(120), FIELD[layout])[FIELD[layout]], before)


@pytest.mark.parametrize("layout", FIELD)
@pytest.mark.parametrize("num_bytes", [0, 1, 100])
def test_a_file_that_was_truncated_is_named_with_both_sizes(
    path: Path, layout: str, num_bytes: int
) -> None:
    opened = expstore.open(path)
    file = next((path / f"steps/{FIELD[layout]}").glob("c.0*"))
    whole = file.stat().st_size
    os.truncate(file, min(num_bytes, whole - 1))
    expected = rf"must have {whole} bytes, got|bytes at least, got|cut short, at"

    with pytest.raises(DamagedError, match=rf"{file}.*({expected}).*; run expstore verify"):
        opened.read([3], FIELD[layout])


def test_a_file_that_is_truncated_between_the_check_and_the_map(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was mapped whole, and reading its end killed the process."""
    opened = expstore.open(path)
    sizes = {f: f.stat().st_size for f in (path / "steps/observation").glob("c.*")}
    for file in sizes:
        os.truncate(file, 0)
    size = files.size
    monkeypatch.setattr(files, "size", lambda file: sizes.get(file) or size(file))

    with pytest.raises(StorageError, match=r"must have \d+ bytes, got 0|it is empty"):
        opened.read([3], "observation")


def in_child(action) -> int:  # type: ignore[no-untyped-def]
    if not (child := os.fork()):
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_though_a_thread_of_its_parent_was_reading(path: Path) -> None:
    """The thread is not in the child, and would never give the column's lock back."""
    opened = expstore.open(path)
    columns = opened.snapshots[0].columns
    kinds = {type(column) for column in columns.values()}
    ends = ends_of(columns["steps/terminated"], opened.fields["terminated"])
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        for owner in (*columns.values(), ends):
            owner._lock.acquire()  # type: ignore[union-attr]
        held.set()
        done.wait()
        for owner in (*columns.values(), ends):
            owner._lock.release()  # type: ignore[union-attr]

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def read() -> None:
        assert opened.read(range(120))["action"].shape == (120, 2)
        assert len(opened.snapshots[0].ends("terminated")) == 3

    try:
        assert in_child(read) == 0
    finally:
        done.set()
        thread.join()
    assert {MappedColumn, CodedColumn} <= kinds
    assert opened.read([3])["action"].shape == (1, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_file_that_was_truncated_before_a_fork_is_found_by_the_child(path: Path) -> None:
    opened = expstore.open(path)
    for file in (path / "steps/reward").glob("c.*"):
        os.truncate(file, 8)

    def read() -> None:
        with pytest.raises(ExpstoreError, match="must have"):
            opened.read([3], "reward")
        opened.read([3], "action")

    assert in_child(read) == 0


def test_a_writer_whose_store_was_deleted_publishes_nothing(path: Path) -> None:
    out = writer(path)
    out.append(episode(3))
    shutil.rmtree(path)

    with pytest.raises(ExpstoreError):
        out.commit()
    out.close()
    assert not path.exists() or not (path / "zarr.json").exists()


@pytest.mark.parametrize("damaged", [None, 1])
def test_a_shard_that_was_cut_short_keeps_the_chunks_before_the_cut(
    tmp_path: Path, damaged: int | None
) -> None:
    """Its index stands at the end, and so is lost; the chunks say themselves how long they are."""
    layout = coded_layout("steps/x", 64, 8)
    rows = np.random.default_rng(2).integers(0, 9, (64, 4)).astype("<i4")
    chunks = [encode(rows[at : at + 8]) for at in range(0, 64, 8)]
    data = bytearray(shard_bytes(layout, chunks)[: sum(map(len, chunks[:5])) + 7])
    if damaged is not None:
        data[sum(map(len, chunks[: damaged + 1])) - 1] ^= 1  # of its checksum
    (tmp_path / "shard").write_bytes(data)

    found = salvaged_shard(tmp_path / "shard", layout, 64)

    assert found is not None
    zeros = encode(np.zeros((8, 4), "<i4"))
    kept = [k for k in range(5) if k != damaged]
    assert [k for k in range(8) if found[k] == chunks[k]] == kept
    assert all(found[k] == zeros for k in range(8) if k not in kept)


def coded_layout(path: str, chunk_rows: int, inner_rows: int) -> ArrayLayout:
    return ArrayLayout(
        path=path,
        dimension="step",
        row_shape=(4,),
        dtype=np.dtype("<i4"),
        chunk_rows=chunk_rows,
        axis_names=("axis",),
        attributes=(),
        inner_rows=inner_rows,
    )
