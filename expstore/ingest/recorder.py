"""Episodes rolled out in a gymnasium environment, each a function of its own seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError, SourceError
from expstore.formats.source import NOTHING, Account, Imported, SourceEpisode
from expstore.ingest.environments import (
    PREFIX,
    Policy,
    make_environment,
    policy_of,
    versions_of,
)

TICK_STEPS = 64  # between two reports of progress


class GymSource:
    """Rolls out an environment: episode k is reset with `seed + k`.

    The action space is seeded from it, too, so a recording that was interrupted and resumed has
    exactly the episodes of one that was not, given a policy that is a function of the
    observation.

    Args:
        env_id: as in `gymnasium.make`, `module:ENV_ID` included.
        num_episodes: to record in all; None if only `num_steps` counts.
        num_steps: to record in all; the last episode is cut there.
        seed: of the first episode; the others follow.
        policy: "random", "module:function", or a function from observation to action.

    Raises:
        SourceError: an unknown environment or policy, or neither count given.
        SchemaError: a space without fixed-size fields.
        MissingExtraError: gymnasium is not installed.
    """

    boundary_rule = "an episode ends when the environment says terminated or truncated"

    def __init__(
        self,
        env_id: str,
        *,
        num_episodes: int | None = None,
        num_steps: int | None = None,
        seed: int = 0,
        policy: str | Policy = "random",
    ) -> None:
        self.num_episodes, self.num_steps = num_episodes, num_steps
        self._check_counts(env_id, seed)
        self._env_id, self._seed = env_id, int(seed)  # environments refuse those of numpy
        self._choose, self._policy_name = policy_of(policy)
        self._env = make_environment(env_id)
        self._observed = leaves("observation", self._env.observation_space)
        self._acted = leaves("action", self._env.action_space)
        self.family = f"{PREFIX}{env_id} seed="  # begins the names of other seeds and policies
        self.name = f"{self.family}{seed} policy={self._policy_name}"
        self.account = Account()
        self._metadata = {
            "env_id": env_id,
            "policy": self._policy_name,
            "versions": versions_of(self._env),
        }

    def describe(self) -> str:
        return f"{self._env_id}, policy {self._policy_name}, seeds from {self._seed} on"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        num_steps = imported.num_steps
        for number in itertools.count():
            room = None if self.num_steps is None else self.num_steps - num_steps
            if number == self.num_episodes or (room is not None and room <= 0):
                return
            if number in imported.keys:
                continue
            episode = self._roll_out(number, room)
            num_steps += len(episode.data["reward"])
            if num_steps == self.num_steps:
                self.boundary_rule += f"; the last one is cut at {num_steps} steps"
            yield episode

    def close(self) -> None:
        self._env.close()

    def _roll_out(self, number: int, room: int | None) -> SourceEpisode:
        """One episode of at most `room` steps."""
        environment, seed = self._env, self._seed + number
        environment.action_space.seed(_action_seed(seed))
        rows = Rows()
        observation, _ = environment.reset(seed=seed)
        rows.add(self._observed, observation)
        rewards: list[NDArray[np.float64]] = []
        flags: list[tuple[bool, bool]] = []
        ended = False
        while not ended and len(rewards) != room:
            action = self._act(observation)
            # Before the step, in which an environment may change what it was given.
            rows.add(self._acted, action)
            observation, reward, terminated, truncated, _ = environment.step(action)
            rows.add(self._observed, observation)
            rewards.append(np.array(reward, np.float64))
            flags.append((bool(terminated), bool(truncated)))
            ended = any(flags[-1])
            if len(rewards) % TICK_STEPS == 0:
                self.account.reached(len(rewards))
        terminated_at, truncated_at = np.array(flags, bool).T
        data = {
            **rows.arrays(self.account),
            "reward": np.stack(rewards),
            "terminated": terminated_at,
            "truncated": truncated_at,
        }
        return SourceEpisode(number, data, metadata={"seed": seed, **self._metadata})

    def _act(self, observation: Any) -> Any:
        if self._choose is None:
            return self._env.action_space.sample()
        return self._choose(observation)

    def _check_counts(self, env_id: str, seed: int) -> None:
        if not env_id:
            raise SourceError(f"{PREFIX} needs an environment, such as {PREFIX}HalfCheetah-v5")
        if self.num_episodes is None and self.num_steps is None:
            raise SourceError(
                f"say how much of {PREFIX}{env_id} to record: --episodes or --steps "
                "(episodes=, steps=)"
            )
        counts = {"episodes": self.num_episodes, "steps": self.num_steps, "seed": seed}
        for name, count in counts.items():
            if count is not None and count < 0:
                raise SourceError(f"--{name} ({name}=) must be >= 0, got {count}")


def _action_seed(seed: int) -> int:
    """Not `seed` itself: the first random action would repeat the noise of the first state."""
    return int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])


@dataclass(frozen=True)
class Leaf:
    """A field under a space, and how to find its value in a value of the space."""

    field: str
    keys: tuple[Any, ...]  # of Dict and Tuple spaces, outermost first
    dtype: str | None  # None to keep what the environment gives


def leaves(name: str, space: Any, keys: tuple[Any, ...] = ()) -> list[Leaf]:
    """The fields under a space; members of Dict and Tuple spaces are nested ones.

    Raises:
        SchemaError: a space without fields of fixed size.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return [Leaf(name, keys, "int64")]
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return [Leaf(name, keys, None)]
    if isinstance(space, spaces.Dict):
        members: list[tuple[Any, Any]] = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        members = list(enumerate(space.spaces))
    else:
        raise SchemaError(
            f"{name}: spaces of type {type(space).__name__} have no field of fixed size; wrap "
            "the environment so that its spaces are made of Box, Discrete, MultiDiscrete, "
            "MultiBinary, Dict and Tuple"
        )
    return [leaf for key, part in members for leaf in leaves(f"{name}/{key}", part, (*keys, key))]


class Rows:
    """The rows of an episode's fields, copied as they come."""

    def __init__(self) -> None:
        self._rows: dict[str, list[NDArray[Any]]] = {}

    def add(self, leaves: list[Leaf], value: Any) -> None:
        """One value of the space that has these leaves."""
        for leaf in leaves:
            part = value
            for key in leaf.keys:
                part = part[key]
            # A copy: environments give the same array again and again.
            self._rows.setdefault(leaf.field, []).append(np.array(part, leaf.dtype))

    def arrays(self, account: Account) -> dict[str, NDArray[Any]]:
        """All rows of each field (T or T + 1, *shape)."""
        arrays = {}
        for name, rows in self._rows.items():
            try:
                arrays[name] = np.stack(rows)
            except ValueError as error:
                raise SchemaError(f"field {name!r} changes its shape in the episode") from error
            for dtype in {row.dtype for row in rows} - {arrays[name].dtype}:
                account.dtype_changes[name] = f"{dtype} to {arrays[name].dtype}"
        return arrays
