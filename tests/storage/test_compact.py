"""A compacted store has the same episodes, to the bit, and no others."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import expstore
from expstore.errors import (
    DamagedError,
    NotAStoreError,
    SchemaError,
    StorageError,
    StoreLockedError,
)
from expstore.storage import stored_episode
from tests.storage import test_ragged
from tests.storage.damage import flip, store_to_damage
from tests.storage.made import assert_same, digest, episode, writer
from tests.torture.check import check_store
from tests.torture.episodes import SMALL, Plan, known_episode
from tests.torture.faults import Operation, failing, frozen, interposed, small_chunks

NEVER_COPIED = ("number", "start")


def same_episodes(one: expstore.Store, other: expstore.Store) -> None:
    """The same episodes in the same order, under whatever numbers."""
    assert one.num_episodes == other.num_episodes
    for a, b in zip(one.episodes, other.episodes, strict=True):
        assert_same(other.episode(b["number"]), one.episode(a["number"]))
        for row in (a, b):
            assert set(NEVER_COPIED) <= set(row)
        left, right = ({k: v for k, v in r.items() if k not in NEVER_COPIED} for r in (a, b))
        assert left == right


@pytest.fixture(params=["blocks of two steps", "whole episodes"])
def blocks(request, monkeypatch):
    if request.param == "blocks of two steps":
        monkeypatch.setattr(stored_episode, "BLOCK_BYTES", 1)


@pytest.mark.parametrize("seed", [SMALL, 3, 5, 7])
def test_a_copy_is_what_was_written_in_every_array(tmp_path, seed, blocks):
    """Read in four ways, and compared with what any store of these episodes must hold."""
    plan = Plan.of(seed)
    with small_chunks(plan.chunks):
        with writer(tmp_path / "a.exp", layout=plan.layouts, chunk_steps=plan.chunk_steps) as out:
            for number in range(6):
                known = known_episode(seed, number)
                out.append(known.data, end_reason=known.asked_reason, **known.metadata)
        copy = expstore.compact(
            tmp_path / "a.exp",
            tmp_path / "b.exp",
            chunk_steps=plan.chunk_steps,
            durable=False,
        )
    assert (copy.num_episodes, copy.left_out) == (6, 0)
    check_store(tmp_path / "b.exp", seed, {6})
    before, after = expstore.open(tmp_path / "a.exp"), expstore.open(tmp_path / "b.exp")
    assert after.fields == before.fields
    assert expstore.inspect(tmp_path / "b.exp").store_id == copy.store_id
    assert copy.store_id != expstore.inspect(tmp_path / "a.exp").store_id


def test_deleted_and_evicted_episodes_are_left_out(tmp_path, blocks):
    path = store_to_damage(tmp_path / "a.exp")
    expstore.delete(path, [0, 3, 10], durable=False)
    before = digest(path)
    copy = expstore.compact(path, tmp_path / "b.exp", durable=False)
    assert digest(path) == before
    assert (copy.num_episodes, copy.num_steps, copy.left_out) == (8, 18, 3)
    after = expstore.open(tmp_path / "b.exp")
    same_episodes(expstore.open(path), after)
    assert after.episode_numbers.tolist() == list(range(8))
    assert after.spans.start.tolist()[0] == 0
    assert expstore.verify(tmp_path / "b.exp").is_sound
    assert not (tmp_path / "b.exp/deleted").exists()


def test_after_eviction(tmp_path, blocks):
    with writer(tmp_path / "a.exp", capacity_steps=12) as out:
        for number in range(9):
            out.append(episode(4, number), seed=number)
    assert expstore.open(tmp_path / "a.exp").episode_numbers.tolist() == [6, 7, 8]
    expstore.compact(tmp_path / "a.exp", tmp_path / "b.exp", durable=False)
    same_episodes(expstore.open(tmp_path / "a.exp"), expstore.open(tmp_path / "b.exp"))
    assert expstore.verify(tmp_path / "b.exp").is_sound


@pytest.mark.parametrize("layout", test_ragged.LAYOUTS)
def test_ragged_columns_and_gaps_in_their_next_values(tmp_path, layout, blocks):
    layouts = dict.fromkeys(["observation/points", "observation/jpeg"], layout)
    test_ragged.fill(tmp_path / "a.exp", layout=layouts, durable=False)
    expstore.delete(tmp_path / "a.exp", [1], durable=False)
    expstore.compact(tmp_path / "a.exp", tmp_path / "b.exp", durable=False)
    before, after = expstore.open(tmp_path / "a.exp"), expstore.open(tmp_path / "b.exp")
    num_gaps = 0
    for old, new in zip(before.episode_numbers.tolist(), range(5), strict=True):
        given, found = before.episode(old), after.episode(new)
        assert found.keys() == given.keys()
        num_gaps += "next_observation" in found
        for group in {"observation", "next_observation"} & found.keys():
            assert found[group].keys() == given[group].keys()
            for name in given[group]:
                assert test_ragged.all_same(found[group][name], given[group][name])
        assert found["task"] == given["task"]
        assert_same(found["action"], given["action"])
    assert num_gaps == 1
    assert expstore.verify(tmp_path / "b.exp").is_sound


def test_another_layout_and_other_chunks(tmp_path):
    path = store_to_damage(tmp_path / "a.exp")
    expstore.compact(
        path, tmp_path / "b.exp", layout={"reward": "coded"}, chunk_steps=8, durable=False
    )
    after = expstore.open(tmp_path / "b.exp")
    assert after.fields["reward"].layout == "coded"
    assert after.fields["observation/image"].layout == "mapped"
    assert after.snapshots[0].root.arrays["steps/reward"].chunk_rows == 8
    same_episodes(expstore.open(path), after)
    with pytest.raises(SchemaError, match="layout must be one of"):
        expstore.compact(path, tmp_path / "c.exp", layout="zipped", durable=False)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.exp", "b.exp"]


@pytest.mark.parametrize("fields", [None, {"x": expstore.Field((), "int8")}])
def test_an_empty_store(tmp_path, fields):
    schema = None if fields is None else expstore.Schema(fields)
    writer(tmp_path / "a.exp", schema=schema).close()
    copy = expstore.compact(tmp_path / "a.exp", tmp_path / "b.exp", durable=False)
    assert (copy.num_episodes, copy.num_steps) == (0, 0)
    assert list(expstore.open(tmp_path / "b.exp").fields) == list(fields or ())
    with writer(tmp_path / "b.exp") as out:
        out.append({"x": np.ones(2, np.int8)})


def test_progress_is_by_episodes(tmp_path):
    seen = []
    path = store_to_damage(tmp_path / "a.exp")
    expstore.compact(
        path, tmp_path / "b.exp", progress=lambda *done: seen.append(done), durable=False
    )
    assert seen == [(done, 11) for done in range(1, 12)]


def test_memory_does_not_grow_with_the_episode(tmp_path, monkeypatch):
    """A block of it is in memory at a time, and what the writer collects: 80 MB in less than 40."""
    monkeypatch.setattr(stored_episode, "BLOCK_BYTES", 1 << 20)
    rows = np.zeros((10_000, 1000))
    rows[::7] = 1.0
    with writer(tmp_path / "a.exp", layout="mapped") as out:
        out.append({"action": rows})
    tracemalloc.start()
    expstore.compact(tmp_path / "a.exp", tmp_path / "b.exp", durable=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6
    assert_same(expstore.open(tmp_path / "b.exp").episode(0)["action"], rows)


# -- all or nothing ------------------------------------------------------------------------------


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.parametrize("kind", ["store", "file", "empty directory", "dangling link"])
def test_a_target_that_is_taken_is_left_alone(tmp_path, kind):
    path = store_to_damage(tmp_path / "a.exp")
    target = tmp_path / "b.exp"
    if kind == "store":
        writer(target).close()
    elif kind == "file":
        target.write_text("mine")
    elif kind == "empty directory":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = digest(tmp_path)
    with pytest.raises(SchemaError, match=r"there is something at .*b\.exp already"):
        expstore.compact(path, target, durable=False)
    assert digest(tmp_path) == before


def test_paths_that_cannot_be(tmp_path):
    with pytest.raises(NotAStoreError):
        expstore.compact(tmp_path / "a.exp", tmp_path / "b.exp")
    path = store_to_damage(tmp_path / "a.exp")
    with pytest.raises(SchemaError, match=r"there is no directory .*deep; make it"):
        expstore.compact(path, tmp_path / "deep/b.exp")
    assert names(tmp_path) == ["a.exp"]


def test_a_damaged_episode_is_named_and_no_target_is_left(tmp_path):
    path = store_to_damage(tmp_path / "a.exp")
    flip(path / "steps/reward/c.0", 8 * int(expstore.open(path).episodes["start"][4]))
    with pytest.raises(DamagedError, match=r"field 'reward' of episode 4 of .*a\.exp fails its"):
        expstore.compact(path, tmp_path / "b.exp", durable=False)
    assert names(tmp_path) == ["a.exp"]
    flip(path / "steps/reward/c.0", 8 * int(expstore.open(path).episodes["start"][4]))
    flip(path / "next/observation/state/value/c.0.0", 4 * 12)
    with pytest.raises(DamagedError, match="field 'observation/state' of episode 4"):
        expstore.compact(path, tmp_path / "b.exp", durable=False)
    expstore.repair(path)
    assert expstore.compact(path, tmp_path / "b.exp", durable=False).left_out == 1


def test_an_interrupt_leaves_nothing(tmp_path):
    path = store_to_damage(tmp_path / "a.exp")

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        expstore.compact(path, tmp_path / "b.exp", progress=stop, durable=False)
    assert names(tmp_path) == ["a.exp"]


def test_a_failure_at_any_operation_leaves_nothing(tmp_path):
    path = store_to_damage(tmp_path / "a.exp")
    expstore.compact(path, tmp_path / "b.exp", durable=False)
    before, fault_at, num_failed = digest(path), 1, 0
    while True:
        shutil.rmtree(tmp_path / "b.exp", ignore_errors=True)
        fired: list[Operation] = []
        with interposed(failing(fault_at, 28, fired)):
            try:
                expstore.compact(path, tmp_path / "b.exp", durable=False)
            except StorageError as error:
                num_failed += 1
                assert "the disk is full" in str(error)
                # Only where it was the removal that failed, something stays.
                assert set(names(tmp_path)) <= {"a.exp", "b.exp.partial"}
        if not fired:
            break
        fault_at += 37
    assert num_failed > 10
    assert digest(path) == before
    assert expstore.verify(tmp_path / "b.exp").is_sound
    assert names(tmp_path) == ["a.exp", "b.exp"]


def test_a_kill_at_any_operation_leaves_no_half_target(tmp_path):
    """What it leaves, the next attempt removes."""
    home, copy = tmp_path / "home", tmp_path / "copy"
    home.mkdir()
    path = home / "a.exp"
    with writer(path) as out:
        for number in range(3):
            out.append(episode(2, number))
    expstore.delete(path, [1], durable=False)
    looks, whole = 0, 0

    def look(operation: Operation) -> None:
        nonlocal looks, whole
        if not operation.path.startswith(str(home)):
            return
        looks += 1
        if (home / "b.exp").exists():
            whole += 1
        elif looks % 29:
            return
        shutil.copytree(home, copy)
        if (copy / "b.exp").exists():
            assert expstore.verify(copy / "b.exp").is_sound
        else:
            expstore.compact(copy / "a.exp", copy / "b.exp", durable=False)
        assert expstore.open(copy / "b.exp").num_episodes == 2
        assert names(copy) == ["a.exp", "b.exp"]
        shutil.rmtree(copy)

    with interposed(frozen(look)):
        expstore.compact(path, home / "b.exp", durable=False)
    assert looks > 200


def test_what_is_no_unfinished_copy_is_in_the_way(tmp_path):
    path = store_to_damage(tmp_path / "a.exp")
    (tmp_path / "b.exp.partial").mkdir()
    (tmp_path / "b.exp.partial/mine").write_text("mine")
    with pytest.raises(SchemaError, match="is in the way, and is no unfinished copy"):
        expstore.compact(path, tmp_path / "b.exp")
    assert (tmp_path / "b.exp.partial/mine").read_text() == "mine"


def test_a_copy_that_another_process_writes_is_left_alone(tmp_path):
    path = store_to_damage(tmp_path / "a.exp")
    with (
        writer(tmp_path / "b.exp.partial"),
        pytest.raises(StoreLockedError, match="wait for it, or give another target"),
    ):
        expstore.compact(path, tmp_path / "b.exp")
    expstore.compact(path, tmp_path / "b.exp", durable=False)
    assert names(tmp_path) == ["a.exp", "b.exp"]


def test_the_source_may_be_written_meanwhile(tmp_path):
    path = tmp_path / "a.exp"
    with writer(path) as out:
        for number in range(4):
            out.append(episode(2, number))
        out.commit()

        def more(done: int, total: int) -> None:
            out.append(episode(3, done))
            out.commit()

        copy = expstore.compact(path, tmp_path / "b.exp", progress=more, durable=False)
    assert copy.num_episodes == 4
    assert expstore.open(path).num_episodes == 8
    assert expstore.verify(tmp_path / "b.exp").is_sound


# -- saved priorities ----------------------------------------------------------------------------


def test_saved_priorities_come_along_for_the_steps_that_are_left(tmp_path):
    pytest.importorskip("torch")
    path, target = tmp_path / "a.exp", tmp_path / "b.exp"
    with writer(path) as out:
        for number in range(6):
            out.append(episode(4, number))
    options = {"batch_size": 3, "unit": expstore.Sequence(length=2), "priorities": "run"}

    def replay(where: Path, **more: object) -> expstore.Replay:
        sampler = expstore.Prioritized(alpha=0.7)
        return expstore.Replay(expstore.open(where), sampler=sampler, **options, **more)

    first = replay(path)
    first.update_priority(steps=np.arange(24), priority=np.arange(24) + 1.0)
    first.sample()
    first.save_priorities()
    view = expstore.open(path).filter([1, 2])
    with expstore.Replay(
        view, sampler=expstore.Prioritized(), **options | {"priorities": None}
    ) as v:
        v.save_priorities("view")
    expstore.delete(path, [0, 3], durable=False)
    copy = expstore.compact(path, target, durable=False)
    assert copy.priorities == ("run",)
    assert list(copy.priorities_left) == ["view"]
    assert "belongs to a view" in copy.priorities_left["view"]

    again = replay(target)
    kept = np.r_[4:12, 16:24]
    found = again.sampler.priorities(again.store.spans, np.arange(16))  # type: ignore[attr-defined]
    assert found.tolist() == (kept + 1.0).tolist()
    assert again.sampler.next_draw == 1  # type: ignore[attr-defined]
    assert again.sample()["reward"].shape == (3, 2)
    assert expstore.verify(target).is_sound


def test_a_damaged_set_is_left_behind_and_named(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "a.exp"
    with writer(path) as out:
        out.append(episode(4, 1))
    replay = expstore.Replay(expstore.open(path), 2, sampler=expstore.Prioritized())
    replay.save_priorities("run")
    (path / "priorities/run/zarr.json").write_bytes(b"{")
    copy = expstore.compact(path, tmp_path / "b.exp", durable=False)
    assert copy.priorities == ()
    assert "is not the pointer of saved priorities" in copy.priorities_left["run"]
    repaired = expstore.repair(path)
    assert [problem.what for problem in repaired.problems] == ["priorities"]
    kept = Path(str(repaired.quarantine)) / "files/priorities/run/zarr.json"
    assert kept.read_bytes() == b"{"
    assert expstore.verify(path).is_sound
