"""Fields, schemas, and the names they may have."""

from __future__ import annotations

import json

import numpy as np
import pytest

import expstore
from expstore import Field, Schema
from expstore.errors import FieldNotFoundError, FormatError, SchemaError


def test_a_scalar_and_a_vector_of_one_are_different_fields():
    assert Field((), "float32") != Field((1,), "float32")


def test_step_bytes_count_every_element():
    assert Field((84, 84, 3), "uint8").step_bytes == 21_168
    assert Field((), "bfloat16").step_bytes == 2


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), np.dtype(">f4"), "float32"])
def test_a_dtype_may_be_one_of_numpys(dtype):
    assert Field((3,), dtype) == Field((3,), "float32")


def test_a_dtype_may_be_one_of_torchs():
    torch = pytest.importorskip("torch")
    assert Field((), torch.bfloat16) == Field((), "bfloat16")
    assert Field((), torch.uint8) == Field((), "uint8")


def test_a_shape_may_be_a_list_and_may_hold_numpy_integers():
    field = Field([np.int64(2), 3], "int8")
    assert field == Field((2, 3), "int8")
    assert json.dumps(Schema({"x": field}).to_json())


@pytest.mark.parametrize("dtype", ["float128", "complex64", "U3", "object", "f4", None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(SchemaError, match="dtype must be one of bool, int8"):
        Field((), dtype)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (-1,)])
def test_a_shape_without_elements_is_refused(shape):
    with pytest.raises(SchemaError, match=r"positive integers, got .* leave out a field"):
        Field(shape, "int8")


@pytest.mark.parametrize("shape", [3, (2.0,), ("3",), None])
def test_a_shape_of_anything_but_integers_is_refused(shape):
    with pytest.raises(SchemaError, match="shape must be a tuple of integers, got"):
        Field(shape, "int8")


def test_a_step_of_more_than_two_gib_is_refused_also_where_numpy_would_overflow():
    with pytest.raises(SchemaError, match="at most 2 GiB"):
        Field((1 << 32, 1 << 32), "int8")


def test_observations_always_have_next_values_and_others_if_asked():
    schema = Schema(
        {
            "observation/image": Field((3,), "uint8"),
            "action": Field((), "int64"),
            "goal": Field((), "float32", has_next=True),
        }
    )
    assert schema.next_fields == ("observation/image", "goal")


def test_observation_is_a_word_and_not_a_beginning():
    assert Schema({"observations": Field((), "int8")}).next_fields == ()


def test_a_schema_survives_json():
    schema = Schema({"observation/x": Field((3, 2), "bfloat16"), "r": Field((), "float64")})
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


@pytest.mark.parametrize(
    "document", [None, {}, {"fields": 3}, {"fields": {"x": {}}}, {"fields": {"done": {}}}]
)
def test_json_that_is_no_schema_is_a_format_error(document):
    with pytest.raises(FormatError, match="the schema in the root's attributes is not valid"):
        Schema.from_json(document)


def test_an_unknown_field_names_the_known_ones():
    with pytest.raises(FieldNotFoundError, match="no field 'b'; the store has 'a'"):
        Schema({"a": Field((), "int8")})["b"]


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["done", "episode", "next", "has_next", "next_x", "done/x"])
def test_reserved_names_are_refused(name):
    with pytest.raises(SchemaError, match=f"field '{name}' has a reserved name .* rename it"):
        Schema({name: Field((), "int8")})


@pytest.mark.parametrize("name", ["x/done", "observation/episode", "info/next", "x/next_y"])
def test_reserved_names_are_free_below_another_name(name):
    assert name in Schema({name: Field((), "int8")}).fields


@pytest.mark.parametrize(
    "name",
    [
        *("", "/x", "x/", "a//b", ".", "..", "...", "../x", "a/../b", "__x", "a/__b"),
        *("zarr.json", "zarr.json.partial", "a\\b", "a\nb", "a\0b", "a\x7fb"),
    ],
)
def test_names_that_are_no_safe_file_names_are_refused(name):
    with pytest.raises(SchemaError, match="cannot be a file name here; rename it"):
        Schema({name: Field((), "int8")})


@pytest.mark.parametrize("name", ["Ünï/çødé", "a b", "x.y", ".hidden", "c.0", "x[1]", "step", "-"])
def test_other_names_are_allowed(name):
    assert name in Schema({name: Field((), "int8")}).fields


def test_a_lone_surrogate_is_no_name():
    with pytest.raises(SchemaError, match="is not valid Unicode; rename it"):
        Schema({"a\ud800": Field((), "int8")})


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(SchemaError, match="field names must be strings, got 3"):
        Schema({3: Field((), "int8")})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x" * 201, "part longer than 200 bytes; shorten it"),
        ("é" * 101, "part longer than 200 bytes; shorten it"),
        ("/".join(["x" * 150] * 7), "longer than 1000 bytes; shorten its name"),
        ("/".join("x" * 33), "nested deeper than 32 levels; shorten its name"),
    ],
)
def test_names_too_long_for_a_path_are_refused(name, text):
    with pytest.raises(SchemaError, match=text):
        Schema({name: Field((), "int8")})


def test_the_longest_names_can_be_written(tmp_path):
    longest = "/".join(["x" * 200] * 4 + ["y" * 194])
    deepest = "/".join("z" * 32)
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({longest: [1, 2], deepest: [3, 4]})
    assert list(expstore.open(tmp_path / "a.exp").fields) == [longest, deepest]


def test_a_field_below_another_field_is_refused():
    with pytest.raises(SchemaError, match="field 'a/b/c' lies under field 'a'; rename one"):
        Schema({"a": Field((), "int8"), "a/b/c": Field((), "int8")})


# -- gymnasium spaces ----------------------------------------------------------------------------


def test_a_schema_is_made_from_spaces():
    spaces = pytest.importorskip("gymnasium").spaces
    schema = Schema.from_spaces(
        spaces.Dict(
            {
                "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
                "pair": spaces.Tuple([spaces.Discrete(4), spaces.MultiBinary([2, 2])]),
            }
        ),
        spaces.MultiDiscrete([3, 4]),
    )
    assert schema.fields == {
        "observation/image": Field((8, 8, 3), "uint8", has_next=True),
        "observation/pair/0": Field((), "int64", has_next=True),
        "observation/pair/1": Field((2, 2), "int8", has_next=True),
        "action": Field((2,), "int64"),
        "reward": Field((), "float64"),
        "terminated": Field((), "bool"),
        "truncated": Field((), "bool"),
    }


def test_the_reward_dtype_of_spaces_can_be_chosen():
    spaces = pytest.importorskip("gymnasium").spaces
    schema = Schema.from_spaces(spaces.Discrete(2), spaces.Discrete(2), reward_dtype="float32")
    assert schema["reward"] == Field((), "float32")


def test_a_space_without_a_fixed_size_is_refused_by_its_place():
    spaces = pytest.importorskip("gymnasium").spaces
    with pytest.raises(SchemaError, match="observation/mission: spaces of type Graph have no"):
        Schema.from_spaces(
            spaces.Dict({"mission": spaces.Graph(spaces.Discrete(2), None)}), spaces.Discrete(2)
        )


def test_a_space_of_an_unsafe_name_is_refused():
    spaces = pytest.importorskip("gymnasium").spaces
    with pytest.raises(SchemaError, match=r"'observation/\.\.' has the part"):
        Schema.from_spaces(spaces.Dict({"..": spaces.Discrete(2)}), spaces.Discrete(2))


def test_what_an_environment_gives_fits_the_schema_of_its_spaces(tmp_path):
    spaces = pytest.importorskip("gymnasium").spaces
    observed = spaces.Dict(
        {"both": spaces.Tuple([spaces.Discrete(4), spaces.Discrete(5)]), "b": spaces.Box(0, 1)}
    )
    acted = spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))])
    schema = Schema.from_spaces(observed, acted)
    with (
        expstore.Writer(tmp_path / "a.exp", schema=schema) as writer,
        writer.episode() as episode,
    ):
        for last in (False, False, True):
            episode.add(
                {
                    "observation": observed.sample(),
                    "action": acted.sample(),
                    "reward": 1.0,
                    "terminated": last,
                    "truncated": False,
                }
            )
        episode.add({"observation": observed.sample()})
    assert expstore.open(tmp_path / "a.exp").num_steps == 3
