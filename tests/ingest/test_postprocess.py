"""Ready postprocess functions on episodes of arrays, against slow loops, and how they are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import SchemaError, SourceError
from expstore.ingest.postprocess import (
    READY,
    DiscountedReturn,
    GeneralizedAdvantage,
    NStepReturn,
    RewardScaling,
    postprocess_of,
)
from expstore.storage.postprocessing import FinishedEpisode

ENDS = ("terminated", "truncated", "cut", "incomplete")


def finished(
    rewards: list[float],
    values: list[float],
    end: str,
    *,
    flags: bool = True,
    one_more: bool = True,
) -> FinishedEpisode:
    count = len(rewards)
    fields: dict[str, Any] = {
        "observation": {"state": np.arange(count + one_more, dtype=float)},
        "reward": np.array(rewards),
        "value": np.array(values[: count + one_more]),
    }
    if flags:
        for flag in ("terminated", "truncated"):
            fields[flag] = np.zeros(count, bool)
            fields[flag][-1] = flag == end
    return FinishedEpisode(fields, end)


numbers = st.lists(st.floats(-5, 5), min_size=1, max_size=12)
estimates = st.lists(st.floats(-5, 5), min_size=13, max_size=13)
ends, shares = st.sampled_from(ENDS), st.floats(0, 1)


@given(numbers, estimates, ends, shares, shares, st.booleans())
def test_advantages_are_discounted_sums_of_temporal_differences(
    rewards: list[float], values: list[float], end: str, gamma: float, decay: float, flags: bool
) -> None:
    out = GeneralizedAdvantage(gamma, decay)(finished(rewards, values, end, flags=flags))

    count = len(rewards)
    following = [*values[1:count], 0.0 if end == "terminated" else values[count]]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(count)]
    slow = [
        sum((gamma * decay) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)
    ]
    np.testing.assert_allclose(out["advantages"], slow, atol=1e-9)
    np.testing.assert_allclose(out["returns"], np.array(slow) + values[:count], atol=1e-9)
    assert out["value"].tolist() == values[:count]


@given(numbers, estimates, ends, shares, st.sampled_from(["value", None]))
def test_returns_are_discounted_sums_with_the_value_where_time_ran_out(
    rewards: list[float], values: list[float], end: str, gamma: float, name: str | None
) -> None:
    out = DiscountedReturn(gamma, name)(finished(rewards, values, end))["returns"]

    beyond = 0.0 if end == "terminated" or name is None else values[len(rewards)]
    slow: list[float] = []
    for reward in reversed(rewards):
        beyond = reward + gamma * beyond
        slow.insert(0, beyond)
    np.testing.assert_allclose(out, slow, atol=1e-9)


@given(numbers, ends, shares, st.integers(1, 15))
def test_n_step_returns_stop_at_the_end_of_the_episode(
    rewards: list[float], end: str, gamma: float, n: int
) -> None:
    out = NStepReturn(n, gamma)(finished(rewards, [0.0] * 13, end))

    for t in range(len(rewards)):
        inside = rewards[t : t + n]
        total = sum(gamma**k * reward for k, reward in enumerate(inside))
        reached = t + len(inside)
        ended = end == "terminated" and reached == len(rewards)
        assert out["n_step_return"][t] == pytest.approx(total, abs=1e-9)
        assert out["n_step_observation"]["state"][t] == reached
        assert out["n_step_discount"][t] == pytest.approx(0.0 if ended else gamma ** len(inside))


def test_rewards_are_divided_by_the_deviation_of_their_running_sum() -> None:
    scaling, sums = RewardScaling(gamma=0.5, clip=None), []
    for rewards in ([1.0, 2.0, 3.0], [4.0, -1.0]):
        out = scaling(finished(rewards, [0.0] * 13, "cut"))["reward"]
        running = 0.0
        for reward in rewards:
            running = 0.5 * running + reward
            sums.append(running)
        np.testing.assert_allclose(out, np.array(rewards) / np.std(sums), rtol=1e-6)


def test_the_last_value_and_observation_come_from_next_fields_too() -> None:
    episode = finished([1.0, 2.0], [0.5, 0.25, 0.0], "truncated", one_more=False)
    episode["next_value"] = np.array([0.25, 8.0])
    episode["next_observation"] = {"state": np.array([1.0, 7.0])}

    assert GeneralizedAdvantage(1.0, 1.0)(episode)["returns"].tolist() == [11.0, 10.0]
    assert NStepReturn(2)(episode)["n_step_observation"]["state"].tolist() == [7.0, 7.0]


def test_what_follows_a_termination_is_needed_by_none() -> None:
    episode = finished([1.0, 2.0], [0.5, 0.25], "terminated", one_more=False)

    assert GeneralizedAdvantage(1.0, 1.0)(episode)["returns"].tolist() == [3.0, 2.0]
    out = NStepReturn(2)(episode)
    assert out["n_step_observation"]["state"].tolist() == [1.0, 1.0]
    assert out["n_step_discount"].tolist() == [0.0, 0.0]


def test_what_is_needed_but_missing_is_named() -> None:
    short = finished([1.0, 2.0], [0.5, 0.25], "truncated", one_more=False)
    with pytest.raises(SchemaError, match=r"'value' must have 3 rows, got 2: .* not terminate"):
        GeneralizedAdvantage()(short)
    with pytest.raises(SchemaError, match="'state' must have 3 rows, got 2"):
        NStepReturn()(short)
    with pytest.raises(SchemaError, match=r"must be a field 'critic' .* name another .* value="):
        DiscountedReturn(value="critic")(short)
    with pytest.raises(SchemaError, match="must be a field 'reward'"):
        RewardScaling()(FinishedEpisode({"observation": np.zeros(3)}))
    with pytest.raises(SchemaError, match="must be a field 'observation'"):
        NStepReturn()(FinishedEpisode({"reward": np.zeros(3)}))


def test_single_precision_and_integers_stay_in_a_float_of_their_own() -> None:
    episode = finished([1.0, 2.0], [0.5, 0.25, 0.0], "cut")
    episode["reward"] = episode["reward"].astype(np.float32)
    assert GeneralizedAdvantage()(episode)["advantages"].dtype == np.float32
    episode["reward"] = np.array([1, 2])
    assert DiscountedReturn(0.5)(episode)["returns"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gae", GeneralizedAdvantage()),
        ("gae:gamma=0.9,lambda=0.8,value=critic", GeneralizedAdvantage(0.9, 0.8, "critic")),
        ("returns:gamma=1, value=none", DiscountedReturn(1.0, None)),
        ("n_step:n=5", NStepReturn(5)),
        ("reward_scaling:clip=none", RewardScaling(clip=None)),
    ],
)
def test_a_ready_function_is_named_with_its_parameters(text: str, expected: Any) -> None:
    found = postprocess_of(text)
    assert repr(found) == repr(expected) and type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gae:lamda=1", "gae has no parameter 'lamda'; it has gamma, gae_lambda, value"),
        ("n_step:n=two", "n_step: n must be of type int, got 'two'"),
        ("n_step:n=0", "n must be at least 1, got 0"),
        ("nonsense", "must be one of gae, returns, n_step, reward_scaling or module:function"),
        ("json:nothing", "json has no function 'nothing'"),
        ("no.such.module:f", "cannot be imported"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_there_is(text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        postprocess_of(text)


def test_any_function_can_be_named() -> None:
    import json

    assert postprocess_of("json:dumps") is json.dumps
    assert set(READY) == {"gae", "returns", "n_step", "reward_scaling"}
