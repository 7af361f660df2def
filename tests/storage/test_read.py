"""Any steps of any fields, in any order, equal to what was appended to the byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore.errors import FieldNotFoundError, SchemaError, StepRangeError
from tests.storage.made import assert_same, episode, store, writer

LENGTHS = (5, 1, 30, 2)
NUM_STEPS = sum(LENGTHS)
STARTS = (0, 5, 6, 36)


def nested(num_steps: int, seed: int) -> dict[str, object]:
    data = episode(num_steps, seed, end=None)
    image = np.random.default_rng(seed).integers(0, 255, (num_steps + 1, 8, 8, 3), np.uint8)
    return {**data, "observation": {"image": image, "state": data["observation"]}}


EPISODES = [nested(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=["mapped", "coded"])
def opened(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("read") / "a.exp"
    return store(path, *EPISODES, layout=request.param, chunk_steps=4)


def rows(field: str) -> np.ndarray:
    """A field of all episodes, one after the other, without final rows."""
    top, _, below = field.partition("/")
    columns = [data[top][below] if below else data[top] for data in EPISODES]  # type: ignore[index]
    return np.concatenate([c[:n] for c, n in zip(columns, LENGTHS, strict=True)])


@given(steps=st.lists(st.integers(0, NUM_STEPS - 1), max_size=20))
def test_steps_come_in_the_order_asked_for(opened, steps):
    got = opened.read(steps, ("observation/image", "reward", "done", "episode"))
    at = np.array(steps, np.int64)
    assert_same(
        got,
        {
            "observation": {"image": rows("observation/image")[at]},
            "reward": rows("reward")[at],
            "done": np.isin(np.arange(NUM_STEPS), [4, 5, 35, 37])[at],
            "episode": np.repeat([0, 1, 2, 3], LENGTHS)[at],
        },
    )


def test_all_fields_come_where_none_are_named(opened):
    got = opened.read(range(NUM_STEPS))
    assert_same(
        got,
        {
            "observation": {
                "image": rows("observation/image"),
                "state": rows("observation/state"),
            },
            **{name: rows(name) for name in ("action", "reward", "terminated", "truncated")},
        },
    )


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 2), (0,), (3, 0)])
def test_the_shape_of_the_steps_comes_first(opened, shape):
    steps = np.random.default_rng(0).integers(0, NUM_STEPS, shape)
    got = opened.read(steps, ("observation", "next_observation/image", "has_next", "reward"))
    assert got["observation"]["image"].shape == (*shape, 8, 8, 3)
    assert got["next_observation"]["image"].shape == (*shape, 8, 8, 3)
    assert got["has_next"].shape == got["reward"].shape == shape
    assert_same(got["reward"], rows("reward")[steps])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64", ">i8"])
def test_steps_may_be_integers_of_any_dtype(opened, dtype):
    steps = np.array([3, 1, 37], dtype)
    assert_same(opened.read(steps, ["reward"])["reward"], rows("reward")[[3, 1, 37]])


def test_an_empty_list_of_steps_gives_empty_arrays(opened):
    got = opened.read([], ["next_observation", "episode"])
    assert got["next_observation"]["state"].shape == (0, 3)
    assert got["episode"].dtype == np.int64


def test_next_observations_stop_at_the_end_of_the_episode(opened):
    got = opened.read([3, 4, 5, 37], ["next_observation/state", "has_next"])
    states = [data["observation"]["state"] for data in EPISODES]  # type: ignore[index]
    expected = np.stack([states[0][4], states[0][5], states[1][1], states[3][2]])
    assert_same(got["next_observation"]["state"], expected)
    assert got["has_next"].tolist() == [True] * 4


def test_what_is_read_belongs_to_the_caller(opened):
    for name in ("reward", "observation/image", "next_observation/image"):
        first = opened.read([0], [name])
        array = first
        for part in name.split("/"):
            array = array[part]
        array[...] = 0
        assert_same(opened.read([0], ["reward"])["reward"], rows("reward")[:1])
    data = opened.episode(0)
    data["observation"]["state"][...] = 0
    assert_same(opened.episode(0), EPISODES[0])


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ([NUM_STEPS], NUM_STEPS),
        ([0, -1], -1),
        ([[0, 1], [10**12, 2]], 10**12),
        ([-(2**63)], -(2**63)),
    ],
)
def test_a_step_that_is_not_there_is_named(opened, steps, shown):
    with pytest.raises(StepRangeError, match=f"step {shown} is not among the 38 steps .* last 37"):
        opened.read(steps)


@pytest.mark.parametrize(
    "steps",
    [np.array([2**63], np.uint64), np.array([3, 2**64 - 1], np.uint64), [2**70], [-(2**70)]],
)
def test_a_step_beyond_63_bits_is_out_of_range_and_not_negative(opened, steps):
    with pytest.raises(StepRangeError, match=r"steps must be below 2\*\*63, got -?\d{19}"):
        opened.read(steps)


@pytest.mark.parametrize("steps", [[0.0], ["0"], [True, False], [None], [[1], [2, 3]]], ids=str)
def test_steps_that_are_no_integers_are_refused(opened, steps):
    with pytest.raises(SchemaError, match="steps must be integers, got"):
        opened.read(steps)


# -- fields --------------------------------------------------------------------------------------


def test_a_group_stands_for_every_field_below_it(opened):
    got = opened.read([1], ["observation", "next_observation"])
    assert list(got["observation"]) == list(got["next_observation"]) == ["image", "state"]


def test_one_name_may_be_given_as_a_string(opened):
    assert list(opened.read([1], "reward")) == ["reward"]


def test_no_fields_give_nothing(opened):
    assert opened.read([1], ()) == {}


def test_fields_come_in_the_order_asked_for(opened):
    assert list(opened.read([1], ["reward", "done", "action"])) == ["reward", "done", "action"]


@pytest.mark.parametrize(
    "name",
    ["rewards", "next_done", "next_", "", "observation/", "obs", "image", "next_next_observation"],
)
def test_a_field_that_is_not_there_is_named_beside_those_that_are(opened, name):
    with pytest.raises(FieldNotFoundError) as raised:
        opened.read([1], ["reward", name])
    assert str(raised.value).startswith(f"there is no field {name!r}; the store has 'observation/")
    assert "'done', 'episode', 'has_next'" in str(raised.value)


@pytest.mark.parametrize("name", [3, None, ("reward",)])
def test_a_name_that_is_no_string_is_not_there(opened, name):
    with pytest.raises(FieldNotFoundError, match="there is no field"):
        opened.read([1], [name])


# -- episodes ------------------------------------------------------------------------------------


def test_an_episode_comes_back_as_it_was_appended(opened):
    for number, data in enumerate(EPISODES):
        assert_same(opened.episode(number), data)
        assert_same(opened.episode(np.int64(number)), data)


@pytest.mark.parametrize("number", [-1, 4, 10**12, np.uint64(2**64 - 1), 2**70])
def test_an_episode_that_is_not_there_is_named(opened, number):
    with pytest.raises(StepRangeError, match=r"episode|below 2\*\*63"):
        opened.episode(number)


def test_the_error_of_a_missing_episode_names_those_that_are_there(opened):
    with pytest.raises(StepRangeError) as raised:
        opened.episode(-1)
    assert str(raised.value) == (
        "episode -1 is not among the 4 episodes here (0 to 3); `episodes` lists them"
    )


@pytest.mark.parametrize("number", [1.0, "1", None, True])
def test_an_episode_number_that_is_no_integer_is_refused(opened, number):
    with pytest.raises(SchemaError, match="the episode number must be integers, got"):
        opened.episode(number)


def test_an_episode_has_next_values_only_where_they_say_more(tmp_path):
    observation = np.arange(10.0)
    gaps = np.array([1.0, 50.0, 3.0])
    with writer(tmp_path / "a.exp") as out:
        out.append({"observation": observation[:3], "next_observation": observation[1:4]})
        out.append({"observation": observation[:3], "next_observation": gaps})
        out.append({"observation": observation[:3]})
    reading = expstore.open(tmp_path / "a.exp")
    assert_same(reading.episode(0), {"observation": observation[:4]})
    assert_same(
        reading.episode(1),
        {"observation": np.array([0.0, 1.0, 2.0, 3.0]), "next_observation": gaps},
    )
    assert_same(reading.episode(2), {"observation": observation[:3]})


def test_what_episode_gives_can_be_appended_again(tmp_path):
    gaps = {"observation": np.arange(3.0), "next_observation": np.array([1.0, 50.0, 3.0])}
    reading = store(tmp_path / "a.exp", gaps, {"observation": np.arange(4.0)})
    with writer(tmp_path / "b.exp") as out:
        for number in range(2):
            out.append(reading.episode(number))
    again = expstore.open(tmp_path / "b.exp")
    names = ("observation", "next_observation", "has_next")
    assert_same(again.read(range(7), names), reading.read(range(7), names))


def test_a_store_without_episodes_has_no_steps_and_no_episodes(tmp_path):
    writer(tmp_path / "a.exp").close()
    empty = expstore.open(tmp_path / "a.exp")
    assert (len(empty), empty.num_episodes, empty.fields) == (0, 0, {})
    assert list(empty.episodes) == []
    assert empty.read([]) == {}
    with pytest.raises(StepRangeError, match="holds no steps; append an episode"):
        empty.read([0])
    with pytest.raises(StepRangeError, match="episode 0 is not among the 0 episodes here;"):
        empty.episode(0)


# -- the table -----------------------------------------------------------------------------------


def test_the_table_has_rows_and_columns(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append({"reward": [1.0, 2.0]}, policy="a", seed=3)
        out.append({"reward": [4.0]}, policy="b", level=7)
    table = expstore.open(tmp_path / "a.exp").episodes
    assert table.columns == (
        "number",
        "start",
        "length",
        "end_reason",
        "return",
        "seed",
        "metadata",
    )
    assert len(table) == 2
    assert table["number"].tolist() == [0, 1]
    assert table["start"].tolist() == [0, 2]
    assert table["length"].tolist() == [2, 1]
    assert table["return"].tolist() == [3.0, 4.0]
    assert table["end_reason"].tolist() == ["cut", "cut"]
    assert table["policy"] == ["a", "b"]
    assert table["metadata"] == [{"policy": "a"}, {"policy": "b", "level": 7}]
    assert dict(table[-1]) == {
        **{"number": 1, "start": 2, "length": 1, "end_reason": "cut", "return": 4.0},
        **{"seed": None, "policy": "b", "level": 7},
    }
    assert [row["number"] for row in table[:2]] == [0, 1]
    assert table[1].get("nothing") is None
    with pytest.raises(FieldNotFoundError, match="not every episode has 'level'; columns are"):
        table["level"]
    with pytest.raises(IndexError):
        table[2]


def test_the_columns_of_the_table_are_the_callers_to_change(opened):
    for name in ("number", "start", "length", "return"):
        opened.episodes[name][:] = 0
    assert opened.episodes["number"].tolist() == [0, 1, 2, 3]
    assert opened.episodes["start"].tolist() == list(STARTS)
    assert opened.episodes["length"].tolist() == list(LENGTHS)
    assert_same(opened.episode(2), EPISODES[2])


def test_the_columns_of_an_empty_table_have_their_dtypes(tmp_path):
    schema = expstore.Schema({"reward": expstore.Field((2,), "float32")})
    writer(tmp_path / "a.exp", schema=schema).close()
    table = expstore.open(tmp_path / "a.exp").episodes
    assert (table["return"].shape, table["return"].dtype) == ((0, 2), np.float64)
    assert (table["start"].shape, table["start"].dtype) == ((0,), np.int64)
    assert table["seed"].tolist() == table["end_reason"].tolist() == []
