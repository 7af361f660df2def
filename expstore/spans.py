"""Episodes laid end to end: the arithmetic between steps, positions and episodes.

A *step* is the number a store gives to a row. A *position* counts the rows of a selection
(a store, a view, a union) from 0 without holes. In a whole store without eviction the two
are the same; everywhere else this class translates, in O(log episodes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expstore.errors import StepRangeError


@dataclass(frozen=True)
class Spans:
    """The selected episodes in order, each with its first step, first position and length."""

    start: NDArray[np.int64]  # (E,) step number of each episode's first row, ascending
    first: NDArray[np.int64]  # (E,) position of that row, ascending from 0
    length: NDArray[np.int64]  # (E,) rows of the episode, at least 1
    streams: NDArray[np.int64]  # (S + 1,) positions where the stores of a union begin, and the end

    @staticmethod
    def laid_out(start: NDArray[np.int64], length: NDArray[np.int64]) -> Spans:
        """One stream of the given episodes."""
        first = np.zeros(len(length), np.int64)
        np.cumsum(length[:-1], out=first[1:])
        return Spans(start, first, length, np.array([0, int(length.sum())], np.int64))

    @staticmethod
    def concatenate(parts: list[Spans]) -> Spans:
        """Several selections one after the other, each keeping its own stream(s)."""
        sizes = np.cumsum([0] + [part.num_steps for part in parts])
        return Spans(
            np.concatenate([part.start for part in parts]),
            np.concatenate(
                [part.first + size for part, size in zip(parts, sizes[:-1], strict=True)]
            ),
            np.concatenate([part.length for part in parts]),
            np.concatenate(
                [part.streams[:-1] + size for part, size in zip(parts, sizes[:-1], strict=True)]
                + [sizes[-1:]]
            ).astype(np.int64),
        )

    @property
    def num_steps(self) -> int:
        """Number of selected steps, N; positions run from 0 to N - 1."""
        return int(self.streams[-1])

    @property
    def num_episodes(self) -> int:
        """Number of selected episodes, E."""
        return len(self.length)

    def episodes_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which selected episode (0 to E - 1) holds each position; positions must be in range."""
        return np.searchsorted(self.first, positions, side="right") - 1

    def steps_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The step number of each position, of any shape; positions must be in range."""
        episode = self.episodes_at(positions)
        return positions + (self.start[episode] - self.first[episode])

    def positions_of(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position of each step number; steps outside the selection are an error."""
        if not steps.size:
            return steps.astype(np.int64)
        if not len(self.start):
            raise StepRangeError(
                "the selection holds no steps; append an episode and commit() it, or widen the "
                "filter"
            )
        episode = np.searchsorted(self.start, steps, side="right") - 1
        within = steps - self.start[episode]
        bad = (episode < 0) | (within < 0) | (within >= self.length[episode])
        if bad.any():
            step = int(np.asarray(steps)[bad].flat[0])
            raise StepRangeError(
                f"step {step} is not among the {self.num_steps} steps of this selection "
                f"({self.num_episodes} episodes, first step {int(self.start[0])}, last "
                f"{int(self.start[-1] + self.length[-1] - 1)})"
            )
        return self.first[episode] + within

    def positions_held(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of those of the given step numbers (n,) that are in the selection.

        >>> spans = Spans.laid_out(start=np.array([0, 10]), length=np.array([3, 4]))
        >>> spans.positions_held(np.array([2, 3, 9, 10, 14])).tolist()
        [2, 3]
        """
        if not len(self.start):
            return np.empty(0, np.int64)
        episode = np.searchsorted(self.start, steps, side="right") - 1
        within = steps - self.start[episode]
        held = (episode >= 0) & (within < self.length[episode])
        return self.first[episode[held]] + within[held]
