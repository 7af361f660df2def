"""Episodes with goals, and units that need them."""

from __future__ import annotations

from typing import Any

import numpy as np

from expstore import Hindsight, NStep, Stack, Step


def compute_reward(achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
    """As in gymnasium-robotics: -1 until the goal is near, for one step or many."""
    distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
    return -(distance > 2.5).astype(np.float32)


def goal_episode(first: int, length: int, ending: tuple[str, bool]) -> dict[str, Any]:
    """Every row is unlike all others; achieved goals count on by 1."""
    reason, is_final_known = ending
    at = np.arange(first, first + length + is_final_known)
    steps = at[:length]
    return {
        "observation": {
            "state": np.stack([at, -at, at * 2], axis=1).astype(np.float32),
            "achieved_goal": np.stack([at, at * 0], axis=1).astype(np.float64),
            "desired_goal": np.stack([at * 0 - 50, at * 0 + first], axis=1).astype(np.float64),
        },
        "action": steps.astype(np.int64),
        "reward": 10.0 + steps,
        "terminated": (steps == first + length - 1) & (reason == "terminated"),
        "truncated": (steps == first + length - 1) & (reason == "truncated"),
    }


def everything(base: Any = None, strategy: str = "future") -> Any:
    base = Step() if base is None else base
    inner = Hindsight(strategy, 0.7, compute_reward, unit=base)  # type: ignore[arg-type]
    return NStep(3, 0.9, unit=Stack(2, unit=inner))
