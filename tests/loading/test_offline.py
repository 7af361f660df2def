"""OfflineDataset: transitions, trajectories, goals and statistics of a store."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import expstore  # noqa: E402
from expstore.errors import (  # noqa: E402
    FieldNotFoundError,
    SchemaError,
    StepRangeError,
)
from expstore.loading import statistics  # noqa: E402
from expstore.loading.goals import offsets  # noqa: E402

# length, how it ends, whether the observation after it is known
EPISODES = (
    (4, "terminated", True),
    (3, "truncated", True),
    (5, "cut", False),
    (2, "terminated", False),
    (3, "truncated", False),
)
LEFT_OUT = [11, 16]  # the last steps of the third and the last one


def episode_of(number: int) -> dict[str, Any]:
    length, end, has_final = EPISODES[number]
    first = 100.0 * number
    observation = np.stack([first + np.arange(length + has_final), -np.ones(length + has_final)], 1)
    flags = {name: np.zeros(length, bool) for name in ("terminated", "truncated")}
    if end in flags:
        flags[end][-1] = True
    reward = np.arange(length, dtype=np.float32) + number
    action = np.full((length, 1), number, np.float32)
    return {"observation": observation, "action": action, "reward": reward, **flags}


@pytest.fixture
def store(tmp_path: Path) -> expstore.Store:
    with expstore.Writer(tmp_path / "demo.exp") as writer:
        for number in range(len(EPISODES)):
            writer.append(episode_of(number), policy="ab"[number % 2])
    return expstore.open(tmp_path / "demo.exp")


def expected() -> dict[str, Any]:
    """All transitions, put together by hand."""
    rows: dict[str, list[Any]] = {name: [] for name in NAMES}
    for number, (length, end, has_final) in enumerate(EPISODES):
        data = episode_of(number)
        for t in range(length):
            is_last = t == length - 1
            if is_last and not has_final and end != "terminated":
                continue
            knows = not is_last or has_final
            rows["observations"].append(data["observation"][t])
            rows["next_observations"].append(data["observation"][t + 1] if knows else [0.0, 0.0])
            rows["actions"].append(data["action"][t])
            rows["rewards"].append(data["reward"][t])
            rows["terminals"].append(is_last and end == "terminated")
            rows["timeouts"].append(is_last and end == "truncated")
    return {name: np.array(values) for name, values in rows.items()}


NAMES = ("observations", "next_observations", "actions", "rewards", "terminals", "timeouts")


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert sorted(one) == sorted(other)
    for name in one:
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), name)


@pytest.mark.parametrize("num_steps", [1, 4, None])
def test_transitions_in_order(store: expstore.Store, num_steps: int | None) -> None:
    data = expstore.OfflineDataset(store)

    blocks = list(data.blocks(num_steps))

    same({n: np.concatenate([b[n] for b in blocks]) for n in NAMES}, expected())
    same(data.transitions(), expected())
    assert (len(data), data.num_left_out) == (15, 2)
    assert num_steps is None or max(len(b["rewards"]) for b in blocks) == num_steps


def test_a_pass_holds_a_block_and_no_more(store: expstore.Store) -> None:
    sizes = {len(block["rewards"]) for block in expstore.OfflineDataset(store).blocks(2)}

    assert sizes == {1, 2}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_have_each_transition_once_per_epoch(store: expstore.Store, prefetch: int) -> None:
    data = expstore.OfflineDataset(store, prefetch=prefetch)

    batches = list(data.batches(4, seed=3, epochs=2))
    again = list(data.batches(4, seed=3, epochs=2))

    assert [len(b["rewards"]) for b in batches] == [4, 4, 4, 3] * 2
    for one, other in zip(batches, again, strict=True):
        same(one, other)
    whole = expected()
    order = np.lexsort(whole["observations"].T)
    for epoch in (batches[:4], batches[4:]):
        joined = {n: np.concatenate([b[n] for b in epoch]) for n in NAMES}
        found = np.lexsort(joined["observations"].T)
        same({n: v[found] for n, v in joined.items()}, {n: v[order] for n, v in whole.items()})
    assert not torch.equal(batches[0]["observations"], batches[4]["observations"])


def test_drop_last_leaves_smaller_batches_out(store: expstore.Store) -> None:
    batches = expstore.OfflineDataset(store).batches(4, epochs=2, drop_last=True)

    assert [len(b["rewards"]) for b in batches] == [4] * 6


def test_flags_come_from_end_reasons_where_there_are_none(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "s.exp") as writer:
        for number in (0, 1, 2):
            data = episode_of(number)
            del data["terminated"], data["truncated"]
            writer.append(data, end_reason=EPISODES[number][1])
    data = expstore.OfflineDataset(expstore.open(tmp_path / "s.exp"))

    found = data.transitions()

    assert np.flatnonzero(found["terminals"]).tolist() == [3]
    assert np.flatnonzero(found["timeouts"]).tolist() == [6]
    [batch] = data.batches(99, epochs=1)
    assert (batch["terminals"].sum(), batch["timeouts"].sum()) == (1, 1)


def test_nested_observations_come_nested(tmp_path: Path) -> None:
    observation = {"image": np.zeros((5, 2, 2), np.uint8), "state": np.arange(5)}
    with expstore.Writer(tmp_path / "s.exp") as writer:
        writer.append({"observation": observation, "action": np.arange(4)})
    data = expstore.OfflineDataset(expstore.open(tmp_path / "s.exp"))

    found = data.transitions()

    assert found["next_observations"]["state"].tolist() == [1, 2, 3, 4]
    assert found["observations"]["image"].shape == (4, 2, 2)
    assert "rewards" not in found
    [batch] = data.batches(4, epochs=1)
    assert sorted(batch["observations"]["state"].tolist()) == [0, 1, 2, 3]


def test_whole_episodes(store: expstore.Store) -> None:
    episodes = list(expstore.OfflineDataset(store).episodes())

    assert [len(e["observations"]) for e in episodes] == [5, 4, 5, 2, 3]
    assert [len(e["rewards"]) for e in episodes] == [4, 3, 5, 2, 3]
    assert [e["terminals"][-1] for e in episodes] == [True, False, False, True, False]


# -- selecting -----------------------------------------------------------------------------------


def test_filter_by_return_and_metadata(store: expstore.Store) -> None:
    data = expstore.OfflineDataset(store)

    assert store.episodes["return"].tolist() == [6, 6, 20, 7, 15]
    assert data.filter("return > 6").store.episode_numbers.tolist() == [2, 3, 4]
    chosen = data.filter("return > 6 and policy == 'a'")
    assert chosen.store.episode_numbers.tolist() == [2, 4]
    assert data.best(0.4).store.episode_numbers.tolist() == [2, 4]
    assert data.best(0.0).store.episode_numbers.tolist() == [2]
    one, other = data.split(0.5, seed=1)
    assert one.store.num_episodes + other.store.num_episodes == 5
    assert len(one) + len(other) == len(data)


def test_a_condition_follows_new_commits_and_pickles(store: expstore.Store) -> None:
    import pickle

    view = pickle.loads(pickle.dumps(store.filter("policy == 'a'")))
    with expstore.Writer(store.paths[0]) as writer:
        writer.append(episode_of(0), policy="a")
        writer.append(episode_of(0))

    assert view.latest().episode_numbers.tolist() == [0, 2, 4, 5]


def test_a_condition_on_a_union_sees_its_numbers(store: expstore.Store, tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "other.exp") as writer:
        writer.append(episode_of(2))
    both = expstore.open([store.paths[0], tmp_path / "other.exp"])

    assert both.filter(f"number >= {2**40}").episode_numbers.tolist() == [2**40]
    assert both.filter("return > 15").episode_numbers.tolist() == [2, 2**40]
    assert both.filter("policy == 'b'").episode_numbers.tolist() == [1, 3]
    assert len(expstore.OfflineDataset(both)) == 15 + 4
    with pytest.raises(FieldNotFoundError, match="no episode has 'nothing'"):
        both.filter("nothing == 1")


def test_what_is_wrong_is_refused(store: expstore.Store, tmp_path: Path) -> None:
    with pytest.raises(FieldNotFoundError, match="observation 'state'"):
        expstore.OfflineDataset(store, observation="state")
    with pytest.raises(SchemaError, match="must be what expstore"):
        expstore.OfflineDataset("demo.exp")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="batch_size"):
        expstore.OfflineDataset(store).batches(0)
    with pytest.raises(StepRangeError, match="no transitions"):
        expstore.OfflineDataset(store.filter([])).transitions()
    with expstore.Writer(tmp_path / "words.exp") as writer:
        writer.append({"observation": ["a", "bc"], "action": [1, 2]})
    with pytest.raises(SchemaError, match="any number of values per step"):
        expstore.OfflineDataset(expstore.open(tmp_path / "words.exp"))


# -- statistics ----------------------------------------------------------------------------------


def test_statistics_in_blocks_are_those_of_the_whole(
    store: expstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "BLOCK_BYTES", 48)
    view = store.filter([0, 2, 4])
    rows = np.concatenate([episode_of(n)["observation"][: EPISODES[n][0]] for n in (0, 2, 4)])

    found = expstore.OfflineDataset(view).statistics("observation")

    np.testing.assert_allclose(found.mean, rows.mean(0), rtol=1e-14)
    np.testing.assert_allclose(found.std, rows.std(0), rtol=1e-14)
    assert found.min.tolist() == rows.min(0).tolist()
    assert found.max.tolist() == rows.max(0).tolist()
    assert found.count == len(rows) == 12


def test_statistics_of_large_values_lose_nothing(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "s.exp") as writer:
        writer.append({"reward": 1e8 + np.arange(4.0)})

    data = expstore.OfflineDataset(expstore.open(tmp_path / "s.exp"))

    assert data.statistics("reward").std == pytest.approx(np.sqrt(1.25), rel=1e-12)


def test_statistics_are_remembered_for_a_commit(store: expstore.Store) -> None:
    found = expstore.OfflineDataset(store).statistics("reward")
    again = expstore.OfflineDataset(expstore.open(store.paths[0])).statistics("reward")
    with expstore.Writer(store.paths[0]) as writer:
        writer.append(episode_of(0))

    assert again is found
    assert expstore.OfflineDataset(store.latest()).statistics("reward").count == found.count + 4


def test_normalised_fields_take_the_statistics_given(store: expstore.Store) -> None:
    data = expstore.OfflineDataset(store)
    scaled = data.normalize("observation", "reward", eps=0.5)
    stats = data.statistics("observation")

    found = scaled.transitions()

    wanted = (expected()["next_observations"] - stats.mean) / (stats.std + 0.5)
    np.testing.assert_allclose(found["next_observations"], wanted, rtol=1e-5)
    assert found["observations"].dtype == np.float32
    [batch] = scaled.batches(99, epochs=1)
    np.testing.assert_allclose(
        np.sort(batch["rewards"].numpy()), np.sort(found["rewards"]), rtol=1e-6
    )
    one = data.filter([0]).normalize(statistics={"observation": stats}).transitions()
    np.testing.assert_allclose(
        one["observations"][:, 0], (np.arange(4) - stats.mean[0]) / (stats.std[0] + 1e-3), rtol=1e-5
    )


# -- returns to go -------------------------------------------------------------------------------


def test_returns_to_go_and_as_a_column(store: expstore.Store) -> None:
    data = expstore.OfflineDataset(store)

    found = data.returns_to_go(0.5)

    by_hand = []
    for number, (length, *_) in enumerate(EPISODES):
        reward = episode_of(number)["reward"]
        by_hand += [sum(0.5**k * reward[t + k] for k in range(length - t)) for t in range(length)]
    np.testing.assert_allclose(found, by_hand)
    expstore.add_field(store.paths[0], "to_go", found)
    assert store.latest().read(np.arange(17), "to_go")["to_go"].tolist() == found.tolist()


def test_trajectories_have_masks_and_returns(store: expstore.Store) -> None:
    data = expstore.OfflineDataset(store)
    to_go = data.returns_to_go()
    seen = []

    for batch in data.trajectories(4, length=3, seed=1, epochs=1):
        for i in range(len(batch["mask"])):
            mask = batch["mask"][i].numpy()
            n = int(mask.sum())
            assert mask.tolist() == [True] * n + [False] * (3 - n)
            number = int(batch["actions"][i, 0, 0])
            t = int(batch["timesteps"][i, 0])
            data_of, first = episode_of(number), sum(e[0] for e in EPISODES[:number])
            assert n == min(3, EPISODES[number][0] - t)
            for name, values in (
                ("observations", data_of["observation"]),
                ("rewards", data_of["reward"]),
            ):
                np.testing.assert_array_equal(batch[name][i, :n], values[t : t + n])
            np.testing.assert_allclose(
                batch["returns_to_go"][i, :n], to_go[first + t : first + t + n]
            )
            assert batch["timesteps"][i, :n].tolist() == list(range(t, t + n))
            for name in (*NAMES, "returns_to_go", "timesteps"):
                assert not batch[name][i, n:].any(), name
            seen.append(first + t)

    assert sorted(seen) == list(range(17))


# -- goals ---------------------------------------------------------------------------------------


def test_goals_lie_ahead_in_the_episode_or_anywhere(store: expstore.Store) -> None:
    data = expstore.OfflineDataset(store)
    distances = []

    for batch in data.goal_batches(5, gamma=0.5, seed=2, epochs=40):
        ahead = (batch["actor_goals"] - batch["observations"])[:, 0].numpy()
        last = np.array([EPISODES[int(n)][0] - 1 + EPISODES[int(n)][2] for n in batch["actions"]])
        t = batch["observations"][:, 0].numpy() % 100
        assert ((ahead >= np.minimum(1, last - t)) & (ahead <= last - t)).all()
        same_state = (batch["value_goals"] == batch["observations"]).all(1)
        assert torch.equal(batch["rewards"], same_state.float() - 1)
        assert torch.equal(batch["masks"], 1 - same_state.float())
        distances += (batch["value_goals"] - batch["observations"])[:, 0].tolist()

    found = np.array(distances)
    assert 0.15 < (found == 0).mean() < 0.35
    assert 0.2 < (abs(found) > 50).mean() < 0.35
    assert (found == 1).mean() > (found == 2).mean() > (found == 3).mean() > 0


def test_goals_of_windows_and_their_distance(store: expstore.Store) -> None:
    unit = expstore.Goals(
        current=0, future=1, random=0, gamma=None, unit=expstore.Sequence(length=3)
    )
    dataset = expstore.SequenceDataset(store, unit)

    batch = dataset.batch(range(17))

    assert batch["goal"].shape == (17, 3, 2)
    assert (batch["goal"] == batch["goal"][:, :1]).all()
    apart = (batch["goal"] - batch["observation"])[..., 0]
    distance = batch.info.goal_distance
    assert torch.equal(torch.where(apart >= 0, apart, -1).long(), distance)
    assert torch.equal(batch.info.goal_reached, distance == 0)


def test_geometric_offsets() -> None:
    where = (np.arange(100_000) + 0.5) / 100_000

    found = offsets(0.9, where, np.full(100_000, 10**6))

    assert [(found == k).mean() for k in (1, 2, 3)] == pytest.approx([0.1, 0.09, 0.081], abs=1e-4)
    assert found.mean() == pytest.approx(10, rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"current": 0.5}, "must sum to 1"),
        ({"gamma": 1.0}, "gamma must be"),
        ({"unit": expstore.Goals()}, "two goals have the name 'goal'"),
    ],
)
def test_goals_of_no_use_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        expstore.Goals(**arguments)
