"""The arithmetic between steps, positions and episodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import StepRangeError
from expstore.spans import Spans

GAPS_AND_LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=8)


def spans_of(gaps_and_lengths: list[tuple[int, int]], base: int = 0) -> tuple[Spans, list[int]]:
    """Episodes with unselected steps between them, and every selected step in order."""
    starts, lengths, steps, at = [], [], [], base
    for gap, length in gaps_and_lengths:
        starts.append(at + gap)
        lengths.append(length)
        steps += range(at + gap, at + gap + length)
        at += gap + length
    return Spans.laid_out(np.array(starts, np.int64), np.array(lengths, np.int64)), steps


@given(GAPS_AND_LENGTHS)
def test_positions_count_the_selected_steps_without_holes(parts):
    spans, steps = spans_of(parts)
    assert spans.num_steps == len(steps)
    assert spans.num_episodes == len(parts)
    assert spans.steps_at(np.arange(len(steps))).tolist() == steps
    assert spans.positions_of(np.array(steps, np.int64)).tolist() == list(range(len(steps)))


@given(GAPS_AND_LENGTHS, st.integers(-3, 60))
def test_a_step_outside_of_the_selection_has_no_position(parts, step):
    spans, steps = spans_of(parts)
    if step in steps:
        assert spans.positions_of(np.array([step])).tolist() == [steps.index(step)]
    else:
        with pytest.raises(StepRangeError):
            spans.positions_of(np.array([step]))


@given(GAPS_AND_LENGTHS, GAPS_AND_LENGTHS, GAPS_AND_LENGTHS)
def test_a_concatenation_keeps_the_parts_as_streams_of_their_own(one, two, three):
    laid = [spans_of(parts, base=k << 40) for k, parts in enumerate((one, two, three))]
    together = Spans.concatenate([spans for spans, _ in laid])
    every = [step for _, steps in laid for step in steps]
    assert together.steps_at(np.arange(len(every))).tolist() == every
    sizes = [len(steps) for _, steps in laid]
    assert together.streams.tolist() == [0, sizes[0], sizes[0] + sizes[1], sum(sizes)]


def test_episodes_are_found_by_position():
    spans = Spans.laid_out(np.array([10, 20]), np.array([2, 3]))
    assert spans.episodes_at(np.arange(5)).tolist() == [0, 0, 1, 1, 1]


def test_positions_keep_the_shape_of_the_steps():
    spans = Spans.laid_out(np.array([10, 20]), np.array([2, 3]))
    assert spans.positions_of(np.array([[20, 10], [11, 22]])).tolist() == [[2, 0], [1, 4]]
    assert int(spans.positions_of(np.array(21))) == 3


def test_no_steps_at_all_is_no_error_in_an_empty_selection():
    spans = Spans.laid_out(np.empty(0, np.int64), np.empty(0, np.int64))
    assert spans.positions_of(np.empty((0, 4), np.int64)).shape == (0, 4)


def test_the_error_names_the_first_step_that_is_not_there():
    spans = Spans.laid_out(np.array([10, 20]), np.array([2, 3]))
    with pytest.raises(StepRangeError, match=r"step 12 is not among the 5 steps .* last 22"):
        spans.positions_of(np.array([10, 12, 13]))


def test_the_error_of_an_empty_selection_says_what_to_do():
    spans = Spans.laid_out(np.empty(0, np.int64), np.empty(0, np.int64))
    with pytest.raises(StepRangeError, match="holds no steps; append an episode and commit"):
        spans.positions_of(np.array([0]))
