"""What a done_key means to a real store, view and union, to a ring, and to what samples them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore.errors import FieldNotFoundError, SchemaError
from expstore.sampling.sequence import Sequence
from expstore.storage.mapping import MappedColumn
from tests.sampling.oracle import ENDS, Recording, any_units
from tests.storage.made import writer

STRIDE = 2**40
LENGTHS = [[3, 1, 7, 2, 5, 9, 1, 4], [6, 2, 2, 8]]
SETTINGS = [{"layout": "mapped", "chunk_steps": 4096}, {"layout": "coded"}]


def episode(length: int, seed: int) -> dict[str, Any]:
    lost = np.random.default_rng(seed).random(length) < 0.3
    return {
        "observation": np.arange(length + 1.0),
        "life_lost": lost.astype(np.float32)[:, None],
        "terminated": np.arange(length) == length - 1,
        "info": {"life_lost": lost},
    }


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two stores, one of them short of its first episodes, which were evicted."""
    paths = [tmp_path_factory.mktemp("done") / f"{k}.exp" for k in range(2)]
    for path, lengths, settings in zip(paths, LENGTHS, SETTINGS, strict=True):
        capacity = {"capacity_steps": 29} if path is paths[0] else {}
        with writer(path, **settings, **capacity) as opened:
            for seed, length in enumerate(lengths):
                opened.append(episode(length, seed))
    assert expstore.open(paths[0]).episodes["number"][0] > 0
    return paths


def recording_of(store: expstore.Store) -> Recording:
    """What a store holds, episode by episode, as the slow rule understands it."""
    recording = Recording([], [], [], [])
    for row in store.episodes:
        data, start = store.episode(row["number"]), int(row["start"])
        recording.is_episode_end += data["terminated"].tolist()
        recording.is_flagged += data["life_lost"][:, 0].astype(bool).tolist()
        recording.stream += [row["number"] // STRIDE] * int(row["length"])
        recording.steps += range(start, start + int(row["length"]))
    return recording


@st.composite
def selections(draw: st.DrawFn, paths: list[Path]) -> expstore.Store:
    """A store, a view, a union or a view of a union."""
    store = expstore.open(draw(st.sampled_from([*paths, paths])))
    numbers = store.episode_numbers.tolist()
    if draw(st.booleans()):
        store = store.filter(draw(st.sets(st.sampled_from(numbers), min_size=1)))
    return store


@given(st.data(), any_units)
def test_windows_of_a_store_follow_the_rule_whatever_ends_them(stores, data, unit):
    store = data.draw(selections(stores))
    recording = recording_of(store)
    steps = np.array(recording.steps)

    index, info = unit.expand(steps, {}, store)

    windows = [recording.slow_window(at, unit) for at in range(len(steps))]
    assert index.tolist() == steps[np.array([at for at, _ in windows])].ravel().tolist()
    assert info["validity_mask"].tolist() == np.array([v for _, v in windows]).ravel().tolist()


@given(st.data(), any_units, st.integers(0, 99))
def test_a_ring_of_the_selected_steps_has_the_same_windows(stores, data, unit, oldest):
    store = data.draw(selections(stores[:1]))
    recording = recording_of(store)
    steps = np.array(recording.steps)
    oldest %= len(steps)
    rows = (np.arange(len(steps)) + oldest) % len(steps)

    of_ring, ring_info = unit.expand(rows, {}, recording.ring(0, oldest))
    of_store, info = unit.expand(steps, {}, store)

    assert steps[(of_ring - oldest) % len(steps)].tolist() == of_store.tolist()
    assert ring_info["validity_mask"].tolist() == info["validity_mask"].tolist()


@given(st.data(), any_units, st.sampled_from(["all", "full"]))
def test_replay_and_dataset_read_these_windows(stores, data, unit, starts):
    pytest.importorskip("torch")
    store = data.draw(selections(stores))
    recording = recording_of(store)
    steps = np.array(recording.steps)
    slow = [recording.slow_window(at, unit) for at in range(len(steps))]
    whole = [at for at, (positions, valid) in enumerate(slow)
             if all(valid) and positions[unit.burn_in] == at]  # fmt: skip
    replay = expstore.Replay(store, len(steps), unit=unit, fields=["done"], starts=starts)
    if starts == "full" and not whole:
        with pytest.raises(expstore.errors.StepRangeError, match="no window can be whole"):
            replay.sample()
        return
    batches = [replay.sample()]
    if starts == "all":
        batches.append(
            expstore.SequenceDataset(store, unit, fields=["done"]).batch(range(len(steps)))
        )
    for batch in batches:
        anchors = np.searchsorted(steps, batch.info.anchor_index[:, 0].numpy())
        assert starts == "all" or set(anchors.tolist()) <= set(whole)
        expected = [slow[at] for at in anchors]
        assert batch.info.index.tolist() == steps[np.array([p for p, _ in expected])].tolist()
        assert batch.info.validity_mask.tolist() == [valid for _, valid in expected]


@pytest.mark.parametrize("done_key", [None, *ENDS])
@pytest.mark.parametrize("starts", ["all", "full"])
def test_every_full_start_is_drawn(stores, done_key, starts):
    pytest.importorskip("torch")
    store = expstore.open(stores)
    recording, unit = recording_of(store), Sequence(2, done_key=done_key, burn_in=1)
    slow = [recording.slow_window(at, unit)[1] for at in range(store.num_steps)]
    expected = [s for s, v in zip(recording.steps, slow, strict=True) if starts == "all" or all(v)]
    replay = expstore.Replay(
        store, len(expected), unit=unit, starts=starts, fields=["done"],
        sampler=expstore.WithoutReplacement(),
    )  # fmt: skip
    assert sorted(replay.sample().info.anchor_index[:, 0].tolist()) == expected


def test_a_nested_field_is_named_by_its_path_with_or_without_next(stores):
    store = expstore.open(stores)
    expected = store.boundaries("life_lost").tolist()
    assert len(expected) > 5
    for key in (("info", "life_lost"), ("next", "info", "life_lost"), "info/life_lost",
                ["info", "life_lost"]):  # fmt: skip
        assert store.boundaries(key).tolist() == expected
        unit = Sequence(3, done_key=key)
        plan = unit.plan(store.spans, np.arange(store.num_steps), unit.boundaries_in(store))
        plain = Sequence(3, done_key="life_lost").expand(store.spans.steps_at(
            np.arange(store.num_steps)), {}, store)[0]  # fmt: skip
        assert plan.steps.ravel().tolist() == plain.tolist()


def test_done_needs_no_flags_and_none_ends_nothing(stores):
    store = expstore.open(stores[1])
    assert store.boundaries("done").tolist() == [5, 7, 9, 17]
    assert store.boundaries(("next", "done")).tolist() == [5, 7, 9, 17]
    assert store.boundaries(None).tolist() == []


@pytest.mark.parametrize("done_key", ["nope", ("next", "nope"), "info", "episode", "next_done"])
def test_an_unknown_key_is_refused_where_a_replay_is_made(stores, done_key):
    store = expstore.open(stores[0])
    unit = Sequence(2, done_key=done_key)
    with pytest.raises(FieldNotFoundError, match="there is no field"):
        unit.expand(np.array([20]), {}, store)
    pytest.importorskip("torch")
    with pytest.raises(FieldNotFoundError, match="there is no field"):
        expstore.Replay(store, 4, unit=unit)


@pytest.mark.parametrize(
    ("name", "text"),
    [("position", r"shape \(2,\) of float32"), ("note", "any number of values of text")],
)
def test_a_field_that_is_no_single_number_cannot_end_windows(tmp_path: Path, name, text):
    data = {"reward": np.ones(2), "position": np.ones((2, 2), np.float32), "note": ["a", "b"]}
    with writer(tmp_path / "a.exp") as opened:
        opened.append(data)
    with pytest.raises(SchemaError, match=text):
        expstore.open(tmp_path / "a.exp").boundaries(name)


def test_any_number_but_zero_ends_a_window(tmp_path: Path):
    bfloat16 = np.array([0, 0x8000, 0x3F80, 1], np.uint16)  # 0, -0, 1, a tiny one
    torch = pytest.importorskip("torch")
    data = {
        "float": np.array([0, -0.0, np.nan, 0.5]),
        "integer": np.array([0, 0, -1, 1], np.int8)[:, None, None],
        "bfloat": torch.from_numpy(bfloat16).view(torch.bfloat16),
    }
    with writer(tmp_path / "a.exp") as opened:
        opened.append(data)
    store = expstore.open(tmp_path / "a.exp")
    for name in data:
        assert store.boundaries(name).tolist() == [2, 3], name


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the column life_lost that are read, one entry per read."""
    counts: list[int] = []
    original = MappedColumn.slice

    def counted(self: MappedColumn, first: int, last: int, start: int, stop: int) -> Any:
        if self.layout.path == "steps/life_lost":
            counts.append(last - first)
        return original(self, first, last, start, stop)

    monkeypatch.setattr(MappedColumn, "slice", counted)
    return counts


def test_a_newer_commit_costs_its_new_rows_only(tmp_path: Path, rows_read: list[int]):
    with writer(tmp_path / "a.exp", layout="mapped") as opened:
        opened.append(episode(100, 0))
        opened.commit()
        store = expstore.open(tmp_path / "a.exp")
        unit = Sequence(3, done_key="life_lost")
        for _ in range(3):
            unit.expand(np.arange(100), {}, store)
            store.filter([0]).boundaries(("next", "life_lost"))
        assert rows_read == [100]
        for seed, length in enumerate([7, 40], start=1):
            opened.append(episode(length, seed))
            opened.commit()
            store = store.latest()  # nothing else holds the older one
            store.boundaries("life_lost")
    assert rows_read == [100, 7, 40]
    expected = store.read(np.arange(147), ["life_lost"])["life_lost"][:, 0]
    assert store.boundaries("life_lost").tolist() == np.flatnonzero(expected).tolist()


def test_a_column_is_read_in_blocks(tmp_path: Path, rows_read, monkeypatch):
    monkeypatch.setattr("expstore.storage.boundaries.BLOCK_BYTES", 4 * 30)
    with writer(tmp_path / "a.exp", layout="mapped") as opened:
        opened.append(episode(100, 0))
    store = expstore.open(tmp_path / "a.exp")
    expected = np.flatnonzero(store.read(np.arange(100), ["life_lost"])["life_lost"])
    assert store.boundaries("life_lost").tolist() == expected.tolist()
    assert rows_read == [30, 30, 30, 10]


def test_eviction_drops_the_ends_below_the_live_start(tmp_path: Path, rows_read: list[int]):
    with writer(tmp_path / "a.exp", layout="mapped", capacity_steps=60) as opened:
        opened.append(episode(50, 0))
        opened.commit()
        old = expstore.open(tmp_path / "a.exp")
        expected = old.boundaries("life_lost").tolist()
        opened.append(episode(40, 1))
        opened.commit()
        new = old.latest()
        flags = new.read(np.arange(50, 90), ["life_lost"])["life_lost"]
        assert new.spans.start.tolist() == [50]
        assert new.boundaries("life_lost").tolist() == np.flatnonzero(flags).tolist()
        assert old.boundaries("life_lost").tolist() == expected
        assert old.filter([0]).boundaries("life_lost").tolist() == expected
        assert rows_read == [50, 40]
        copy = pickle.loads(pickle.dumps(old))  # asks anew, for what only it still reaches
        assert copy.boundaries("life_lost").tolist() == expected
        assert rows_read == [50, 40, 50]


def test_two_snapshots_of_different_ages_ask_in_any_order(tmp_path: Path):
    with writer(tmp_path / "a.exp", capacity_steps=60) as opened:
        for seed, length in enumerate([50, 40, 30]):
            opened.append(episode(length, seed))
            opened.commit()
            if not seed:
                oldest = expstore.open(tmp_path / "a.exp")
                oldest.read([0], ["life_lost"])
    newest = oldest.latest()
    number = newest.num_episodes + 1
    found = [store.boundaries("life_lost").tolist() for store in (newest, oldest)]
    data = [newest.episode(number), oldest.episode(0)]
    assert found == [np.flatnonzero(rows["life_lost"]).tolist() for rows in data]


def test_a_follower_sees_the_ends_of_new_commits(tmp_path: Path):
    pytest.importorskip("torch")
    with writer(tmp_path / "a.exp") as opened:
        opened.append(episode(20, 0))
        opened.commit()
        unit = Sequence(4, done_key="life_lost")
        replay = expstore.Replay(
            expstore.open(tmp_path / "a.exp"), 200, unit=unit, follow=True, starts="full"
        )
        replay.sample()
        opened.append(episode(30, 1))
        opened.commit()
        batch = replay.sample()
    recording = recording_of(expstore.open(tmp_path / "a.exp"))
    whole = [at for at in range(50) if all(recording.slow_window(at, unit)[1])]
    assert set(batch.info.anchor_index[:, 0].tolist()) == set(whole)


def test_a_store_takes_its_ends_along_to_another_process(stores):
    store = expstore.open(stores).filter(lambda row: row["length"] > 2)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.boundaries("life_lost").tolist() == store.boundaries("life_lost").tolist()
