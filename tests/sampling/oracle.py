"""The window rule as slowly and obviously as it can be said, and things to try it on."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from expstore.sampling.ring import Ring
from expstore.sampling.sequence import Sequence
from expstore.spans import Spans

ENDS = ("life_lost", ("next", "life_lost"))  # a field that is no episode end to a store
DONE_KEYS = (("next", "done"), "done", None, *ENDS)


@dataclass
class Recording:
    """Steps one after the other: what a store, a view, a union and a ring have in common."""

    is_episode_end: list[bool]
    is_flagged: list[bool]  # the field life_lost
    stream: list[int]  # which independent recording each step belongs to
    steps: list[int]  # the step numbers, ascending

    def slow_window(self, anchor: int, unit: Sequence) -> tuple[list[int], list[bool]]:
        """Positions and validity of one window, walking one step at a time."""
        if unit.episode_boundary == "include_reset" or unit.done_key is None:
            is_end = [False] * len(self.steps)
        else:
            is_end = self.is_flagged if unit.done_key in ENDS else self.is_episode_end

        def may_follow(position: int) -> bool:
            inside = 0 < position < len(self.steps)
            return (
                inside
                and self.stream[position] == self.stream[position - 1]
                and not is_end[position - 1]
            )

        low = high = anchor
        while may_follow(low):
            low -= 1
        while may_follow(high + 1):
            high += 1
        if unit.episode_boundary == "stop":
            while (
                anchor > low and anchor + (unit.length + unit.bootstrap - 1) * unit.dilation > high
            ):
                anchor -= 1
        positions, valid = [], []
        for record in range(unit.burn_in + unit.length + unit.bootstrap):
            wanted = anchor + (record - unit.burn_in) * unit.dilation
            positions.append(min(max(wanted, low), high))
            valid.append(low <= wanted <= high)
        return positions, valid

    def spans(self) -> Spans:
        """The same steps as a store's episodes, one part per stream."""
        parts = []
        for stream in sorted(set(self.stream)):
            members = [i for i in range(len(self.steps)) if self.stream[i] == stream]
            firsts = [i for i in members if i == members[0] or self.is_episode_end[i - 1]]
            length = np.diff([*firsts, members[-1] + 1]).astype(np.int64)
            start = np.array([self.steps[i] for i in firsts], np.int64)
            parts.append(Spans.laid_out(start, length))
        return Spans.concatenate(parts)

    def ring(self, num_free: int, oldest: int) -> Ring:
        """The same steps in a ring; free rows are flagged, so that reading them would show."""
        if num_free:
            flags = {name: np.array([*ends, *[True] * num_free]) for name, ends in self._fields()}
            return Ring(flags, newest=len(self.steps) - 1, is_full=False)
        flags = {name: np.roll(ends, oldest) for name, ends in self._fields()}
        return Ring(flags, newest=(oldest - 1) % len(self.steps), is_full=True)

    def _fields(self) -> list[tuple[Any, list[bool]]]:
        is_flagged = {key: key in ENDS for key in DONE_KEYS if key is not None}
        return [(k, self.is_flagged if f else self.is_episode_end) for k, f in is_flagged.items()]


@dataclass
class Selection:
    """What a unit sees of a store."""

    spans: Spans
    ends: dict[Any, NDArray[np.int64]] = field(default_factory=dict)

    def boundaries(self, done_key: Any) -> NDArray[np.int64]:
        return self.ends[done_key]


def selection_of(recording: Recording) -> Selection:
    ends = np.flatnonzero(recording.is_flagged)
    return Selection(recording.spans(), dict.fromkeys(ENDS, ends))


@st.composite
def recordings(draw: st.DrawFn, num_streams: int = 1, has_gaps: bool = False) -> Recording:
    """One or several streams of episodes; with gaps, steps between episodes are left out."""
    recording = Recording([], [], [], [])
    for stream in range(num_streams):
        step = stream * 2**40 + draw(st.integers(0, 5))
        for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)):
            recording.is_episode_end += [False] * (length - 1) + [True]
            recording.is_flagged += draw(st.lists(st.booleans(), min_size=length, max_size=length))
            recording.stream += [stream] * length
            recording.steps += range(step, step + length)
            step += length + (draw(st.integers(0, 3)) if has_gaps else 0)
    return recording


def units(done_key: st.SearchStrategy[Any]) -> st.SearchStrategy[Sequence]:
    return st.builds(
        Sequence,
        length=st.integers(1, 8),
        episode_boundary=st.sampled_from(["pad", "stop", "include_reset"]),
        done_key=done_key,
        burn_in=st.integers(0, 6),
        bootstrap=st.integers(0, 4),
        dilation=st.integers(1, 4),
    )


any_units = units(st.sampled_from(DONE_KEYS))
