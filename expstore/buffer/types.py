"""What environments and policies hand to a buffer, and batches of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from expstore.errors import SchemaError

Processed_EnvRet_fields = ["next_observation", "reward", "terminated", "truncated", "info"]


@dataclass(eq=False)
class EnvRet:
    """What an environment gave: an observation, and what led to it.

    Attributes:
        env_id: which environment.
        observation: an array, a tensor, a number, or a dict or tuple of such.
        last_reward: for the action before this observation; 0 on a reset.
        last_terminated: whether that action ended the task.
        last_truncated: whether the episode was cut off there.
        info: anything; the default postprocess leaves it out.
        is_first: True says that this is the observation of a reset, and closes an episode
            that is still open.

    >>> EnvRet("env-0", observation=[0.5]).to_dict()["last_reward"]
    0.0
    """

    env_id: str
    observation: Any
    last_reward: Any = 0.0
    last_terminated: Any = False
    last_truncated: Any = False
    info: Any = field(default_factory=dict)
    _extra: dict[str, Any] = field(default_factory=dict)
    ts_env_sent_ns: int = field(default_factory=time.time_ns)
    is_first: bool = False

    @classmethod
    def fields(cls) -> list[str]:
        """Names of the fields that make a row."""
        return list(_ENV_FIELDS)

    def to_dict(self) -> dict[str, Any]:
        """The fields, and what `_extra` adds to them.

        Raises:
            SchemaError: an extra field has the name of a field.
        """
        row: dict[str, Any] = {
            "observation": self.observation,
            "last_reward": self.last_reward,
            "last_terminated": self.last_terminated,
            "last_truncated": self.last_truncated,
            "info": self.info,
        }
        if self._extra:
            for name in self._extra:
                if name in row:
                    raise ExtraFieldError(
                        f"_extra of env {self.env_id!r} has {name!r}, which is a field of "
                        f"{type(self).__name__}; rename it"
                    )
            row.update(self._extra)
        return row

    def cpu(self) -> EnvRet:
        """A copy with its tensors in host memory."""
        return self._mapped(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)

    def cuda(self) -> EnvRet:
        """A copy with its arrays and tensors on the GPU."""
        return self._mapped(_to_cuda)

    def numpy(self) -> EnvRet:
        """A copy with arrays in place of tensors."""
        return self._mapped(_to_numpy)

    def _mapped(self, function: Callable[[Any], Any]) -> EnvRet:
        names = (*_ENV_FIELDS, "_extra")
        return replace(self, **{n: mapped(getattr(self, n), function) for n in names})

    def __hash__(self) -> int:
        return hash(self.env_id)


class ExtraFieldError(SchemaError, KeyError):
    """An extra field has the name of a field."""

    def __str__(self) -> str:
        return str(self.args[0])


_ENV_FIELDS = ("observation", "last_reward", "last_terminated", "last_truncated", "info")


@dataclass(eq=False)
class MultiAgentEnvRet(EnvRet):
    """An `EnvRet` of several agents: observation, reward and flags are dicts by agent."""

    last_reward: Any = field(default_factory=dict)
    last_terminated: Any = field(default_factory=dict)
    last_truncated: Any = field(default_factory=dict)

    __hash__ = EnvRet.__hash__


class PolicyResponse:
    """What a policy answered: `action`, and whatever else is to be kept with it.

    >>> response = PolicyResponse("env-0", action=1, log_prob=-0.7)
    >>> response.action, response.to_dict()
    (1, {'action': 1, 'log_prob': -0.7})
    """

    action: Any
    log_prob: Any
    value: Any

    def __init__(self, env_id: str, **answers: Any) -> None:
        self.env_id = env_id
        self.ts_policy_sent_ns = time.time_ns()
        self.__dict__.update(answers)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the id and the time."""
        row = self.__dict__.copy()
        del row["env_id"], row["ts_policy_sent_ns"]
        return row

    def cpu(self) -> PolicyResponse:
        """Move its tensors to host memory, in place."""
        return self._map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)

    def cuda(self) -> PolicyResponse:
        """Move its arrays and tensors to the GPU, in place."""
        return self._map(_to_cuda)

    def numpy(self) -> PolicyResponse:
        """Turn its tensors into arrays, in place."""
        return self._map(_to_numpy)

    def compute_sent_latency(self) -> float:
        """Seconds since it was made."""
        return (time.time_ns() - self.ts_policy_sent_ns) * 1e-9

    def _map(self, function: Callable[[Any], Any]) -> PolicyResponse:
        for name, value in self.to_dict().items():
            setattr(self, name, mapped(value, function))
        return self

    def __repr__(self) -> str:
        answers = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"{type(self).__name__}({self.env_id!r}, {answers})"

    def __hash__(self) -> int:
        return hash(self.env_id)

    def __eq__(self, other: object) -> bool:
        return self is other


class MultiAgentPolicyResponse(PolicyResponse):
    """A `PolicyResponse` of several agents: its answers are dicts by agent."""


@dataclass(frozen=True)
class EnvMeta:
    """What is known of an environment: its spaces, and how many it steps at once."""

    env_id: str
    action_space: Any = None
    observation_space: Any = None
    num_envs: int = 1


class BatchedData:
    """Pairs of an environment's id and what came from it or for it, in order.

    >>> batch = BatchedData(["a", "b"], [1, 2])
    >>> batch["b"], list(batch)
    (2, [('a', 1), ('b', 2)])
    """

    def __init__(self, ids: Sequence[str], data: Sequence[Any]) -> None:
        if len(ids) != len(data):
            raise SchemaError(f"there are {len(ids)} ids for {len(data)} entries; give one each")
        self.ids = tuple(ids)
        self.data = list(data)

    def __getitem__(self, env_id: str) -> Any:
        """The first entry of that id."""
        for known, entry in self:
            if known == env_id:
                return entry
        raise KeyError(env_id)

    def __contains__(self, env_id: object) -> bool:
        return env_id in self.ids

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(self.ids, self.data, strict=True)

    def __len__(self) -> int:
        return len(self.ids)

    def keys(self) -> tuple[str, ...]:
        return self.ids

    def values(self) -> list[Any]:
        return list(self.data)

    def items(self) -> list[tuple[str, Any]]:
        return list(self)

    def __repr__(self) -> str:
        return f"BatchedData({list(self.ids)!r}, {self.data!r})"


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same tree of dicts, lists and tuples with `function` applied to each leaf."""
    if isinstance(value, dict):
        return {key: mapped(member, function) for key, member in value.items()}
    if isinstance(value, tuple):
        members = [mapped(member, function) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if isinstance(value, list):
        return [mapped(member, function) for member in value]
    return function(value)


def _to_cuda(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(np.array(leaf))
    return leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf


def _to_numpy(leaf: Any) -> Any:
    return leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf
