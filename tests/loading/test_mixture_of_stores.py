"""Stores, views and unions as the parts of a Mixture: fixed shares, following, exact resume."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import expstore  # noqa: E402
from expstore.errors import SchemaError  # noqa: E402
from expstore.sampling.mixture import Mixture  # noqa: E402
from tests.loading.making import episode, fill  # noqa: E402

STRIDE = 2**40


@pytest.fixture
def offline(tmp_path: Path) -> expstore.Store:
    return fill(tmp_path / "offline.exp", [10, 20, 30], durable=False)


@pytest.fixture
def online(tmp_path: Path) -> expstore.Store:
    return fill(tmp_path / "online.exp", [5, 5], durable=False)


def owners(batch: expstore.Batch) -> list[int]:
    return np.bincount(batch.info.index.reshape(len(batch.info.index), -1)[:, 0] // STRIDE).tolist()


def test_every_batch_has_half_its_anchors_from_each_store(offline, online):
    mixture = Mixture({offline: 0.5, online: 0.5})
    replay = expstore.Replay(expstore.union([offline, online]), batch_size=8, sampler=mixture)
    for _ in range(5):
        batch = replay.sample()
        assert owners(batch) == [4, 4]
        assert torch.equal(batch["action"], batch.info.index % STRIDE)


def test_what_open_gives_for_the_same_paths_will_do(offline, online):
    both = expstore.open([*offline.paths, *online.paths])
    replay = expstore.Replay(both, 8, sampler=Mixture({offline: 0.25, online: 0.75}))
    assert owners(replay.sample()) == [2, 6]


def test_views_and_unions_may_be_parts(offline, online):
    long = offline.filter(lambda row: row["length"] > 15)
    first, rest = online.filter([0]), online.filter([1])
    actors = expstore.union([first, rest])
    mixture = Mixture({long: 0.5, actors: 0.25, offline: 0.25})
    assert list(mixture.shares) == [
        str(offline.paths[0]), f"{online.paths[0]}, {online.paths[0]}", f"{offline.paths[0]} (2)"
    ]  # fmt: skip
    unit = expstore.Sequence(length=4, episode_boundary="include_reset")
    replay = expstore.Replay(
        expstore.union([long, actors, offline]), 400, sampler=mixture, unit=unit
    )
    index = replay.sample().info.index
    assert np.bincount(index[:, 0] // STRIDE)[[0, 3]].tolist() == [200, 100]
    assert (index // STRIDE == index[:, :1] // STRIDE).all()
    per_part = [set((index[index // STRIDE == k] % STRIDE).tolist()) for k in range(4)]
    assert per_part[0] == set(range(10, 60))
    assert per_part[1:3] == [set(range(5)), set(range(5, 10))]
    assert per_part[3] & set(range(10)) and per_part[3] & set(range(10, 60))


def test_each_part_follows_its_store(offline, tmp_path: Path):
    kept = offline.filter([2])  # by number: cannot follow, and need not as long as nothing comes
    with expstore.Writer(tmp_path / "online.exp", durable=False) as writer:
        writer.append(episode(0, 3))
        writer.commit()
        online = expstore.open(tmp_path / "online.exp").filter(lambda row: row["number"] != 1)
        replay = expstore.Replay(
            expstore.union([kept, online]), 100, follow=True,
            sampler=Mixture({kept: 0.5, online: 0.5}),
        )  # fmt: skip
        assert set((replay.sample().info.index % STRIDE).tolist()) <= {0, 1, 2, *range(30, 60)}
        for length in (4, 5):
            writer.append(episode(writer.num_steps, length))
            writer.commit()
        batch = replay.sample()
    assert owners(batch) == [50, 50]
    assert set(batch.info.index[50:].tolist()) == {STRIDE + s for s in (0, 1, 2, 7, 8, 9, 10, 11)}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prioritized_members_resume_exactly(offline, online, prefetch):
    def replay() -> expstore.Replay:
        samplers = {online: expstore.Prioritized(alpha=1.0), offline: expstore.WithoutReplacement()}
        return expstore.Replay(
            expstore.union([offline, online]), 6, prefetch=prefetch, seed=3,
            sampler=Mixture({offline: 1 / 3, online: 2 / 3}, samplers),
        )  # fmt: skip

    with replay() as one, replay() as other:
        batch = one.sample()
        one.update_priority(batch, torch.arange(1.0, 7.0))
        one.update_priority(steps=[STRIDE + 9, 3], priority=[1000.0, 1e6])
        for _ in range(prefetch + 1):
            one.sample()
        other.load_state_dict(one.state_dict())
        for _ in range(5):
            expected, found = one.sample(), other.sample()
            assert torch.equal(found.info.index, expected.info.index)
            assert torch.equal(found.info.weight, expected.info.weight)
            assert (expected.info.index[2:] == STRIDE + 9).sum() >= 3


def test_parts_in_another_order_or_of_another_view_are_refused(offline, online):
    mixture = Mixture({offline: 0.5, online: 0.5})
    with pytest.raises(SchemaError, match=r"part .*offline\.exp of the mixture is not what stands"):
        expstore.Replay(expstore.union([online, offline]), 8, sampler=mixture)
    one, other = online.filter([0]), online.filter([1])
    with pytest.raises(SchemaError, match=r"another view of .*union of the same stores and views"):
        expstore.Replay(expstore.union([other, one]), 8, sampler=Mixture({one: 0.5, other: 0.5}))
    with pytest.raises(SchemaError, match="the mixture is of 2 stores, the selection of 1"):
        expstore.Replay(offline, 8, sampler=mixture)


def test_a_mixture_keeps_no_store_alive(offline, tmp_path: Path):
    store = fill(tmp_path / "b.exp", [4], durable=False)
    mixture = Mixture({offline: 0.5, store: 0.5})
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    assert list(mixture.samplers) == [str(tmp_path / "offline.exp"), str(tmp_path / "b.exp")]


def test_a_path_as_a_name_must_stand_where_its_store_does(offline, online):
    both = expstore.union([offline, online])
    for name in (str(offline.paths[0]), offline.paths[0], "offline.exp"):
        expstore.Replay(both, 8, sampler=Mixture({name: 0.5, "rest": 0.5}))
        with pytest.raises(
            SchemaError, match=r"offline\.exp of the mixture is the path of another"
        ):
            expstore.Replay(both, 8, sampler=Mixture({"rest": 0.5, name: 0.5}))


def test_shares_that_are_no_dict_are_refused(offline):
    with pytest.raises(SchemaError, match="shares must be a dict of a share for each store"):
        Mixture([(offline, 1.0)])  # type: ignore[arg-type]
