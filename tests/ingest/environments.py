"""Small environments with the habits that recorders stumble over."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Nested(gymnasium.Env[Any, Any]):
    """Nested spaces, one array given again and again, terminated after `seed % 5 + 1` steps."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
            "pair": spaces.Tuple((spaces.Discrete(9), spaces.Box(-1, 1, (1,), np.float32))),
        }
    )
    action_space = spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))

    def __init__(self) -> None:
        self._image = np.zeros((2, 2), np.uint8)
        self._step = self._length = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._step, self._length = 0, (seed or 0) % 5 + 1
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._observation(), 1, self._step == self._length, False, {}

    def _observation(self) -> Any:
        self._image[:] = self._step
        return {"image": self._image, "pair": (self._step, np.array([0.5], np.float32))}


class Careless(Nested):
    """Resets with float64 and steps with float32, the other way round of what it declares."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def _observation(self) -> Any:
        return np.zeros(1, np.float32 if self._step else np.float64)


class Worded(Nested):
    """An observation that has no fixed size."""

    observation_space = spaces.Text(5)


for environment in (Nested, Careless, Worded):
    gymnasium.register(f"{environment.__name__}-v0", entry_point=environment)


def constant(observation: Any) -> int:
    """A policy."""
    return 1
