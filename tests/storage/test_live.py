"""Readers beside a writer: never a torn episode, never one that was not committed."""

import pickle
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import expstore
from expstore.errors import EvictedError, NotAStoreError
from expstore.storage.verification import verify
from tests.torture.check import check_episode, check_steps, check_store, read_single
from tests.torture.episodes import Plan, expected_arrays, known_episode
from tests.torture.nursery import ROOT

SEEDS = (2, 8)  # files in one range of addresses, and file by file; both with coded columns
SECONDS = 1.5


@contextmanager
def running_writer(
    path: Path, seed: int, seconds: float = SECONDS, *capacity: int
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.torture.live"]
    command += map(str, (path, seed, seconds, *capacity))
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


STRIDE = 2**40  # between the numbers of the stores of a union


def check_any(store: expstore.Store, seed: int, rng: np.random.Generator) -> None:
    """The oldest, the newest and some other live episodes, whole, and steps of them."""
    live, plan = store.episode_numbers, Plan.of(seed)
    numbers = [int(live[0]), int(live[-1]), *rng.choice(live, 2).tolist()]
    starts = dict(zip(live.tolist(), store.episodes["start"].tolist(), strict=True))
    located = []
    for number in numbers:
        known = known_episode(seed, number % STRIDE)
        check_episode(store, number, known, plan)
        located.append((known, int(rng.integers(len(known)))))
    pairs = zip(numbers, located, strict=True)
    steps = np.array([starts[number] + offset for number, (_, offset) in pairs])
    check_steps(store, steps, located, plan)


@pytest.mark.parametrize(("seed", "num_stores"), [(12, 2), (20, 1)])
def test_readers_of_stores_that_evict_read_right_or_are_told(
    tmp_path: Path, seed: int, num_stores: int
) -> None:
    """One follows, one stays where it is, and one comes too late or just in time.

    Files one by one and in one range of addresses, with coded, ragged and next values.
    """
    paths = [tmp_path / f"{k}.exp" for k in range(num_stores)]
    rng, told, num_right, firsts = np.random.default_rng(3), 0, 0, set()
    with ExitStack() as stack:
        writers = [stack.enter_context(running_writer(path, seed, 60, 110)) for path in paths]
        for path, writer in zip(paths, writers, strict=True):
            first_store(path, writer)
        store = old = expstore.open(paths)
        pickled: deque[bytes] = deque(maxlen=4)
        while told < 3 or num_right < 30 or len(firsts) < 5:
            assert all(writer.poll() is None for writer in writers), "they were to write for longer"
            store = store.latest()
            pickled.append(pickle.dumps(store))
            for reader in (store, old, pickle.loads(pickled[0])):
                try:
                    check_any(reader, seed, rng)
                    num_right += 1
                    firsts.add(int(reader.episode_numbers[0]))
                except EvictedError as error:
                    assert "latest()" in str(error)
                    told += 1


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
            for name in known.columns.keys() - {"observation/words"}:
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


class CheckedEpisodes:
    """A dataset that checks a random episode of the newest commit at each item."""

    def __init__(self, path: Path, seed: int, num_items: int) -> None:
        self._path, self._seed, self._num_items = path, seed, num_items
        self._store: expstore.Store | None = None

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, item: int) -> int:
        store = expstore.open(self._path) if self._store is None else self._store.latest()
        self._store = store
        number = int(np.random.default_rng(item).integers(store.num_episodes))
        check_episode(store, number, known_episode(self._seed, number), Plan.of(self._seed))
        return int(store.num_episodes)


def test_loader_workers_see_whole_committed_episodes(tmp_path: Path) -> None:
    data = pytest.importorskip("torch.utils.data")
    path, seed, seen = tmp_path / "store.exp", SEEDS[0], set()
    with running_writer(path, seed, 60) as writer:
        first_store(path, writer)
        while len(seen) < 3:
            loader = data.DataLoader(CheckedEpisodes(path, seed, 24), batch_size=4, num_workers=2)
            seen |= {int(count) for batch in loader for count in batch}
            assert writer.poll() is None, "it was to write for longer"
