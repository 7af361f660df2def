"""A writer is killed at any moment: whole episodes or nothing, and writing goes on."""

import importlib.util
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import expstore
from expstore.storage.commits import Recovery, read_history
from tests.torture.check import Found, check_store
from tests.torture.child import NEVER_S, Task
from tests.torture.episodes import SMALL, Plan, known_episode
from tests.torture.eviction import Limits, check_eviction
from tests.torture.faults import Operation, frozen, interposed, small_chunks
from tests.torture.loaders import Loaders
from tests.torture.nursery import Nursery, journal_of
from tests.torture.rounds import play_history, random_limits, split_rounds

HISTORIES = split_rounds(200, seed=23)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


@pytest.fixture(scope="module")
def loaders() -> Iterator[Loaders | None]:
    """None where there is no torch: the rounds then go without."""
    if importlib.util.find_spec("torch") is None:
        yield None
        return
    with Loaders() as started:
        yield started


@pytest.mark.parametrize(("seed", "num_rounds"), HISTORIES)
def test_a_kill_leaves_exactly_what_was_committed(
    tmp_path: Path, nursery: Nursery, loaders: Loaders | None, seed: int, num_rounds: int
) -> None:
    also = loaders if seed % 4 == 0 else None  # they take as long as all the rest
    tally = play_history(nursery, tmp_path, seed, num_rounds, sample=10, loaders=also)

    assert tally.rounds > 0


def test_loaders_find_what_is_wrong(tmp_path: Path, loaders: Loaders | None) -> None:
    """Those of another seed must find other values, or they would find nothing ever."""
    if loaders is None:
        pytest.skip("needs torch")
    for seed, is_right in ((5, True), (6, False)):
        with expstore.Writer(tmp_path / f"{seed}.exp") as writer:
            for number in range(3):
                writer.append(known_episode(5, number).data)
        loaders.begin(tmp_path / f"{seed}.exp", seed)
        time.sleep(0.5)
        if is_right:
            assert loaders.end() > 0
        else:
            with pytest.raises(AssertionError):
                loaders.end()


def test_the_suite_plays_two_hundred_rounds_and_some_of_stores_with_a_capacity() -> None:
    assert sum(num_rounds for _, num_rounds in HISTORIES) == 200
    limits = [random_limits(seed) for seed, _ in HISTORIES]
    assert {(a.capacity_steps is None, a.capacity_bytes is None) for a in limits} >= {
        (True, True), (True, False), (False, True)
    }  # fmt: skip


LIMITS = Limits(capacity_steps=120)
NUM_EPISODES = 14  # the last one makes others leave, as one before it did


def test_a_kill_at_any_operation_of_an_eviction_leaves_one_commit_or_the_other(
    tmp_path: Path,
) -> None:
    """A copy made before an operation is what a kill would leave there; the next writer goes on."""
    path, plan = tmp_path / "store.exp", Plan.of(SMALL)
    looks: list[str] = []
    copies: list[Path] = []
    found: list[Found] = []

    def look(operation: Operation) -> None:
        looks.append(operation.path)
        is_root = operation.path.endswith("store.exp/zarr.json")
        if is_root or (operation.call == "unlink" and len(looks) % 20 == 0):
            copies.append(path.with_name(f"copy-{len(looks)}.exp"))
            shutil.copytree(path, copies[-1])

    def writer(path: Path) -> expstore.Writer:
        return expstore.Writer(
            path,
            layout=plan.layouts,
            chunk_steps=plan.chunk_steps,
            commit_interval_s=NEVER_S,
            durable=False,
            capacity_steps=LIMITS.capacity_steps,
        )

    def append_next(writer: expstore.Writer) -> None:
        known = known_episode(SMALL, writer.num_episodes)
        writer.append(known.data, end_reason=known.asked_reason, **known.metadata)

    with small_chunks(plan.chunks):
        with writer(path) as out:
            for _ in range(NUM_EPISODES - 1):
                append_next(out)
                out.commit()
            before = check_store(path, SMALL, {NUM_EPISODES - 1})
            append_next(out)
            with interposed(frozen(look)):
                out.commit()
        for copy in copies:
            found.append(check_store(copy, SMALL, {NUM_EPISODES - 1, NUM_EPISODES}, sample=5))
            check_eviction(copy, SMALL, LIMITS, before, found[-1], is_closed=False)
            with writer(copy) as again:
                append_next(again)
            after = check_store(copy, SMALL, {found[-1].num_episodes + 1}, sample=5)
            check_eviction(copy, SMALL, LIMITS, found[-1], after, is_closed=True)

    assert before.first_episode > 0
    assert {seen.num_episodes for seen in found} == {NUM_EPISODES - 1, NUM_EPISODES}
    assert len({seen.first_episode for seen in found}) == 2
    assert len(found) > 3


def killed_writer(tmp_path: Path, nursery: Nursery, *moves: tuple[str, int]) -> Path:
    """A store whose writer was gone after these moves, without closing."""
    path = tmp_path / "store.exp"
    task = Task(str(path), str(tmp_path / "journal"), seed=5, moves=list(moves), leave="exit")
    assert nursery.run(task) == 0
    assert journal_of(task)[0][0] == "opened"
    return path


def test_the_next_writer_says_what_was_lost(tmp_path: Path, nursery: Nursery) -> None:
    path = killed_writer(tmp_path, nursery, ("append", 3), ("commit", 1), ("append", 4))
    lost_steps = sum(len(known_episode(5, number)) for number in (3, 4, 5, 6))

    with expstore.Writer(path) as writer:
        assert (writer.recovery.lost_episodes, writer.recovery.lost_steps) == (4, lost_steps)
        assert writer.num_episodes == 3


def test_what_was_discarded_dropped_or_refused_is_not_lost(
    tmp_path: Path, nursery: Nursery
) -> None:
    moves = (("append", 1), ("commit", 1), ("append", 2), ("discard", 1), ("drop", 1), ("fail", 1))
    path = killed_writer(tmp_path, nursery, *moves, ("refuse", 1))

    with expstore.Writer(path) as writer:
        assert (writer.recovery.lost_episodes, writer.recovery.lost_steps) == (0, 0)


def test_an_episode_lost_before_the_first_commit_is_reported(
    tmp_path: Path, nursery: Nursery
) -> None:
    path = killed_writer(tmp_path, nursery, ("append", 1))

    with expstore.Writer(path) as writer:
        assert (writer.recovery.lost_episodes, writer.recovery.lost_steps) == (
            1,
            len(known_episode(5, 0)),
        )
        assert writer.num_episodes == 0


def test_a_loss_is_reported_once(tmp_path: Path, nursery: Nursery) -> None:
    path = killed_writer(tmp_path, nursery, ("append", 1), ("commit", 1), ("append", 1))

    with expstore.Writer(path):
        pass
    with expstore.Writer(path) as writer:
        assert writer.recovery == Recovery()


def test_nothing_is_lost_when_a_writer_was_closed(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "store.exp", commit_interval_s=NEVER_S) as writer:
        writer.append(known_episode(5, 0).data)
    with expstore.Writer(tmp_path / "store.exp") as writer:
        assert writer.recovery == Recovery()


def test_a_killed_creation_is_no_commit_of_the_history(tmp_path: Path, nursery: Nursery) -> None:
    """Its line stood in the history a second time, once for each creation that was killed."""
    path = tmp_path / "store.exp"
    for kill_at in range(1, 20):
        task = Task(str(path), str(tmp_path / "journal"), seed=5, moves=[], kill_at=kill_at)
        nursery.run(task)
        if (path / "zarr.json").exists():
            break

    assert [entry["number"] for entry in read_history(path)] == [0]
