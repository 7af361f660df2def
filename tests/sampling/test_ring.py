"""Ring: what it accepts, what it refuses, and the seam that no window crosses."""

import numpy as np
import pytest

from expstore.errors import AnchorShapeError, FieldNotFoundError, SchemaError, StepRangeError
from expstore.sampling.ring import Ring
from expstore.sampling.sequence import Sequence


def test_a_full_ring_begins_after_its_newest_row():
    ring = Ring(np.zeros(10), newest=3, is_full=True)
    assert (ring.num_rows, ring.num_live, ring.oldest) == (10, 10, 4)


def test_a_ring_that_was_filled_exactly_begins_at_row_0():
    ring = Ring(np.zeros(10), newest=9, is_full=True)
    assert (ring.num_live, ring.oldest) == (10, 0)


def test_rows_after_the_newest_of_a_ring_that_is_not_full_are_not_live():
    ring = Ring(np.zeros(10), newest=3, is_full=False)
    assert (ring.num_live, ring.oldest) == (4, 0)
    with pytest.raises(StepRangeError, match="row must be from 0 to 3, got 4"):
        Sequence(2).expand(np.array([4]), {}, ring)


@pytest.mark.parametrize("row", [-1, 10])
def test_a_row_outside_of_the_ring_is_refused_instead_of_wrapped(row):
    ring = Ring(np.zeros(10), newest=3, is_full=True)
    with pytest.raises(StepRangeError, match=f"row must be from 0 to 9, got {row}"):
        Sequence(2).expand(np.array([0, row]), {}, ring)


def test_a_lane_that_does_not_exist_is_refused():
    ring = Ring(np.zeros((10, 2)), newest=3, is_full=True)
    with pytest.raises(StepRangeError, match="coordinate 1 of an anchor must be from 0 to 1"):
        Sequence(2).expand(np.array([[0, 2]]), {}, ring)


def test_the_seam_is_not_lost_when_a_ring_is_described_anew():
    flags = np.zeros(10)  # no flags at all: only the newest row says where the seam is
    for _ in range(2):
        ring = Ring(flags.copy(), newest=3, is_full=True)
        index, info = Sequence(4).expand(np.array([2]), {}, ring)
        assert index.tolist() == [2, 3, 3, 3]
        assert info["validity_mask"].tolist() == [True, True, False, False]


def test_an_edited_flag_takes_effect_at_once():
    flags = np.zeros(10, bool)
    ring = Ring({"done": flags}, newest=9, is_full=True)
    unit = Sequence(3, done_key="done")
    assert unit.expand(np.array([4]), {}, ring)[0].tolist() == [4, 5, 6]
    flags[5] = True
    assert unit.expand(np.array([4]), {}, ring)[0].tolist() == [4, 5, 5]


def test_only_rows_within_reach_of_a_window_are_read():
    endless = np.broadcast_to(np.zeros(1, bool), (2**50,))  # reading all of it is impossible
    ring = Ring(endless, newest=7, is_full=True)
    index, _ = Sequence(2, "stop", burn_in=2).expand(np.array([2**49]), {}, ring)
    assert index.tolist() == [2**49 + k for k in (-2, -1, 0, 1)]


@pytest.mark.parametrize("trailing", [(), (1,), (1, 1)])
@pytest.mark.parametrize("lanes", [(), (2,), (2, 3)])
def test_trailing_dimensions_of_size_1_are_accepted(lanes, trailing):
    flags = np.zeros((6, *lanes, *trailing), np.float32)
    flags[(3, *(size - 1 for size in lanes))] = 0.5
    anchor = np.array([[2, *(size - 1 for size in lanes)]])

    index, _ = Sequence(3).expand(anchor, {}, Ring(flags, newest=5, is_full=True))

    assert index[0].tolist() == [2, 3, 3]


def test_a_single_lane_may_or_may_not_be_named_by_the_anchors():
    ring = Ring(np.zeros((6, 1)), newest=5, is_full=True)
    plain, info = Sequence(2).expand(np.array([2]), {}, ring)
    (rows, lanes), lane_info = Sequence(2).expand(np.array([[2, 0]]), {}, ring)
    assert plain.tolist() == rows.tolist() == [2, 3]
    assert lanes.tolist() == [0, 0]
    assert info["anchor_index"].tolist() == [2, 2]
    assert lane_info["anchor_index"].tolist() == [[2, 0], [2, 0]]


def test_anchors_without_lanes_are_refused_where_there_are_lanes():
    ring = Ring(np.zeros((6, 2)), newest=5, is_full=True)
    text = r"Sequence expected multidimensional anchors with shape \[batch, D\]\."
    with pytest.raises(AnchorShapeError, match=text):
        Sequence(2).expand(np.array([2]), {}, ring)


@pytest.mark.parametrize("shape", [(6,), (6, 2, 3)])
def test_anchors_with_another_number_of_coordinates_are_refused(shape):
    text = r"Multidimensional anchors must have shape \[batch, storage\.ndim\]\."
    with pytest.raises(RuntimeError, match=text):
        Sequence(2).expand(np.array([[2, 0]]), {}, Ring(np.zeros(shape), newest=5, is_full=True))


def test_flags_are_found_by_their_key():
    flags = {("next", "done"): np.zeros(4), "stop": np.array([0, 1, 0, 0])}
    ring = Ring(flags, newest=3, is_full=True)
    for key, expected in [(("next", "done"), [1, 2]), ("stop", [1, 1]), (("stop",), [1, 1])]:
        assert Sequence(2, done_key=key).expand(np.array([1]), {}, ring)[0].tolist() == expected


def test_an_unknown_key_is_refused_unless_flags_are_not_read():
    ring = Ring({"done": np.zeros(4)}, newest=3, is_full=True)
    with pytest.raises(KeyError, match="key 'nope' not found in the ring"):
        Sequence(2, done_key="nope").expand(np.array([1]), {}, ring)
    with pytest.raises(FieldNotFoundError):
        Sequence(2, "stop", done_key=("next", "nope")).expand(np.array([1]), {}, ring)
    assert Sequence(2, "include_reset", "nope").expand(np.array([1]), {}, ring)[0].tolist() == [
        1,
        2,
    ]


def test_an_empty_ring_has_no_anchor():
    ring = Ring(np.zeros(4), newest=-1, is_full=False)
    assert Sequence(2).expand(np.empty(0, int), {}, ring)[0].tolist() == []
    with pytest.raises(StepRangeError):
        Sequence(2).expand(np.array([0]), {}, ring)


@pytest.mark.parametrize(
    ("flags", "newest", "is_full", "text"),
    [
        ({}, 0, True, "at least one array of flags"),
        (np.array(1), 0, True, r"shape \(rows, \*lanes\)"),
        ({"a": np.zeros(3), "b": np.zeros(4)}, 0, True, r"as many rows, got \[3, 4\]"),
        (np.zeros(3), 3, True, "newest must be a row from 0 to 2, got 3"),
        (np.zeros(3), -1, True, "newest must be a row from 0 to 2, got -1"),
        (np.zeros(3), -2, False, "newest must be a row from -1 to 2, got -2"),
    ],
)
def test_a_ring_that_cannot_be_is_refused(flags, newest, is_full, text):
    with pytest.raises(SchemaError, match=text):
        Ring(flags, newest=newest, is_full=is_full)
