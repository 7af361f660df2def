"""The task of the offline examples: a scripted policy for Pendulum-v1, and how others are judged.

expstore ingest gym:Pendulum-v1 pendulum.exp --episodes 100 --policy pendulum:scripted
"""

from collections.abc import Callable
from typing import Any

import numpy as np

ENV_ID = "Pendulum-v1"
rng = np.random.default_rng(0)


def scripted(observation: Any) -> Any:
    """Swings up by energy and holds at the top, a third of the time at random."""
    cos, sin, speed = observation
    if rng.random() < 0.35:
        return rng.uniform(-2, 2, 1).astype(np.float32)
    if cos > 0.85:
        torque = -12 * np.arctan2(sin, cos) - 2.5 * speed
    else:
        energy = speed**2 / 6 + 5 * (cos - 1)  # 0 at the top
        torque = -2.0 * np.sign(energy * speed if speed else 1.0)
    return np.clip([torque], -2, 2).astype(np.float32)


def mean_return(act: Callable[[Any], Any], episodes: int = 5, seed: int = 1000) -> float:
    """The return of a policy from observation to action."""
    import gymnasium

    total = 0.0
    with gymnasium.make(ENV_ID) as env:
        for k in range(episodes):
            observation, _ = env.reset(seed=seed + k)
            done = False
            while not done:
                observation, reward, terminated, truncated, _ = env.step(act(observation))
                total += float(reward)
                done = terminated or truncated
    return total / episodes
