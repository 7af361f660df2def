"""Rings, stores, views and unions give the windows of one slow and obvious rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import FieldNotFoundError, StepRangeError
from expstore.sampling.sequence import Sequence
from expstore.sampling.window import plan_numpy
from expstore.spans import Spans
from tests.sampling.oracle import ENDS, Recording, any_units, recordings, selection_of

every_recording = st.one_of(
    recordings(),
    recordings(has_gaps=True),
    recordings(num_streams=3),
    recordings(num_streams=2, has_gaps=True),
)


def slow(recording: Recording, unit: Sequence, anchors: list[int]) -> tuple[list, list]:
    windows = [recording.slow_window(anchor, unit) for anchor in anchors]
    return [positions for positions, _ in windows], [valid for _, valid in windows]


@given(every_recording, any_units)
def test_a_plan_on_a_store_follows_the_rule_for_every_anchor(recording, unit):
    store = selection_of(recording)
    anchors = np.arange(store.spans.num_steps)
    boundaries = unit.boundaries_in(store)

    plan = unit.plan(store.spans, anchors, boundaries)

    positions, valid = slow(recording, unit, list(anchors))
    assert plan.positions.tolist() == positions
    assert plan.valid.tolist() == valid
    assert plan.steps.tolist() == np.array(recording.steps)[np.array(positions)].tolist()


@given(every_recording, any_units, st.data())
def test_the_compiled_plan_equals_the_numpy_plan(recording, unit, data):
    store = selection_of(recording)
    spans = store.spans
    position = st.integers(0, spans.num_steps - 1)
    anchors = np.array(data.draw(st.lists(position, max_size=9)), np.int64)
    edges, boundaries = spans.first, None
    if unit.done_key in ENDS:
        boundaries = store.ends[unit.done_key]
        edges = boundaries + 1
    if unit.done_key is None or unit.episode_boundary == "include_reset":
        edges = spans.streams

    compiled = unit.plan(spans, anchors, boundaries)
    plain = plan_numpy(unit.shape, spans, edges, anchors)

    assert np.array_equal(compiled.steps, plain.steps)
    assert np.array_equal(compiled.valid, plain.valid)
    assert np.array_equal(compiled.positions, plain.positions)
    assert compiled.steps.dtype == plain.steps.dtype == np.int64
    assert compiled.valid.dtype == plain.valid.dtype == np.bool_


@given(every_recording, any_units)
def test_expanding_steps_of_a_store_follows_the_rule(recording, unit):
    anchors = np.array(recording.steps)

    index, info = unit.expand(anchors, {}, selection_of(recording))

    positions, valid = slow(recording, unit, list(range(len(anchors))))
    assert index.tolist() == anchors[np.array(positions)].ravel().tolist()
    assert info["validity_mask"].tolist() == np.array(valid).ravel().tolist()
    assert info["anchor_index"].tolist() == np.repeat(anchors, unit.window).tolist()


@given(recordings(), any_units, st.integers(0, 3), st.integers(0, 99))
def test_a_ring_follows_the_rule_wherever_it_wraps(recording, unit, num_free, oldest):
    num_live = len(recording.steps)
    oldest = 0 if num_free else oldest % num_live
    rows = (np.arange(num_live) + oldest) % num_live

    index, info = unit.expand(rows, {}, recording.ring(num_free, oldest))

    positions, valid = slow(recording, unit, list(range(num_live)))
    assert index.tolist() == rows[np.array(positions)].ravel().tolist()
    assert info["validity_mask"].tolist() == np.array(valid).ravel().tolist()


@given(every_recording, any_units)
def test_every_window_has_a_valid_first_learning_record_and_readable_padding(recording, unit):
    store = selection_of(recording)
    boundaries = unit.boundaries_in(store)

    plan = unit.plan(store.spans, np.arange(store.spans.num_steps), boundaries)

    assert plan.valid[:, unit.burn_in].all()
    assert np.isin(plan.steps, recording.steps).all()


@given(recordings(num_streams=3), any_units)
def test_windows_never_leave_their_store_of_a_union(recording, unit):
    store = selection_of(recording)
    boundaries = unit.boundaries_in(store)

    plan = unit.plan(store.spans, np.arange(store.spans.num_steps), boundaries)

    assert (plan.steps >> 40 == np.array(recording.stream)[:, None]).all()


def test_windows_run_along_the_selected_steps_of_a_view_when_resets_are_included():
    view = Spans.laid_out(start=np.array([0, 10]), length=np.array([3, 4]))

    plan = Sequence(4, "include_reset", burn_in=1).plan(view, np.array([2]))

    assert plan.steps.tolist() == [[1, 2, 10, 11, 12]]
    assert plan.valid.all()


def test_an_empty_store_of_a_union_has_no_part_in_any_window():
    none = Spans.laid_out(np.empty(0, np.int64), np.empty(0, np.int64))
    one = Spans.laid_out(np.array([0]), np.array([3]))
    other = Spans.laid_out(np.array([2**40]), np.array([2]))
    union = Spans.concatenate([none, one, none, other, none])

    plan = Sequence(3, done_key=None).plan(union, np.array([1, 3]))

    assert plan.steps.tolist() == [[1, 2, 2], [2**40, 2**40 + 1, 2**40 + 1]]


@pytest.mark.parametrize("anchor", [-1, 7])
def test_a_position_outside_of_the_store_is_refused(anchor):
    spans = Spans.laid_out(np.array([5]), np.array([7]))
    with pytest.raises(StepRangeError, match=f"positions from 0 to 6, got {anchor}"):
        Sequence(2).plan(spans, np.array([0, anchor]))
    with pytest.raises(StepRangeError, match=f"positions from 0 to 6, got {anchor}"):
        plan_numpy(Sequence(2).shape, spans, spans.first, np.array([0, anchor]))


def test_a_field_that_ends_episodes_must_come_with_its_boundaries():
    spans = Spans.laid_out(np.array([0]), np.array([7]))
    with pytest.raises(FieldNotFoundError, match="the boundaries of done_key 'life_lost'"):
        Sequence(2, done_key="life_lost").plan(spans, np.array([0]))


def test_a_plan_of_no_anchors_is_empty():
    spans = Spans.laid_out(np.array([0]), np.array([7]))
    plan = Sequence(3).plan(spans, np.empty(0, np.int64))
    assert plan.steps.shape == plan.valid.shape == plan.positions.shape == (0, 3)
