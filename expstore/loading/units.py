"""What a sampler's anchor stands for, besides the windows of `Sequence`: single steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from expstore.sampling.window import WindowPlan
from expstore.spans import Spans


class Unit(Protocol):
    """Makes the steps of a batch of its anchors."""

    @property
    def window(self) -> int:
        """W, records per anchor."""
        ...

    @property
    def learning(self) -> NDArray[np.bool_]:
        """(W,) which records belong to the learning region."""
        ...

    def plan(self, spans: Spans, anchors: NDArray[np.int64]) -> WindowPlan:
        """Lay the window over anchors (B,), which are positions."""
        ...


@dataclass(frozen=True)
class Step:
    """Single steps: fields come as (B, *shape), info as (B,).

    >>> Step().window
    1
    """

    @property
    def window(self) -> int:
        return 1

    @property
    def learning(self) -> NDArray[np.bool_]:
        return np.ones(1, bool)

    def plan(self, spans: Spans, anchors: NDArray[np.int64]) -> WindowPlan:
        """The anchors themselves, as windows (B, 1)."""
        steps = spans.steps_at(anchors)[:, None]
        return WindowPlan(steps, np.ones(steps.shape, bool), anchors[:, None])
