"""What a workload found: figures of its contestants, and goals that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


class Mismatch(Exception):
    """A contestant does not return the bytes it should: its time means nothing."""


@dataclass(frozen=True)
class Figure:
    """One contestant's measurements."""

    contestant: str
    median: float
    quartiles: tuple[float, float]
    unit: str
    num_rounds: int

    @staticmethod
    def of(contestant: str, values: Sequence[float], unit: str) -> Figure:
        """The figure of one value per round."""
        low, median, high = np.percentile(values, (25, 50, 75)).tolist()
        return Figure(contestant, median, (low, high), unit, len(values))


@dataclass(frozen=True)
class Goal:
    """A value that must not be above, or below, a limit."""

    what: str
    value: float
    limit: float
    at_most: bool = True
    unit: str = "x"  # of a ratio

    @property
    def is_reached(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


@dataclass(frozen=True)
class Result:
    """All that one workload found."""

    workload: str
    about: str
    figures: list[Figure]
    goals: list[Goal]

    def document(self) -> dict[str, Any]:
        """As it stands in the JSON."""
        goals = [{**asdict(goal), "is_reached": goal.is_reached} for goal in self.goals]
        return {**asdict(self), "goals": goals}


def ratio(
    what: str,
    figures: Sequence[Figure],
    ours: str,
    theirs: str,
    limit: float,
    *,
    at_most: bool = True,
) -> list[Goal]:
    """The goal that our median is at most `limit` times theirs, or at least; none without theirs.

    >>> figures = [Figure.of("a", [1.0], "ms"), Figure.of("b", [4.0], "ms")]
    >>> [goal.value for goal in ratio("a / b", figures, "a", "b", 1 / 3)]
    [0.25]
    >>> ratio("a / c", figures, "a", "c", 1 / 3)
    []
    """
    by_name = {figure.contestant: figure.median for figure in figures}
    if theirs not in by_name:
        return []
    return [Goal(what, by_name[ours] / by_name[theirs], limit, at_most)]
