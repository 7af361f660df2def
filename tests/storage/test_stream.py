"""An episode streamed step by step is the episode that `append` would have written."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore import Field, Schema
from expstore.errors import SchemaError, WriterStateError
from tests.storage.made import assert_same, digest, episode, steps_of, writer


def stream(out: expstore.Writer, data: dict[str, object], num_steps: int, **metadata) -> None:
    """Add an episode step by step, and its final observation if there is one."""
    with out.episode(**metadata) as block:
        for step in steps_of(data, num_steps):
            block.add(step)
        if len(data["observation"]) > num_steps:  # type: ignore[arg-type]
            block.add({"observation": data["observation"][num_steps]})  # type: ignore[index]


def rows_of(path) -> dict[str, bytes]:
    """The bytes of every chunk file."""
    return {
        str(entry.relative_to(path)): entry.read_bytes()
        for part in ("steps", "next", "episodes")
        for entry in sorted((path / part).rglob("c.*"))
    }


STEP = {name: value[0] for name, value in episode(2).items()}  # of an episode that goes on
LAST = {**STEP, "terminated": True}


# -- the same as append --------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("layout", ["mapped", "coded"])
def test_streamed_and_appended_episodes_are_the_same_bytes(tmp_path, num_steps, layout):
    data = episode(num_steps)
    with writer(tmp_path / "streamed.exp", layout=layout) as out:
        stream(out, data, num_steps, seed=7, policy="a")
        stream(out, data, num_steps)
    with writer(tmp_path / "appended.exp", layout=layout) as out:
        out.append(data, seed=7, policy="a")
        out.append(data)
    assert rows_of(tmp_path / "streamed.exp") == rows_of(tmp_path / "appended.exp")
    assert_same(expstore.open(tmp_path / "streamed.exp").episode(1), data)
    assert expstore.verify(tmp_path / "streamed.exp").is_sound


@pytest.mark.parametrize("layout", ["mapped", "coded"])
def test_blocks_of_any_size_and_single_steps_are_the_same_bytes(tmp_path, layout):
    data = {**episode(700), "next_action": np.zeros((700, 1), np.float32)}
    data["action"] = np.ones((700, 1), np.float32)
    steps = {name: values[:700] for name, values in data.items()}
    with writer(tmp_path / "streamed.exp", layout=layout) as out, out.episode(seed=7) as block:
        at = 0
        for size in (1, 2, 300, 1, 396):
            part = {name: values[at : at + size] for name, values in steps.items()}
            if size == 2:
                for step in steps_of(part, size):
                    block.add(step)
            else:
                block.extend(part)
            at += size
        block.add({"observation": data["observation"][700]})
    with writer(tmp_path / "appended.exp", layout=layout) as out:
        out.append(data, seed=7)
    assert rows_of(tmp_path / "streamed.exp") == rows_of(tmp_path / "appended.exp")


def test_a_block_that_does_not_fit_adds_nothing(tmp_path):
    data = episode(4)
    steps = {name: values[:4] for name, values in data.items()}
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        with pytest.raises(SchemaError, match="the final observation comes with other steps"):
            block.extend(data)
        first = {name: values[:2] for name, values in steps.items()}
        block.extend({**first, "terminated": [False, False]})
        with pytest.raises(SchemaError, match=r"'reward' must have 4 rows .* got 3"):
            block.extend({**steps, "reward": steps["reward"][:3]})
        with pytest.raises(SchemaError, match=r"field 'terminated' .*true"):
            block.extend({**steps, "terminated": [False, True, False, False]})
        block.extend({**steps, "terminated": [False, False, False, True]})
        with pytest.raises(SchemaError, match="'terminated' was true in the step before"):
            block.extend(steps)
    assert expstore.open(tmp_path / "a.exp").episodes["length"].tolist() == [6]


def test_an_episode_larger_than_every_buffer_is_the_same(tmp_path):
    image = np.random.default_rng(0).integers(0, 255, (90, 300, 300, 3), np.uint8)
    for path, layout in ((tmp_path / "a.exp", "mapped"), (tmp_path / "b.exp", "coded")):
        with writer(path, layout={"observation": layout}) as out, out.episode() as block:
            for row in image:
                block.add({"observation": row, "reward": 1.0})
        opened = expstore.open(path)
        assert np.array_equal(opened.episode(0)["observation"], image)
        assert expstore.verify(path).is_sound


@given(seed=st.integers(0, 1000), num_steps=st.integers(1, 600))
def test_the_return_does_not_depend_on_how_the_rewards_came(tmp_path_factory, seed, num_steps):
    reward = np.random.default_rng(seed).normal(size=num_steps) * 10.0 ** (seed % 5)
    path = tmp_path_factory.mktemp("return") / "a.exp"
    with writer(path) as out:
        out.append({"reward": reward})
        with out.episode() as block:
            for value in reward:
                block.add({"reward": value})
    one, other = expstore.open(path).episodes["return"]
    assert one == other


def test_nested_and_tuple_steps_come_out_nested(tmp_path):
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        for n in range(3):
            block.add({"observation": {"a": np.float32([n]), "b": (n, np.zeros(2))}, "reward": n})
    got = expstore.open(tmp_path / "a.exp").episode(0)
    assert_same(
        got,
        {
            "observation": {
                "a": np.float32([[0], [1], [2]]),
                "b": {"0": np.arange(3), "1": np.zeros((3, 2))},
            },
            "reward": np.arange(3),
        },
    )


def test_a_tuple_of_numbers_is_read_as_the_schema_says(tmp_path):
    schema = Schema({"pair/0": Field((), "int64"), "pair/1": Field((), "int64")})
    vector = Schema({"pair": Field((2,), "int64")})
    with writer(tmp_path / "a.exp", schema=schema) as out, out.episode() as block:
        block.add({"pair": (1, 2)})
    with writer(tmp_path / "b.exp", schema=vector) as out, out.episode() as block:
        block.add({"pair": (1, 2)})
    assert expstore.open(tmp_path / "a.exp").read([0])["pair"]["1"].tolist() == [2]
    assert expstore.open(tmp_path / "b.exp").read([0])["pair"].tolist() == [[1, 2]]


def test_tensors_are_accepted(tmp_path):
    torch = pytest.importorskip("torch")
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        for n in range(3):
            block.add(
                {
                    "observation": torch.full((2,), n, dtype=torch.bfloat16),
                    "reward": torch.tensor(0.5 * n, requires_grad=True),
                    "list": [torch.tensor(n), torch.tensor(n)],
                }
            )
    got = expstore.open(tmp_path / "a.exp").episode(0)
    assert_same(
        got,
        {
            "observation": np.array([[0, 0], [0x3F80] * 2, [0x4000] * 2], np.uint16),
            "reward": np.float32([0, 0.5, 1]),
            "list": np.array([[0, 0], [1, 1], [2, 2]]),
        },
    )


def test_arrays_may_be_reused_at_once(tmp_path):
    row = np.zeros(3)
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        for n in range(3):
            row[:] = n
            block.add({"observation": row, "reward": 0.0})
        row[:] = 9
        block.add({"observation": row})
        row[:] = -1
    got = expstore.open(tmp_path / "a.exp").episode(0)["observation"]
    assert got[:, 0].tolist() == [0, 1, 2, 9]


def test_casts_are_counted_when_the_episode_ends(tmp_path):
    schema = Schema({"x": Field((), "float64"), "observation": Field((), "float64")})
    with writer(tmp_path / "a.exp", schema=schema, cast=True) as out:
        with out.episode() as block:
            block.add({"x": np.float32(1), "observation": 1.0})
            block.add({"x": np.float32(2), "observation": np.float32(2)})
            block.add({"observation": np.float32(3)})
            assert out.casts == {}
        assert out.casts == {"x": 2, "observation": 2}
        with out.episode() as block:
            block.add({"x": np.float32(1), "observation": 1.0})
            block.discard()
        assert out.casts == {"x": 2, "observation": 2}


# -- next values ---------------------------------------------------------------------------------


def test_next_values_may_be_given_with_every_step(tmp_path):
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        for n in range(5):
            block.add({"observation": float(n), "next_observation": n + 1.0 if n != 2 else 9.0})
    opened = expstore.open(tmp_path / "a.exp")
    got = opened.read(range(5), ["next_observation", "has_next"])
    assert got["next_observation"].tolist() == [1.0, 2.0, 9.0, 4.0, 5.0]
    assert got["has_next"].all()


def test_the_order_of_the_names_does_not_matter(tmp_path):
    step = {"observation": {"a": 1.0, "b": 2.0}, "next_observation": {"a": 3.0, "b": 4.0}}
    turned = {
        "next_observation": {"b": 6.0, "a": 5.0},
        "observation": {"b": 4.0, "a": 3.0},
    }
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        block.add(step)
        block.add(turned)
    got = expstore.open(tmp_path / "a.exp").read([0, 1], ["observation", "next_observation"])
    assert got["observation"]["a"].tolist() == [1.0, 3.0]
    assert got["next_observation"]["b"].tolist() == [4.0, 6.0]


@pytest.mark.parametrize("first", [True, False])
def test_next_values_come_in_every_step_or_in_none(tmp_path, first):
    steps = [{"observation": 1.0, "next_observation": 2.0}, {"observation": 2.0}]
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        block.add(steps[0 if first else 1] | {"reward": 0.0})
        with pytest.raises(SchemaError, match=r"in every step .* in episode 0, step 1; give the"):
            block.add(steps[1 if first else 0] | {"reward": 0.0})


def test_a_final_observation_must_agree_with_the_next_one(tmp_path):
    step = {"observation": 1.0, "next_observation": 2.0, "reward": 0.0}
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        block.add(step)
        with pytest.raises(SchemaError, match=r"final 'observation' .* differs .*; give one"):
            block.add({"observation": 3.0})
        block.add({"observation": 2.0})
    assert expstore.open(tmp_path / "a.exp").episode(0)["observation"].tolist() == [1.0, 2.0]


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "end_reason", "expected"),
    [
        ({"terminated": True}, None, "terminated"),
        ({"truncated": True}, None, "truncated"),
        ({}, None, "cut"),
        ({}, "incomplete", "incomplete"),
    ],
)
def test_the_end_reason_is_found_as_in_append(tmp_path, last, end_reason, expected):
    with writer(tmp_path / "a.exp") as out, out.episode(end_reason=end_reason) as block:
        for _ in range(300):
            block.add(STEP)
        block.add({**STEP, **last})
    assert expstore.open(tmp_path / "a.exp").episodes[0]["end_reason"] == expected


def test_an_unknown_end_reason_is_refused_at_once(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        with pytest.raises(SchemaError, match=r"end_reason in episode 0 must be .* got 'over'"):
            out.episode(end_reason="over")
        out.append(episode(2))


def test_an_end_reason_against_the_flags_drops_the_episode(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        with (
            pytest.raises(SchemaError, match="'cut' in episode 0 contradicts the flags"),
            out.episode(end_reason="cut") as block,
        ):
            block.add(LAST)
        assert out.num_episodes == 0
        out.append(episode(2))
    assert expstore.verify(tmp_path / "a.exp").is_sound


@pytest.mark.parametrize("before", [0, 255, 256])
def test_no_step_follows_a_flag(tmp_path, before):
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        for _ in range(before):
            block.add(STEP)
        block.add(LAST)
        with pytest.raises(SchemaError) as raised:
            block.add(STEP)
        assert str(raised.value) == (
            f"no step can be added in episode 0, step {before + 1}: field 'terminated' was "
            "true in the step before; end the episode there"
        )
        block.add({"observation": np.float32([7, 8, 9])})
    opened = expstore.open(tmp_path / "a.exp")
    assert opened.num_steps == before + 1
    assert opened.episode(0)["observation"][-1].tolist() == [7, 8, 9]
    assert opened.episodes[0]["end_reason"] == "terminated"


def test_the_final_observation_comes_last_and_once(tmp_path):
    final = {"observation": np.float32([7, 8, 9])}
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        block.add(STEP)
        block.add(final)
        with pytest.raises(
            SchemaError, match=r"comes twice in episode 0, step 1; give one of them"
        ):
            block.add(final)
        with pytest.raises(SchemaError, match=r"the final one came in the step before; end the"):
            block.add(STEP)
    got = expstore.open(tmp_path / "a.exp").episode(0)
    assert (len(got["reward"]), len(got["observation"])) == (1, 2)


@pytest.mark.parametrize(
    ("final", "text"),
    [
        ({"observation": np.zeros(4, np.float32)}, r"must have shape \(3,\), got \(4,\) .*step 1"),
        ({"observation": np.zeros(3)}, "must have dtype float32, got float64 .*step 1"),
        ({"observation": {"a": 1.0}}, "'observation/a' .*step 1 is not in the schema"),
    ],
    ids=["shape", "dtype", "name"],
)
def test_a_final_observation_that_does_not_fit_leaves_the_episode_open(tmp_path, final, text):
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        block.add(STEP)
        with pytest.raises(SchemaError, match=text):
            block.add(final)
        block.add(STEP)
    assert expstore.open(tmp_path / "a.exp").num_steps == 2


def test_in_a_store_of_observations_only_every_observation_is_a_step(tmp_path):
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        for n in range(4):
            block.add({"observation": float(n)})
    assert expstore.open(tmp_path / "a.exp").episode(0)["observation"].tolist() == [0, 1, 2, 3]


def test_an_episode_without_steps_is_refused_and_dropped(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        with (
            pytest.raises(SchemaError, match=r"no steps in episode 0; discard\(\) it"),
            out.episode(),
        ):
            pass
        out.append(episode(2))


def test_an_episode_is_over_after_its_end(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        with out.episode() as block:
            block.add(STEP)
            block.end()
            block.end()
            block.discard()
        assert out.num_episodes == 1
        with pytest.raises(WriterStateError, match=r"in episode 0 is over; open a new episode"):
            block.add(STEP)


# -- refused steps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"action": np.zeros(3, np.float32)}, r"'action' must have shape \(2,\), got \(3,\)"),
        ({"reward": np.float32(1)}, "'reward' must have dtype float64, got float32"),
        ({"reward": None}, "field 'reward' is missing"),
        ({"extra": 1.0}, "field 'extra' .* is not in the schema"),
        ({"done": True}, "field 'done' .* has a reserved name"),
        ({"action": [[1], [2, 3]]}, "field 'action' .* cannot be one array"),
        ({"action": "left"}, "field 'action' .* must hold booleans, integers or floats|text"),
        ({"next_reward": 1.0}, "'next_reward'|next values must come in every step"),
    ],
    ids=["shape", "dtype", "missing", "unknown", "reserved", "rows", "text", "next"],
)
@pytest.mark.parametrize("before", [1, 256])
def test_a_step_that_does_not_fit_is_refused_and_the_episode_goes_on(
    tmp_path, changed, text, before
):
    wrong = {name: value for name, value in {**STEP, **changed}.items() if value is not None}
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        for _ in range(before):
            block.add(STEP)
        with pytest.raises(SchemaError, match=text) as raised:
            block.add(wrong)
        assert f"in episode 0, step {before}" in str(raised.value)
        assert block.num_steps == before
        block.add(LAST)
    opened = expstore.open(tmp_path / "a.exp")
    assert opened.num_steps == before + 1
    assert expstore.verify(tmp_path / "a.exp").is_sound


def test_a_first_step_that_does_not_fit_defines_nothing(tmp_path):
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        before = digest(tmp_path / "a.exp")
        for wrong in ({"done": True}, {"x": "text", "done": 1}, {"x": np.zeros(0)}, {}, []):
            with pytest.raises(SchemaError, match="in episode 0, step 0"):
                block.add(wrong)
        assert digest(tmp_path / "a.exp") == before
        block.add({"y": 1.0})
    assert list(expstore.open(tmp_path / "a.exp").fields) == ["y"]


# -- dropped episodes ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 256, 1000])
@pytest.mark.parametrize("layout", ["mapped", "coded"])
def test_a_discarded_episode_leaves_no_trace(tmp_path, num_steps, layout):
    with writer(tmp_path / "a.exp", layout=layout) as out:
        out.append(episode(3))
        with out.episode(seed=1, note="gone") as block:
            for step in steps_of(episode(num_steps, 1), num_steps):
                block.add(step)
            block.discard()
            block.discard()
        assert (out.num_episodes, out.num_steps) == (1, 3)
        out.append(episode(4, 2))
    with writer(tmp_path / "b.exp", layout=layout) as out:
        out.append(episode(3))
        out.append(episode(4, 2))
    opened, expected = (expstore.open(tmp_path / name) for name in ("a.exp", "b.exp"))
    names = [*opened.fields, "next_observation", "has_next", "done", "episode"]
    assert_same(opened.read(range(7), names), expected.read(range(7), names))
    assert expstore.verify(tmp_path / "a.exp").is_sound


def test_an_exception_in_the_block_drops_the_episode_and_goes_on(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        with pytest.raises(ZeroDivisionError), out.episode() as block:
            block.add(STEP)
            raise ZeroDivisionError
        assert out.num_episodes == 0
        out.append(episode(2))
    assert_same(expstore.open(tmp_path / "a.exp").episode(0), episode(2))


def test_an_episode_left_open_is_dropped_when_the_writer_closes(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append(episode(2))
        block = out.episode()
        block.add(STEP)
    assert expstore.open(tmp_path / "a.exp").num_episodes == 1
    with pytest.raises(WriterStateError, match=r"is over; open a new episode"):
        block.add(STEP)


@pytest.mark.parametrize("num_steps", [1, 1000])
def test_a_discarded_first_episode_does_not_define_the_fields(tmp_path, num_steps):
    with writer(tmp_path / "a.exp") as out:
        with out.episode() as block:
            for _ in range(num_steps):
                block.add({"x": np.zeros(1000, np.float32), "y/z": 1})
            block.discard()
        assert out.schema.fields == {}
        out.append({"x": np.zeros((2, 7), np.uint8), "y": [1, 2]})
    opened = expstore.open(tmp_path / "a.exp")
    assert {name: field.shape for name, field in opened.fields.items()} == {"x": (7,), "y": ()}
    assert expstore.verify(tmp_path / "a.exp").is_sound


def test_a_commit_does_not_publish_fields_of_an_open_first_episode(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        with out.episode() as block:
            block.add({"x": 1.0})
            out.commit()
            assert expstore.open(tmp_path / "a.exp").fields == {}
            block.discard()
        out.append({"other": [1]})
    assert list(expstore.open(tmp_path / "a.exp").fields) == ["other"]


def test_a_schema_that_was_given_survives_a_discarded_first_episode(tmp_path):
    schema = Schema({"x": Field((), "float64")})
    with writer(tmp_path / "a.exp", schema=schema) as out:
        with out.episode() as block:
            block.add({"x": 1.0})
            block.discard()
        assert list(out.schema.fields) == ["x"]
        with pytest.raises(SchemaError, match="field 'other' in episode 0 is not in the schema"):
            out.append({"other": [1]})


# -- beside other calls --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["mapped", "coded"])
def test_commits_while_an_episode_is_open_do_not_show_it(tmp_path, layout):
    data = episode(600)
    with writer(tmp_path / "a.exp", layout=layout) as out:
        out.append(episode(3))
        with out.episode() as block:
            for number, step in enumerate(steps_of(data, 600)):
                block.add(step)
                if number % 200 == 100:
                    out.commit()
                    opened = expstore.open(tmp_path / "a.exp")
                    assert (opened.num_episodes, opened.num_steps) == (1, 3)
                    assert expstore.verify(tmp_path / "a.exp").is_sound
            block.add({"observation": data["observation"][-1]})
        out.commit()
        assert expstore.open(tmp_path / "a.exp").num_episodes == 2
    assert_same(expstore.open(tmp_path / "a.exp").episode(1), data)
    assert expstore.verify(tmp_path / "a.exp").is_sound


@pytest.mark.parametrize("layout", ["mapped", "coded"])
def test_an_episode_may_be_discarded_after_a_commit_was_made_in_it(tmp_path, layout):
    with writer(tmp_path / "a.exp", layout=layout) as out:
        out.append(episode(3))
        with out.episode() as block:
            for step in steps_of(episode(600), 600):
                block.add(step)
            out.commit()
            block.discard()
        out.append(episode(5))
    opened = expstore.open(tmp_path / "a.exp")
    assert_same(opened.episode(1), episode(5))
    assert expstore.verify(tmp_path / "a.exp").is_sound


def test_nothing_else_can_be_written_while_an_episode_is_open(tmp_path):
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        block.add(STEP)
        for call, what in (
            (lambda: out.append(episode(2)), "append"),
            (out.episode, "open an episode"),
            (out.discard, "discard"),
        ):
            with pytest.raises(WriterStateError, match=f"cannot {what} while an episode is open"):
                call()
    assert expstore.open(tmp_path / "a.exp").num_episodes == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_cannot_add_to_an_open_episode(tmp_path):
    with writer(tmp_path / "a.exp") as out, out.episode() as block:
        for _ in range(256):
            block.add(STEP)
        if not (child := os.fork()):
            code = 1
            try:
                block.add({**STEP, "reward": -1.0})
            except WriterStateError:
                block.discard()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        block.add(LAST)
    opened = expstore.open(tmp_path / "a.exp")
    assert opened.num_steps == 257
    assert expstore.verify(tmp_path / "a.exp").is_sound
