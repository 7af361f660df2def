"""Every case recorded from the class whose behaviour Sequence promises."""

import json
from pathlib import Path

import numpy as np
import pytest

from expstore.sampling.ring import Ring
from expstore.sampling.sequence import Sequence
from expstore.spans import Spans
from tests.sampling.oracle import Selection

FOLDER = Path(__file__).parent / "conformance"
MASKS = ("validity_mask", "learning_mask")
ENTRIES = (*MASKS, "anchor_index", "sequence_id", "step_in_sequence")
CASES = json.loads((FOLDER / "sequence_cases.json").read_text())["cases"]
TABLE = json.loads((FOLDER / "sequence_table.json").read_text())["cases"]


def key_of(case):
    return tuple(case["done_key"]) if isinstance(case["done_key"], list) else case["done_key"]


def ring_of(case):
    """The case's ring; rows that were never written are flagged, so that reading them shows."""
    flags = np.ones((case["capacity_rows"], *case["lane_shape"]), case["done_dtype"])
    physical = np.array(case["done_physical"])
    flags[: len(physical)] = physical
    flags = flags.reshape(*flags.shape, *case["done_trailing_shape"])
    by_key = flags if case["done_key"] is None else {key_of(case): flags}
    return Ring(by_key, newest=case["newest_row"], is_full=case["is_full"])


def unit_of(case):
    return Sequence(**case["params"], done_key=case["done_key"])


def anchors_of(case):
    anchors = np.array(case["anchors"], np.int64).reshape(-1, case["ndim"])
    return tuple(anchors.T) if case["ndim"] > 1 else anchors[:, 0]


def info_of(case):
    weight = np.arange(1, len(case["anchors"]) + 1, dtype=np.float32)
    return {"priority_weight": weight, "scalar_meta": 3.0}


def flat(index):
    if isinstance(index, tuple):
        return np.stack([np.asarray(axis) for axis in index], axis=1).tolist()
    return index.tolist()


def as_recorded(key, values):
    return np.asarray(values).astype(int).tolist() if key in MASKS else np.asarray(values).tolist()


def check(case, index, info):
    expected = case["expected"]
    assert isinstance(index, tuple) == expected["index_is_tuple"], case["id"]
    assert flat(index) == flat(info["index"]) == expected["index"], case["id"]
    for key in (*ENTRIES, "priority_weight"):
        assert as_recorded(key, info[key]) == expected[key], (case["id"], key)
        dtype = str(info[key].dtype).removeprefix("torch.")
        assert [dtype, list(info[key].shape)] == expected["dtypes"][key], (case["id"], key)
    assert info["scalar_meta"] == expected["scalar_meta"], case["id"]


def test_the_recorded_cases_are_all_there():
    assert (len(CASES), len(TABLE)) == (2000, 64)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_ring_of_arrays_passes_every_recorded_case(ndim):
    for case in (case for case in CASES if case["ndim"] == ndim):
        index, info = unit_of(case).expand(anchors_of(case), info_of(case), ring_of(case))
        check(case, index, info)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_ring_of_tensors_passes_every_recorded_case(ndim):
    torch = pytest.importorskip("torch")

    def tensors(value):
        if isinstance(value, tuple):
            return tuple(torch.tensor(axis) for axis in value)
        if isinstance(value, dict):
            return {key: torch.tensor(entry) for key, entry in value.items()}
        return torch.tensor(value)

    for case in (case for case in CASES if case["ndim"] == ndim):
        arrays = ring_of(case)
        ring = Ring(tensors(arrays.flags), newest=arrays.newest, is_full=arrays.is_full)
        info = {**info_of(case), "priority_weight": tensors(info_of(case)["priority_weight"])}
        check(case, *unit_of(case).expand(tensors(anchors_of(case)), info, ring))


def test_lane_anchors_may_come_as_rows_of_coordinates():
    for case in (case for case in CASES if case["ndim"] > 1):
        anchors = np.array(case["anchors"])
        check(case, *unit_of(case).expand(anchors, info_of(case), ring_of(case)))


def test_a_store_of_the_same_records_passes_every_recorded_case():
    """Step numbers are the recorded record ids, so the windows must hold the same records."""
    for case in (case for case in CASES if case["ndim"] == 1):
        records = np.sort(case["live_record_ids"])
        rows = np.argsort(case["live_record_ids"])
        ends = np.array(case["done_physical"], bool)[rows]
        ends[-1] = True
        firsts = np.flatnonzero(np.concatenate([[True], ends[:-1]]))
        length = np.diff([*firsts, len(records)])
        spans = Spans.laid_out(records[firsts], length.astype(np.int64))
        store = Selection(spans, {key_of(case): np.flatnonzero(ends)})
        anchors = np.array(case["anchor_records"])

        index, info = unit_of(case).expand(anchors, {}, store)

        expected = case["expected"]
        assert index.tolist() == expected["records"], case["id"]
        for key in (*MASKS, "sequence_id", "step_in_sequence"):
            assert as_recorded(key, info[key]) == expected[key], (case["id"], key)


def table_ring(name):
    def ends(num_rows, *rows):
        flags = np.zeros(num_rows, bool)
        flags[list(rows)] = True
        return flags

    lanes = np.stack([ends(8, 4, 7), ends(8, 6, 7)], axis=1)
    flags, newest, is_full = {
        "A": (ends(10, 5, 9), 9, True),
        "B": (ends(10), 3, True),
        "C": (ends(10, 6, 1), 3, True),
        "D": (ends(20, 5), 9, False),
        "E": (ends(10, 1, 9), 9, True),
        "F": (ends(6, *range(6)), 5, True),
        "G": (ends(10), 4, False),
        "H": (lanes, 7, True),
        "I": (np.zeros((6, 2), bool), 1, True),
        "J": (ends(1), 0, True),
    }[name]
    return Ring(flags, newest=newest, is_full=is_full)


@pytest.mark.parametrize(
    "case", TABLE, ids=[f"{n}: {case['what']}" for n, case in enumerate(TABLE, 1)]
)
def test_the_table_of_named_cases(case):
    unit = Sequence(**case["params"])
    index, info = unit.expand(np.array(case["anchors"]), {}, table_ring(case["ring"]))
    assert flat(index) == case["index"]
    for key in ENTRIES:
        assert as_recorded(key, info[key]) == case[key]
