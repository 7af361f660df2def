"""Chunk files read as one array, in place or file by file, and never a crash."""

from __future__ import annotations

import gc
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import expstore
from expstore.errors import DamagedError
from expstore.storage import files, mapping
from expstore.storage.mapping import MappedColumn
from expstore.storage.parallel import Threads
from tests.storage.made import assert_same, needs_map_fixed, writer

ROWS = 1024  # of a chunk: the least that fills a page with float32


def append(path: Path, *lengths: int) -> None:
    """Rows that count up through the whole store, in one-step observations of float32."""
    with writer(path, layout="mapped", chunk_steps=1) as out:
        for length in lengths:
            first = out.num_steps
            out.append({"x": np.arange(first, first + length, dtype=np.float32)})


def column(opened: expstore.Store, name: str = "x") -> MappedColumn:
    found = opened.snapshots[0].columns[f"steps/{name}"]
    assert isinstance(found, MappedColumn)
    return found


@pytest.fixture(params=["in place", "file by file", "too many maps", "no address space"])
def way(request, monkeypatch):
    """The ways in which a column can come to be read."""
    if request.param == "in place" and not files.can_map_in_place():
        pytest.skip("files cannot be mapped in place")
    if request.param == "file by file":
        monkeypatch.setattr(files, "can_map_in_place", lambda: False)
    if request.param == "too many maps":
        monkeypatch.setattr(mapping, "MAX_MAPS", 0)
    if request.param == "no address space":

        def refuse(num_bytes: int) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(files, "Mapping", refuse)
    return request.param


# -- the same rows in every way ------------------------------------------------------------------


def test_many_chunks_are_read_as_one_column(tmp_path, way):
    append(tmp_path / "a.exp", 3, 5000, 1, 20_000)
    assert len(list((tmp_path / "a.exp/steps/x").glob("c.*"))) == 25
    opened = expstore.open(tmp_path / "a.exp")
    steps = np.random.default_rng(0).integers(0, 25_004, (50, 40))
    assert_same(opened.read(steps)["x"], steps.astype(np.float32))
    assert_same(opened.episode(1)["x"], np.arange(3, 5003, dtype=np.float32))
    following = opened.read([5002, 5003, 5004], ["next_x"])["next_x"]
    assert following.tolist() == [0.0, 0.0, 5005.0]
    is_whole = column(opened).whole(0, 25_004) is not None
    assert is_whole == (way == "in place")


def test_rows_at_the_edges_of_chunks(tmp_path, way):
    append(tmp_path / "a.exp", 4 * ROWS)
    read = column(expstore.open(tmp_path / "a.exp"))
    for first, last in [(0, 1), (0, ROWS), (ROWS - 1, ROWS + 1), (ROWS, 2 * ROWS), (7, 7),
                        (0, 4 * ROWS), (4 * ROWS - 1, 4 * ROWS), (ROWS, ROWS)]:  # fmt: skip
        got = read.slice(first, last, 0, 4 * ROWS)
        assert got.tolist() == list(range(first, last))


def test_a_store_that_grows_is_followed(tmp_path, way):
    append(tmp_path / "a.exp", 10)
    opened = expstore.open(tmp_path / "a.exp")
    for length in (5, ROWS, 3 * ROWS, 1):
        before = opened
        append(tmp_path / "a.exp", length)
        opened = before.latest()
        every = np.arange(opened.num_steps)
        assert_same(opened.read(every)["x"], every.astype(np.float32))
        assert_same(before.read(every[: len(before)])["x"], every[: len(before)].astype(np.float32))


def test_the_smallest_and_the_largest_rows(tmp_path, way):
    data = {"bit": np.array([True, False]), "big": np.ones((2, 1 << 17), np.float32)}
    with writer(tmp_path / "a.exp", layout="mapped", chunk_steps=16) as out:
        for _ in range(12):
            out.append(data)
    opened = expstore.open(tmp_path / "a.exp")
    assert len(list((tmp_path / "a.exp/steps/big").glob("c.*"))) == 2
    assert_same(opened.episode(11), data)
    assert opened.read([23, 0])["bit"].tolist() == [False, True]


def test_steps_of_no_power_of_two_are_read_file_by_file(tmp_path):
    frames = np.random.default_rng(0).integers(0, 255, (1100, 99, 99, 3), np.uint8)
    with writer(tmp_path / "a.exp", layout="mapped") as out:
        out.append({"frame": frames})
    opened = expstore.open(tmp_path / "a.exp")
    assert column(opened, "frame").layout.chunk_bytes % 4096 != 0
    steps = np.array([1099, 0, 1023, 1024, 1024, 5])
    assert np.array_equal(opened.read(steps)["frame"], frames[steps])
    assert np.array_equal(opened.episode(0)["frame"], frames)


# -- in place ------------------------------------------------------------------------------------


@needs_map_fixed
def test_an_array_taken_before_sees_rows_appended_later(tmp_path):
    append(tmp_path / "a.exp", 10)
    opened = expstore.open(tmp_path / "a.exp")
    early = column(opened).whole(0, 10)
    append(tmp_path / "a.exp", 5, 3 * ROWS)
    newer = opened.latest()
    late = column(newer).whole(0, len(newer))
    assert late is early
    assert early[: len(newer)].tolist() == list(range(len(newer)))


def test_rows_are_not_copied_until_they_are_read(tmp_path):
    append(tmp_path / "a.exp", 10)
    read = column(expstore.open(tmp_path / "a.exp"))
    rows = read.slice(2, 8, 0, 10)
    assert rows.base is not None
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 1


def test_a_mapped_array_outlives_its_store(tmp_path):
    append(tmp_path / "a.exp", 10, 2 * ROWS)
    opened = expstore.open(tmp_path / "a.exp")
    rows = column(opened).slice(5, 2000, 0, len(opened))
    del opened
    gc.collect()
    shutil.rmtree(tmp_path / "a.exp")
    assert rows.tolist() == list(range(5, 2000))


def test_snapshots_of_one_process_share_what_is_mapped(tmp_path):
    append(tmp_path / "a.exp", 2000)
    one, other = expstore.open(tmp_path / "a.exp"), expstore.open(tmp_path / "a.exp")
    assert column(one) is column(other)


@needs_map_fixed
def test_maps_are_given_back(tmp_path):
    append(tmp_path / "a.exp", 20 * ROWS)
    gc.collect()
    before = mapping._Range.num_maps
    opened = expstore.open(tmp_path / "a.exp")
    opened.read(range(20 * ROWS))
    assert mapping._Range.num_maps >= before + 20
    del opened
    gc.collect()
    assert mapping._Range.num_maps == before


@needs_map_fixed
def test_where_the_maps_run_out_while_growing_old_arrays_stay(tmp_path, monkeypatch):
    append(tmp_path / "a.exp", ROWS)
    opened = expstore.open(tmp_path / "a.exp")
    early = column(opened).whole(0, ROWS)
    gc.collect()  # what earlier tests mapped would make room
    monkeypatch.setattr(mapping, "MAX_MAPS", mapping._Range.num_maps)
    append(tmp_path / "a.exp", 3 * ROWS)
    newer = opened.latest()
    assert_same(newer.read(range(4 * ROWS))["x"], np.arange(4 * ROWS, dtype=np.float32))
    assert column(newer).whole(0, 4 * ROWS) is None
    assert early[:ROWS].tolist() == list(range(ROWS))


@needs_map_fixed
def test_a_column_that_outgrows_its_addresses_moves(tmp_path, monkeypatch):
    monkeypatch.setattr(mapping, "RESERVED_BYTES", 0)
    append(tmp_path / "a.exp", ROWS)
    opened = expstore.open(tmp_path / "a.exp")
    early = column(opened).whole(0, ROWS)
    for length in (ROWS, 3 * ROWS, 9 * ROWS):
        append(tmp_path / "a.exp", length)
        opened = opened.latest()
        every = np.arange(len(opened))
        assert_same(opened.read(every)["x"], every.astype(np.float32))
    assert early[:ROWS].tolist() == list(range(ROWS))


def test_only_some_files_stay_mapped_where_they_are_mapped_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "can_map_in_place", lambda: False)
    append(tmp_path / "a.exp", 100 * ROWS)
    opened = expstore.open(tmp_path / "a.exp")
    steps = np.arange(0, 100 * ROWS, 7)
    assert_same(opened.read(steps)["x"], steps.astype(np.float32))
    assert len(column(opened)._chunks) == mapping.CHUNKS_KEPT


def test_threads_may_read_a_column_that_grows(tmp_path, way):
    append(tmp_path / "a.exp", ROWS)
    opened = expstore.open(tmp_path / "a.exp")
    wrong: list[object] = []
    done = threading.Event()

    def read() -> None:
        seen = opened
        rng = np.random.default_rng(threading.get_ident())
        while not done.is_set():
            seen = seen.latest()
            steps = rng.integers(0, len(seen), 50)
            got = seen.read(steps)["x"]
            if got.tolist() != steps.tolist():
                wrong.append((steps, got))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for _ in range(15):
        append(tmp_path / "a.exp", ROWS)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []


# -- damage --------------------------------------------------------------------------------------


def test_a_missing_file_is_damage(tmp_path, way):
    append(tmp_path / "a.exp", 4 * ROWS)
    (tmp_path / "a.exp/steps/x/c.2").unlink()
    opened = expstore.open(tmp_path / "a.exp")
    with pytest.raises(DamagedError, match=r"steps/x/c\.2 is missing, .*; run expstore verify"):
        opened.read([2 * ROWS])


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda d: d + b"\0"])
def test_a_file_of_another_size_is_damage_and_no_crash(tmp_path, way, change):
    append(tmp_path / "a.exp", 4 * ROWS)
    file = tmp_path / "a.exp/steps/x/c.2"
    size = len(change(bytes(4096)))
    file.write_bytes(change(file.read_bytes()))
    opened = expstore.open(tmp_path / "a.exp")
    for _ in range(2):
        with pytest.raises(DamagedError, match=rf"c\.2 must have 4096 bytes, got {size}; run exps"):
            opened.read([2 * ROWS])


@needs_map_fixed
def test_maps_are_not_lost_by_reading_a_damaged_column_again_and_again(tmp_path):
    append(tmp_path / "a.exp", 4 * ROWS)
    gc.collect()
    before = mapping._Range.num_maps
    (tmp_path / "a.exp/steps/x/c.2").unlink()
    opened = expstore.open(tmp_path / "a.exp")
    for _ in range(5):
        with pytest.raises(DamagedError):
            opened.snapshots[0].rows("x", 0, 1)
    assert mapping._Range.num_maps == before


def test_a_damaged_file_does_not_hinder_other_columns(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append({"x": [1, 2], "y": [3, 4]})
    (tmp_path / "a.exp/steps/x/c.0").unlink()
    opened = expstore.open(tmp_path / "a.exp")
    assert opened.read([0, 1], ["y"])["y"].tolist() == [3, 4]


def test_a_file_that_comes_back_can_be_read_again(tmp_path, way):
    append(tmp_path / "a.exp", 4 * ROWS)
    file = tmp_path / "a.exp/steps/x/c.2"
    file.rename(tmp_path / "kept")
    opened = expstore.open(tmp_path / "a.exp")
    with pytest.raises(DamagedError):
        opened.read([2 * ROWS])
    (tmp_path / "kept").rename(file)
    assert opened.read([2 * ROWS])["x"].tolist() == [2 * ROWS]


def test_a_writer_does_not_go_on_in_a_file_of_another_size(tmp_path):
    append(tmp_path / "a.exp", 10)
    file = tmp_path / "a.exp/steps/x/c.0"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"c\.0 must have 4096 bytes, got 4095; run expstore"):
        append(tmp_path / "a.exp", 10)
    assert expstore.open(tmp_path / "a.exp").num_steps == 10


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    "shape, dtype", [((2, 3), "f8"), ((16,), "u1"), ((3,), "u1"), ((4,), "i2")]
)
def test_batches_that_no_cache_holds_are_copied_alike(
    tmp_path, monkeypatch, shape, dtype, num_threads
):
    pytest.importorskip("numba")
    from expstore.storage.row_kernels import STORE_BYTES

    assert mapping.STREAMED_ALIGNMENT % STORE_BYTES == 0
    rows = np.random.default_rng(0).integers(0, 255, (9000, *shape)).astype(dtype)
    with writer(tmp_path / "a.exp", layout="mapped", chunk_steps=1) as out:
        out.append({"x": rows})
    monkeypatch.setattr(mapping, "STREAMED_BYTES", 1)
    monkeypatch.setattr(mapping, "STREAMED_ROW_BYTES", 1)
    monkeypatch.setattr(mapping, "SPLIT_BYTES", 1)
    found = column(expstore.open(tmp_path / "a.exp"))
    steps = np.random.default_rng(1).integers(0, 9000, 777)
    out = np.empty((777, *shape), dtype)
    found.take(steps, out, 0, 9000, Threads(num_threads))
    assert_same(out, rows[steps])
    strided = np.zeros((777, 2, *shape), dtype)
    found.take(steps, strided[:, 1], 0, 9000)
    assert_same(strided[:, 1], rows[steps])
    assert not strided[:, 0].any()
