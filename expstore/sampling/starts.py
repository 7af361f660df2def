"""Full starts: the anchors whose whole window lies within what bounds it."""

from __future__ import annotations

import numpy as np

from expstore.errors import StepRangeError
from expstore.sampling.window import Integers, WindowShape
from expstore.spans import Spans


def full_starts(spans: Spans, shape: WindowShape, edges: Integers | None = None) -> Spans:
    """The steps at which a window is whole, neither padded nor slid back.

    What comes back are spans like any other: every sampler draws from them as it is, and
    ``steps_at`` gives the step numbers of the anchors. Episodes too short for a window vanish.
    Costs time proportional to the number of episodes, so keep it for as long as the spans.

    Args:
        spans: The selected steps.
        shape: The window.
        edges: Sorted positions at which a stretch begins that no window leaves; the episodes'
            first positions if not given. The ends of the streams bound in any case.

    Raises:
        StepRangeError: There are steps, but no stretch is long enough.

    >>> spans = Spans.laid_out(start=np.array([0, 5, 7]), length=np.array([5, 2, 4]))
    >>> window = WindowShape(num_records=4, burn_in=1, dilation=1, need=0)
    >>> starts = full_starts(spans, window)
    >>> starts.steps_at(np.arange(starts.num_steps)).tolist()
    [1, 2, 8]
    """
    before = shape.burn_in * shape.dilation
    after = (shape.num_records - 1 - shape.burn_in) * shape.dilation
    low, high, longest = _between(spans, spans.first if edges is None else edges, before, after)
    if not len(low) and spans.num_steps:
        raise StepRangeError(
            f"no window can be whole: it spans {before + after + 1} steps, the longest stretch "
            f"has {longest}; shorten the window, or draw from every step"
        )
    return _narrowed(spans, low, high)


def _between(
    spans: Spans, edges: Integers, before: int, after: int
) -> tuple[Integers, Integers, int]:
    """First and one past the last position of each stretch's starts, and the longest stretch."""
    inner = edges[(edges > 0) & (edges < spans.num_steps)]
    cuts = np.union1d(spans.streams, inner)
    low, high = cuts[:-1] + before, cuts[1:] - after
    stays = low < high
    return low[stays], high[stays], int(np.diff(cuts).max(initial=0))


def _narrowed(spans: Spans, low: Integers, high: Integers) -> Spans:
    """The positions of the stretches [low, high), cut where an episode begins."""
    stretch = np.searchsorted(low, spans.first, side="right") - 1
    is_inside = stretch >= 0
    is_inside[is_inside] = spans.first[is_inside] < high[stretch[is_inside]]
    begin = np.union1d(low, spans.first[is_inside])
    stop = np.minimum(high[np.searchsorted(low, begin, side="right") - 1],
                      np.append(begin[1:], spans.num_steps))  # fmt: skip
    length = stop - begin
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    streams = ends[np.searchsorted(begin, spans.streams)]
    return Spans(spans.steps_at(begin), ends[:-1], length, streams)
