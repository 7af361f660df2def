"""A Replay that is opened by the name of saved priorities goes on where it was saved."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import expstore  # noqa: E402
from expstore.errors import DamagedError, SchemaError, StateError, StorageError  # noqa: E402
from expstore.loading.batch import Batch  # noqa: E402
from tests.loading.making import fill  # noqa: E402

LENGTHS = [3, 20, 7, 31]


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(one.fields[n], other.fields[n]) for n in one.fields) and all(
        torch.equal(one.info[n], other.info[n]) for n in one.info
    )


def prioritized(store: expstore.Store, **options: Any) -> expstore.Replay:
    options.setdefault("sampler", expstore.Prioritized(alpha=0.7, beta=0.5))
    unit = expstore.Sequence(length=4)
    return expstore.Replay(store, 8, unit=unit, **options)


def learn(replay: expstore.Replay, num_batches: int = 3) -> list[Batch]:
    """Batches, with priorities that follow from them."""
    batches = []
    for _ in range(num_batches):
        batches.append(replay.sample())
        replay.update_priority(batches[-1], batches[-1]["reward"] % 5)
    return batches


def priorities_of(replay: expstore.Replay) -> list[float]:
    sampler: Any = replay.sampler
    steps = replay.store.spans.steps_at(np.arange(replay.store.num_steps))
    return list(sampler.priorities(replay.store.spans, steps).tolist())


def fingerprint(path: Path) -> dict[str, Any]:
    return {
        str(f): (f.stat().st_mtime_ns, f.read_bytes() if f.is_file() else b"")
        for f in [path, *sorted(path.rglob("*"))]
    }


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("stratified", [False, True])
def test_a_replay_opened_by_name_goes_on_exactly(tmp_path: Path, prefetch: int, stratified: bool):
    store = fill(tmp_path / "a.exp", LENGTHS)

    def replay(seed: int, **options: Any) -> expstore.Replay:
        sampler = expstore.Prioritized(alpha=0.7, beta=0.5, stratified=stratified)
        return prioritized(store, sampler=sampler, seed=seed, prefetch=prefetch, **options)

    with replay(5) as first, replay(1, priorities="run") as fresh:
        learn(fresh)
        learn(first)
        first.save_priorities("run")
        expected = learn(first, 5)

    with replay(9, priorities="run") as again:
        assert all(map(equal, learn(again, 5), expected))
        again.save_priorities()  # under the name it was opened with
        expected = learn(again)
    with replay(9, priorities="run") as once_more:
        assert all(map(equal, learn(once_more), expected))


CONTINUE = """
import sys, expstore
from tests.loading.test_saved_priorities import learn, prioritized
replay = prioritized(expstore.open(sys.argv[1]), priorities="run")
print([batch.info.index.tolist() for batch in learn(replay)])
"""


def test_a_new_process_goes_on_exactly(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = prioritized(store)
    learn(replay)
    replay.save_priorities("run")

    command = [sys.executable, "-c", CONTINUE, str(tmp_path / "a.exp")]
    run = subprocess.run(command, check=True, capture_output=True, text=True)

    expected = [batch.info.index.tolist() for batch in learn(replay)]
    assert run.stdout == f"{expected}\n"


def test_a_new_name_starts_afresh(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)

    new, plain = prioritized(store, priorities="new"), prioritized(store)

    assert all(map(equal, learn(new), learn(plain)))
    assert not (tmp_path / "a.exp" / "priorities").exists()


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_appended_steps_enter_at_the_largest_priority(tmp_path: Path, follow: bool, prefetch: int):
    store = fill(tmp_path / "a.exp", LENGTHS)
    with prioritized(store, prefetch=prefetch) as replay:
        learn(replay)
        replay.update_priority(steps=[4, 9], priority=[0.25, 50])
        replay.save_priorities("run")
        before = priorities_of(replay)
        ahead = [replay.sample() for _ in range(prefetch)]
    grown = fill(tmp_path / "a.exp", [6])

    with prioritized(grown, priorities="run", follow=follow, prefetch=prefetch) as again:
        assert priorities_of(again) == before + [50.0] * 6
        # What was drawn before the store has grown comes first.
        assert all(torch.equal(again.sample().info.index, b.info.index) for b in ahead)
        learn(again)


def test_evicted_steps_are_gone(tmp_path: Path):
    """Also the batches ahead that hold any of them."""
    path = tmp_path / "a.exp"
    small = {"chunk_steps": 8, "capacity_steps": sum(LENGTHS)}
    with prioritized(fill(path, LENGTHS, **small), prefetch=4) as replay:
        learn(replay)
        steps = np.arange(sum(LENGTHS))
        replay.update_priority(steps=steps, priority=steps / 2)
        replay.save_priorities("run")
        ahead = [replay.sample() for _ in range(4)]
    store = fill(path, [24], **small)
    first = int(store.spans.start[0])
    assert first == 30

    with prioritized(store, priorities="run", prefetch=4) as again:
        assert priorities_of(again) == [*(steps[first:] / 2), *[30.0] * 24]
        kept = [b for b in ahead if (b.info.anchor_index >= first).all()]
        assert len(kept) < 4
        assert all(equal(again.sample(), batch) for batch in kept)
        assert all((again.sample().info.index >= first).all() for _ in range(10))
        again.update_priority(steps=[0], priority=[1])
        assert again.sampler.num_ignored == 1  # type: ignore[attr-defined]


def test_several_sets_beside_one_store(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    for number, name in enumerate(["one", "two"]):
        replay = prioritized(store)
        replay.update_priority(steps=[number], priority=[9])
        replay.save_priorities(name)

    one, two = (prioritized(store, priorities=name) for name in ("one", "two"))

    assert priorities_of(one)[:3] == [9, 1, 1]
    assert priorities_of(two)[:3] == [1, 9, 1]
    assert [(s.name, s.num_steps) for s in expstore.inspect(tmp_path / "a.exp").priorities] == [
        ("one", 61),
        ("two", 61),
    ]


def test_sets_elsewhere_leave_the_data_untouched(tmp_path: Path):
    store = fill(tmp_path / "data" / "a.exp", LENGTHS)
    before = fingerprint(tmp_path / "data")
    elsewhere = tmp_path / "mine" / "sets"

    replay = prioritized(store, priorities_path=elsewhere, priorities="run")
    learn(replay)
    replay.save_priorities()
    replay.save_priorities("other")
    again = prioritized(store, priorities_path=str(elsewhere), priorities="run")

    assert all(map(equal, learn(again), learn(replay)))
    assert fingerprint(tmp_path / "data") == before
    assert sorted(p.name for p in elsewhere.iterdir()) == ["other", "run"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    replay = prioritized(fill(tmp_path / "a.exp", LENGTHS), priorities_path=tmp_path / "file")

    with pytest.raises(StorageError, match=r"cannot create the directory .*file/run"):
        replay.save_priorities("run")


def test_the_priorities_of_a_union_are_those_of_its_stores(tmp_path: Path):
    paths = [tmp_path / "a.exp", tmp_path / "b.exp"]
    for path in paths:
        fill(path, LENGTHS)
    replay = prioritized(expstore.open(paths), prefetch=1)
    learn(replay)
    replay.save_priorities("run")
    expected = learn(replay)

    assert (paths[0] / "priorities" / "run").is_dir()
    with prioritized(expstore.open(paths), priorities="run", prefetch=1) as again:
        assert all(map(equal, learn(again), expected))
    for other in (paths[0], paths[::-1]):
        store = expstore.open(other)
        with pytest.raises(StateError, match=r"priorities saved in .*run: the state belongs to"):
            elsewhere = paths[0] / "priorities"
            prioritized(store, priorities="run", priorities_path=elsewhere)
    with pytest.raises(StateError, match="holds priorities of the stores"):
        prioritized(expstore.open(paths[0])).save_priorities("run")
    replay.close()


def test_the_priorities_of_a_union_grow_with_each_store(tmp_path: Path):
    paths = [tmp_path / "a.exp", tmp_path / "b.exp"]
    for path in paths:
        fill(path, [5])
    replay = prioritized(expstore.open(paths))
    replay.update_priority(steps=[1, 2**40], priority=[3, 4])
    replay.save_priorities("run")
    for path in paths:
        fill(path, [2])

    again = prioritized(expstore.open(paths), priorities="run")

    assert priorities_of(again) == [1, 3, 1, 1, 1, 4, 4, 4, 1, 1, 1, 1, 4, 4]


def test_a_mixture_goes_on_exactly(tmp_path: Path):
    paths = [tmp_path / name for name in ("a.exp", "b.exp", "c.exp")]
    for path in paths:
        fill(path, LENGTHS)

    def replay(**options: Any) -> expstore.Replay:
        samplers = {"a": expstore.Prioritized(), "b": expstore.Prioritized(alpha=1.0)}
        mixture = expstore.Mixture({"a": 0.5, "b": 0.3, "c": 0.2}, {**samplers})
        return prioritized(expstore.open(paths), sampler=mixture, **options)

    first = replay(seed=3)
    learn(first)
    first.save_priorities("run")

    assert all(map(equal, learn(replay(priorities="run")), learn(first)))
    names = [s.num_steps for s in expstore.inspect(paths[0]).priorities]
    assert names == [122]  # of the parts that have priorities


def test_a_view_goes_on_exactly_and_grows(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)

    def long(store: expstore.Store) -> expstore.Store:
        return store.filter(lambda row: row["length"] > 5)

    replay = prioritized(long(store))
    learn(replay)
    replay.save_priorities("run")
    before = priorities_of(replay)

    again = prioritized(long(store), priorities="run")
    assert all(map(equal, learn(again), learn(replay)))
    grown = prioritized(long(fill(tmp_path / "a.exp", [2, 6])), priorities="run")
    assert priorities_of(grown) == before + [max(before)] * 6


def test_another_view_is_refused(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = prioritized(store.filter([0, 2]))
    learn(replay)
    replay.save_priorities("run")

    with pytest.raises(StateError, match=r"run: the state belongs to another view"):
        prioritized(store, priorities="run")
    grown = fill(tmp_path / "a.exp", [4])
    with pytest.raises(StateError, match="load it on the store and view it was saved with"):
        prioritized(grown, priorities="run")


def test_another_store_is_refused(tmp_path: Path):
    elsewhere = tmp_path / "sets"
    store, other = (fill(tmp_path / name, LENGTHS) for name in ("a.exp", "b.exp"))
    replay = prioritized(store, priorities_path=elsewhere)
    learn(replay)
    replay.save_priorities("run")

    store_id = store.snapshots[0].root.store_id
    with pytest.raises(StateError, match=f"sets/run: the state belongs to store {store_id} at"):
        prioritized(other, priorities_path=elsewhere, priorities="run")
    with pytest.raises(StateError, match="save under another name"):
        prioritized(other, priorities_path=elsewhere).save_priorities("run")


def test_an_older_commit_is_refused(tmp_path: Path):
    """Its steps are a part of those with priorities, and saving again would lose the others."""
    fill(tmp_path / "a.exp", LENGTHS)
    replay = prioritized(fill(tmp_path / "a.exp", LENGTHS))
    learn(replay)
    replay.save_priorities("run")

    older = expstore.open(tmp_path / "a.exp", at=1)
    with pytest.raises(
        StateError, match=r"saved at commit 2 of .*this is commit 1; open the newest"
    ):
        prioritized(older, priorities="run")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"unit": expstore.Sequence(length=5)}, "unit was Sequence"),
        ({"batch_size": 9}, "batch_size was 8"),
        ({"sampler": expstore.Prioritized(alpha=0.1)}, r"run: .*alpha=0\.7"),
        ({"sampler": expstore.Mixture({"a": 1.0})}, "run: "),
    ],
)
def test_another_replay_is_refused(tmp_path: Path, options: dict[str, Any], text: str):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = prioritized(store)
    replay.save_priorities("run")
    usual = {"batch_size": 8, "unit": replay.unit, "sampler": expstore.Prioritized(0.7, 0.5)}

    with pytest.raises(StateError, match=text):
        expstore.Replay(store, priorities="run", **{**usual, **options})


@pytest.mark.parametrize("sampler", [expstore.Uniform(), expstore.WithoutReplacement()])
def test_a_sampler_without_priorities_has_none_to_save(tmp_path: Path, sampler: Any):
    store = fill(tmp_path / "a.exp", LENGTHS)
    text = f"{type(sampler).__name__} has no priorities; give sampler=Prioritized"

    with pytest.raises(StateError, match=text):
        expstore.Replay(store, 4, sampler=sampler).save_priorities("run")
    with pytest.raises(StateError, match=text):
        expstore.Replay(store, 4, sampler=sampler, priorities="run")
    assert not (tmp_path / "a.exp" / "priorities").exists()


def test_a_name_must_be_given_and_be_one(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)

    with pytest.raises(SchemaError, match="give a name"):
        prioritized(store).save_priorities()
    with pytest.raises(SchemaError, match=r"that of a directory, not '\.\./steps'"):
        prioritized(store).save_priorities("../steps")
    with pytest.raises(SchemaError, match="that of a directory, not '__x'"):
        prioritized(store, priorities="__x")


def test_damage_is_named(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    prioritized(store).save_priorities(
        "empty"
    )  # nothing was drawn, so there are no arrays of steps
    replay = prioritized(store)
    learn(replay)
    replay.save_priorities("run")
    file = next((tmp_path / "a.exp/priorities/run").rglob("raw/c.0"))
    file.write_bytes(file.read_bytes()[::-1])

    with pytest.raises(DamagedError, match="sampler/streams/0/raw fail their checksum"):
        prioritized(store, priorities="run")
    assert all(map(equal, learn(prioritized(store, priorities="empty")), learn(prioritized(store))))


def test_saving_while_others_sample(tmp_path: Path):
    """It writes what was there at one moment, and holds nobody up while it does."""
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = prioritized(store, prefetch=2)
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            learn(replay, 1)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for _ in range(5):
            replay.save_priorities("run")
            with prioritized(store, priorities="run", prefetch=2) as again:
                learn(again, 4)
    finally:
        stop.set()
        thread.join()
    replay.close()
