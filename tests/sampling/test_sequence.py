"""Sequence: its arguments, and what expand takes, gives and refuses."""

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest

from expstore.errors import AnchorShapeError, FieldNotFoundError, SchemaError, StepRangeError
from expstore.sampling.ring import Ring
from expstore.sampling.sequence import Sequence, SequenceConfig
from expstore.spans import Spans
from tests.sampling.oracle import Selection

STORE = Selection(Spans.laid_out(np.array([100, 105]), np.array([5, 5])))  # steps 100 to 109
RING = Ring(np.array([0, 0, 0, 0, 1, 0, 0, 0, 0, 1]), newest=9, is_full=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"length": 0}, "length must be strictly positive, got 0."),
        ({"length": -3}, "length must be strictly positive, got -3."),
        ({"length": 1, "episode_boundary": "x"}, "Unknown episode_boundary x"),
        ({"length": 1, "episode_boundary": None}, "Unknown episode_boundary None"),
        ({"length": 1, "burn_in": -1}, "burn_in must be non-negative, got -1."),
        ({"length": 1, "bootstrap": -2}, "bootstrap must be non-negative, got -2."),
        ({"length": 1, "dilation": 0}, "dilation must be strictly positive, got 0."),
    ],
)
def test_a_bad_argument_is_refused_with_the_known_text(arguments, text):
    with pytest.raises(SchemaError) as caught:
        Sequence(**arguments)
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)


def test_arguments_are_checked_in_order():
    bad = {"length": 0, "episode_boundary": "x", "burn_in": -1, "bootstrap": -1, "dilation": 0}
    complaints = []
    good = {"length": 1, "episode_boundary": "pad", "burn_in": 0, "bootstrap": 0, "dilation": 1}
    for name in good:
        with pytest.raises(ValueError, match=name) as caught:
            Sequence(**bad)
        complaints.append(str(caught.value).split()[0])
        bad[name] = good[name]
    assert complaints == ["length", "Unknown", "burn_in", "bootstrap", "dilation"]


@pytest.mark.parametrize("value", [True, 2.5, "a", None, [3]])
@pytest.mark.parametrize("name", ["length", "burn_in", "bootstrap", "dilation"])
def test_a_number_of_records_must_be_an_int(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an int, got"):
        Sequence(**{"length": 1, name: value})


def test_a_numpy_integer_is_an_int():
    assert Sequence(np.int32(3)) == Sequence(3)
    assert type(Sequence(np.int32(3)).length) is int


def test_length_is_required():
    with pytest.raises(TypeError, match="length"):
        Sequence()


def test_a_list_as_done_key_becomes_a_tuple():
    assert Sequence(1, done_key=["next", "done"]).done_key == ("next", "done")
    assert hash(Sequence(1, done_key=["next", "done"])) == hash(Sequence(1))


@pytest.mark.parametrize("key", [3, (), ("next", 3), [None]])
def test_a_done_key_that_is_no_key_is_refused(key):
    with pytest.raises(TypeError, match="done_key must be a string, a tuple of strings or None"):
        Sequence(1, done_key=key)


def test_a_window_that_leaves_64_bits_is_refused():
    with pytest.raises(SchemaError, match=r"a window may span 2\*\*61 steps"):
        Sequence(2**31, dilation=2**31)


def test_the_unit_knows_its_window_and_offsets():
    unit = Sequence(2, burn_in=1, bootstrap=1, dilation=3)
    assert unit.window == 4
    assert unit.offsets.tolist() == [-3, 0, 3, 6]
    assert unit.offsets.dtype == np.int64


def test_a_used_unit_still_equals_hashes_and_pickles():
    unit = Sequence(3)
    unit.expand(np.array([2]), {}, RING)
    assert pickle.loads(pickle.dumps(unit)) == unit == Sequence(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        unit.length = 4


def test_the_config_holds_the_arguments_for_hydra():
    config = dataclasses.asdict(SequenceConfig(length=4, done_key=["next", "done"]))
    assert config.pop("_target_") == "expstore.Sequence"
    assert Sequence(**config) == Sequence(4)


@pytest.mark.parametrize(("storage", "shift"), [(STORE, 100), (RING, 0)])
def test_expand_gives_every_entry_flat_with_its_dtype(storage, shift):
    anchors = np.array([3, 5], np.int32) + np.int32(shift)

    index, info = Sequence(2, burn_in=1, bootstrap=1).expand(anchors, {}, storage)

    assert (index - shift).tolist() == [2, 3, 4, 4, 5, 5, 6, 7]
    assert info["index"] is index
    assert (info["anchor_index"] - shift).tolist() == [3, 3, 3, 3, 5, 5, 5, 5]
    assert info["validity_mask"].tolist() == [True, True, True, False, False, True, True, True]
    assert info["learning_mask"].tolist() == [False, True, True, False] * 2
    assert info["sequence_id"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert info["step_in_sequence"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert {key: str(value.dtype) for key, value in info.items()} == {
        "index": "int64",
        "anchor_index": "int32",
        "validity_mask": "bool",
        "learning_mask": "bool",
        "sequence_id": "int64",
        "step_in_sequence": "int64",
    }


@pytest.mark.parametrize("num_anchors", [2, 2**15])
def test_what_expand_gives_is_the_callers_to_change(num_anchors):
    anchors, unit = np.full(num_anchors, 101), Sequence(3, burn_in=1)
    index, info = unit.expand(anchors, {}, STORE)
    expected = {key: value.copy() for key, value in info.items()}
    for value in info.values():
        value[:] = 0
    _, again = unit.expand(anchors, {}, STORE)
    assert anchors.tolist() == [101] * num_anchors
    assert index.sum() == 0
    for key, value in again.items():
        assert value.tolist() == expected[key].tolist(), key


def test_the_anchor_reported_is_the_one_before_the_window_slid_back():
    index, info = Sequence(4, "stop").expand(np.array([103]), {}, STORE)
    assert index.tolist() == [101, 102, 103, 104]
    assert info["anchor_index"].tolist() == [103] * 4


def test_entries_of_info_are_repeated_numbers_passed_through_and_the_input_left_alone():
    number, zero_dim = 3.5, np.array(2)
    info = {
        "weight": np.array([1.0, 2.0], np.float32),
        "rows": [[1, 2], [3, 4]],
        "number": number,
        "zero_dim": zero_dim,
        "index": np.array([2, 7]),
    }
    before = dict(info)

    _, out = Sequence(2).expand(np.array([2, 7]), info, RING)

    assert info.keys() == before.keys()
    assert all(info[key] is before[key] for key in before)
    assert out["weight"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert out["weight"].dtype == np.float32
    assert out["rows"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert out["number"] is number
    assert out["zero_dim"] is zero_dim
    assert out["index"].tolist() == [2, 3, 7, 8]


@pytest.mark.parametrize("value", ["text", None, ["a", "b"], {"a": 1}])
def test_an_entry_of_info_that_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="info entry 'name' must be a number or an array"):
        Sequence(2).expand(np.array([2]), {"name": value}, RING)


@pytest.mark.parametrize("storage", [STORE, RING])
def test_no_anchors_give_empty_entries(storage):
    index, info = Sequence(3).expand([], {"weight": np.ones(0, np.float32)}, storage)
    assert index.shape == info["weight"].shape == info["validity_mask"].shape == (0,)
    assert info["anchor_index"].dtype == np.int64


@pytest.mark.parametrize("anchor", [-1, 99, 110])
def test_a_step_that_the_store_does_not_hold_is_refused(anchor):
    with pytest.raises(StepRangeError, match=f"step {anchor} is not among the 10 steps"):
        Sequence(2).expand(np.array([101, anchor]), {}, STORE)


def test_a_step_of_an_episode_outside_of_the_view_is_refused():
    view = Selection(Spans.laid_out(np.array([0, 10]), np.array([3, 4])))
    with pytest.raises(StepRangeError, match="step 3 is not among the 7 steps"):
        Sequence(2).expand(np.array([3]), {}, view)


def test_an_empty_store_refuses_every_anchor():
    empty = Selection(Spans.laid_out(np.empty(0, np.int64), np.empty(0, np.int64)))
    with pytest.raises(StepRangeError, match="holds no steps"):
        Sequence(2).expand(np.array([0]), {}, empty)


def test_anchors_that_are_no_integers_are_refused():
    for anchors in (np.array([1.0]), np.array([True]), ["1"]):
        with pytest.raises(TypeError, match="anchors must be integers"):
            Sequence(2).expand(anchors, {}, RING)


@pytest.mark.parametrize("anchors", [np.array(3), np.zeros((1, 1, 1), int), ([1, 2], [0]), ()])
def test_anchors_of_another_shape_are_refused(anchors):
    text = r"Sequence expected multidimensional anchors with shape \[batch, D\]\."
    with pytest.raises(RuntimeError, match=text) as caught:
        Sequence(2).expand(anchors, {}, RING)
    assert isinstance(caught.value, AnchorShapeError)


def test_a_store_refuses_anchors_with_lanes():
    with pytest.raises(AnchorShapeError, match="D = 2 for a store"):
        Sequence(2).expand(np.array([[101, 0]]), {}, STORE)


def test_a_tuple_of_one_array_stays_a_tuple():
    index, info = Sequence(2).expand((np.array([101]),), {}, STORE)
    assert isinstance(index, tuple)
    assert [axis.tolist() for axis in index] == [[101, 102]]
    assert info["anchor_index"].tolist() == [101, 101]


def test_any_other_storage_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"got list; wrap .* TensorStorage of a TensorDict"):
        Sequence(2).expand(np.array([1]), {}, [1, 2, 3])


def test_a_storage_may_offer_its_spans_as_a_method():
    class Store:
        def spans(self):
            return STORE.spans

    assert Sequence(2).expand(np.array([101]), {}, Store())[0].tolist() == [101, 102]


@pytest.mark.parametrize("done_key", ["done", ("done",), ("next", "done"), ["next", "done"]])
def test_the_done_flags_of_a_store_are_its_episodes(done_key):
    index, _ = Sequence(3, done_key=done_key).expand(np.array([104]), {}, STORE)
    assert index.tolist() == [104, 104, 104]


def test_another_field_bounds_where_it_is_true_and_episodes_do_not():
    store = Selection(STORE.spans, {("next", "goal"): np.array([2, 6])})
    unit = Sequence(3, done_key=("next", "goal"), burn_in=1)

    index, info = unit.expand(np.array([101, 103, 109]), {}, store)

    assert index.reshape(3, 4).tolist() == [
        [100, 101, 102, 102], [103, 103, 104, 105], [108, 109, 109, 109]
    ]  # fmt: skip
    assert info["validity_mask"].reshape(3, 4).tolist() == [
        [True, True, True, False], [False, True, True, True], [True, True, False, False]
    ]  # fmt: skip


def test_a_storage_without_boundaries_refuses_another_field_unless_resets_are_included():
    class Store:
        spans = STORE.spans

    with pytest.raises(FieldNotFoundError, match="Store cannot say where the field 'goal' is"):
        Sequence(2, done_key="goal").expand(np.array([101]), {}, Store())
    index, _ = Sequence(2, "include_reset", done_key="goal").expand(np.array([104]), {}, Store())
    assert index.tolist() == [104, 105]


def test_expanding_neither_imports_torch_nor_a_ring_numba():
    code = (
        "import sys, numpy as np\n"
        "from expstore.sampling.ring import Ring\n"
        "from expstore.sampling.sequence import Sequence\n"
        "import expstore.sampling.uniform, expstore.sampling.priority\n"
        "ring = Ring(np.zeros(4), newest=3, is_full=True)\n"
        "Sequence(2).expand(np.array([1]), {}, ring)\n"
        "print([name for name in ('torch', 'numba') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
