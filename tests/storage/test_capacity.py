"""Capacity: whole oldest episodes leave, readers are not disturbed, disk use stays flat."""

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import expstore
from expstore.errors import CapacityError, EvictedError, SchemaError, StepRangeError
from expstore.storage import files
from expstore.storage.mapping import MappedColumn
from tests.storage.made import needs_map_fixed

LAYOUTS = ["mapped", "coded"]


def episode(first: int, length: int) -> dict[str, Any]:
    """Steps that know their numbers, with next values and text."""
    steps = np.arange(first, first + length + 1)
    return {
        "observation": {
            "state": steps[:, None].repeat(64, axis=1),
            "text": [f"step {step}" for step in steps],
        },
        "action": steps[:-1],
        "reward": np.ones(length),
    }


def check(store: expstore.Store) -> None:
    """Every live step reads as what it is."""
    spans = store.spans
    steps = spans.steps_at(np.arange(spans.num_steps))
    fields = ("action", "observation", "next_observation", "has_next")
    read = store.read(steps, fields)
    assert np.array_equal(read["action"], steps)
    assert np.array_equal(read["observation"]["state"][:, 5], steps)
    assert np.array_equal(read["next_observation"]["state"][:, 5], steps + 1)
    assert read["observation"]["text"].tolist() == [f"step {step}" for step in steps]
    assert read["next_observation"]["text"].tolist() == [f"step {step + 1}" for step in steps]
    assert read["has_next"].all()
    assert [row["tag"] for row in store.episodes] == store.episode_numbers.tolist()


def fill(path: Path, lengths: list[int], commit_every: int = 5, **options: Any) -> expstore.Store:
    options = {"commit_interval_s": 1e9, "durable": False, **options}
    with expstore.Writer(path, **options) as writer:
        for i, length in enumerate(lengths):
            writer.append(episode(writer.num_steps, length), tag=writer.num_episodes)
            if i % commit_every == 0:
                writer.commit()
    return expstore.open(path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("commit_every", [1, 7, 1000])
def test_the_oldest_episodes_leave_whole(tmp_path: Path, layout: str, commit_every: int):
    lengths = np.random.default_rng(0).integers(1, 120, 60).tolist()
    path = tmp_path / "a.exp"

    store = fill(path, lengths, commit_every, capacity_steps=1000, layout=layout)

    kept = 0
    while kept < len(lengths) and sum(lengths[-kept - 1 :]) <= 1000:
        kept += 1
    assert store.num_episodes == kept
    assert store.num_steps == sum(lengths[-kept:])
    assert store.episode_numbers[0] == len(lengths) - kept
    check(store)
    assert expstore.verify(path).is_sound


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_zarr_readers_see_the_live_rows_at_their_numbers(tmp_path: Path, layout: str):
    store = fill(tmp_path / "a.exp", [90] * 60, capacity_steps=1000, layout=layout)
    first = int(store.spans.start[0])
    actions = zarr.open_group(tmp_path / "a.exp", mode="r")["steps/action"][:]
    assert np.array_equal(actions[first:], np.arange(first, 60 * 90))
    assert not actions[:64].any()


def test_an_episode_longer_than_the_capacity_is_refused_and_nothing_written(tmp_path: Path):
    path = tmp_path / "a.exp"
    fill(path, [3], capacity_steps=10)
    with expstore.Writer(path, capacity_steps=10) as writer:
        with pytest.raises(CapacityError, match=r"11 steps in episode 1, .* may hold 10"):
            writer.append(episode(3, 11), tag=1)
        with pytest.raises(CapacityError), writer.episode(tag=1) as stream:
            for t in range(1000):
                stream.add({"observation": {"state": np.full(64, t), "text": "x"},
                            "action": t, "reward": 0.0})  # fmt: skip
        writer.append(episode(3, 10), tag=1)
    store = expstore.open(path)
    assert store.episode_numbers.tolist() == [1]
    check(store)


def test_five_steps_of_capacity_hold_the_four_newest_rows(tmp_path: Path):
    assert fill(tmp_path / "a.exp", [3, 4], capacity_steps=5).num_steps == 4


@pytest.mark.parametrize("name", ["capacity_steps", "capacity_bytes"])
def test_a_capacity_below_one_is_refused(tmp_path: Path, name: str):
    with pytest.raises(SchemaError, match=f"{name} must be an integer of at least 1, got 0"):
        expstore.Writer(tmp_path / "a.exp", **{name: 0})


def disk_use(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("c.*"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_on_disk_stay_within_the_capacity(tmp_path: Path, layout: str):
    rng = np.random.default_rng(0)
    path, used = tmp_path / "a.exp", []
    with expstore.Writer(path, capacity_bytes=4 << 20, layout=layout, durable=False) as writer:
        for _ in range(80):
            noise = rng.integers(0, 255, (50, 40, 40), dtype=np.uint8)  # 80 KB
            writer.append({"observation": noise, "action": np.zeros(49, np.int64)})
            writer.commit()
            used.append(disk_use(path))
    assert max(used) <= 4.5 * 2**20
    assert min(used[50:]) >= 3 << 20
    assert expstore.verify(path).is_sound
    assert expstore.open(path).num_episodes > 30


def test_a_long_run_keeps_the_number_of_files_and_bytes_flat(tmp_path: Path):
    path, used = tmp_path / "a.exp", []
    with expstore.Writer(path, capacity_steps=500, durable=False) as writer:
        for i in range(240):
            writer.append(episode(writer.num_steps, 20), tag=i)
            writer.commit()
            if i % 40 == 39:
                chunks = list((path / "steps/action").glob("c.*"))
                used.append((len(chunks), disk_use(path)))
    assert max(n for n, _ in used[1:]) <= used[0][0] + 2
    assert max(b for _, b in used[1:]) <= used[0][1] * 1.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_old_reader_reads_on_or_is_told_what_was_evicted(tmp_path: Path, layout: str):
    path = tmp_path / "a.exp"
    mapped = fill(path, [60] * 10, capacity_steps=600, layout=layout)
    check(mapped)  # maps every file
    unmapped = pickle.dumps(mapped)
    fill(path, [60] * 40, capacity_steps=600, layout=layout)

    check(mapped)
    command = [sys.executable, "-c", LATE, str(tmp_path / "pickled")]
    (tmp_path / "pickled").write_bytes(unmapped)
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.split() == ["EvictedError", "EvictedError"]


LATE = """
import pickle, sys, numpy as np, expstore
store = pickle.loads(open(sys.argv[1], "rb").read())
for ask in (lambda: store.read([0, 1], ["action"]), lambda: store.episode(0)):
    try:
        print(ask())
    except expstore.errors.EvictedError as error:
        assert "latest()" in str(error)
        print("EvictedError")
"""


def test_asking_for_evicted_steps_is_an_error(tmp_path: Path):
    store = fill(tmp_path / "a.exp", [60] * 50, capacity_steps=600)
    with pytest.raises(StepRangeError, match="step 0 is not among"):
        store.read([0])
    with pytest.raises(StepRangeError, match="episode 0 is not among"):
        store.episode(0)


def maps_of_deleted_files(path: Path) -> int:
    with open("/proc/self/maps") as maps:
        return sum("(deleted)" in line and f"{path}/" in line for line in maps)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="maps are not listed here")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evicted_files_are_freed_when_followers_move_on(tmp_path: Path, layout: str):
    path = tmp_path / "a.exp"
    store = fill(path, [60] * 10, capacity_steps=600, layout=layout)
    most = 0
    with expstore.Writer(path, capacity_steps=600, commit_interval_s=1e9) as writer:
        for i in range(30):
            writer.append(episode(writer.num_steps, 60), tag=writer.num_episodes)
            writer.commit()
            store = store.latest()
            check(store)
            if i > 10:
                most = max(most, maps_of_deleted_files(path))
    assert most <= 30  # of the hundreds that were evicted


def test_what_the_first_commit_evicts_leaves_no_files(tmp_path: Path):
    """Files of columns that were new with that commit stayed until the store was reopened."""
    path, num_evicted = tmp_path / "a.exp", 0
    options = {"capacity_steps": 600, "commit_interval_s": 1e9, "durable": False}
    with expstore.Writer(path, **options) as writer:
        for _ in range(40):
            writer.append(episode(writer.num_steps, 60), tag=writer.num_episodes)
        writer.commit()
        (root,) = (snapshot.root for snapshot in expstore.open(path).snapshots)
        for layout in root.arrays.values():
            evicted = range(root.commit.dims[layout.dimension][0] // layout.chunk_rows)
            assert not any((path / layout.chunk_path(chunk)).exists() for chunk in evicted)
            num_evicted += len(evicted)
    assert num_evicted > 0


def test_views_lose_what_is_evicted_and_follow(tmp_path: Path):
    path = tmp_path / "a.exp"
    store = fill(path, [60] * 10, capacity_steps=600)
    view = store.filter(lambda row: row["tag"] % 2 == 0)
    fill(path, [60] * 6, capacity_steps=600)
    follower = view.latest()
    assert follower.episode_numbers.tolist() == [6, 8, 10, 12, 14]
    check(follower)


def test_unions_of_evicting_stores_keep_their_numbers(tmp_path: Path):
    one = fill(tmp_path / "a.exp", [60] * 30, capacity_steps=600)
    fill(tmp_path / "b.exp", [60] * 30, capacity_steps=300)
    union = expstore.open([tmp_path / "a.exp", tmp_path / "b.exp"])
    assert union.num_steps == 900
    steps = np.array([one.spans.start[0], 2**40 + 1799])
    assert union.read(steps, ["action"])["action"].tolist() == [int(steps[0]), 1799]


def test_the_capacity_can_change_when_a_store_is_reopened(tmp_path: Path):
    path = tmp_path / "a.exp"
    fill(path, [10] * 50)
    assert fill(path, [10], capacity_steps=100).num_steps == 100
    assert fill(path, [10] * 3).num_steps == 130
    check(expstore.open(path))


def test_discarding_keeps_what_is_live(tmp_path: Path):
    path = tmp_path / "a.exp"
    with expstore.Writer(path, capacity_steps=100, commit_interval_s=1e9) as writer:
        for i in range(30):
            writer.append(episode(writer.num_steps, 10), tag=i)
        writer.commit()
        for i in range(30, 60):
            writer.append(episode(writer.num_steps, 10), tag=i)
        writer.discard()
        assert (writer.num_steps, writer.num_episodes) == (300, 30)
        writer.append(episode(300, 10), tag=30)
    check(expstore.open(path))


def test_evicted_error_is_a_step_range_error():
    assert issubclass(EvictedError, StepRangeError)


def test_a_range_between_two_mapped_ones_is_never_taken_for_mapped(tmp_path: Path):
    path = tmp_path / "a.exp"
    options = {"capacity_steps": 16 * 4096, "durable": False, "commit_interval_s": 1e9}
    with expstore.Writer(path, **options) as writer:

        def add(num_episodes: int) -> expstore.Store:
            for _ in range(num_episodes):
                numbers = np.arange(1024) + writer.num_steps
                writer.append({"x": numbers, "reward": np.zeros(1024)})
            writer.commit()
            return expstore.open(path)

        oldest = add(64)
        oldest.read([oldest.spans.start[0]])
        between = add(96)
        newest = add(96)
        newest.read([newest.spans.start[-1]])
        with pytest.raises(EvictedError, match="was evicted"):
            between.read([int(between.spans.start[2])], ["x"])
        first = int(oldest.spans.start[0])
        assert oldest.read([first], ["x"])["x"].tolist() == [first]


KEPT = """
import gc, sys
import numpy as np
import expstore

def fill(num_episodes):
    with expstore.Writer(sys.argv[1], capacity_steps=600, layout="mapped", durable=False) as writer:
        for _ in range(num_episodes):
            x = np.arange(writer.num_steps, writer.num_steps + 60)
            writer.append({"x": x[:, None].repeat(64, axis=1), "reward": np.ones(60)})

fill(10)
store = expstore.open(sys.argv[1])
start, length = store.spans.start, store.spans.length
column, rows = store.snapshots[0].index.column("length"), store.snapshots[0].rows("x", 0, 600)
for _ in range(10):
    fill(5)
    store = store.latest()
    store.read([store.spans.start[0]])
gc.collect()
print(start.sum(), length.sum(), column.sum(), rows[:, 5].sum())
del start, length, column, rows
gc.collect()
print(store.snapshots[0].columns["steps/x"]._ranges[0].first > 0)
"""


@needs_map_fixed
def test_arrays_kept_alone_can_be_read_when_their_rows_have_left(tmp_path: Path):
    """`store.spans.start` lay in a map that the store took with it: reading it was a crash."""
    command = [sys.executable, "-X", "faulthandler", "-c", KEPT, str(tmp_path / "a.exp")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.split() == ["2700", "600", "600", str(sum(range(600))), "True"]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="maps are not listed here")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_follower_at_the_newest_commit_holds_no_evicted_file(tmp_path: Path, layout: str):
    path = tmp_path / "a.exp"
    store = fill(path, [60] * 10, capacity_steps=600, layout=layout)
    for _ in range(4):
        check(store)
        fill(path, [60] * 7, capacity_steps=600)
        store = store.latest()
    check(store)
    gc.collect()
    assert maps_of_deleted_files(path) == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="maps are not listed here")
def test_what_could_not_be_unmapped_is_unmapped_later(tmp_path: Path):
    path = tmp_path / "a.exp"
    store = fill(path, [60] * 10, capacity_steps=600, layout="mapped")
    check(store)
    column = store.snapshots[0].columns["steps/action"]
    assert isinstance(column, MappedColumn)
    fill(path, [60] * 20, capacity_steps=600)
    with column._lock:  # as another thread that is about to map more of it
        store = store.latest()
        gc.collect()
        assert maps_of_deleted_files(path / "steps/action") > 0
    store.latest()
    assert maps_of_deleted_files(path) == 0


@pytest.mark.parametrize("way", ["in place", "file by file", "coded"])
def test_a_file_evicted_between_two_looks_is_evicted_and_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    path, evicted = tmp_path / "a.exp", []
    layout = "coded" if way == "coded" else "mapped"
    if way == "file by file":
        monkeypatch.setattr(files, "can_map_in_place", lambda: False)
    store = fill(path, [60] * 10, capacity_steps=600, layout=layout)
    first = int(store.spans.start[0])
    real = files.size

    def size(file: Path) -> int | None:
        found = real(file)
        if not evicted and file.parent == path / "steps/action":
            evicted.append(file)
            fill(path, [60] * 20, capacity_steps=600)
        return found

    monkeypatch.setattr(files, "size", size)
    with pytest.raises(EvictedError, match=r"was evicted: .*; go on with store\.latest\(\)"):
        store.read([first], ["action"])
    assert evicted and not evicted[0].exists()
