"""Ready postprocess functions: advantages, discounted and n-step returns, scaled rewards.

Each is a callable that runs another one first, `base`, and adds columns to what that gives. The
end of an episode is treated as what it was: after `terminated` the value is 0; after `truncated`,
or a cut, it is the policy's `value` of the final observation, on the last row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from expstore.buffer.postprocess import RawEpisode, default_postprocess_fn, stacked
from expstore.errors import SchemaError
from expstore.ingest import returns
from expstore.ingest.returns import RunningDeviation

Postprocess = Callable[[Any], dict[str, Any]]


@dataclass
class GeneralizedAdvantage:
    """Adds `advantages` and `returns`, the advantages plus the values.

    The formula and its source stand at `expstore.ingest.returns.advantages`.

    Args:
        gamma: discount.
        gae_lambda: from 0, one step, to 1, the whole return.
        base: runs first.
        value_key: the policy's estimate on each row, the last one included.

    >>> rows = {"observation": [0.0, 1.0, 2.0], "last_reward": [0.0, 1.0, 2.0],
    ...         "last_terminated": [False, False, True], "value": [0.5, 0.4, 9.0]}
    >>> GeneralizedAdvantage(gamma=1.0, gae_lambda=1.0)(rows)["returns"].tolist()
    [3.0, 2.0]
    """

    gamma: float = 0.99
    gae_lambda: float = 0.95
    base: Postprocess = default_postprocess_fn
    value_key: str = "value"

    def __call__(self, raw_episode: Mapping[str, list[Any]]) -> dict[str, Any]:
        episode = dict(self.base(raw_episode))
        reward, terminated, done = _outcome(episode)
        value = _values(raw_episode, self.value_key, terminated)
        found = returns.advantages(
            _array(reward), _array(value), _array(terminated), _array(done),
            self.gamma, self.gae_lambda,
        )  # fmt: skip
        episode["advantages"] = _like(reward, found)
        episode["returns"] = episode["advantages"] + value[:-1]
        return episode


@dataclass
class DiscountedReturn:
    """Adds `returns`: `returns[t] = reward[t] + gamma * returns[t + 1]`.

    Beyond the last step stands 0 after `terminated`, else the value of the final observation.

    Args:
        gamma: discount.
        base: runs first.
        value_key: the policy's estimate; None to put 0 there in any case, which makes the
            returns of episodes too small that did not terminate.

    >>> rows = {"observation": [0.0, 1.0, 2.0], "last_reward": [0.0, 1.0, 2.0],
    ...         "last_terminated": [False, False, False], "value": [0.0, 0.0, 4.0]}
    >>> DiscountedReturn(gamma=0.5)(rows)["returns"].tolist()
    [3.0, 4.0]
    """

    gamma: float = 0.99
    base: Postprocess = default_postprocess_fn
    value_key: str | None = "value"

    def __call__(self, raw_episode: Mapping[str, list[Any]]) -> dict[str, Any]:
        episode = dict(self.base(raw_episode))
        reward, terminated, done = _outcome(episode)
        beyond = torch.zeros_like(reward)
        if self.value_key is not None:
            value = _values(raw_episode, self.value_key, terminated)
            ends = done.clone()
            ends[-1] = True
            beyond = torch.where(ends & ~terminated, value[1:].to(beyond.dtype), beyond)
        found = returns.discounted_returns(_array(reward), _array(done), self.gamma, _array(beyond))
        episode["returns"] = _like(reward, found)
        return episode


@dataclass
class NStepReturn:
    """Adds `n_step_return`, `n_step_discount` and `n_step_observation` for n-step targets.

    With `m = min(n, steps left)`, the return is `sum(gamma**k * reward[t + k], k < m)`, the
    observation the one after these m steps, and the discount `gamma**m`, or 0 where they
    terminated: `target = n_step_return + n_step_discount * value(n_step_observation)`.

    Args:
        n: steps, at least 1.
        gamma: discount.
        base: runs first.

    >>> rows = {"observation": [0.0, 1.0, 2.0], "last_reward": [0.0, 1.0, 2.0],
    ...         "last_terminated": [False, False, False]}
    >>> episode = NStepReturn(n=3, gamma=0.5)(rows)
    >>> episode["n_step_return"].tolist(), episode["n_step_discount"].tolist()
    ([2.0, 2.0], [0.25, 0.5])
    """

    n: int = 3
    gamma: float = 0.99
    base: Postprocess = default_postprocess_fn

    def __post_init__(self) -> None:
        if self.n < 1:
            raise SchemaError(f"n must be at least 1, got {self.n}")

    def __call__(self, raw_episode: Mapping[str, list[Any]]) -> dict[str, Any]:
        episode = dict(self.base(raw_episode))
        reward, terminated, done = _outcome(episode)
        total, discount, at = returns.n_step_returns(
            _array(reward), _array(terminated), _array(done), self.n, self.gamma
        )
        episode["n_step_return"] = _like(reward, total)
        episode["n_step_discount"] = _like(reward, discount)
        last = torch.from_numpy(at).to(reward.device)
        episode["n_step_observation"] = _taken(episode["next_observation"], last)
        return episode


@dataclass
class RewardScaling:
    """Divides rewards by the running standard deviation of their discounted sum.

    The sum begins anew with each episode; an episode counts before it is scaled.
    (Engstrom et al.: Implementation matters in deep RL, 2020, arXiv:2005.12729.)

    Args:
        gamma: discount of the sum.
        base: runs first.
        eps: added to the variance.
        clip: the largest absolute result; None for no limit.

    >>> rows = {"observation": [0.0, 1.0, 2.0], "last_reward": [0.0, 1.0, 2.0]}
    >>> RewardScaling(gamma=1.0)(rows)["reward"].tolist()
    [1.0, 2.0]
    """

    gamma: float = 0.99
    base: Postprocess = default_postprocess_fn
    eps: float = 1e-8
    clip: float | None = 10.0
    deviation: RunningDeviation = field(default_factory=RunningDeviation, init=False, repr=False)

    def __call__(self, raw_episode: Mapping[str, list[Any]]) -> dict[str, Any]:
        episode = dict(self.base(raw_episode))
        reward, _, done = _outcome(episode)
        self.deviation.update(_array(reward), _array(done), self.gamma)
        scaled = self.deviation.scaled(_array(reward), self.eps, self.clip)
        episode["reward"] = _like(reward, scaled)
        return episode

    def state_dict(self) -> dict[str, Any]:
        """The running statistics."""
        return dict(vars(self.deviation))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved statistics."""
        self.deviation.count = int(state["count"])
        self.deviation.mean = float(state["mean"])
        self.deviation.squares = float(state["squares"])


def default_compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    dones: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns (T, ...) as RLightning computes them: no bootstrap after any done.

    Args:
        rewards: (T, ...).
        values: (T + 1, ...), the last one of the final observation.
        dones: (T, ...), after which the value counts as 0, also where a time limit was met.
        gamma: discount.
        gae_lambda: as for `GeneralizedAdvantage`.

    >>> ones = torch.ones(2)
    >>> default_compute_gae(ones, torch.zeros(3), torch.tensor([False, True]), 0.5, 1.0)[1].tolist()
    [1.5, 1.0]
    """
    ended = _array(dones.bool())
    found = returns.advantages(_array(rewards), _array(values), ended, ended, gamma, gae_lambda)
    advantages = _like(rewards, found)
    return advantages, advantages + values[:-1]


def _outcome(episode: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards (T, ...), and which steps terminated or ended."""
    reward = episode.get("reward")
    if not isinstance(reward, torch.Tensor):
        raise SchemaError(f"the episode must have a tensor 'reward', got {reward!r}")
    if not reward.is_floating_point():
        reward = reward.to(torch.float32)
    none = torch.zeros_like(reward, dtype=torch.bool)
    terminated = episode.get("terminated", none).bool().reshape(reward.shape)
    truncated = episode.get("truncated", none).bool().reshape(reward.shape)
    return reward, terminated, terminated | truncated


def _values(
    raw_episode: Mapping[str, list[Any]], key: str, terminated: torch.Tensor
) -> torch.Tensor:
    """The policy's values (T + 1, ...), the last one of the final observation."""
    if key not in raw_episode:
        raise SchemaError(
            f"the rows have no {key!r}, which the policy must answer with; they have "
            f"{', '.join(raw_episode)}"
        )
    value: torch.Tensor = stacked(raw_episode[key], key).reshape(-1, *terminated.shape[1:])
    is_known = not isinstance(raw_episode, RawEpisode) or raw_episode.policy_valid
    if not is_known and not bool(terminated[-1].all()):
        raise SchemaError(
            f"the last row has no {key!r}, which is the value after the episode; answer the last "
            "EnvRet, too, or let the episode terminate"
        )
    return value


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor of any device as an array; of bfloat16, which numpy has not, as float32."""
    plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    array: NDArray[Any] = plain.detach().cpu().numpy()
    return array


def _like(example: torch.Tensor, values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values).to(example.device, example.dtype)


def _taken(rows: Any, last: torch.Tensor) -> Any:
    """Rows (T, ...) at `last`, which may differ between environments (T, num_envs)."""
    if isinstance(rows, dict):
        return {key: _taken(member, last) for key, member in rows.items()}
    if not isinstance(rows, torch.Tensor):
        return [rows[at] for at in last.tolist()]
    if last.ndim == 1:
        return rows[last]
    columns = torch.arange(last.shape[1], device=last.device).expand(last.shape)
    return rows[last, columns]
