"""Deleted episodes are gone for those who look from then on, and for nobody else."""

from __future__ import annotations

import random
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import expstore
from expstore.errors import (
    DamagedError,
    FieldNotFoundError,
    SchemaError,
    StepRangeError,
    StoreLockedError,
)
from expstore.storage.conditions import Condition
from tests.format_reader import FormatReader
from tests.storage.made import assert_same, digest, episode, writer
from tests.torture.faults import Operation, frozen, interposed

LENGTHS = (3, 5, 1, 4, 2, 6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with writer(tmp_path / "a.exp") as out:
        for number, length in enumerate(LENGTHS):
            out.append(
                episode(length, number), seed=number, policy="ab"[number % 2], sub={"k": number}
            )
    return tmp_path / "a.exp"


def delete(path: Path, which: object, **settings: object) -> expstore.Deletion:
    return expstore.delete(path, which, durable=False, **settings)  # type: ignore[arg-type]


# -- what is gone --------------------------------------------------------------------------------


def test_deleted_episodes_are_gone_and_others_keep_their_numbers(path):
    before = expstore.open(path)
    result = delete(path, [1, 4])
    assert (result.episodes, result.num_steps, result.commit) == ((1, 4), 7, 2)
    assert (result.kept_episodes, result.kept_steps) == (4, 14)

    after = expstore.open(path)
    assert after.episode_numbers.tolist() == [0, 2, 3, 5]
    assert (after.num_episodes, after.num_steps, len(after)) == (4, 14, 14)
    assert after.episodes["length"].tolist() == [3, 1, 4, 6]
    assert after.episodes["start"].tolist() == [0, 8, 9, 15]
    assert [row["seed"] for row in after.episodes] == [0, 2, 3, 5]
    assert after.spans.start.tolist() == [0, 8, 9, 15]
    for number in (0, 2, 3, 5):
        assert_same(after.episode(number), before.episode(number))
    with pytest.raises(StepRangeError, match="episode 4 is not among the 4 episodes"):
        after.episode(4)
    assert after.read([8, 2])["reward"].tolist() == before.read([8, 2])["reward"].tolist()
    with pytest.raises(StepRangeError, match="step 7 is not among the 14 steps"):
        after.read([2, 7])
    with pytest.raises(StepRangeError):
        after.filter([1])


def test_next_values_stop_where_an_episode_stops_whatever_follows_it(path):
    before = expstore.open(path).read([2, 14], ["next_observation", "has_next"])
    delete(path, [1, 4])
    after = expstore.open(path).read([2], ["next_observation", "has_next"])
    assert after["has_next"].tolist() == [True]
    assert_same(after["next_observation"][0], before["next_observation"][0])


def test_older_commits_keep_them(path):
    first = expstore.open(path)
    delete(path, [1])
    second = expstore.open(path)
    delete(path, [2, 5])
    assert expstore.open(path).episode_numbers.tolist() == [0, 3, 4]
    assert expstore.open(path, at=1).episode_numbers.tolist() == [0, 1, 2, 3, 4, 5]
    assert expstore.open(path, at=2).episode_numbers.tolist() == [0, 2, 3, 4, 5]
    assert first.num_episodes == 6 and second.num_episodes == 5
    assert_same(first.episode(1), episode(5, 1))
    assert first.latest().episode_numbers.tolist() == [0, 3, 4]


def test_views_lose_them_with_the_next_commit_and_not_before(path):
    store = expstore.open(path)
    view = store.filter(lambda row: row["length"] > 2)
    left, right = store.split(0.5, seed=1)
    chosen = store.filter([1, 2])
    sides = left.episode_numbers.tolist(), right.episode_numbers.tolist()
    delete(path, [1, 3])
    assert view.episode_numbers.tolist() == [0, 1, 3, 5]
    assert view.latest().episode_numbers.tolist() == [0, 5]
    for side, part in zip(sides, (left, right), strict=True):
        assert part.latest().episode_numbers.tolist() == [n for n in side if n not in (1, 3)]
    with pytest.raises(SchemaError, match="cannot follow new commits"):
        chosen.latest()
    with writer(path) as out:
        out.append(episode(7, 6))
    assert view.latest().episode_numbers.tolist() == [0, 5, 6]


def test_the_table_of_a_union_lacks_them(path, tmp_path):
    shutil.copytree(path, tmp_path / "b.exp")
    delete(path, [0])
    delete(tmp_path / "b.exp", [5])
    both = expstore.open([path, tmp_path / "b.exp"])
    numbers = [1, 2, 3, 4, 5, *(2**40 + n for n in range(5))]
    assert both.episode_numbers.tolist() == numbers
    assert both.episodes["length"].tolist() == [5, 1, 4, 2, 6, 3, 5, 1, 4, 2]
    assert both.num_steps == 18 + 15


def test_everything_can_be_deleted_and_the_store_goes_on(path):
    delete(path, "length > 0")
    store = expstore.open(path)
    assert (store.num_episodes, store.num_steps) == (0, 0)
    with pytest.raises(StepRangeError, match="holds no steps"):
        store.read([0])
    with writer(path) as out:
        assert out.append(episode(2, 9)) == 6
    assert expstore.open(path).episode_numbers.tolist() == [6]
    assert_same(expstore.open(path).episode(6), episode(2, 9))
    assert expstore.verify(path).is_sound


def test_a_writer_carries_tombstones_on(path):
    delete(path, [1])
    with writer(path) as out:
        out.append(episode(2, 9))
        out.commit()
        out.append(episode(3, 9))
        out.discard()
    delete(path, [6])
    assert expstore.open(path).episode_numbers.tolist() == [0, 2, 3, 4, 5]
    assert expstore.open(path, at=3).episode_numbers.tolist() == [0, 2, 3, 4, 5, 6]
    assert expstore.verify(path).is_sound


def test_deletion_and_eviction_go_together(tmp_path):
    path = tmp_path / "a.exp"
    with writer(path, capacity_steps=40) as out:
        for number in range(8):
            out.append(episode(5, number))
    delete(path, [0, 3, 7])
    assert expstore.open(path).episode_numbers.tolist() == [1, 2, 4, 5, 6]
    with writer(path, capacity_steps=40) as out:
        for number in range(8, 12):
            out.append(episode(5, number))
    store = expstore.open(path)
    assert store.episode_numbers.tolist() == [4, 5, 6, 8, 9, 10, 11]
    assert store.num_steps == 35
    for number in store.episode_numbers.tolist():
        assert_same(store.episode(number), episode(5, number))
    assert expstore.verify(path).is_sound
    found = {c.number: c for c in expstore.history(path)}
    assert (found[2].num_deleted, found[3].num_evicted, found[3].num_steps) == (3, 2, 35)


def test_the_second_reader_sees_the_tombstones(path):
    delete(path, [4, 1])
    delete(path, [2])
    reader = FormatReader(path)
    assert reader.deleted() == [1, 2, 4]
    assert reader.array("deleted/length").tolist() == [5, 2, 1]


def test_a_pickled_store_has_the_tombstones_of_its_commit(path):
    import pickle

    delete(path, [1])
    data = pickle.dumps(expstore.open(path))
    delete(path, [2])
    assert pickle.loads(data).episode_numbers.tolist() == [0, 2, 3, 4, 5]


def test_samplers_draw_none_of_them(path):
    pytest.importorskip("torch")
    store = expstore.open(path)
    replay = expstore.Replay(
        store,
        batch_size=64,
        unit=expstore.Sequence(length=3),
        sampler=expstore.Prioritized(alpha=1.0),
        follow=True,
    )
    replay.update_priority(steps=np.arange(21), priority=np.arange(21) + 1.0)
    delete(path, [1, 4, 5])
    kept = np.r_[0:3, 8:13]
    for _ in range(5):
        info = replay.sample().info
        assert np.isin(info.index.numpy(), kept).all()
    priorities = replay.sampler.priorities(replay.store.spans, kept)  # type: ignore[attr-defined]
    assert priorities.tolist() == (kept + 1.0).tolist()
    assert replay.store.num_steps == 8


# -- which ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ([], ()),
        ([5, 0, 5], (0, 5)),
        (np.array([False, True, False, False, False, True]), (1, 5)),
        (lambda row: row["policy"] == "a", (0, 2, 4)),
        ("length<=2", (2, 4)),
        ("length >= 3 and length != 5 and number < 5", (0, 3)),
        ("policy == 'b' and length > 4", (1, 5)),
        ('policy != "b"', (0, 2, 4)),
        ("seed == 3", (3,)),
        ("seed == null", ()),
        ("seed != null and seed > 4", (5,)),
        ("sub.k > 3.5", (4, 5)),
        ("end_reason == 'terminated' and start < 1", (0,)),
        ("policy == 'it\\'s'", None),
        ("length > 1e9", ()),
        ("policy == true", ()),
        ("policy != 3", (0, 1, 2, 3, 4, 5)),
        ('length < inf and policy == "\\u0061"', (0, 2, 4)),
    ],
)
def test_what_where_means(path, where, numbers):
    if numbers is None:
        with pytest.raises(SchemaError):
            delete(path, where, dry_run=True)
        return
    before = digest(path)
    found = delete(path, where, dry_run=True)
    assert digest(path) == before
    assert found.episodes == numbers
    assert delete(path, where).episodes == numbers
    kept = [n for n in range(6) if n not in numbers]
    assert expstore.open(path).episode_numbers.tolist() == kept
    assert expstore.open(path).snapshots[0].root.commit.number == (2 if numbers else 1)


def test_return_is_a_column_and_not_a_keyword(path):
    returns = expstore.open(path).episodes["return"]
    below = tuple(np.flatnonzero(returns < 0).tolist())
    assert delete(path, "return < 0").episodes == below


@pytest.mark.parametrize(
    "text",
    [
        *("", "length", "length <", "< 3", "length < 3 and", "length < 3 or length > 5", "3 < 4"),
        *("length < number", "length = 3", "not length", "length < 3)", "(length < 3)", "a b c"),
        *("length < 3; length", "__import__('os').system('x') == 0", "length < 0x10", "\0"),
        *("length < 3 length > 2", "length <> 3", "policy == 'a", 'policy == "\\x"', "f() < 3"),
    ],
)
def test_what_is_no_condition_is_refused_and_nothing_is_deleted(path, text):
    before = digest(path)
    with pytest.raises(SchemaError, match=r"is no condition.*: it must be like return"):
        delete(path, text, dry_run=True)
    assert digest(path) == before


def test_a_long_condition_is_no_deep_one():
    assert len(Condition.parse(" and ".join(["a < 1"] * 20_000)).comparisons) == 20_000


def test_values_that_cannot_be_compared_are_named(path):
    with pytest.raises(SchemaError, match=r"'policy' of episode 0 is 'a', which < cannot compare"):
        delete(path, "policy < 3")
    with pytest.raises(SchemaError, match="'sub' of episode 0 is no single value"):
        delete(path, "sub == 3")
    with pytest.raises(SchemaError, match="compare it with a number"):
        delete(path, "length < 'x'")


def test_a_name_that_no_episode_has_is_an_error(path):
    with pytest.raises(FieldNotFoundError, match="no episode has 'polcy'; there is number, start"):
        delete(path, "polcy == 'a'")
    assert expstore.open(path).num_episodes == 6


@pytest.mark.parametrize("numbers", [[6], [0, -1], [1 << 40], [2.5], ["a"]])
def test_numbers_that_are_not_there_delete_nothing(path, numbers):
    with pytest.raises((StepRangeError, SchemaError)):
        delete(path, numbers)
    assert expstore.open(path).num_episodes == 6


def test_an_episode_is_deleted_once(path):
    delete(path, [1])
    with pytest.raises(StepRangeError, match="episode 1 is not among the 5 episodes"):
        delete(path, [0, 1])
    assert expstore.open(path).num_episodes == 5


# -- the lock, kills and damage ------------------------------------------------------------------


def test_it_needs_the_lock(path):
    with writer(path):
        with pytest.raises(StoreLockedError, match="close that writer first"):
            delete(path, [1])
        assert delete(path, [1], dry_run=True).episodes == (1,)
    assert expstore.open(path).num_episodes == 6


def test_a_kill_at_any_operation_deletes_all_or_nothing(path, tmp_path, monkeypatch):
    """The first deletion, which makes the arrays, and another one."""
    monkeypatch.setattr("expstore.storage.files.together", lambda calls: [c() for c in calls])
    copy, seen = tmp_path / "killed.exp", []

    def look(operation: Operation) -> None:
        if not operation.path.startswith(str(path)):
            return
        shutil.copytree(path, copy)
        numbers = expstore.open(copy).episode_numbers.tolist()
        seen.append(numbers)
        if len(seen) % 17 == 0:
            assert expstore.verify(copy).is_sound
            with writer(copy) as out:
                number = out.append(episode(2, 9))
            assert expstore.open(copy).episode_numbers.tolist() == [*numbers, number]
            if 2 in numbers:
                delete(copy, [2])
                assert 2 not in expstore.open(copy).episode_numbers
            assert expstore.verify(copy).is_sound
        shutil.rmtree(copy)

    with interposed(frozen(look)):
        expstore.delete(path, [0, 5])
        expstore.delete(path, [2])

    states = [seen[0]] + [b for a, b in pairwise(seen) if a != b]
    assert states == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 3, 4]]
    assert len(seen) > 80


def test_a_tombstone_of_an_episode_that_never_was_is_damage(path):
    delete(path, [1])
    chunk = path / "deleted/episode/c.0"
    with chunk.open("r+b") as file:
        file.write((99).to_bytes(8, "little"))
    with pytest.raises(DamagedError, match="tombstones of episodes that it never had"):
        expstore.open(path).num_steps  # noqa: B018


def test_random_deletions_against_a_set(path):
    rng = random.Random(1)
    kept, number = set(range(6)), 6
    for _ in range(12):
        gone = {n for n in kept if rng.random() < 0.3}
        delete(path, sorted(gone))
        kept -= gone
        with writer(path) as out:
            for _ in range(rng.randrange(3)):
                out.append(episode(1 + number % 3, number))
                kept.add(number)
                number += 1
        store = expstore.open(path)
        assert store.episode_numbers.tolist() == sorted(kept)
        for n in kept:
            if n >= 6:
                assert_same(store.episode(n), episode(1 + n % 3, n))
    assert expstore.verify(path).is_sound


def test_a_resumed_import_does_not_bring_them_back(tmp_path):
    (tmp_path / "recorded").mkdir()
    for number in range(3):
        np.savez(tmp_path / f"recorded/ep{number}.npz", reward=np.ones(number + 1))
    expstore.ingest_from(tmp_path / "recorded", tmp_path / "a.exp")
    delete(tmp_path / "a.exp", [1])
    report = expstore.ingest_from(tmp_path / "recorded", tmp_path / "a.exp", resume=True)
    assert report.num_episodes == 0
    assert expstore.open(tmp_path / "a.exp").episode_numbers.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("length = 3", "write == to compare"),
        ("length > 3 or seed == 1", "there is no or"),
        ("length > 3 && seed == 1", "join comparisons by a small and"),
        ("3 < length", "a comparison begins with the name"),
        ("policy == sac", "put quotes around sac"),
    ],
)
def test_what_is_nearly_a_condition_is_met_with_a_hint(text, hint):
    with pytest.raises(SchemaError, match=hint):
        Condition.parse(text)
