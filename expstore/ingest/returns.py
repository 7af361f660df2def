"""Formulas over the steps of one episode: advantages, discounted and n-step returns.

All arrays are (T, ...), with any shape behind the steps, such as several environments; `done` is
where an episode ends, for whatever reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def advantages(
    reward: Array, value: Array, terminated: Array, done: Array, gamma: float, gae_lambda: float
) -> Array:
    """Generalized advantage estimates.

    `delta[t] = reward[t] + gamma * value[t + 1] * (1 - terminated[t]) - value[t]`, and
    `out[t] = delta[t] + gamma * gae_lambda * (1 - done[t]) * out[t + 1]`.
    (Schulman et al.: High-dimensional continuous control using generalized advantage estimation,
    2016, arXiv:1506.02438.)

    Args:
        value: (T + 1, ...), the last one of the observation after the last step; it may be NaN
            where that step terminated.

    >>> none = np.zeros(2, bool)
    >>> advantages(np.ones(2), np.zeros(3), none, none, 0.5, 1.0)
    array([1.5, 1. ])
    """
    following = np.where(terminated, 0, value[1:]).astype(value.dtype)
    delta = reward + gamma * following - value[:-1]
    return backwards(delta, (gamma * gae_lambda * ~done).astype(delta.dtype))


def discounted_returns(reward: Array, done: Array, gamma: float, beyond: Array) -> Array:
    """`out[t] = reward[t] + gamma * (beyond[t] + (1 - done[t]) * out[t + 1])`.

    Args:
        beyond: what follows after a step that ends an episode, 0 after all others.

    >>> discounted_returns(np.ones(3), np.zeros(3, bool), 0.5, np.zeros(3))
    array([1.75, 1.5 , 1.  ])
    """
    values = reward + (gamma * beyond).astype(reward.dtype)
    return backwards(values, (gamma * ~done).astype(values.dtype))


def n_step_returns(
    reward: Array, terminated: Array, done: Array, n: int, gamma: float
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Returns over at most n steps, their discounts, and the last step of each.

    With `m = min(n, steps left)`, the return is `sum(gamma**k * reward[t + k], k < m)` and the
    discount `gamma**m`, or 0 where the last of these steps terminated.

    >>> none = np.zeros(3, bool)
    >>> n_step_returns(np.ones(3), none, none, 2, 0.5)
    (array([1.5, 1.5, 1. ]), array([0.25, 0.25, 0.5 ]), array([1, 2, 2]))
    """
    total, discount = np.zeros_like(reward), np.ones_like(reward)
    last = np.empty(reward.shape, np.int64)
    last[:] = np.arange(len(reward)).reshape(-1, *[1] * (reward.ndim - 1))
    going = np.ones_like(done)
    for k in range(min(n, len(reward))):
        going = going & _ahead(np.ones_like(done), k)
        total = total + np.where(going, discount * _ahead(reward, k), 0).astype(reward.dtype)
        discount = np.where(going, discount * gamma, discount).astype(reward.dtype)
        last += going if k else 0
        going = going & ~_ahead(done, k)
    ended = np.take_along_axis(terminated, last, 0)
    return total, np.where(ended, 0, discount).astype(reward.dtype), last


class RunningDeviation:
    """The standard deviation of rewards' discounted sum, over all episodes so far.

    The sum begins anew with each episode.
    (Engstrom et al.: Implementation matters in deep RL, 2020, arXiv:2005.12729.)

    Attributes:
        count: values so far.
        mean: of them.
        squares: sum of their squared distances from the mean.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def update(self, reward: Array, done: Array, gamma: float) -> None:
        """Take the steps of an episode, by Welford's method.

        >>> deviation = RunningDeviation()
        >>> deviation.update(np.array([1.0, 3.0]), np.array([False, True]), gamma=0.0)
        >>> deviation.mean, deviation.squares
        (2.0, 2.0)
        """
        sums = forwards(reward.astype(np.float64), gamma * ~done)
        for value in sums.reshape(-1).tolist():
            self.count += 1
            distance = value - self.mean
            self.mean += distance / self.count
            self.squares += distance * (value - self.mean)

    def scaled(self, reward: Array, eps: float, clip: float | None) -> Array:
        """Rewards divided by it.

        Args:
            eps: added to the variance.
            clip: the largest absolute result; None for no limit.
        """
        deviation = (self.squares / self.count + eps) ** 0.5
        scaled: Array = (reward / deviation).astype(reward.dtype)
        return scaled if clip is None else np.clip(scaled, -clip, clip)


def backwards(values: Array, keep: Array) -> Array:
    """`out[t] = values[t] + keep[t] * out[t + 1]`, 0 beyond the end."""
    out = values.copy()
    for step in range(len(values) - 2, -1, -1):
        out[step] += keep[step] * out[step + 1]
    return out


def forwards(values: Array, keep: Array) -> Array:
    """`out[t] = values[t] + keep[t - 1] * out[t - 1]`."""
    out = values.copy()
    for step in range(1, len(values)):
        out[step] += keep[step - 1] * out[step - 1]
    return out


def _ahead(values: Array, steps: int) -> Array:
    """`out[t] = values[t + steps]`, 0 or false beyond the end."""
    out = np.zeros_like(values)
    if steps < len(values):
        out[: len(values) - steps] = values[steps:]
    return out
