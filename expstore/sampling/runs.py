"""Sets of step numbers as runs: (R, 2) half-open bounds, ascending, with gaps between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expstore.spans import Spans

Runs = NDArray[np.int64]
STREAM_BITS = 40  # in a union, the steps of the k-th store are numbered from k * 2**40 on


def merged(spans: Spans) -> Spans:
    """The same steps in as few episodes as can be: neighbours are joined within each stream.

    >>> spans = Spans.laid_out(start=np.array([0, 3, 9]), length=np.array([3, 4, 1]))
    >>> merged(spans).start.tolist(), merged(spans).length.tolist()
    ([0, 9], [7, 1])
    """
    begins = np.ones(spans.num_episodes, np.bool_)
    begins[1:] = spans.start[1:] != (spans.start + spans.length)[:-1]
    heads = np.searchsorted(spans.first, spans.streams[:-1])
    begins[heads[heads < spans.num_episodes]] = True
    at = np.flatnonzero(begins)
    length = np.add.reduceat(spans.length, at) if len(at) else spans.length
    return Spans(spans.start[at], spans.first[at], length, spans.streams)


def runs_of_streams(held: Spans) -> list[Runs]:
    """The runs of each stream of merged spans."""
    runs = np.stack([held.start, held.start + held.length], axis=1)
    return np.split(runs, np.searchsorted(held.first, held.streams[1:-1]))


def num_steps(runs: Runs) -> int:
    """How many steps the runs hold."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def clipped(runs: Runs, start: int, stop: int) -> Runs:
    """The part from start to stop - 1.

    >>> clipped(np.array([[0, 5], [8, 9]]), 3, 8).tolist()
    [[3, 5]]
    """
    cut = np.clip(runs, start, stop)
    return cut[cut[:, 0] < cut[:, 1]]


def union(one: Runs, other: Runs) -> Runs:
    """The steps of either; runs that touch become one.

    >>> union(np.array([[0, 5], [8, 9]]), np.array([[4, 6]])).tolist()
    [[0, 6], [8, 9]]
    """
    runs = np.concatenate([one, other])
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    stop = np.maximum.accumulate(runs[:, 1])
    is_first, is_last = np.ones((2, len(runs)), np.bool_)
    is_first[1:] = is_last[:-1] = runs[1:, 0] > stop[:-1]
    return np.stack([runs[is_first, 0], stop[is_last]], axis=1)


def holds(runs: Runs, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each step is in one of the runs.

    >>> holds(np.array([[0, 5], [8, 9]]), np.array([4, 5, 8, -1])).tolist()
    [True, False, True, False]
    """
    at = np.searchsorted(runs[:, 0], steps, side="right") - 1
    return (at >= 0) & (steps < np.append(runs[:, 1], 0)[at])
