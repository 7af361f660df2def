"""Episodes of several stores in one, with a note of where they were."""

from __future__ import annotations

import numpy as np
import pytest

import expstore
from expstore.errors import DamagedError, SchemaError
from tests.storage.damage import flip
from tests.storage.made import assert_same, digest, episode, writer


@pytest.fixture
def paths(tmp_path):
    for k, lengths in enumerate([(3, 5), (2,), (4, 1, 6)]):
        with writer(tmp_path / f"{k}.exp") as out:
            for number, length in enumerate(lengths):
                out.append(episode(length, 10 * k + number), seed=number, actor=k)
    return [tmp_path / f"{k}.exp" for k in range(3)]


def test_all_episodes_are_there_in_order_with_their_metadata(paths, tmp_path):
    expstore.delete(paths[2], [1], durable=False)
    before = [digest(path) for path in paths]
    copy = expstore.merge(paths, tmp_path / "all.exp", durable=False)
    assert [digest(path) for path in paths] == before
    assert (copy.num_episodes, copy.num_steps, copy.left_out) == (5, 20, 1)
    assert copy.sources == tuple(map(str, paths))
    store = expstore.open(copy.path)
    assert store.episodes["length"].tolist() == [3, 5, 2, 4, 6]
    assert store.episodes["actor"] == [0, 0, 1, 2, 2]
    assert [row["seed"] for row in store.episodes] == [0, 1, 0, 0, 2]
    known = [episode(3, 0), episode(5, 1), episode(2, 10), episode(4, 20), episode(6, 22)]
    for number, data in enumerate(known):
        assert_same(store.episode(number), data)
    assert expstore.verify(copy.path).is_sound


def test_where_an_episode_comes_from_is_in_its_metadata(paths, tmp_path):
    expstore.merge(paths[:2], tmp_path / "two.exp", durable=False)
    expstore.merge([tmp_path / "two.exp", paths[2]], tmp_path / "all.exp", durable=False)
    ids = {path.name: expstore.inspect(path).store_id for path in [*paths, tmp_path / "two.exp"]}
    rows = expstore.open(tmp_path / "all.exp").episodes["merged_from"]

    def hop(name: str, number: int) -> dict[str, object]:
        return {"store": name, "store_id": ids[name], "episode": number}

    assert rows[1] == [hop("0.exp", 1), hop("two.exp", 1)]
    assert rows[2] == [hop("1.exp", 0), hop("two.exp", 2)]
    assert rows[5] == [hop("2.exp", 2)]


def test_next_values_that_only_one_of_them_has(tmp_path):
    """Rewards after the last step are known in one store, and nothing is known in the other."""
    rewards = np.arange(4.0)
    with writer(tmp_path / "a.exp") as out:
        out.append({"reward": rewards[:3], "next_reward": rewards[1:]})
    with writer(tmp_path / "b.exp") as out:
        out.append({"reward": rewards})
    for order in (["a", "b"], ["b", "a"]):
        target = tmp_path / f"{'-'.join(order)}.exp"
        expstore.merge([tmp_path / f"{name}.exp" for name in order], target, durable=False)
        assert expstore.verify(target).is_sound
        store = expstore.open(target)
        for number, name in enumerate(order):
            steps = np.arange(3 if name == "a" else 4) + int(store.spans.start[number])
            found = store.read(steps, ["next_reward", "has_next"])
            if name == "a":
                assert found["next_reward"].tolist() == [1, 2, 3]
                assert found["has_next"].tolist() == [True] * 3
            else:
                assert found["next_reward"].tolist() == [1, 2, 3, 0]
                assert found["has_next"].tolist() == [True] * 3 + [False]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"reward": np.ones(2, "f4")}, "field 'reward' is .*float64.* in .*0.exp and .*float32"),
        ({"reward": np.ones((2, 1))}, r"field 'reward' is \(\(\), 'float64'\) in .*\(\(1,\)"),
        ({"reward": np.ones(2), "extra": np.ones(2)}, "field 'extra' is None in .*0.exp"),
        ({"action": np.ones(2)}, "field 'reward' is"),
    ],
)
def test_a_field_that_differs_is_named_and_nothing_is_written(tmp_path, data, text):
    for k, columns in enumerate([{"reward": np.ones(2)}, data]):
        with writer(tmp_path / f"{k}.exp") as out:
            out.append(columns)
    with pytest.raises(SchemaError, match=text):
        expstore.merge([tmp_path / "0.exp", tmp_path / "1.exp"], tmp_path / "all.exp")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0.exp", "1.exp"]


def test_a_store_without_fields_and_no_store_at_all(paths, tmp_path):
    writer(tmp_path / "empty.exp").close()
    with pytest.raises(SchemaError, match=r"empty\.exp has no fields yet"):
        expstore.merge([paths[0], tmp_path / "empty.exp"], tmp_path / "all.exp")
    with pytest.raises(SchemaError, match="at least one store"):
        expstore.merge([], tmp_path / "all.exp")
    with pytest.raises(SchemaError, match="there is something at"):
        expstore.merge(paths, paths[0])


def test_damage_in_one_of_them_leaves_no_target(paths, tmp_path):
    flip(paths[1] / "steps/reward/c.0", 0)
    with pytest.raises(DamagedError, match=r"field 'reward' of episode 0 of .*1\.exp"):
        expstore.merge(paths, tmp_path / "all.exp", durable=False)
    assert not (tmp_path / "all.exp").exists() and not (tmp_path / "all.exp.partial").exists()


def test_one_path_is_a_merge_of_one(paths, tmp_path):
    copy = expstore.merge(str(paths[0]), tmp_path / "all.exp", durable=False)
    assert copy.num_episodes == 2
    assert expstore.open(copy.path).fields == expstore.open(paths[0]).fields


def test_an_episode_that_comes_twice_is_counted(paths, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(2):
        np.savez(tmp_path / "in" / f"{number}.npz", **episode(3, number))
    for name in ("a", "b"):
        expstore.ingest_from(tmp_path / "in", tmp_path / f"{name}.exp")
    expstore.merge(paths[:2], tmp_path / "two.exp", durable=False)

    same_file = expstore.merge([tmp_path / "a.exp", tmp_path / "b.exp"], tmp_path / "ab.exp")
    same_store = expstore.merge([tmp_path / "two.exp", paths[0]], tmp_path / "all.exp")
    none = expstore.merge([tmp_path / "a.exp", *paths], tmp_path / "none.exp")

    assert (same_file.num_episodes, same_file.repeated) == (4, 2)
    assert (same_store.num_episodes, same_store.repeated) == (5, 2)
    assert none.repeated == 0
