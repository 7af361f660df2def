"""One episode: flattened, converted, measured and compared with its schema."""

from __future__ import annotations

import math

import numpy as np
import pytest

from expstore import Field, Schema
from expstore.episode import Columns, Episode, encode_metadata, end_of, flatten, nest, to_array
from expstore.errors import SchemaError

HERE = "in episode 12"


# -- flatten and nest ----------------------------------------------------------------------------


def test_nested_names_are_joined_and_split_again():
    data = {"observation": {"image": {"left": 1, "right": 2}, "state": 3}, "action": 4}
    flat = flatten(data)
    assert flat == {
        "observation/image/left": 1,
        "observation/image/right": 2,
        "observation/state": 3,
        "action": 4,
    }
    assert nest(flat) == data


def test_names_joined_by_the_caller_are_the_same_as_nested_ones():
    assert flatten({"observation/state": 1}) == flatten({"observation": {"state": 1}})


def test_a_field_given_twice_is_refused():
    with pytest.raises(SchemaError, match="field 'a/b' in episode 12 is given twice, nested and"):
        flatten({"a/b": 1, "a": {"b": 2}}, HERE)


def test_a_tuple_of_arrays_has_members_named_by_number():
    one, two = np.zeros((3, 2)), np.ones((3, 4))
    assert flatten({"observation": (one, {"x": two})}) == {
        "observation/0": one,
        "observation/1/x": two,
    }


def test_a_tuple_of_numbers_is_one_column():
    assert flatten({"reward": (1.0, 2.0)}) == {"reward": (1.0, 2.0)}


def test_the_fields_of_the_store_decide_how_a_tuple_is_read():
    pair = (np.zeros(2), np.ones(2))
    assert list(flatten({"x": pair}, HERE, {"x": None})) == ["x"]
    assert list(flatten({"x": (1.0, 2.0)}, HERE, {"x/0": None, "x/1": None})) == ["x/0", "x/1"]
    assert list(flatten({"next_x": (1, 2)}, HERE, {"x/0": None})) == ["next_x/0", "next_x/1"]


def test_a_mapping_that_contains_itself_is_refused():
    endless: dict[str, object] = {}
    endless["x"] = endless
    with pytest.raises(SchemaError, match="in episode 12 is nested too deeply; flatten it"):
        flatten(endless, HERE)


@pytest.mark.parametrize("data", [[1, 2], None, "observation", np.zeros(3)])
def test_an_episode_that_is_no_mapping_is_refused(data):
    with pytest.raises(SchemaError, match="in episode 12 must be a mapping of fields, got"):
        flatten(data, HERE)


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(SchemaError, match="must be strings, got 0 under 'observation' in episode"):
        flatten({"observation": {0: [1.0]}}, HERE)


# -- conversion ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(24, dtype=np.uint16).reshape(3, 8)[:, ::2],
        np.arange(12, dtype=np.int8).reshape(3, 4)[::-1],
        np.arange(12, dtype=">f2").reshape(4, 3).T,
    ],
    ids=["big endian", "fortran", "strided", "reversed", "big endian and transposed"],
)
def test_arrays_of_any_order_become_little_endian_c_order(array):
    converted, dtype = to_array(array, "x")
    assert converted.flags.c_contiguous
    assert converted.dtype == array.dtype.newbyteorder("<")
    assert dtype == array.dtype.name
    assert converted.tolist() == array.tolist()


def test_lists_become_arrays_as_numpy_says():
    assert to_array([True, False], "x")[1] == "bool"
    assert to_array([1, 2], "x")[1] == "int64"
    assert to_array([[1, 2.5]], "x")[1] == "float64"
    assert to_array([2**63], "x")[1] == "uint64"


@pytest.mark.parametrize(
    "values",
    [[2**63 + 1, -1], [2**53 + 1, 0.5], [[0.5, 1.0], [2**60 + 1, math.nan]]],
    ids=["no 64-bit integer", "beside a float", "beside a NaN"],
)
def test_a_list_whose_integers_would_be_rounded_is_refused(values):
    with pytest.raises(SchemaError, match="x holds integers that dtype float64 would change"):
        to_array(values, "x")


def test_large_floats_infinities_and_nan_in_lists_are_kept():
    array, dtype = to_array([1e300, -math.inf, math.nan, 2**53, 0.1], "x")
    assert dtype == "float64"
    assert array.tobytes() == np.array([1e300, -math.inf, math.nan, 2**53, 0.1]).tobytes()


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(SchemaError, match=r"x cannot be one array: .*; convert it first"):
        to_array([[1, 2], [3]], "x")


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a"]),
        np.array([b"a"]),
        np.array([None]),
        np.array([1j]),
        np.array(["2020"], "datetime64[D]"),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, np.longdouble),
        [2**64],
        "text",
        object(),
        {1, 2},
        (value for value in [1]),
    ],
    ids=[
        "str",
        "bytes",
        "None",
        "complex",
        "date",
        "record",
        "long double",
        "huge",
        "text",
        "object",
        "set",
        "generator",
    ],
)
def test_what_is_no_number_of_64_bits_is_refused(value):
    with pytest.raises(SchemaError, match="x must hold booleans, integers or floats of at most 64"):
        to_array(value, "x")


def test_a_masked_array_is_refused_since_its_mask_would_be_lost():
    with pytest.raises(SchemaError, match="x cannot be one array: a masked array"):
        to_array(np.ma.masked_equal([1, 2], 2), "x")


def test_tensors_keep_their_dtype():
    torch = pytest.importorskip("torch")
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32"):
        tensor = torch.ones(3, 2).to(getattr(torch, name))
        array, dtype = to_array(tensor, "x")
        assert (array.dtype.name, dtype, array.shape) == (name, name, (3, 2))


def test_bfloat16_becomes_its_bits():
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[1.0, -2.0], [float("nan"), 0.0]], dtype=torch.bfloat16)
    array, dtype = to_array(tensor.T, "x")
    assert dtype == "bfloat16"
    assert array.dtype == np.uint16
    assert array.tolist() == [[0x3F80, 0x7FC0], [0xC000, 0x0000]]


def test_bfloat16_of_ml_dtypes_becomes_its_bits():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array, dtype = to_array(np.array([1.0, -2.0], ml_dtypes.bfloat16), "x")
    assert (array.tolist(), dtype) == ([0x3F80, 0xC000], "bfloat16")


def test_tensors_that_require_a_gradient_are_accepted():
    torch = pytest.importorskip("torch")
    assert to_array(torch.ones(2, requires_grad=True), "x")[0].tolist() == [1.0, 1.0]


def test_a_list_of_tensors_is_stacked():
    torch = pytest.importorskip("torch")
    array, dtype = to_array([torch.ones(2, dtype=torch.bfloat16)] * 3, "x")
    assert (array.shape, dtype) == ((3, 2), "bfloat16")


@pytest.mark.parametrize("other", ["float64", "float16"])
def test_a_list_of_tensors_of_different_dtypes_is_refused_and_not_promoted(other):
    torch = pytest.importorskip("torch")
    rows = [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=getattr(torch, other))]
    with pytest.raises(SchemaError, match="rows of different shapes or dtypes, such as bfloat16"):
        to_array(rows, "x")


def test_a_list_of_tensors_of_different_shapes_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(SchemaError, match="rows of different shapes or dtypes"):
        to_array([torch.ones(2), torch.ones(3)], "x")


def test_tensors_that_have_no_array_are_refused():
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.float8_e5m2)):
        with pytest.raises(SchemaError, match="x cannot be one array: "):
            to_array(tensor, "x")


# -- how many steps ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "num_steps"),
    [
        ({"action": 3, "observation": 4, "reward": 3}, 3),
        ({"observation": 4, "reward": 3}, 3),
        ({"observation": 4, "truncated": 3}, 3),
        ({"observation": 4, "info": 3}, 3),
        ({"observation/a": 4, "observation/b": 3}, 3),
        ({"observation": 4}, 4),
        ({"observation": 4, "next_observation": 3}, 3),
        ({"action/arm": 3, "action/leg": 3, "observation/a": 4, "observation/b": 3}, 3),
    ],
    ids=str,
)
def test_the_number_of_steps_is_that_of_the_leading_field(lengths, num_steps):
    columns = Columns.of({name: np.zeros(n) for name, n in lengths.items()}, HERE)
    assert columns.num_steps == num_steps
    assert {len(array) for array in columns.arrays.values()} == {num_steps}
    assert set(columns.final) == {n for n, length in lengths.items() if length > num_steps}


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ({"action": 3, "reward": 4}, "field 'reward' must have 3 rows in episode 12, got 4"),
        ({"action": 3, "observation": 5}, "'observation' must have 3 or 4 rows .*, got 5"),
        ({"action": 3, "observation": 2}, "'observation' must have 3 or 4 rows .*, got 2"),
        ({"action/a": 3, "action/b": 4}, "field 'action/b' must have 3 rows .*, got 4"),
        ({"action": 4, "reward": 3}, "field 'reward' must have 4 rows in episode 12, got 3"),
        ({"info": 4, "x": 3}, "field 'info' must have 3 rows in episode 12, got 4"),
        ({"action": 3, "next_observation": 4, "observation": 3}, "'next_observation' must have 3"),
        ({"action": 3, "observations": 4}, "field 'observations' must have 3 rows"),
    ],
    ids=str,
)
def test_columns_of_different_lengths_are_refused(lengths, text):
    with pytest.raises(SchemaError, match=f"{text}.*; all columns of an episode have one row"):
        Columns.of({name: np.zeros(n) for name, n in lengths.items()}, HERE)


def test_an_episode_without_steps_is_refused():
    with pytest.raises(SchemaError, match="there are no steps in episode 12; skip episodes"):
        Columns.of({"action": np.zeros((0, 2)), "observation": np.zeros((1, 3))}, HERE)


def test_an_episode_without_fields_is_refused():
    for data in ({}, {"observation": {}}, {"next_observation": np.zeros(3)}):
        with pytest.raises(SchemaError, match="there are no fields in episode 12; give at least"):
            Columns.of(data, HERE)


def test_a_single_value_is_no_column():
    torch = pytest.importorskip("torch")
    for value in (1.0, np.float32(1.0), torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16)):
        with pytest.raises(SchemaError, match="field 'x' in episode 12 must have one row per step"):
            Columns.of({"x": value}, HERE)


# -- against the schema --------------------------------------------------------------------------

SCHEMA = Schema(
    {"observation": Field((2,), "float32"), "reward": Field((), "float64"), "n": Field((), "int32")}
)


def fit(casts: dict[str, int] | None = None, **changed: object) -> Episode:
    data = {
        "observation": np.zeros((4, 2), np.float32),
        "reward": np.zeros(3),
        "n": np.ones(3, "i4"),
    }
    data.update(changed)  # type: ignore[arg-type]
    columns = Columns.of({k: v for k, v in data.items() if v is not None}, HERE)
    return Episode.fit(columns, SCHEMA, HERE, casts=casts)


def test_casts_that_lose_nothing_are_counted_by_row():
    casts: dict[str, int] = {}
    fitted = fit(casts, observation=np.ones((4, 2), np.float16), n=np.array([1, 2, 3], np.uint16))
    assert casts == {"observation": 4, "n": 3}
    assert fitted.columns["n"].dtype == np.int32
    assert fitted.final["observation"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("observation", np.zeros((4, 2))),
        ("n", np.zeros(3, np.int64)),
        ("n", np.zeros(3, np.uint32)),
        ("n", np.zeros(3, np.float32)),
        ("reward", np.array([0, 0, 2**53 + 1])),
        ("reward", np.array([0, 0, -(2**53) - 1])),
        ("reward", np.array([0, 0, 2**64 - 1], np.uint64)),
    ],
    ids=str,
)
def test_casts_that_could_lose_something_are_refused_also_with_cast(name, value):
    casts: dict[str, int] = {}
    with pytest.raises(SchemaError, match=f"field '{name}' must have dtype .* convert it$"):
        fit(casts, **{name: value})
    assert casts == {}


def test_integers_that_a_float_holds_exactly_may_be_cast():
    fitted = fit({}, reward=np.array([2**53, -(2**53), 7]))
    assert fitted.columns["reward"].tolist() == [2.0**53, -(2.0**53), 7.0]


def test_bfloat16_and_its_bits_are_not_the_same():
    torch = pytest.importorskip("torch")
    schema = Schema({"x": Field((), "uint16")})
    columns = Columns.of({"x": torch.zeros(3, dtype=torch.bfloat16)}, HERE)
    with pytest.raises(SchemaError, match="must have dtype uint16, got bfloat16"):
        Episode.fit(columns, schema, HERE, casts={})


def test_a_final_row_that_differs_from_the_last_next_row_is_refused():
    observation = np.arange(8, dtype=np.float32).reshape(4, 2)
    fit(observation=observation, next_observation=observation[1:])
    with pytest.raises(SchemaError, match=r"has 4 rows and the last differs .* give one of them"):
        fit(observation=observation, next_observation=observation[:3])


# -- how it ended --------------------------------------------------------------------------------


def flags(terminated: list[bool], truncated: list[bool]) -> dict[str, np.ndarray]:
    return {"terminated": np.array(terminated), "truncated": np.array(truncated)}


@pytest.mark.parametrize(
    ("terminated", "truncated", "reason"),
    [
        (True, False, "terminated"),
        (False, True, "truncated"),
        (True, True, "terminated"),
        (False, False, "cut"),
    ],
)
def test_the_end_reason_comes_from_the_flags(terminated, truncated, reason):
    assert end_of(flags([False, terminated], [False, truncated]), HERE, None) == reason


def test_without_flags_the_end_reason_is_the_callers_else_cut():
    assert end_of({}, HERE, None) == "cut"
    for reason in ("terminated", "truncated", "cut", "incomplete"):
        assert end_of({}, HERE, reason) == reason


def test_an_end_without_a_flag_may_be_said_to_be_incomplete():
    assert end_of(flags([False], [False]), HERE, "incomplete") == "incomplete"


def test_where_both_flags_are_true_either_may_be_the_reason():
    assert end_of(flags([True], [True]), HERE, "truncated") == "truncated"


@pytest.mark.parametrize(
    ("terminated", "truncated", "reason"),
    [
        (True, False, "truncated"),
        (True, False, "cut"),
        (False, True, "incomplete"),
        (False, False, "terminated"),
    ],
)
def test_an_end_reason_against_the_flags_is_refused(terminated, truncated, reason):
    with pytest.raises(SchemaError, match=f"end_reason '{reason}' in episode 12 contradicts"):
        end_of(flags([terminated], [truncated]), HERE, reason)


def test_an_unknown_end_reason_is_refused():
    with pytest.raises(SchemaError, match=r"end_reason in episode 12 must be one of .*got 'done'"):
        end_of({}, HERE, "done")


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_a_flag_inside_the_episode_is_refused(flag):
    columns = flags([False] * 5, [False] * 5)
    columns[flag][[2, 4]] = True
    with pytest.raises(
        SchemaError, match=f"'{flag}' is true at step 2 of 5 in episode 12, .* split it there"
    ):
        end_of(columns, HERE, None)


def test_flags_of_other_shapes_and_dtypes_are_read_alike():
    assert end_of({"terminated": np.array([[0.0], [1.0]])}, HERE, None) == "terminated"


# -- metadata ------------------------------------------------------------------------------------


def test_metadata_becomes_compact_json():
    assert encode_metadata({"a": [1, 2.5, None, True], "b": {"c": "ü"}}, HERE) == (
        b'{"a":[1,2.5,null,true],"b":{"c":"\\u00fc"}}'
    )


def test_no_metadata_takes_no_bytes():
    assert encode_metadata({}, HERE) == b""


def test_numpy_and_torch_values_become_numbers_and_lists():
    metadata = {
        "a": np.float32(0.5),
        "b": np.arange(3),
        "c": np.array([[True]]),
        "d": np.uint64(2**64 - 1),
    }
    assert encode_metadata(metadata, HERE) == (
        b'{"a":0.5,"b":[0,1,2],"c":[[true]],"d":18446744073709551615}'
    )


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", 1j, np.datetime64("2020"), {"x": {3: 4}}, {None: 1}, 10**5000],
    ids=["object", "set", "bytes", "complex", "date", "int key", "None key", "huge"],
)
def test_metadata_that_is_no_json_is_refused(value):
    with pytest.raises(SchemaError, match=r"metadata in episode 12 must be JSON: .*; convert it"):
        encode_metadata({"x": value}, HERE)


def test_metadata_that_contains_itself_is_refused():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(SchemaError, match="metadata in episode 12 must be JSON"):
        encode_metadata({"x": endless}, HERE)


@pytest.mark.parametrize("key", ["start", "length", "end_reason", "return", "number", "metadata"])
def test_metadata_named_like_a_column_of_the_index_is_refused(key):
    with pytest.raises(SchemaError, match=f"metadata '{key}' in episode 12 .*; rename it"):
        encode_metadata({key: 1}, HERE)
