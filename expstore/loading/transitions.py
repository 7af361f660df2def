"""Transitions: the steps of which it is known what came after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from expstore.loading.rows import column, episodes_of, numbers_of
from expstore.sampling.draw import Draw
from expstore.sampling.uniform import WithoutReplacement
from expstore.spans import Spans
from expstore.storage.store import Store

FLAGS = {"terminals": "terminated", "timeouts": "truncated"}  # D4RL's names, and ours
BLOCK_STEPS = 1 << 20  # that are asked about at a time


class Transitions:
    """The sampler that draws each transition once per epoch.

    Args:
        runs: gives the spans of the transitions among all steps.
        drop_last: as for `WithoutReplacement`.
    """

    def __init__(self, runs: Callable[[Spans], Spans], drop_last: bool = False) -> None:
        self._runs = runs
        self._inner = WithoutReplacement(drop_last)
        self._known: tuple[Spans, Spans] | None = None

    def draw(self, spans: Spans, batch_size: int, seed: int) -> Draw:
        """See `Sampler.draw`."""
        if self._known is None or self._known[0] is not spans:
            self._known = spans, self._runs(spans)
        runs = self._known[1]
        draw = self._inner.draw(runs, batch_size, seed)
        if runs is spans:
            return draw
        return replace(draw, anchors=spans.positions_of(runs.steps_at(draw.anchors)))

    def state_dict(self) -> dict[str, int | str]:
        """See `Sampler.state_dict`."""
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """See `Sampler.load_state_dict`."""
        self._inner.load_state_dict(state)


def left_out_of(store: Store) -> NDArray[np.int64]:
    """(K,) ascending positions of the steps whose next value is not known, nor needed.

    Only the flags of those steps are read, and what is stored of next values.
    """
    found, spans = [np.empty(0, np.int64)], store.spans
    for first in range(0, spans.num_steps, BLOCK_STEPS):
        positions = np.arange(first, min(first + BLOCK_STEPS, spans.num_steps))
        is_known = numbers_of(column(store, "has_next", spans.steps_at(positions)))
        at = positions[~is_known]
        ended = flag_at(store, "terminals", spans.steps_at(at))
        found.append(at[~ended.any(axis=tuple(range(1, ended.ndim)))])
    return np.concatenate(found)


def without(spans: Spans, positions: NDArray[np.int64]) -> Spans:
    """Spans without some positions (K,), ascending.

    >>> spans = Spans.laid_out(start=np.array([0, 10]), length=np.array([5, 3]))
    >>> rest = without(spans, np.array([1, 4, 7]))
    >>> rest.steps_at(np.arange(rest.num_steps)).tolist()
    [0, 2, 3, 10, 11]
    """
    # Each position ends a stretch and begins another one, in the same episode.
    episode = np.sort(np.append(np.arange(spans.num_episodes), spans.episodes_at(positions)))
    begin = np.sort(np.append(spans.first, positions + 1))
    end = np.sort(np.append(spans.first + spans.length, positions))
    kept = end > begin
    start = begin[kept] + (spans.start - spans.first)[episode[kept]]
    return Spans.laid_out(start, (end - begin)[kept])


def flag_at(store: Store, key: str, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A flag by D4RL's name at steps (n,), as recorded.

    A store without it says by the end reasons which last steps had it.
    """
    flag = FLAGS[key]
    if flag in store.fields:
        return np.asarray(numbers_of(column(store, flag, steps)), bool)
    spans, episode = store.spans, episodes_of(store.spans, steps)
    is_last = steps == spans.start[episode] + spans.length[episode] - 1
    reasons = np.asarray(store.episodes["end_reason"])
    return np.asarray(is_last & (reasons[episode] == flag), bool)
