"""Priorities of records become one priority per anchor."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import SchemaError
from expstore.sampling.priority import reduce_priorities

FILE = Path(__file__).parent / "conformance" / "sequence_priority_cases.json"
CASES = json.loads(FILE.read_text())["cases"]
RECORDED = [case for case in CASES if "error" not in case]
FAILED = [case for case in CASES if "error" in case]


def test_the_recorded_cases_are_all_there():
    assert (len(RECORDED), len(FAILED)) == (269, 31)


@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median"])
def test_every_recorded_case_is_reduced_alike(reduction):
    for case in (case for case in RECORDED if case["reduction"] == reduction):
        anchors, reduced = reduce_priorities(
            np.array(case["anchor_index"]),
            np.array(case["td_error"], np.float32),
            np.array(case["validity_mask"], bool),
            reduction,
        )
        assert anchors.tolist() == case["unique_anchors"], case["id"]
        assert reduced.dtype == np.float32, case["id"]
        assert reduced.tolist() == pytest.approx(case["reduced"], rel=1e-6), case["id"]


def test_only_the_anchors_change_in_the_recorded_trees():
    for case in RECORDED:
        anchors, reduced = reduce_priorities(
            np.array(case["anchor_index"]),
            np.array(case["td_error"], np.float32),
            np.array(case["validity_mask"], bool),
            case["reduction"],
        )
        tree = np.array(case["tree_before"])
        leaf = np.ravel_multi_index(anchors.reshape(len(anchors), -1).T, case["shape"])
        tree[leaf] = (reduced.astype(float) + case["eps"]) ** case["alpha"]
        assert tree.tolist() == pytest.approx(case["tree_after"], rel=1e-5), case["id"]


@pytest.mark.parametrize("case", FAILED, ids=[str(case["id"]) for case in FAILED])
def test_coordinates_with_several_priorities_per_record_are_no_error_here(case):
    rng = np.random.default_rng(case["id"])
    num_records = case["td_shape"][0]
    anchor_index = rng.integers(0, 3, (num_records, case["ndim"]))
    priority = rng.random(case["td_shape"])

    anchors, reduced = reduce_priorities(anchor_index, priority, np.ones(num_records, bool), "mean")

    expected: dict[tuple, float] = {}
    for anchor, values in zip(anchor_index.tolist(), priority, strict=True):
        key = tuple(anchor)
        expected[key] = max(expected.get(key, 0.0), values.mean())
    assert [tuple(anchor) for anchor in anchors.tolist()] == sorted(expected)
    assert reduced.tolist() == pytest.approx([expected[key] for key in sorted(expected)])


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(0, 9, width=32), st.booleans()),
        max_size=30,
    ),
    st.booleans(),
)
def test_the_largest_valid_priority_of_every_anchor_wins(records, has_lanes):
    rows, lanes, priority, valid = (
        (np.array(column) for column in zip(*records, strict=True))
        if (records)
        else (np.empty(0, int), np.empty(0, int), np.empty(0), np.empty(0, bool))
    )
    index = np.stack([rows, lanes], axis=1) if has_lanes else rows

    anchors, reduced = reduce_priorities(index, priority, valid)

    expected: dict[object, float] = {}
    for row, lane, value, is_valid in records:
        if is_valid:
            key = (row, lane) if has_lanes else row
            expected[key] = max(expected.get(key, 0.0), value)
    found = [tuple(anchor) for anchor in anchors.tolist()] if has_lanes else anchors.tolist()
    assert dict(zip(found, reduced.tolist(), strict=True)) == expected
    assert found == sorted(expected)


def test_windows_may_come_as_two_dimensions():
    anchors, reduced = reduce_priorities(
        np.array([[7, 7], [3, 3], [7, 7]]),
        np.array([[1.0, 9.0], [2.0, 3.0], [4.0, 0.0]]),
        np.array([[True, False], [True, True], [True, True]]),
    )
    assert anchors.tolist() == [3, 7]
    assert reduced.tolist() == [3.0, 4.0]


def test_not_a_number_is_not_hidden_by_a_larger_priority():
    for priority in ([[1.0], [np.nan]], [[np.nan], [1.0]]):
        for reduction in ("max", "min", "mean", "median"):
            _, reduced = reduce_priorities(
                np.array([1, 1]), np.array(priority), np.ones(2, bool), reduction
            )
            assert np.isnan(reduced).all()
    _, reduced = reduce_priorities(
        np.array([1]), np.array([[1.0, np.nan, 2.0]]), np.ones(1, bool), "median"
    )
    assert np.isnan(reduced).all()


def test_an_anchor_without_a_valid_record_is_left_out():
    anchors, reduced = reduce_priorities(np.array([1, 2]), np.ones(2), np.array([False, True]))
    assert (anchors.tolist(), reduced.tolist()) == ([2], [1.0])
    anchors, reduced = reduce_priorities(np.array([1]), np.ones(1), np.array([False]))
    assert (anchors.tolist(), reduced.tolist()) == ([], [])


@pytest.mark.parametrize(
    ("anchor_index", "priority", "reduction", "text"),
    [
        (np.ones(3, int), np.ones(2), "max", r"anchor_index must have shape \(2,\)"),
        (np.ones((2, 1, 1), int), np.ones(2), "max", r"anchor_index must have shape \(2,\)"),
        (np.ones(2, int), np.ones(3), "max", r"must begin with the records' shape \(2,\), got"),
        (np.ones(2, int), np.ones((2, 0)), "max", r"at least one priority, got \(2, 0\)"),
        (np.ones(2, int), np.ones(2), "sum", "reduction must be one of .*, got 'sum'"),
    ],
)
def test_what_does_not_fit_is_refused(anchor_index, priority, reduction, text):
    with pytest.raises(SchemaError, match=text):
        reduce_priorities(anchor_index, priority, np.ones(2, bool), reduction)
