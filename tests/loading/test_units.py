"""Units make of each record what a plain loop over its episode would make of it."""

from __future__ import annotations

import functools
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import expstore  # noqa: E402
from expstore import Hindsight, NStep, Sequence, Stack, Step  # noqa: E402
from expstore.errors import FieldNotFoundError, SchemaError, StateError  # noqa: E402
from expstore.loading.units import layers_of  # noqa: E402
from tests.loading.goals import compute_reward, everything, goal_episode  # noqa: E402
from tests.loading.test_replay import equal  # noqa: E402
from tests.storage import made  # noqa: E402

LENGTHS = [3, 1, 7, 2, 5, 1, 9, 1, 4, 1]
# why an episode ends, and whether its final observation is known
ENDINGS = [("terminated", True), ("cut", False), ("truncated", True), ("incomplete", False)]
ENDINGS += [("cut", True), ("terminated", False), ("cut", False)]


def fill(path: Path, lengths: list[int], **settings: Any) -> expstore.Store:
    with made.writer(path, **settings) as writer:
        for k, length in enumerate(lengths):
            ending = ENDINGS[k % len(ENDINGS)]
            reason = ending[0] if ending[0] == "incomplete" else None
            # Twice the number of steps: no final observation is another episode's first one.
            data = goal_episode(1000 + 2 * writer.num_steps, length, ending)
            writer.append(data, end_reason=reason)
    return expstore.open(path)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, expstore.Store]:
    """A store, one of compressed columns, a union of both, and a view of that."""
    folder = tmp_path_factory.mktemp("units")
    mapped = fill(folder / "mapped.exp", LENGTHS)
    coded = fill(folder / "coded.exp", LENGTHS[::-1], layout="coded")
    union = expstore.open([folder / "mapped.exp", folder / "coded.exp"])
    view = union.filter(union.episode_numbers[::2].tolist())
    return {"mapped": mapped, "coded": coded, "union": union, "view": view}


NAMES = ["mapped", "coded", "union", "view"]
some_store = st.sampled_from(NAMES)


class Episode:
    """One episode as lists of what happened, for loops."""

    def __init__(self, store: expstore.Store, number: int) -> None:
        data = store.episode(number)
        self.start = int(store.episodes["start"][store.episode_numbers.tolist().index(number)])
        self.data = data
        self.length = len(data["reward"])
        self.is_final_known = len(data["observation"]["state"]) > self.length
        self.is_terminated = bool(data["terminated"][-1])

    def observation(self, name: str, at: int) -> Any:
        """At step `at`, which may be one past the last; zeros if nobody knows."""
        rows = self.data["observation"][name]
        return rows[at].tolist() if at < len(rows) else [0.0] * rows.shape[1]

    def num_steps(self, at: int, n: int) -> int:
        """The steps of a return from `at` on."""
        used = 1
        while used < n and at + used < self.length:
            is_last = at + used == self.length - 1
            if is_last and not self.is_terminated and not self.is_final_known:
                break  # with that reward, there would be nothing to bootstrap from
            used += 1
        return used

    def discount(self, at: int, n: int, gamma: float) -> float:
        last = at + self.num_steps(at, n) - 1
        if last == self.length - 1 and (self.is_terminated or not self.is_final_known):
            return 0.0
        return gamma ** (last - at + 1)

    def is_worth_something(self, at: int, n: int) -> bool:
        last = at + self.num_steps(at, n) - 1
        return last < self.length - 1 or self.is_terminated or self.is_final_known

    def stack(self, name: str, at: int, k: int) -> list[Any]:
        return [self.observation(name, max(0, at - behind)) for behind in reversed(range(k))]

    def next_stack(self, name: str, at: int, k: int) -> list[Any]:
        """What comes after `at`, behind the newest k - 1 of the stack there."""
        return [*self.stack(name, at, k)[1:], self.observation(name, at + 1)]


def episodes_of(store: expstore.Store) -> dict[int, tuple[Episode, int]]:
    """Episode, and place in it, of each step number."""
    found = {}
    for number in store.episode_numbers.tolist():
        episode = Episode(store, number)
        for at in range(episode.length):
            found[episode.start + at] = episode, at
    return found


def every_anchor(store: expstore.Store, unit: Any, **options: Any) -> Any:
    return at_anchors(store, range(len(store)), unit, **options)


def at_anchors(store: expstore.Store, anchors: Any, unit: Any, **options: Any) -> Any:
    positions = [anchor % len(store) for anchor in anchors]
    return expstore.SequenceDataset(store, unit, **options).batch(positions)


def records(batch: Any) -> list[tuple[Any, int, int]]:
    """(index into a tensor, step, anchor) of each record of a batch."""
    index, anchors = batch.info.index.numpy(), batch.info.anchor_index.numpy()
    return [(at, int(index[at]), int(anchors[at])) for at in np.ndindex(index.shape)]


windows = st.builds(
    Sequence,
    length=st.integers(1, 6),
    episode_boundary=st.sampled_from(["pad", "stop", "include_reset"]),
    burn_in=st.integers(0, 3),
    bootstrap=st.integers(0, 2),
    dilation=st.integers(1, 3),
)
bases = st.one_of(st.just(Step()), windows)
some_anchors = st.lists(st.integers(0, 67), min_size=1, max_size=9)
gammas = st.sampled_from([0.0, 0.5, 0.9, 1.0])


# -- NStep -------------------------------------------------------------------------------------


@given(some_store, some_anchors, bases, st.integers(1, 12), gammas)
def test_n_step_returns_are_those_of_a_loop(stores, name, anchors, base, n, gamma):
    store = stores[name]
    known = episodes_of(store)
    fields = ("observation", "action", "terminated", "truncated", "done")

    batch = at_anchors(store, anchors, NStep(n, gamma, unit=base), fields=fields)

    padded = at_anchors(store, anchors, base, fields=("action",))
    assert torch.equal(batch.info.index, padded.info.index)
    assert torch.equal(batch.info.anchor_index, padded.info.anchor_index)
    for at, step, _ in records(batch):
        episode, first = known[step]
        used = episode.num_steps(first, n)
        last = first + used - 1
        rewards = episode.data["reward"][first : first + used]
        total = sum(gamma**i * reward for i, reward in enumerate(rewards))
        assert batch["reward"][at].item() == pytest.approx(total, rel=1e-12)
        assert batch.info.num_steps[at] == used
        expected = episode.discount(first, n, gamma)
        assert batch.info.discount[at].item() == pytest.approx(expected, rel=1e-6)
        worth = episode.is_worth_something(first, n)
        assert batch.info.validity_mask[at] == (padded.info.validity_mask[at] and worth)
        for key in ("state", "achieved_goal"):
            now, after = batch["observation"][key][at], batch["next_observation"][key][at]
            assert now.tolist() == episode.observation(key, first)
            assert after.tolist() == episode.observation(key, last + 1)
        assert batch["action"][at] == episode.data["action"][first]
        assert batch["terminated"][at] == episode.data["terminated"][last]
        assert batch["truncated"][at] == episode.data["truncated"][last]
        assert batch["done"][at] == (last == episode.length - 1)


def test_n_step_returns_in_numbers(tmp_path: Path):
    first, second = (made.episode(5, end=end) for end in ("terminated", "truncated"))
    first["reward"] = second["reward"] = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    store = made.store(tmp_path / "a.exp", first, second)

    batch = every_anchor(store, NStep(3, gamma=0.5))

    returns = [3.0, 6.0, 12.0, 16.0, 16.0]
    assert batch["reward"].tolist() == returns * 2
    assert batch.info.num_steps.tolist() == [3, 3, 3, 2, 1] * 2
    assert batch.info.discount.tolist() == [0.125, 0.125, 0, 0, 0, 0.125, 0.125, 0.125, 0.25, 0.5]
    assert bool(batch.info.validity_mask.all())
    assert np.array_equal(batch["next_observation"][[7, 8, 9]], second["observation"][[5, 5, 5]])


def test_n_and_gamma_change_on_the_same_data(stores):
    one, other = (every_anchor(stores["mapped"], NStep(*given)) for given in ((2, 0.5), (4, 0.9)))
    assert one["reward"][0].item() == pytest.approx(1010 + 0.5 * 1011)
    assert other["reward"][0].item() == pytest.approx(1010 + 0.9 * 1011 + 0.81 * 1012)


def test_a_cut_episode_bootstraps_from_its_last_observation(tmp_path: Path):
    data = {"observation": np.arange(4.0), "reward": np.array([1.0, 2.0, 4.0, 8.0])}
    store = made.store(tmp_path / "a.exp", data)

    batch = every_anchor(store, NStep(3, gamma=0.5))

    assert batch["reward"].tolist() == [3.0, 4.0, 4.0, 8.0]
    assert batch["next_observation"].tolist() == [3.0, 3.0, 3.0, 0.0]
    assert batch.info.discount.tolist() == [0.125, 0.25, 0.5, 0.0]
    assert batch.info.validity_mask.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("dtype", "returned"),
    [("float64", "float64"), ("float32", "float32"), ("int32", "float32"), ("bool", "float32")],
)
def test_rewards_may_be_vectors_of_any_numbers(tmp_path: Path, dtype: str, returned: str):
    rewards = (np.arange(10).reshape(5, 2) % 3).astype(dtype)
    data = {"observation": np.zeros((6, 1)), "reward": rewards}
    store = made.store(tmp_path / "a.exp", data)

    batch = every_anchor(store, NStep(2, gamma=0.5))

    expected = rewards + 0.5 * np.append(rewards[1:], [[0, 0]], axis=0)
    assert batch["reward"].dtype == getattr(torch, returned)
    assert batch["reward"].tolist() == expected.tolist()


def test_an_infinite_reward_stays_where_it_is(tmp_path: Path):
    data = {"observation": np.zeros((5, 1)), "reward": np.array([1.0, 2.0, -np.inf, 4.0])}
    store = made.store(tmp_path / "a.exp", data)
    assert every_anchor(store, NStep(2, 0.0))["reward"].tolist() == [1, 2, -math.inf, 4]
    assert every_anchor(store, NStep(2, 0.5))["reward"].tolist() == [2, -math.inf, -math.inf, 4]


def test_bfloat16_and_text_come_along(tmp_path: Path):
    values = torch.randn(6, 2, dtype=torch.bfloat16)
    rewards = torch.tensor([1, 2, 4, 8, 16], dtype=torch.bfloat16)
    words = ["a", "bb", "", "dddd", "e"]
    data = {"observation": values, "reward": rewards, "word": words}
    store = made.store(tmp_path / "a.exp", data)

    batch = every_anchor(store, NStep(2, 0.5, unit=Stack(2)))

    assert batch["reward"].dtype == torch.bfloat16
    assert batch["reward"].tolist() == [2, 4, 8, 16, 16]
    assert torch.equal(batch["next_observation"][0], values[[1, 2]])
    assert batch.text("word") == words


@pytest.mark.parametrize("reason", ["terminated", "truncated"])
def test_without_flags_the_end_reason_says_whether_to_bootstrap(tmp_path: Path, reason: str):
    with made.writer(tmp_path / "a.exp") as writer:
        for end_reason in ("cut", reason):
            data = {"observation": np.arange(4.0), "reward": np.ones(3)}
            writer.append(data, end_reason=end_reason)
    store = expstore.open(tmp_path / "a.exp")
    for selection in (store, store.filter([1]), expstore.union([store, store.filter([1])])):
        batch = every_anchor(selection, NStep(9, gamma=1.0))
        ends_at_0 = [] if len(selection) == 3 else [1.0] * 3
        again = [float(reason == "truncated")] * 3
        assert batch.info.discount.tolist() == [*ends_at_0, *again * (1 + (len(selection) == 9))]


def test_next_values_that_a_source_recorded_itself_are_used(tmp_path: Path):
    after = np.array([1.0, 7.0, 3.0, 4.0])  # the second is no observation of the episode
    data = {"observation": np.arange(4.0), "next_observation": after, "reward": np.ones(4)}
    store = made.store(tmp_path / "a.exp", data)
    assert every_anchor(store, NStep(1, 0.9))["next_observation"].tolist() == after.tolist()
    stacked = every_anchor(store, NStep(1, 0.9, unit=Stack(2)))["next_observation"]
    assert stacked.tolist() == [[0, 1], [1, 7], [2, 3], [3, 4]]


# -- Stack -------------------------------------------------------------------------------------


@given(some_store, some_anchors, bases, st.integers(1, 12), st.booleans())
def test_stacks_are_those_of_a_loop(stores, name, anchors, base, k, also_now):
    store = stores[name]
    known = episodes_of(store)
    fields = ["next_observation", "action", *(["observation"] if also_now else [])]

    batch = at_anchors(store, anchors, Stack(k, unit=base), fields=fields)

    plain = at_anchors(store, anchors, base, fields=fields)
    assert all(torch.equal(batch.info[key], plain.info[key]) for key in plain.info)
    assert torch.equal(batch["action"], plain["action"])
    assert list(batch.fields) == list(plain.fields)
    for at, step, _ in records(batch):
        episode, first = known[step]
        for key in ("state", "desired_goal"):
            after = batch["next_observation"][key][at].tolist()
            assert after == episode.next_stack(key, first, k)
            if also_now:
                assert batch["observation"][key][at].tolist() == episode.stack(key, first, k)


def test_only_the_named_fields_are_stacked(stores):
    unit = Stack(3, ("action",), unit=Stack(2, ["observation/state"], unit=Sequence(length=4)))
    batch = every_anchor(stores["mapped"], unit)
    assert batch["action"].shape == (34, 4, 3)
    assert batch["observation"]["state"].shape == (34, 4, 2, 3)
    assert batch["observation"]["desired_goal"].shape == (34, 4, 2)


def test_ragged_observations_are_stacked_too(tmp_path: Path):
    words = ["a", "bb", "", "dddd", "eeeee"]
    data = {"observation": {"text": words}, "action": np.arange(4)}
    store = made.store(tmp_path / "a.exp", data)
    for fields in (["next_observation"], ["observation", "next_observation"]):
        batch = every_anchor(store, Stack(2), fields=fields)
        following = [["a", "bb"], ["bb", ""], ["", "dddd"], ["dddd", "eeeee"]]
        assert batch.text("next_observation/text") == following
    assert batch.text("observation/text") == [["a", "a"], ["a", "bb"], ["bb", ""], ["", "dddd"]]


def test_the_tensors_of_a_stack_are_the_callers_to_change(stores):
    batch = every_anchor(stores["mapped"], Stack(3), fields=["observation", "next_observation"])
    copy = pickle.loads(pickle.dumps(batch))
    batch["observation"]["state"].zero_()
    assert torch.equal(batch["next_observation/state"], copy["next_observation/state"])
    batch["next_observation"]["desired_goal"][:, 0] = 5
    assert torch.equal(batch["observation/desired_goal"], copy["observation/desired_goal"])


# -- Hindsight ---------------------------------------------------------------------------------


def num_judged(episode: Episode) -> int:
    """Steps after which it is known what was achieved."""
    return episode.length if episode.is_final_known else episode.length - 1


def possible(episode: Episode, at: int, strategy: str) -> list[int]:
    """After which steps of its episode an anchor's goal may have been achieved."""
    judged = num_judged(episode)
    if strategy == "final":
        return [judged - 1] if judged else []
    return list(range(at if strategy == "future" else 0, judged))


@given(some_store, bases, st.sampled_from(["future", "final", "episode"]), st.data())
def test_goals_and_rewards_are_those_of_a_loop(stores, name, base, strategy, data):
    store = stores[name]
    known = episodes_of(store)
    unit = Hindsight(strategy, data.draw(st.sampled_from([0.5, 1.0])), compute_reward, unit=base)
    fields = ("observation", "next_observation", "reward", "terminated")
    replay = expstore.Replay(store, 12, unit=unit, fields=fields, seed=data.draw(st.integers()))

    batch = replay.sample()

    plain = expstore.Replay(store, 12, unit=base, fields=fields, seed=replay.seed).sample()
    for key in ("index", "anchor_index"):
        assert torch.equal(batch.info[key], plain.info[key])
    goals: dict[int, list[float]] = {}  # by row of the batch
    for at, step, anchor in records(batch):
        (episode, place), (of_anchor, from_) = known[step], known[anchor]
        rows = batch["observation"], plain["observation"]
        after = batch["next_observation"]["desired_goal"][at].tolist()
        valid, reward = bool(plain.info.validity_mask[at]), plain["reward"][at].item()
        goal = rows[1]["desired_goal"][at].tolist()
        if batch.info.relabeled[at]:
            assert episode.start == of_anchor.start
            places = possible(of_anchor, from_, strategy)
            goal = rows[0]["desired_goal"][at].tolist()
            assert goal in [of_anchor.observation("achieved_goal", i + 1) for i in places]
            assert goals.setdefault(at[0], goal) == goal
            assert after == goal
            if place < num_judged(episode):
                achieved = np.array(episode.observation("achieved_goal", place + 1))
                reward = float(compute_reward(achieved, np.array(goal), {}))
            else:
                valid = False
        elif episode.start == of_anchor.start and unit.ratio == 1.0:
            assert not possible(of_anchor, from_, strategy)
        assert rows[0]["desired_goal"][at].tolist() == goal
        assert batch["reward"][at].item() == reward
        assert batch.info.validity_mask[at] == valid
    for key in ("observation/state", "observation/achieved_goal", "terminated"):
        assert torch.equal(batch[key], plain[key])


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_every_possible_goal_comes_about_equally_often(stores, strategy):
    known = episodes_of(stores["mapped"])
    unit = Hindsight(strategy, 0.8, compute_reward)
    replay = expstore.Replay(stores["mapped"], 4000, unit=unit, fields=["observation"], seed=3)
    share, counts = [], {}
    for _ in range(10):
        batch = replay.sample()
        goal = batch["observation"]["desired_goal"][:, 0]
        for step, value, new in zip(
            batch.info.index.tolist(), goal.tolist(), batch.info.relabeled.tolist(), strict=True
        ):
            if not possible(*known[step], strategy):
                continue
            share.append(new)
            if new:
                counts[step, value] = counts.get((step, value), 0) + 1
    assert np.mean(share) == pytest.approx(0.8, abs=0.01)
    for step, (episode, at) in known.items():
        places = possible(episode, at, strategy)
        found = [counts.pop((step, episode.observation("achieved_goal", i + 1)[0])) for i in places]
        mean = 40_000 / 34 * 0.8 / max(len(places), 1)
        assert all(abs(count - mean) < 6 * math.sqrt(mean) for count in found)
    assert not counts


@pytest.mark.parametrize("ratio", [0, 1])
def test_none_or_all_anchors_get_new_goals(stores, ratio):
    batch = every_anchor(stores["mapped"], Hindsight("episode", ratio, compute_reward))
    known = episodes_of(stores["mapped"])
    has_goals = [bool(num_judged(known[step][0])) for step in batch.info.index.tolist()]
    assert batch.info.relabeled.tolist() == [ratio == 1 and has for has in has_goals]


def test_a_reward_function_may_ask_for_other_fields(stores):
    def compute(achieved: Any, goal: Any, info: Any) -> Any:
        assert achieved.shape == goal.shape == (len(achieved), 2)
        assert "observation/state" in info
        return info["action"] * 2

    batch = every_anchor(stores["union"], Hindsight("episode", 1.0, compute))
    new = batch.info.relabeled & batch.info.validity_mask
    assert torch.equal(batch["reward"][new], batch["action"][new].double() * 2)
    recorded = every_anchor(stores["union"], Step())["reward"]
    assert torch.equal(batch["reward"][~new], recorded[~new])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda achieved: 0.0, r"rewards of shape \(\d+,\) .* got shape \(\)"),
        (lambda achieved: achieved, r"got shape \(\d+, 2\)"),
        (lambda achieved: ["high"] * len(achieved), "of <U4"),
        (lambda achieved: None, "of object"),
    ],
)
def test_a_reward_function_that_returns_no_rewards_is_named(stores, result, text):
    def compute(achieved: Any, goal: Any, info: Any) -> Any:
        return result(achieved)

    with pytest.raises(SchemaError, match=rf"reward_fn .*compute must return .*{text}"):
        every_anchor(stores["mapped"], Hindsight("episode", 1.0, compute))


def test_fractions_do_not_become_integers_unnoticed(tmp_path: Path):
    data = goal_episode(0, 5, ("truncated", True))
    data["reward"] = data["reward"].astype(np.int32)
    store = made.store(tmp_path / "a.exp", data)
    with pytest.raises(SchemaError, match=r"field of torch\.int32, got .* float32"):
        every_anchor(store, Hindsight("final", 1.0, compute_reward))

    def compute_success(achieved: Any, goal: Any, info: Any) -> Any:
        return compute_reward(achieved, goal, info) == 0

    batch = every_anchor(store, Hindsight("final", 1.0, compute_success))
    assert batch["reward"].tolist() == [0, 0, 1, 1, 1]
    assert batch["reward"].dtype == torch.int32


def test_goals_and_rewards_may_be_bfloat16(tmp_path: Path):
    data = goal_episode(0, 5, ("truncated", True))
    data["reward"] = torch.ones(5, dtype=torch.bfloat16)
    for name in ("achieved_goal", "desired_goal"):
        values = torch.from_numpy(data["observation"][name])
        data["observation"][name] = values.to(torch.bfloat16)
    batch = every_anchor(made.store(tmp_path / "a.exp", data), final(Step()))
    assert batch["observation"]["desired_goal"].dtype == torch.bfloat16
    assert batch["observation"]["desired_goal"].tolist() == [[5, 0]] * 5
    assert batch["reward"].dtype == torch.bfloat16
    assert batch["reward"].tolist() == [-1, -1, 0, 0, 0]


def test_goals_may_be_of_another_type_than_what_is_achieved(tmp_path: Path):
    data = goal_episode(0, 5, ("truncated", True))
    data["observation"]["desired_goal"] = data["observation"]["desired_goal"].astype(np.float32)
    data["reward"] = data["reward"].astype(np.float32)[:, None]
    batch = every_anchor(made.store(tmp_path / "a.exp", data), final(Step()))
    assert batch["observation"]["desired_goal"].dtype == torch.float32
    assert batch["reward"].tolist() == [[-1], [-1], [0], [0], [0]]


# -- all of them together ----------------------------------------------------------------------


NESTED: list[Callable[[int, float, int, Any], Any]] = [
    lambda n, gamma, k, base: NStep(n, gamma, unit=Stack(k, unit=final(base))),
    lambda n, gamma, k, base: Stack(k, unit=final(NStep(n, gamma, unit=base))),
    lambda n, gamma, k, base: final(NStep(n, gamma, unit=Stack(k, unit=base))),
]


def final(unit: Any) -> Hindsight:
    return Hindsight("final", 1.0, compute_reward, unit=unit)


numbers = st.tuples(st.integers(1, 12), gammas, st.integers(1, 5))


@given(some_store, some_anchors, bases, numbers, st.sampled_from(NESTED))
def test_units_compose_in_any_order(stores, name, anchors, base, numbers, nested):
    store, (n, gamma, k) = stores[name], numbers
    known = episodes_of(store)

    batch = at_anchors(store, anchors, nested(n, gamma, k, base))

    plain = at_anchors(store, anchors, base, fields=["action"])
    for at, step, anchor in records(batch):
        (episode, first), (of_anchor, _) = known[step], known[anchor]
        used, judged = episode.num_steps(first, n), num_judged(of_anchor)
        is_new = episode.start == of_anchor.start and judged > 0
        goal = of_anchor.observation("achieved_goal", judged) if is_new else None
        total = 0.0
        for i in range(used):
            reward = episode.data["reward"][first + i]
            if is_new and first + i < judged:
                achieved = np.array(episode.observation("achieved_goal", first + i + 1))
                reward = float(compute_reward(achieved, np.array(goal), {}))
            total += gamma**i * reward
        assert batch["reward"][at].item() == pytest.approx(total, rel=1e-12)
        now, after = batch["observation"], batch["next_observation"]
        assert now["state"][at].tolist() == episode.stack("state", first, k)
        assert after["state"][at].tolist() == episode.next_stack("state", first + used - 1, k)
        if is_new:
            assert now["desired_goal"][at].tolist() == [goal] * k
            assert after["desired_goal"][at].tolist() == [goal] * k
        assert batch.info.relabeled[at] == is_new
        worth = episode.is_worth_something(first, n)
        if is_new and first + used > judged:
            worth = False  # the last reward is one for another goal
        assert batch.info.validity_mask[at] == (plain.info.validity_mask[at] and worth)
    assert len(layers_of(nested(n, gamma, k, base))) == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("base", [Step(), Sequence(length=4, burn_in=1)])
def test_a_loaded_state_continues_with_the_batch_that_was_next(stores, name, prefetch, base):
    def replay(prefetch: int) -> expstore.Replay:
        unit = everything(base)
        return expstore.Replay(stores[name], 16, unit=unit, seed=5, prefetch=prefetch)

    first = replay(prefetch)
    for _ in range(4):
        first.sample()
    state = json.loads(json.dumps(first.state_dict()))
    expected = [first.sample() for _ in range(4)]
    assert any(bool(batch.info.relabeled.any()) for batch in expected)
    for other in (prefetch, 0):
        resumed = replay(other)
        resumed.sample()
        resumed.seed = 99  # whatever it was before does not matter
        resumed.load_state_dict(state)
        assert all(equal(batch, resumed.sample()) for batch in expected)
        resumed.close()
    first.close()


RESUME = """
import json, sys, expstore
from tests.loading.goals import everything
replay = expstore.Replay(expstore.open(sys.argv[1]), 16, unit=everything(), seed=5, prefetch=2)
replay.load_state_dict(json.loads(sys.argv[2]))
print(json.dumps([replay.sample()["observation/desired_goal"].tolist() for _ in range(3)]))
replay.close()
"""


def test_a_state_resumes_in_a_new_process(tmp_path: Path):
    replay = expstore.Replay(fill(tmp_path / "a.exp", LENGTHS), 16, unit=everything(), seed=5)
    for _ in range(3):
        replay.sample()
    command = [sys.executable, "-c", RESUME, str(tmp_path / "a.exp")]
    command.append(json.dumps(replay.state_dict()))
    printed = subprocess.run(command, check=True, capture_output=True).stdout
    expected = [replay.sample()["observation/desired_goal"].tolist() for _ in range(3)]
    assert json.loads(printed) == expected


def test_seeds_and_draws_choose_other_goals(stores):
    def goals(seed: int) -> list[list[float]]:
        unit = Hindsight("episode", 1.0, compute_reward)
        replay = expstore.Replay(stores["view"], 500, unit=unit, seed=seed)
        batches = [replay.sample() for _ in range(2)]
        place = [b["observation/desired_goal"][b.info.anchor_index == 5] for b in batches]
        return [goal[:, 0].tolist() for goal in place]

    (first, second), (other, _) = goals(0), goals(1)
    assert [first, second] == goals(0)
    assert len({*map(tuple, (first, second, other))}) == 3


def test_the_repr_says_what_a_state_must_agree_on(stores):
    unit = NStep(np.int64(3), np.float64(0.5), unit=everything(Sequence(4)).unit)
    assert repr(unit) == (
        "NStep(n=3, gamma=0.5, reward='reward', unit=Stack(k=2, fields=('observation',), "
        "unit=Hindsight(strategy='future', ratio=0.7, "
        "reward_fn=tests.loading.goals.compute_reward, goal='observation/desired_goal', "
        "achieved='observation/achieved_goal', reward='reward', "
        f"unit={Sequence(4)!r})))"
    )
    limited = functools.partial(compute_reward, info={})
    assert "partial(tests.loading.goals.compute_reward, info={})" in repr(
        Hindsight(reward_fn=limited)
    )
    state = expstore.Replay(stores["mapped"], 4, unit=NStep(3, 0.5)).state_dict()
    other = expstore.Replay(stores["mapped"], 4, unit=NStep(3, 0.9))
    with pytest.raises(StateError, match=r"unit was NStep\(n=3, gamma=0.5, .*gamma=0.9"):
        other.load_state_dict(state)


@pytest.mark.parametrize("base", [Step(), Sequence(length=4, burn_in=1)])
def test_priorities_go_to_the_anchors(stores, base):
    store, sampler = stores["view"], expstore.Prioritized(alpha=1.0, beta=1.0, eps=0.0)
    replay = expstore.Replay(store, 40, unit=everything(base), sampler=sampler, prefetch=1)
    batch = replay.sample()
    anchors = batch.info.anchor_index.reshape(40, -1)[:, 0]
    replay.update_priority(batch, anchors % 1000 + 1)
    steps = np.unique(anchors.numpy())
    assert sampler.priorities(store.spans, steps).tolist() == (steps % 1000 + 1).tolist()
    replay.close()


def test_full_starts_are_those_of_the_windows_within(stores):
    base = Sequence(length=4, burn_in=1)
    anchors = []
    for unit in (base, everything(base)):
        replay = expstore.Replay(stores["mapped"], 300, unit=unit, starts="full")
        anchors.append(replay.sample().info.anchor_index)
    assert torch.equal(*anchors)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_units_follow_a_store_that_grows_from_nothing(tmp_path: Path, prefetch: int):
    with made.writer(tmp_path / "a.exp") as writer:
        store = expstore.open(tmp_path / "a.exp")
        unit = everything(Sequence(length=2), strategy="final")
        replay = expstore.Replay(store, 64, unit=unit, follow=True, prefetch=prefetch)
        for first in (0, 100, 200):
            writer.append(goal_episode(first, 6, ("truncated", True)))
            writer.commit()
            for _ in range(prefetch + 1):
                batch = replay.sample()
    achieved = batch["observation/desired_goal"][batch.info.relabeled][:, 0, 0]
    assert set(achieved.tolist()) == {6.0, 106.0, 206.0}
    replay.close()


@pytest.mark.parametrize("base", [Step(), Sequence(length=3)])
def test_loader_workers_change_nothing(stores, base):
    dataset = expstore.SequenceDataset(stores["union"], everything(base, "episode"))
    dataset = pickle.loads(pickle.dumps(dataset))

    def epochs(num_workers: int) -> list[list[Any]]:
        loader = expstore.sequence_loader(dataset, 16, seed=4, num_workers=num_workers)
        return [list(loader) for _ in range(2)]

    first, second = epochs(0)
    for alone, together in zip([first, second], epochs(2), strict=True):
        assert len(alone) == len(together)
        assert all(map(equal, alone, together))
    assert torch.equal(first[0].info.index, second[0].info.index)
    assert not equal(first[0], second[0])  # other goals in another epoch

    loader = expstore.sequence_loader(dataset, 16, seed=4)
    walk = iter(loader)
    next(walk)
    resumed = expstore.sequence_loader(dataset, 16)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert all(map(equal, resumed, first[1:]))


def test_items_of_a_dataset_are_the_same_every_time(stores):
    dataset = expstore.SequenceDataset(stores["mapped"], Hindsight("episode", 1.0, compute_reward))

    def goals() -> list[list[float]]:
        return [dataset[i]["observation"]["desired_goal"].tolist() for i in range(30)]

    assert goals() == goals()
    assert len(set(map(tuple, goals()))) > 10


def test_a_batch_becomes_a_tensordict(stores):
    pytest.importorskip("tensordict")
    batch = expstore.Replay(stores["mapped"], 8, unit=everything(Sequence(length=3))).sample()
    tensors = batch.to_tensordict()
    assert torch.equal(tensors["next", "observation", "state"], batch["next_observation/state"])
    assert tensors["discount"].shape == (8, 3)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: NStep(0, 0.9), "n must be an integer of at least 1, got 0"),
        (lambda: NStep(2.0, 0.9), r"n must be an integer of at least 1, got 2\.0"),
        (lambda: NStep(True, 0.9), "n must be an integer"),
        (lambda: NStep(3, 1.1), r"gamma must be a number from 0 to 1, got 1\.1"),
        (lambda: NStep(3, math.nan), "gamma must be a number from 0 to 1, got nan"),
        (lambda: NStep(3, "0.9"), "gamma must be a number"),
        (lambda: NStep(3, 0.9, unit=Sequence), r"unit must be Step\(\)"),
        (lambda: NStep(3, 0.9, unit=None), r"unit must be Step\(\).* got None"),
        (lambda: NStep(3, 0.9, unit=Stack(2, unit=NStep(2, 0.9))), "around another NStep"),
        (lambda: Stack(0), "k must be an integer of at least 1, got 0"),
        (lambda: Stack(2, ()), "fields must be names of fields, got"),
        (lambda: Stack(2, 5), "fields must be names of fields, got 5"),
        (lambda: Stack(2, ("next_observation",)), "must be recorded ones, got 'next_observation'"),
        (lambda: Stack(2, ("done",)), "must be recorded ones, got 'done'"),
        (lambda: Stack(2, unit=4), r"unit must be Step\(\).* got 4"),
        (lambda: Hindsight("past", 0.8, compute_reward), "strategy must be one of .* got 'past'"),
        (lambda: Hindsight("final", 1.5, compute_reward), "ratio must be a number from 0 to 1"),
        (lambda: Hindsight("final", 0.5), "reward_fn must be a function .* got None"),
        (lambda: final(final(Step())), "Hindsight is around another Hindsight"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make, text):
    with pytest.raises(SchemaError, match=text):
        make()


MISSING = [
    (NStep(3, 0.9, "score"), "reward 'score': there is no field 'score'; the store has 'obs"),
    (Stack(3, ("frames",)), "no field 'frames'"),
    (Hindsight(reward_fn=compute_reward, goal="goal"), "goal 'goal': there is no field 'goal'"),
    (Hindsight(reward_fn=compute_reward, achieved="x"), "achieved 'x': there is no field 'x'"),
    (Hindsight(reward_fn=compute_reward, reward="x"), "reward 'x': there is no field 'x'"),
]


@pytest.mark.parametrize(("unit", "text"), MISSING)
def test_a_missing_field_is_named_at_once(stores, unit, text):
    for around in (unit, Stack(2, ("action",), unit=unit)):
        with pytest.raises(FieldNotFoundError, match=text):
            expstore.Replay(stores["mapped"], 4, unit=around)
        with pytest.raises(FieldNotFoundError, match=text):
            expstore.SequenceDataset(stores["mapped"], around)


UNFIT = [
    (Stack(2, unit=Stack(3, ("observation/state",))), "field 'observation/state' is stacked twice"),
    (NStep(3, 0.9, "word"), "field 'word' must be numbers to sum, got text"),
    (Hindsight(reward_fn=compute_reward, goal="word"), r"one shape, got any number of values"),
    (Hindsight(reward_fn=compute_reward, goal="action"), r"one shape, got \(\) and \(2,\)"),
    (Hindsight(reward_fn=compute_reward, achieved="place"), "achieved 'place' must have next val"),
]


@pytest.mark.parametrize(("unit", "text"), UNFIT)
def test_fields_of_no_use_are_refused_at_once(tmp_path: Path, unit, text):
    data = goal_episode(0, 3, ("truncated", True))
    data |= {"word": ["a", "b", "c"], "place": np.zeros((3, 2))}
    store = made.store(tmp_path / "a.exp", data)
    with pytest.raises(SchemaError, match=text):
        expstore.Replay(store, 4, unit=unit)
