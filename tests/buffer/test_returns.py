"""Ready postprocess functions against slow loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expstore.buffer.postprocess import RawEpisode
from expstore.buffer.returns import (
    DiscountedReturn,
    GeneralizedAdvantage,
    NStepReturn,
    RewardScaling,
    default_compute_gae,
)
from expstore.errors import SchemaError

ENDS = ("terminated", "truncated", "cut")


def rows(rewards: list[float], values: list[float], end: str) -> dict[str, list[object]]:
    count = len(rewards)
    return {
        "observation": [float(k) for k in range(count + 1)],
        "last_reward": [0.0, *rewards],
        "last_terminated": [False] * count + [end == "terminated"],
        "last_truncated": [False] * count + [end == "truncated"],
        "value": list(values[: count + 1]),
    }


numbers = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12)
values = st.lists(st.floats(-5, 5, width=32), min_size=13, max_size=13)


@given(numbers, values, st.sampled_from(ENDS), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_discounted_sums_of_temporal_differences(
    rewards: list[float], values: list[float], end: str, gamma: float, decay: float
) -> None:
    out = GeneralizedAdvantage(gamma, decay)(rows(rewards, values, end))

    count = len(rewards)
    following = [*values[1:count], 0.0 if end == "terminated" else values[count]]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(count)]
    slow = [
        sum((gamma * decay) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)
    ]
    np.testing.assert_allclose(out["advantages"].numpy(), slow, atol=1e-3)
    np.testing.assert_allclose(out["returns"].numpy(), np.array(slow) + values[:count], atol=1e-3)


@given(numbers, values, st.sampled_from(ENDS), st.floats(0, 1))
def test_returns_are_discounted_sums_with_the_value_where_time_ran_out(
    rewards: list[float], values: list[float], end: str, gamma: float
) -> None:
    out = DiscountedReturn(gamma)(rows(rewards, values, end))["returns"]

    beyond, slow = 0.0 if end == "terminated" else values[len(rewards)], []
    for reward in reversed(rewards):
        beyond = reward + gamma * beyond
        slow.insert(0, beyond)
    np.testing.assert_allclose(out.numpy(), slow, atol=1e-3)


@given(numbers, st.sampled_from(ENDS), st.floats(0, 1), st.integers(1, 6))
def test_n_step_returns_stop_at_the_episodes_end(
    rewards: list[float], end: str, gamma: float, n: int
) -> None:
    out = NStepReturn(n, gamma)(rows(rewards, [0.0] * 13, end))

    for t in range(len(rewards)):
        inside = rewards[t : t + n]
        total = sum(gamma**k * reward for k, reward in enumerate(inside))
        reached = t + len(inside)
        ended = end == "terminated" and reached == len(rewards)
        assert out["n_step_return"][t].item() == pytest.approx(total, abs=1e-3)
        assert out["n_step_observation"][t].item() == reached
        expected = 0.0 if ended else gamma ** len(inside)
        assert out["n_step_discount"][t].item() == pytest.approx(expected, abs=1e-5)


def test_rows_of_vector_environments_are_handled_column_by_column() -> None:
    batched = {
        "observation": [torch.tensor([[float(k)], [k + 10.0]]) for k in range(4)],
        "last_reward": [torch.zeros(2)] + [torch.tensor([k, k + 1.0]) for k in range(3)],
        "last_terminated": [torch.tensor([False, k == 3]) for k in range(4)],
        "last_truncated": [torch.zeros(2, dtype=torch.bool)] * 4,
        "value": [torch.tensor([0.5, k]) for k in range(4)],
    }
    single = [
        {key: [value[at] for value in column] for key, column in batched.items()} for at in (0, 1)
    ]

    for function, keys in [
        (GeneralizedAdvantage(0.9, 0.8), ("advantages", "returns")),
        (DiscountedReturn(0.9), ("returns",)),
        (NStepReturn(2, 0.9), ("n_step_return", "n_step_discount", "n_step_observation")),
    ]:
        together = function(batched)
        for at, own in enumerate(single):
            for key in keys:
                torch.testing.assert_close(together[key][:, at], function(own)[key])


def test_rewards_are_divided_by_the_deviation_of_their_running_sum() -> None:
    scaling, sums = RewardScaling(gamma=0.5, clip=None), []
    for rewards in ([1.0, 2.0, 3.0], [4.0, -1.0]):
        out = scaling(rows(rewards, [0.0] * 13, "cut"))["reward"]
        running = 0.0
        for reward in rewards:
            running = 0.5 * running + reward
            sums.append(running)
        np.testing.assert_allclose(out.numpy(), np.array(rewards) / np.std(sums), rtol=1e-5)

    other = RewardScaling(gamma=0.5, clip=None)
    other.load_state_dict(scaling.state_dict())
    assert other.state_dict() == scaling.state_dict()
    assert scaling.state_dict()["count"] == len(sums)


def test_a_final_value_that_nobody_answered_is_not_made_up() -> None:
    answered = rows([1.0], [0.5, float("nan")], "truncated")
    unanswered = RawEpisode(answered, policy_valid=False)

    with pytest.raises(SchemaError, match="last row has no 'value'"):
        GeneralizedAdvantage()(unanswered)
    terminated = RawEpisode(rows([1.0], [0.5, float("nan")], "terminated"), policy_valid=False)
    assert GeneralizedAdvantage()(terminated)["advantages"].tolist() == [0.5]
    with pytest.raises(SchemaError, match="have no 'critic'"):
        DiscountedReturn(value_key="critic")(answered)
    assert DiscountedReturn(value_key=None)(unanswered)["returns"].tolist() == [1.0]


def test_the_helper_of_that_name_agrees_with_the_documented_figures() -> None:
    rewards, value = torch.tensor([1.0, 2, 3]), torch.tensor([0.5, 0.4, 0.3, 0.2])
    dones = torch.tensor([False, False, True])

    advantages, returns = default_compute_gae(rewards, value, dones, 0.8, 0.9)
    assert advantages.tolist() == pytest.approx([3.54448, 3.784, 2.7], abs=1e-5)
    assert returns.tolist() == pytest.approx([4.04448, 4.184, 3.0], abs=1e-5)
