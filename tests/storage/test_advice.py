"""Cold data: nothing is read from the device but the pages that a batch needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore.storage import advice, files
from expstore.storage.advice import ReadAhead, advise, merged_pages, runs_of
from expstore.storage.coded import CodedColumn
from tests.storage.made import assert_same

PAGE = 4096
FRAME = (64, 64, 3)  # 12 KiB
NUM_STEPS = 2000


def bytes_read() -> int:
    """By this thread, from a device."""
    try:
        lines = Path("/proc/thread-self/io").read_text().splitlines()
    except OSError:
        pytest.skip("this system does not count what a thread reads")
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def evict(path: Path) -> None:
    """Drop a store's files from the page cache; none of them may be mapped."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def frames(layout: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    if layout == "mapped":
        return rng.integers(0, 256, (NUM_STEPS, *FRAME), np.uint8)
    out = np.zeros((NUM_STEPS, *FRAME), np.uint8)  # of a hundredth of the bytes, compressed
    out[:, ::16, ::8] = rng.integers(0, 256, (NUM_STEPS, 4, 8, 3), np.uint8)
    return out


@pytest.fixture(scope="module", params=["mapped", "coded"])
def recorded(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("cold") / "a.exp"
    observation = frames(request.param)
    with expstore.Writer(path, layout={"observation": request.param}) as writer:
        for first in range(0, NUM_STEPS, 200):
            writer.append(
                {"observation": observation[first : first + 200], "action": np.arange(200)}
            )
    return path, observation, request.param


def windows() -> np.ndarray[Any, Any]:
    first = np.random.default_rng(1).permutation(NUM_STEPS // 40)[:8] * 40
    return first[:, None] + np.arange(20)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be emptied")
def test_nothing_outside_of_the_planned_pages_is_read(recorded):
    path, observation, layout = recorded
    expstore.open(path).read([0])  # whatever Python and the metadata need is in memory
    evict(path)
    opened = expstore.open(path)
    column = opened.snapshots[0].columns["steps/observation"]
    steps = windows()
    assert opened.spans.num_steps == NUM_STEPS  # the index is read before the count begins
    before = bytes_read()
    got = opened.read(steps, ["observation"])["observation"]
    read = bytes_read() - before
    assert_same(got, observation[steps])
    if not read:
        pytest.skip("nothing was read from a device: these files lie in memory")
    if layout == "mapped":
        assert read <= 1.1 * got.nbytes
        return
    assert isinstance(column, CodedColumn)
    chunks = np.unique(steps // column.layout.inner_rows).tolist()
    assert column.num_decoded == len(chunks)
    stored = 0
    for chunk in chunks:
        number, within = divmod(chunk, column.layout.chunks_per_shard)
        stored += len(column._shard(number, NUM_STEPS).chunk(within)) + 2 * PAGE
    index = 16 * column.layout.chunks_per_shard + 2 * PAGE
    num_shards = -(-NUM_STEPS // column.layout.chunk_rows)
    assert read <= 1.1 * (stored + num_shards * index)


@pytest.mark.parametrize("without", ["", "madvise", "map_fixed", "map_fixed,madvise"])
def test_cold_rows_are_the_same_with_and_without_advice(recorded, monkeypatch, without):
    path, observation, _ = recorded
    monkeypatch.setenv("EXPSTORE_WITHOUT", without)
    evict(path)
    opened = expstore.open(path)
    steps = np.random.default_rng(2).integers(0, NUM_STEPS - 1, 50)
    got = opened.read(steps, ["observation", "next_observation"])
    assert_same(got["observation"], observation[steps])
    inside = steps % 200 != 199
    assert_same(got["next_observation"][inside], observation[steps + 1][inside])
    assert not got["next_observation"][~inside].any()


def test_advice_ends_when_all_is_in_memory_and_comes_back(monkeypatch):
    counts = [0, 0]
    monkeypatch.setattr(advice, "device_reads", lambda: tuple(counts))
    switch = ReadAhead()
    assert switch.is_on

    def batch(reads: int, waits: int) -> bool:
        before = switch.begin()
        counts[0] += reads
        counts[1] += waits
        switch.end(before)
        return switch.is_on

    assert batch(reads=800, waits=0)  # advised, and needed
    assert not batch(reads=0, waits=0)
    assert not batch(reads=0, waits=0)
    assert batch(reads=0, waits=1)  # a page that had left
    assert batch(reads=8, waits=0)
    assert not batch(reads=0, waits=0)


def test_warm_batches_are_not_advised(recorded, monkeypatch):
    path, _, _ = recorded
    opened = expstore.open(path)
    given_advice: list[int] = []
    opened.read(windows())
    opened.snapshots[0].read_ahead.is_on = False
    monkeypatch.setattr(files, "advise", lambda address, num_bytes: given_advice.append(num_bytes))
    monkeypatch.setattr(advice, "device_reads", lambda: (0, 0))
    opened.read(windows())
    assert given_advice == []


def test_without_madvise_there_is_no_advice(monkeypatch):
    monkeypatch.setenv("EXPSTORE_WITHOUT", "madvise")
    monkeypatch.setattr(advice, "device_reads", lambda: pytest.fail("nobody may ask"))
    switch = ReadAhead()
    switch.end(switch.begin())
    assert not switch.is_on


def test_advice_is_for_whole_pages_in_pieces(monkeypatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(files, "advise", lambda address, size: asked.append((address, size)))
    far = 10 * PAGE + 300 * 1024
    advise([np.array([[far - 5, far + 5], [3, 4]]), np.array([[PAGE, 10 * PAGE + 300 * 1024]])])
    assert asked == [(0, 256 << 10), (256 << 10, 22 * PAGE)]


ranges = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=12)


@given(ranges)
def test_merged_pages_are_the_pages_of_the_ranges(given_ranges):
    array = np.array([(a, a + n) for a, n in given_ranges], np.int64).reshape(-1, 2)
    merged = merged_pages(array, 8)
    pages = {page for a, b in array.tolist() for page in range(a // 8, -(-b // 8))}
    found = [page for a, b in merged.tolist() for page in range(a // 8, b // 8)]
    assert found == sorted(pages)
    assert (merged[1:, 0] > merged[:-1, 1]).all()


@given(st.lists(st.integers(0, 30), max_size=30))
def test_runs_hold_exactly_the_rows(rows):
    runs = runs_of(np.array(rows, np.int64))
    assert {row for a, b in runs.tolist() for row in range(a, b)} == set(rows)
