"""Ready functions for `Writer(postprocess=)` and `expstore ingest --postprocess`.

Each takes a finished episode and returns its fields with some added or changed. The end of an
episode is treated as what it was: after `terminated` nothing follows; after `truncated`, or a cut,
what follows is the value of the final observation, the last of T + 1 values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError, SourceError
from expstore.ingest.lookup import imported
from expstore.ingest.returns import (
    RunningDeviation,
    advantages,
    discounted_returns,
    n_step_returns,
)
from expstore.storage.postprocessing import FinishedEpisode, Function

Array = NDArray[Any]


@dataclass
class GeneralizedAdvantage:
    """Adds `advantages` (T,) and `returns` (T,), the advantages plus the values.

    The formula and its source stand at `expstore.ingest.returns.advantages`. Of T + 1 values the
    last one is used, but not stored.

    Args:
        gamma: discount.
        gae_lambda: from 0, one step, to 1, the whole return.
        value: field with the policy's estimates, (T + 1,), or (T,) if the episode terminated.

    >>> episode = FinishedEpisode({"reward": np.ones(2), "value": np.zeros(3)}, "truncated")
    >>> GeneralizedAdvantage(gamma=0.5, gae_lambda=1.0)(episode)["returns"]
    array([1.5, 1. ])
    """

    gamma: float = 0.99
    gae_lambda: float = 0.95
    value: str = "value"

    def __call__(self, episode: FinishedEpisode) -> dict[str, Any]:
        reward, terminated, done = outcome(episode)
        value = values(episode, self.value, len(reward)).astype(reward.dtype)
        found = advantages(reward, value, terminated, done, self.gamma, self.gae_lambda)
        added = {"advantages": found, "returns": found + value[:-1]}
        return {**episode, self.value: episode[self.value][: len(reward)], **added}


@dataclass
class DiscountedReturn:
    """Adds `returns` (T,): `returns[t] = reward[t] + gamma * returns[t + 1]`.

    Args:
        gamma: discount.
        value: field with the policy's estimates, (T + 1,), of which the last one follows after an
            episode that did not terminate; by default 0 follows, which makes its returns too
            small.

    >>> episode = FinishedEpisode({"reward": np.ones(3)}, "terminated")
    >>> DiscountedReturn(gamma=0.5)(episode)["returns"]
    array([1.75, 1.5 , 1.  ])
    """

    gamma: float = 0.99
    value: str | None = None

    def __call__(self, episode: FinishedEpisode) -> dict[str, Any]:
        reward, terminated, done = outcome(episode)
        beyond, kept = np.zeros_like(reward), dict(episode)
        if self.value is not None:
            value = values(episode, self.value, len(reward))
            beyond[-1] = 0 if terminated[-1].all() else value[-1]
            kept[self.value] = episode[self.value][: len(reward)]
        return {**kept, "returns": discounted_returns(reward, done, self.gamma, beyond)}


@dataclass
class NStepReturn:
    """Adds `n_step_return`, `n_step_discount` (T,) and `n_step_observation` (T, *shape).

    `target = n_step_return + n_step_discount * value(n_step_observation)`; the formula stands at
    `expstore.ingest.returns.n_step_returns`. Where the discount is 0 because the episode
    terminated and its final observation is not known, the last known one stands for it.

    Args:
        n: steps, at least 1.
        gamma: discount.

    >>> episode = FinishedEpisode({"observation": np.arange(4.0), "reward": np.ones(3)})
    >>> NStepReturn(n=2, gamma=0.5)(episode)["n_step_observation"]
    array([2., 3., 3.])
    """

    n: int = 3
    gamma: float = 0.99

    def __post_init__(self) -> None:
        if self.n < 1:
            raise SchemaError(f"n must be at least 1, got {self.n}")

    def __call__(self, episode: FinishedEpisode) -> dict[str, Any]:
        reward, terminated, done = outcome(episode)
        total, discount, last = n_step_returns(reward, terminated, done, self.n, self.gamma)
        may_end = bool(terminated[-1].all())
        observation = following(episode, "observation", len(reward), may_end)
        added = {"n_step_return": total, "n_step_discount": discount}
        return {**episode, **added, "n_step_observation": _taken(observation, last)}


@dataclass
class RewardScaling:
    """Divides `reward` by the running standard deviation of its discounted sum.

    An episode counts before it is scaled. The statistics are this object's: those of another
    process begin anew.

    Args:
        gamma: discount of the sum.
        eps: added to the variance.
        clip: the largest absolute result; None for no limit.

    >>> episode = FinishedEpisode({"reward": np.array([1.0, 3.0])}, "truncated")
    >>> RewardScaling(gamma=0.0)(episode)["reward"].round(3)
    array([1., 3.])
    """

    gamma: float = 0.99
    eps: float = 1e-8
    clip: float | None = 10.0
    deviation: RunningDeviation = field(default_factory=RunningDeviation, init=False, repr=False)

    def __call__(self, episode: FinishedEpisode) -> dict[str, Any]:
        reward, _, done = outcome(episode)
        self.deviation.update(reward, done, self.gamma)
        return {**episode, "reward": self.deviation.scaled(reward, self.eps, self.clip)}


READY: Mapping[str, type[Any]] = {
    "gae": GeneralizedAdvantage,
    "returns": DiscountedReturn,
    "n_step": NStepReturn,
    "reward_scaling": RewardScaling,
}
SHORT = {"lambda": "gae_lambda"}  # as people write it, but no name in Python


def postprocess_of(postprocess: str | Function) -> Function:
    """A function, or the one that a text names.

    Args:
        postprocess: "module:function", or a ready one with its parameters:
            "gae:gamma=0.99,lambda=0.95", "returns", "n_step:n=5", "reward_scaling:clip=none".

    Raises:
        SourceError: it names no function, or a parameter that the function does not have.

    >>> postprocess_of("gae:gamma=0.9,lambda=0.8")
    GeneralizedAdvantage(gamma=0.9, gae_lambda=0.8, value='value')
    """
    if not isinstance(postprocess, str):
        return postprocess
    name, _, given = postprocess.partition(":")
    if name not in READY or (given and "=" not in given):
        return imported(postprocess, "postprocess", f"one of {', '.join(READY)}")
    kinds = {f.name: f.type for f in fields(READY[name]) if f.init}
    parameters: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        key, _, text = part.partition("=")
        key = SHORT.get(key.strip(), key.strip())
        if key not in kinds:
            raise SourceError(
                f"postprocess {name} has no parameter {key!r}; it has {', '.join(kinds)}"
            )
        parameters[key] = _parameter(f"{name}: {key}", str(kinds[key]), text.strip())
    try:
        ready: Function = READY[name](**parameters)
    except SchemaError as error:
        raise SourceError(f"postprocess {postprocess!r}: {error}") from error
    return ready


def _parameter(what: str, kind: str, text: str) -> Any:
    if "None" in kind and text.lower() == "none":
        return None
    make: Callable[[str], Any] = int if kind == "int" else str if "str" in kind else float
    try:
        return make(text)
    except ValueError:
        raise SourceError(f"postprocess {what} must be of type {kind}, got {text!r}") from None


def outcome(episode: FinishedEpisode) -> tuple[Array, NDArray[np.bool_], NDArray[np.bool_]]:
    """Rewards (T, ...) as floats, and where the episode terminated, and where it ended.

    Raises:
        SchemaError: there are no rewards.
    """
    reward = episode.get("reward")
    if not isinstance(reward, np.ndarray):
        raise SchemaError(f"there must be a field 'reward' of numbers; there are {list(episode)}")
    if reward.dtype.kind != "f":
        reward = reward.astype(np.float64)
    terminated, done = np.zeros(reward.shape, bool), np.zeros(reward.shape, bool)
    terminated[-1], done[-1] = episode.end_reason == "terminated", True
    if "terminated" in episode:
        last = np.asarray(episode["terminated"], bool)[-1]
        own = terminated[-1:]
        own[:] = last.reshape(own.shape) if last.size == own.size else last.any()
    return reward, terminated, done


def values(episode: FinishedEpisode, name: str, num_steps: int) -> Array:
    """The policy's estimates (T + 1, ...); a last one that nobody gave is NaN.

    Raises:
        SchemaError: there is no such field, or it lacks the last value, which is needed.
    """
    found = episode.get(name)
    if not isinstance(found, np.ndarray):
        raise SchemaError(
            f"there must be a field {name!r} with the policy's estimates; there are "
            f"{list(episode)}: record it, or name another field with value="
        )
    found = found.astype(np.float64) if found.dtype.kind != "f" else found
    shape = episode["reward"].shape[1:]
    if len(found) == num_steps + 1:
        return found.reshape(num_steps + 1, *shape)
    if len(found) == num_steps and f"next_{name}" in episode:
        last = episode[f"next_{name}"][-1:]
        return np.concatenate([found, last]).reshape(num_steps + 1, *shape)
    if len(found) == num_steps and episode.end_reason == "terminated":
        last = np.full((1, *found.shape[1:]), np.nan, found.dtype)
        return np.concatenate([found, last]).reshape(num_steps + 1, *shape)
    raise SchemaError(
        f"field {name!r} must have {num_steps + 1} rows, got {len(found)}: the episode did not "
        "terminate, so what follows is worth the value of its final observation"
    )


def following(episode: Mapping[str, Any], name: str, num_steps: int, may_end: bool) -> Any:
    """What came after each step of a field (T, *shape), or of all that lies under it.

    Args:
        may_end: whether the last known value may stand for one that is not known.

    Raises:
        SchemaError: the field is not there, or does not say what came last.
    """
    found, after = episode.get(name), episode.get(f"next_{name}")
    if found is None:
        raise SchemaError(f"there must be a field {name!r}; there are {list(episode)}")
    if isinstance(found, Mapping):
        inner = {**found, **{f"next_{k}": v for k, v in (after or {}).items()}}
        return {key: following(inner, key, num_steps, may_end) for key in found}
    if after is not None:
        return after
    if len(found) == num_steps + 1:
        return found[1:]
    if may_end:
        return np.concatenate([found[1:], found[-1:]])
    raise SchemaError(
        f"field {name!r} must have {num_steps + 1} rows, got {len(found)}: the episode did not "
        "terminate, so its final observation is needed"
    )


def _taken(rows: Any, last: NDArray[np.int64]) -> Any:
    if isinstance(rows, Mapping):
        return {key: _taken(member, last) for key, member in rows.items()}
    if last.ndim == 1:
        return rows[last]
    return rows[(last, *np.indices(last.shape)[1:])]
