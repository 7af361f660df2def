"""The window rule on integers, and its plain NumPy form on episodes laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expstore.errors import StepRangeError
from expstore.spans import Spans

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class WindowPlan:
    """Where every record of every window is read."""

    steps: Integers  # (B, W) step number, or row of a ring
    valid: NDArray[np.bool_]  # (B, W) the record is a step of the window, not padding
    positions: Integers  # (B, W) the same records counted from the oldest one


@dataclass(frozen=True)
class WindowShape:
    """The four integers that the rule needs to know about a window."""

    num_records: int  # W
    burn_in: int  # records before the anchor
    dilation: int  # steps between two records
    need: int  # steps that must follow the anchor, else the window slides back; 0 never slides

    @property
    def offsets(self) -> Integers:
        """(W,) distance in steps of each record from the anchor."""
        return (np.arange(self.num_records, dtype=np.int64) - self.burn_in) * self.dilation


def lay_windows(
    shape: WindowShape, positions: Integers, start: Integers, stop: Integers
) -> tuple[Integers, NDArray[np.bool_]]:
    """Lay a window over each position, never leaving [start, stop).

    A window that lacks steps behind its anchor slides back, at most to ``start`` (only if
    ``shape.need`` is above 0). Records outside of the bounds repeat the nearest step inside.

    Args:
        shape: The window.
        positions: (B,) anchors, each with ``start <= position < stop``.
        start: (B,) first position the window may touch.
        stop: (B,) one past the last position the window may touch.

    Returns:
        (B, W) positions, all within bounds, and (B, W) whether the record lay within them
        before it was clipped.
    """
    missing = np.maximum(shape.need - (stop - 1 - positions), 0)
    anchors = positions - np.minimum(missing, positions - start)
    wanted = anchors[:, None] + shape.offsets
    clipped = np.clip(wanted, start[:, None], stop[:, None] - 1)
    return clipped, clipped == wanted


def bounds_within(spans: Spans, edges: Integers, positions: Integers) -> tuple[Integers, Integers]:
    """The stretch between two edges that holds each position, cut at the ends of its stream.

    Args:
        spans: The selected steps.
        edges: Sorted positions at which a new stretch begins.
        positions: (B,) positions in range.

    Returns:
        (B,) start and (B,) stop of the half-open stretch.
    """
    stream = np.searchsorted(spans.streams, positions, side="right")
    start, stop = spans.streams[stream - 1], spans.streams[stream]
    if not len(edges):
        return start, stop
    after = np.searchsorted(edges, positions, side="right")
    left = np.where(after > 0, edges[np.maximum(after - 1, 0)], start)
    right = np.where(after < len(edges), edges[np.minimum(after, len(edges) - 1)], stop)
    return np.maximum(start, left), np.minimum(stop, right)


def plan_numpy(
    shape: WindowShape, spans: Spans, edges: Integers, positions: Integers
) -> WindowPlan:
    """The oracle of the compiled kernel: the same plan from plain NumPy, several times slower.

    Raises:
        StepRangeError: A position is negative or not below ``spans.num_steps``.
    """
    check_positions(spans, positions)
    start, stop = bounds_within(spans, edges, positions)
    at, valid = lay_windows(shape, positions, start, stop)
    return WindowPlan(steps=spans.steps_at(at), valid=valid, positions=at)


def check_positions(spans: Spans, positions: Integers) -> None:
    """Raise ``StepRangeError`` unless every position is one of the selected steps'."""
    bad = (positions < 0) | (positions >= spans.num_steps)
    if bad.any():
        raise StepRangeError(
            f"anchors must be positions from 0 to {spans.num_steps - 1}, got "
            f"{int(positions[bad][0])}"
        )
