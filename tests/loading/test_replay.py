"""Replay gives the windows it drew, the same ones for the same seed, and resumes exactly."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import expstore  # noqa: E402
from expstore.errors import (  # noqa: E402
    FieldNotFoundError,
    SchemaError,
    StateError,
    StepRangeError,
)
from expstore.loading.batch import Batch  # noqa: E402
from tests.loading.making import episode, fill  # noqa: E402

LENGTHS = [1, 5, 30, 2, 17, 60]
LAYOUTS = ["mapped", "coded"]


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(one.fields[n], other.fields[n]) for n in one.fields) and all(
        torch.equal(one.info[n], other.info[n]) for n in one.info
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_of_a_window_is_the_step_that_its_index_says(tmp_path: Path, layout: str):
    store = fill(tmp_path / "a.exp", LENGTHS, layout=layout, chunk_steps=16)
    unit = expstore.Sequence(length=7, burn_in=3, bootstrap=1)
    replay = expstore.Replay(store, batch_size=64, unit=unit)

    for _ in range(10):
        batch = replay.sample()
        index = batch.info.index
        assert batch["observation"]["state"].shape == (64, 11, 3)
        assert torch.equal(batch["action"], index)
        assert torch.equal(batch["reward"], index / 2)
        assert torch.equal(batch["observation/state"][..., 0], index.float())
        assert torch.equal(batch["observation/image"][..., 0, 0], index.to(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_next_values_come_with_the_windows(tmp_path: Path, layout: str):
    store = fill(tmp_path / "a.exp", LENGTHS, layout=layout)
    fields = ("next_observation", "has_next", "done", "episode", "terminated")
    replay = expstore.Replay(store, 64, unit=expstore.Sequence(length=9), fields=fields)

    batch = replay.sample()

    following = batch.info.index + 1
    expected = torch.where(batch["done"], -following, following).float()
    assert torch.equal(batch["next_observation"]["state"][..., 0], expected)
    assert torch.equal(batch["done"], batch["terminated"])
    assert batch["has_next"].all()


def test_single_steps_come_without_a_window_axis(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)

    batch = expstore.Replay(store, batch_size=8).sample()

    assert batch["observation"]["state"].shape == (8, 3)
    assert batch["reward"].shape == (8,)
    assert {name: tuple(entry.shape) for name, entry in batch.info.items()} == dict.fromkeys(
        ("index", "anchor_index", "validity_mask", "learning_mask", "sequence_id",
         "step_in_sequence", "weight"), (8,)
    )  # fmt: skip


def test_info_says_what_each_row_is(tmp_path: Path):
    store = fill(tmp_path / "a.exp", [4])
    unit = expstore.Sequence(length=3, burn_in=1)

    info = expstore.Replay(store, batch_size=5, unit=unit).sample().info

    anchors = info.anchor_index[:, 0]
    assert torch.equal(info.anchor_index, anchors[:, None].expand(5, 4))
    wanted = anchors[:, None] + torch.tensor([-1, 0, 1, 2])
    assert torch.equal(info.validity_mask, (wanted >= 0) & (wanted < 4))
    assert torch.equal(info.index, wanted.clamp(0, 3))
    assert info.learning_mask.tolist() == [[False, True, True, True]] * 5
    assert info.sequence_id[:, 2].tolist() == [0, 1, 2, 3, 4]
    assert info.step_in_sequence[4].tolist() == [0, 1, 2, 3]
    assert info.weight.dtype == torch.float32
    assert bool((info.weight == 1).all())


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_same_seed_gives_the_same_batches(tmp_path: Path, prefetch: int):
    store = fill(tmp_path / "a.exp", LENGTHS)
    one = expstore.Replay(store, 16, unit=expstore.Sequence(length=4), seed=5, prefetch=prefetch)
    same = expstore.Replay(store, 16, unit=expstore.Sequence(length=4), seed=5)
    other = expstore.Replay(store, 16, unit=expstore.Sequence(length=4), seed=6)

    batches = [one.sample() for _ in range(6)]

    assert all(equal(batch, same.sample()) for batch in batches)
    assert not equal(batches[0], other.sample())
    one.close()


SAMPLERS = {"uniform": expstore.Uniform, "permutation": expstore.WithoutReplacement}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loaded_state_continues_with_the_batch_that_was_next(
    tmp_path: Path, name: str, prefetch: int
):
    store = fill(tmp_path / "a.exp", LENGTHS)

    def replay() -> expstore.Replay:
        unit, sampler = expstore.Sequence(length=4), SAMPLERS[name]()
        return expstore.Replay(store, 16, unit=unit, sampler=sampler, seed=5, prefetch=prefetch)

    first = replay()
    for _ in range(11):
        first.sample()
    state = json.loads(json.dumps(first.state_dict()))
    expected = [first.sample() for _ in range(9)]

    resumed = replay()
    resumed.sample()  # whatever it did before does not matter
    resumed.load_state_dict(state)

    assert all(equal(batch, resumed.sample()) for batch in expected)
    first.close()
    resumed.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_checkpoint_of_any_sampler_loads_as_weights_only(tmp_path: Path, prefetch: int):
    store = fill(tmp_path / "a.exp", LENGTHS)

    def replay() -> expstore.Replay:
        samplers = {store: expstore.Prioritized(), more: expstore.WithoutReplacement()}
        sampler = expstore.Mixture({store: 0.5, more: 0.5}, samplers)
        both = expstore.union([store, more])
        return expstore.Replay(both, 16, sampler=sampler, seed=5, prefetch=prefetch)

    more = fill(tmp_path / "b.exp", LENGTHS)
    with replay() as first:
        for step in range(5):
            batch = first.sample()
            first.update_priority(batch, torch.arange(16) + step)
        torch.save({"replay": first.state_dict()}, tmp_path / "run.pt")
        expected = [first.sample() for _ in range(9)]

    with replay() as resumed:
        resumed.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True)["replay"])
        assert all(equal(batch, resumed.sample()) for batch in expected)


RESUME = """
import json, sys, expstore
store = expstore.open(sys.argv[1])
replay = expstore.Replay(store, 16, unit=expstore.Sequence(length=4), seed=5, prefetch=2)
replay.load_state_dict(json.loads(sys.argv[2]))
print(json.dumps([replay.sample().info.index.tolist() for _ in range(3)]))
replay.close()
"""


def test_a_state_resumes_in_a_new_process(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = expstore.Replay(store, 16, unit=expstore.Sequence(length=4), seed=5)
    for _ in range(7):
        replay.sample()
    state = json.dumps(replay.state_dict())

    command = [sys.executable, "-c", RESUME, str(tmp_path / "a.exp"), state]
    resumed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    assert resumed == [replay.sample().info.index.tolist() for _ in range(3)]


def test_a_state_of_another_store_is_refused(tmp_path: Path):
    state = expstore.Replay(fill(tmp_path / "a.exp", LENGTHS), 4).state_dict()
    other = expstore.Replay(fill(tmp_path / "b.exp", LENGTHS), 4)
    with pytest.raises(StateError, match="belongs to store"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 5}, "batch_size was 4 .* and is 5 now"),
        ({"unit": expstore.Sequence(length=2)}, "unit was"),
        ({"sampler": expstore.WithoutReplacement()}, "sampler"),
    ],
)
def test_a_state_of_another_kind_of_replay_is_refused(
    tmp_path: Path, change: dict[str, object], text: str
):
    store = fill(tmp_path / "a.exp", LENGTHS)
    state = expstore.Replay(store, 4).state_dict()
    other = expstore.Replay(store, **{"batch_size": 4, **change})
    with pytest.raises(StateError, match=text):
        other.load_state_dict(state)
    with pytest.raises(StateError, match="must have"):
        other.load_state_dict({})


def test_views_are_sampled_like_stores(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    view = store.filter(lambda row: row["tag"] in (5, 17))
    replay = expstore.Replay(view, 64, unit=expstore.Sequence(length=6))

    seen = set()
    for _ in range(20):
        batch = replay.sample()
        assert torch.equal(batch["action"], batch.info.index)
        seen |= set(batch.info.index.flatten().tolist())

    assert seen == {*range(1, 6), *range(38, 55)}


def test_unions_are_sampled_like_stores(tmp_path: Path):
    fill(tmp_path / "a.exp", [3, 4])
    fill(tmp_path / "b.exp", [6])
    union = expstore.open([tmp_path / "a.exp", tmp_path / "b.exp"])
    replay = expstore.Replay(union, 64, unit=expstore.Sequence(length=3), fields=("action", "done"))

    batch = replay.sample()

    assert torch.equal(batch["action"], batch.info.index % 2**40)
    assert set((batch.info.index // 2**40).flatten().tolist()) == {0, 1}


def test_a_batch_is_the_callers_to_keep_and_change(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = expstore.Replay(store, 64, unit=expstore.Sequence(length=20), seed=1)
    kept = [replay.sample() for _ in range(6)]
    copies = [pickle.loads(pickle.dumps(batch)) for batch in kept]

    for batch in kept[::2]:
        batch["observation/image"].zero_()
        batch.info.learning_mask.zero_()
    later = [replay.sample() for _ in range(6)]

    for batch, copy in zip(kept[1::2], copies[1::2], strict=True):
        assert equal(batch, copy)
    assert all(bool(batch.info.learning_mask.all()) for batch in later)
    again = expstore.Replay(store, 64, unit=expstore.Sequence(length=20), seed=1)
    assert all(equal(copy, again.sample()) for copy in copies)


def test_bfloat16_comes_back_as_bfloat16(tmp_path: Path):
    values = torch.randn(10, 2, dtype=torch.bfloat16)
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({"observation": values, "action": torch.arange(9)})

    batch = expstore.Replay(expstore.open(tmp_path / "a.exp"), 30).sample()

    assert batch["observation"].dtype == torch.bfloat16
    assert torch.equal(batch["observation"], values[batch.info.index])


def test_sampling_from_nothing_says_so(tmp_path: Path):
    with expstore.Writer(tmp_path / "a.exp"):
        pass
    replay = expstore.Replay(expstore.open(tmp_path / "a.exp"), 4)
    with pytest.raises(StepRangeError, match="no step to draw from"):
        replay.sample()


def test_an_unknown_field_and_bad_sizes_are_refused(tmp_path: Path):
    store = fill(tmp_path / "a.exp", [3])
    with pytest.raises(FieldNotFoundError, match="no field 'obs'"):
        expstore.Replay(store, 4, fields=("obs",))
    with pytest.raises(SchemaError, match="batch_size must be an integer of at least 1, got 0"):
        expstore.Replay(store, 0)
    with pytest.raises(SchemaError, match="prefetch must be"):
        expstore.Replay(store, 1, prefetch=-1)


def test_an_error_while_reading_ahead_surfaces_at_the_batch_it_belongs_to(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    chunk = tmp_path / "a.exp" / "steps" / "action" / "c.0"
    chunk.unlink()
    replay = expstore.Replay(store, 4, prefetch=2)
    with pytest.raises(expstore.errors.DamagedError, match=r"c\.0 is missing"):
        replay.sample()
    replay.close()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_threads_change_nothing(tmp_path: Path, num_threads: int):
    store = fill(tmp_path / "a.exp", [300] * 4, layout="coded", chunk_steps=64)
    unit = expstore.Sequence(length=50)
    fields = ("observation", "next_observation")
    one = expstore.Replay(store, 64, unit=unit, fields=fields, num_threads=1)
    many = expstore.Replay(store, 64, unit=unit, fields=fields, num_threads=num_threads)
    for _ in range(3):
        assert equal(one.sample(), many.sample())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_following_finds_new_commits_between_draws(tmp_path: Path, prefetch: int):
    store = fill(tmp_path / "a.exp", [3])
    replay = expstore.Replay(
        store.filter(lambda row: row["length"] != 50), 64, follow=True, prefetch=prefetch
    )
    with expstore.Writer(tmp_path / "a.exp") as writer:
        for length in (50, 20):
            writer.append(episode(writer.num_steps, length))
            writer.commit()
            for _ in range(prefetch + 1):
                batch = replay.sample()
                assert torch.equal(batch["action"], batch.info.index)
    assert set(batch.info.index.tolist()) <= {0, 1, 2, *range(53, 73)}
    assert int(batch.info.index.max()) > 52
    replay.close()


def test_a_store_may_grow_while_it_is_sampled(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = expstore.Replay(store, 32, unit=expstore.Sequence(length=5), seed=3)
    again = expstore.Replay(store, 32, unit=expstore.Sequence(length=5), seed=3)
    expected = [replay.sample() for _ in range(4)]

    with expstore.Writer(tmp_path / "a.exp") as writer:
        for got in expected:
            writer.append(episode(writer.num_steps, 50))
            writer.commit()
            assert equal(again.sample(), got)
    assert expstore.open(tmp_path / "a.exp").num_steps == sum(LENGTHS) + 200
    assert np.array_equal(store.read([0, 1], ["action"])["action"], [0, 1])


def prioritized(store: expstore.Store, prefetch: int = 0, **options: object) -> expstore.Replay:
    sampler = expstore.Prioritized(alpha=1.0, beta=1.0, eps=0.0)
    return expstore.Replay(
        store, 32, sampler=sampler, seed=4, prefetch=prefetch, **{"unit": None, **options}
    )


def test_steps_are_drawn_by_the_priorities_they_were_given(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = prioritized(store)
    replay.update_priority(steps=np.arange(115), priority=np.zeros(115))
    replay.update_priority(steps=[7, 50], priority=[1.0, 3.0])

    batches = [replay.sample() for _ in range(30)]

    index = torch.cat([batch.info.index for batch in batches])
    assert set(index.tolist()) == {7, 50}
    assert 0.7 < float((index == 50).float().mean()) < 0.8


@pytest.mark.parametrize("records", [False, True])
def test_a_batch_gives_its_anchors_the_largest_of_their_values(tmp_path: Path, records: bool):
    store = fill(tmp_path / "a.exp", [4])
    replay = prioritized(store, unit=expstore.Sequence(length=3))
    batch = replay.sample()
    error = batch.info.index.float() + 1 if records else torch.arange(32.0)
    replay.update_priority(batch, error)

    anchors = batch.info.anchor_index[:, 0]
    steps = np.unique(anchors.numpy())
    found = replay.sampler.priorities(store.spans, steps)
    if records:
        assert found.tolist() == [min(step + 2, 3) + 1 for step in steps]
    else:
        assert found.tolist() == [float(error[anchors == step].max()) for step in steps.tolist()]


def test_only_the_learning_region_counts_if_asked(tmp_path: Path):
    store = fill(tmp_path / "a.exp", [40])
    replay = prioritized(store, unit=expstore.Sequence(length=1, burn_in=1))
    batch = replay.sample()
    error = torch.tensor([[9.0, 2.0]]).expand(32, 2)
    replay.update_priority(batch, error, region="learning")
    steps = np.unique(batch.info.anchor_index.numpy())
    assert set(replay.sampler.priorities(store.spans, steps).tolist()) == {2.0}


@pytest.mark.parametrize(
    ("priority", "text"),
    [
        (torch.ones(31), r"must have shape \(32,\) .* or \(32, 3\)"),
        (torch.ones(32, 1), "got \\(32, 1\\)"),
        (torch.ones(32, 3, 1), "got \\(32, 3, 1\\)"),
        (-torch.ones(32), "must be from 0 to"),
        (torch.full((32,), float("nan")), "NaN|nan"),
        (torch.full((32, 3), float("inf")), "inf"),
        ("high", "must be numbers"),
    ],
)
def test_priorities_that_make_no_sense_are_refused(tmp_path: Path, priority: object, text: str):
    replay = prioritized(fill(tmp_path / "a.exp", [40]), unit=expstore.Sequence(length=3))
    batch = replay.sample()
    with pytest.raises(SchemaError, match=text):
        replay.update_priority(batch, priority)


def test_a_sampler_without_priorities_says_so(tmp_path: Path):
    replay = expstore.Replay(fill(tmp_path / "a.exp", [40]), 4)
    with pytest.raises(StateError, match="Uniform has no priorities"):
        replay.update_priority(replay.sample(), torch.ones(4))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prioritized_sampling_resumes_exactly(tmp_path: Path, prefetch: int):
    store = fill(tmp_path / "a.exp", LENGTHS)
    first = prioritized(store, prefetch)
    for _ in range(6):
        batch = first.sample()
        first.update_priority(batch, batch.info.index.float() % 7)
    state = pickle.loads(pickle.dumps(first.state_dict()))

    def go_on(replay: expstore.Replay) -> list[Batch]:
        batches = []
        for _ in range(8):
            batches.append(replay.sample())
            replay.update_priority(batches[-1], batches[-1].info.index.float() % 5)
        return batches

    expected = go_on(first)
    resumed = prioritized(store, prefetch)
    resumed.load_state_dict(state)
    assert all(map(equal, go_on(resumed), expected))
    first.close()
    resumed.close()


def test_new_steps_enter_at_the_largest_priority(tmp_path: Path):
    replay = prioritized(fill(tmp_path / "a.exp", [10]), follow=True)
    replay.update_priority(steps=np.arange(10), priority=np.full(10, 5.0))
    fill(tmp_path / "a.exp", [10])
    replay.sample()
    assert replay.sampler.priorities(replay.store.spans, np.arange(10, 20)).tolist() == [5.0] * 10


def test_full_starts_give_whole_windows_only(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    unit = expstore.Sequence(length=6, burn_in=2)
    replay = expstore.Replay(store, 64, unit=unit, starts="full")
    seen = set()
    for _ in range(30):
        batch = replay.sample()
        assert bool(batch.info.validity_mask.all())
        assert torch.equal(batch["action"], batch.info.index)
        seen |= set(batch.info.anchor_index[:, 0].tolist())
    ends = np.cumsum(LENGTHS)
    whole = {s for end, n in zip(ends, LENGTHS, strict=True) for s in range(end - n + 2, end - 5)}
    assert seen == whole


def test_several_threads_may_sample_one_replay(tmp_path: Path):
    from concurrent.futures import ThreadPoolExecutor

    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = expstore.Replay(store, 16, unit=expstore.Sequence(length=4), seed=5)
    alone = expstore.Replay(store, 16, unit=expstore.Sequence(length=4), seed=5)
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda _: replay.sample(), range(40)))
    drawn = sorted(batch.info.index.tolist() for batch in batches)
    assert drawn == sorted(alone.sample().info.index.tolist() for _ in range(40))


def test_a_training_run_follows_a_recording_that_evicts(tmp_path: Path):
    import threading

    path, stop = tmp_path / "a.exp", threading.Event()

    def record() -> None:
        with expstore.Writer(path, capacity_steps=400, durable=False) as writer:
            while not stop.is_set():
                writer.append(episode(writer.num_steps, 20), tag=20)
                writer.commit()

    fill(path, [20] * 20, capacity_steps=400)
    recorder = threading.Thread(target=record)
    recorder.start()
    try:
        replay = prioritized(expstore.open(path), unit=expstore.Sequence(length=8), follow=True)
        newest, num_batches = 0, 0
        while num_batches < 60 or newest < 400:  # until a step comes that was recorded meanwhile
            batch = replay.sample()
            assert torch.equal(batch["action"], batch.info.index)
            replay.update_priority(batch, batch.info.validity_mask.float())
            newest, num_batches = int(batch.info.index.max()), num_batches + 1
    finally:
        stop.set()
        recorder.join()


def test_a_state_from_another_commit_or_view_is_refused_unless_it_follows(tmp_path: Path):
    path = tmp_path / "a.exp"
    store = fill(path, LENGTHS)
    replay = expstore.Replay(store, 4)
    replay.sample()
    state = json.loads(json.dumps(replay.state_dict()))
    grown = fill(path, [3])

    with pytest.raises(StateError, match=r"saved at commit 1 .* this is commit 2; .*at=1"):
        expstore.Replay(grown, 4).load_state_dict(state)
    with pytest.raises(StateError, match="another view"):
        expstore.Replay(store.filter([0, 2]), 4).load_state_dict(state)
    exact = expstore.Replay(expstore.open(path, at=1), 4)
    exact.load_state_dict(state)
    assert equal(exact.sample(), replay.sample())
    following = expstore.Replay(grown, 4, follow=True)
    following.load_state_dict(state)
    following.sample()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_that_an_interrupt_kept_back_is_still_the_next_one(
    tmp_path: Path, prefetch: int, monkeypatch: pytest.MonkeyPatch
):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay = expstore.Replay(store, 4, seed=9, prefetch=prefetch)
    alone = expstore.Replay(store, 4, seed=9)
    for _ in range(3):
        assert equal(replay.sample(), alone.sample())
    real = expstore.Replay._read

    def interrupted(*_: object) -> Batch:
        raise KeyboardInterrupt

    monkeypatch.setattr(expstore.Replay, "_read", interrupted)
    caught = 0
    for _ in range(4):
        try:
            assert equal(replay.sample(), alone.sample())
        except KeyboardInterrupt:
            caught += 1
    assert caught
    monkeypatch.setattr(expstore.Replay, "_read", real)
    alone = expstore.Replay(store, 4, seed=9)
    resumed = expstore.Replay(store, 4, seed=9)
    resumed.load_state_dict(replay.state_dict())
    following = resumed.sample()
    assert any(equal(following, alone.sample()) for _ in range(7))
    assert equal(following, replay.sample())
    replay.close()


def test_a_follower_may_begin_before_the_first_episode(tmp_path: Path):
    with expstore.Writer(tmp_path / "a.exp") as writer:
        replay = expstore.Replay(expstore.open(tmp_path / "a.exp"), 4, follow=True)
        writer.append(episode(0, 5))
        writer.commit()
        assert replay.sample()["action"].shape == (4,)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"store": "a.exp"}, "must be what expstore.open returned, got str"),
        ({"unit": 10}, "unit must be Step"),
        ({"unit": expstore.Sequence}, "unit must be Step"),
    ],
)
def test_what_is_no_store_or_unit_is_refused_at_once(
    tmp_path: Path, change: dict[str, object], text: str
):
    with pytest.raises(SchemaError, match=text):
        expstore.Replay(**{"store": fill(tmp_path / "a.exp", [3]), "batch_size": 4, **change})


def test_a_seed_of_numpy_is_one_of_pythons(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replays = [expstore.Replay(store, batch_size=8, seed=seed) for seed in (np.int64(7), 7)]
    assert equal(*(replay.sample() for replay in replays))
    assert json.loads(json.dumps(replays[0].state_dict())) == replays[1].state_dict()
    with pytest.raises(SchemaError, match=r"seed must be an integer, got 0\.5"):
        expstore.Replay(store, batch_size=8, seed=0.5)


def test_a_loaders_seed_of_numpy_is_one_of_pythons(tmp_path: Path):
    dataset = expstore.SequenceDataset(fill(tmp_path / "a.exp", LENGTHS), expstore.Step())
    how = {"batch_size": 8, "shuffle": True}
    loaders = [expstore.sequence_loader(dataset, seed=seed, **how) for seed in (np.int64(7), 7)]
    assert equal(*(next(iter(loader)) for loader in loaders))
    assert json.loads(json.dumps(loaders[0].state_dict())) == loaders[1].state_dict()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_closed_replay_says_so_and_its_state_still_continues(tmp_path: Path, prefetch: int):
    store = fill(tmp_path / "a.exp", LENGTHS)
    replay, other = (expstore.Replay(store, 8, prefetch=prefetch) for _ in range(2))
    with replay:
        replay.sample()
    with pytest.raises(StateError, match="closed"):
        replay.sample()
    other.load_state_dict(replay.state_dict())
    expected = expstore.Replay(store, 8)
    expected.sample()
    with other:
        assert torch.equal(other.sample().info.index, expected.sample().info.index)


def test_a_state_with_other_starts_is_refused(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    unit = expstore.Sequence(length=2)
    state = expstore.Replay(store, 8, unit=unit, starts="full").state_dict()
    with pytest.raises(StateError, match="starts was full"):
        expstore.Replay(store, 8, unit=unit).load_state_dict(state)


def test_numbers_of_numpy_are_numbers(tmp_path: Path):
    store = fill(tmp_path / "a.exp", LENGTHS)
    with expstore.Replay(store, np.int64(8), prefetch=np.int32(1)) as replay:
        assert replay.sample().info.index.shape == (8,)
        assert type(replay.state_dict()["batch_size"]) is int


@pytest.mark.parametrize("sampler", ["uniform", expstore.Uniform, 3])
def test_what_is_no_sampler_is_refused_at_once(tmp_path: Path, sampler: Any):
    store = fill(tmp_path / "a.exp", LENGTHS)
    with pytest.raises(SchemaError, match="sampler must be"):
        expstore.Replay(store, 8, sampler=sampler)
