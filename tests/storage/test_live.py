"""Readers beside a writer: never a torn episode, never one that was not committed."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import expstore
from expstore.errors import NotAStoreError
from expstore.storage.maintain import verify
from tests.torture.check import check_episode, check_steps, check_store, read_single
from tests.torture.episodes import Plan, expected_arrays, known_episode
from tests.torture.nursery import ROOT

SEEDS = (2, 8)  # files in one range of addresses, and file by file; both with coded columns
SECONDS = 1.5


@contextmanager
def running_writer(path: Path, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.torture.live", str(path), str(seed), str(SECONDS)]
    with subprocess.Popen(command, cwd=ROOT) as writer:
        try:
            yield writer
        finally:
            writer.kill()


def first_store(path: Path, writer: subprocess.Popen[bytes]) -> expstore.Store:
    """As soon as it has episodes."""
    while writer.poll() is None:
        try:
            store = expstore.open(path)
        except NotAStoreError:
            continue
        if store.num_episodes:
            return store
        time.sleep(0.001)
    raise AssertionError("the writer ended without a commit")


@pytest.mark.parametrize("seed", SEEDS)
def test_readers_that_follow_or_stay_see_whole_committed_episodes(
    tmp_path: Path, seed: int
) -> None:
    path, plan, rng = tmp_path / "store.exp", Plan.of(seed), np.random.default_rng(1)
    num_commits = 0
    with running_writer(path, seed) as writer:
        store = old = first_store(path, writer)
        old_size = old.num_episodes, old.num_steps
        while writer.poll() is None:
            newer = store.latest()
            assert newer.num_episodes >= store.num_episodes
            num_commits += newer is not store
            store = newer
            numbers = [store.num_episodes - 1, *rng.integers(0, store.num_episodes, 5).tolist()]
            for number in numbers:
                check_episode(store, number, known_episode(seed, number), plan)
            starts = store.episodes["start"]
            located = [
                (known_episode(seed, number), int(rng.integers(store.episodes["length"][number])))
                for number in numbers
            ]
            steps = np.array([starts[known.number] + offset for known, offset in located])
            check_steps(store, steps, located, plan)
            assert (old.num_episodes, old.num_steps) == old_size
            number = int(rng.integers(old.num_episodes))
            check_episode(old, number, known_episode(seed, number), plan)
        assert writer.returncode == 0

    assert num_commits > 1
    check_store(path, seed, range(10_000), sample=20)


def read_growing(array: zarr.Array[Any], first: int, last: int) -> NDArray[Any]:
    """Rows of a column, read again where the last shard was replaced between two reads of it.

    zarr-python opens a shard once for its index and once for each inner chunk. A checksum
    tells it that the two were of different files; it never returns wrong rows.
    """
    for _ in range(20):
        try:
            return np.asarray(array[first:last])
        except ValueError as error:
            if "checksum" not in str(error):
                raise
    raise AssertionError("the last shard was replaced at every read")


@pytest.mark.parametrize("seed", SEEDS)
def test_zarr_python_sees_whole_committed_episodes(tmp_path: Path, seed: int) -> None:
    """Through the root; and a single array, opened first, never leads it."""
    path, plan, rng = tmp_path / "store.exp", Plan.of(seed), np.random.default_rng(2)
    num_reads, lengths = 0, set()
    with running_writer(path, seed) as writer:
        first_store(path, writer)
        while writer.poll() is None:
            single = (
                read_single(path / "steps/done") if (path / "steps/done/zarr.json").exists() else ()
            )
            group = zarr.open_group(path, mode="r")
            start, length = (group[f"episodes/{name}"] for name in ("start", "length"))
            assert len(single) <= group["steps/done"].shape[0]
            number = int(rng.integers(start.shape[0]))
            known = known_episode(seed, number)
            first, count = int(start[number]), int(length[number])
            assert count == len(known)
            for name in plan.fields:
                rows = read_growing(group[f"steps/{name}"], first, first + count)
                assert rows.tobytes() == known.columns[name].tobytes(), (name, number)
            assert (np.asarray(group["steps/episode"][first : first + count]) == number).all()
            num_reads, lengths = num_reads + 1, lengths | {start.shape[0]}
        assert writer.returncode == 0

    assert num_reads > 3
    assert len(lengths) > 1
    episodes = [known_episode(seed, number) for number in range(start.shape[0])]
    done = expected_arrays(plan, episodes)["steps/done"]
    assert np.asarray(group["steps/done"][...]).tobytes() == done.tobytes()


def test_verify_of_a_store_that_is_being_written_is_sound(tmp_path: Path) -> None:
    path, seed, commits = tmp_path / "store.exp", SEEDS[0], set()
    with running_writer(path, seed) as writer:
        first_store(path, writer)
        while writer.poll() is None:
            verified = verify(path)
            assert verified.is_sound, verified.problems
            commits.add(verified.commit)

    assert len(commits) > 1
