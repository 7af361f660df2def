"""Next values are stored once, and read as if they were stored twice."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore.storage import streaming
from expstore.storage.reading import STRIDE
from tests.storage.made import assert_same, steps_of, store, writer

# Bits of float32: 0, -0, three NaN of different payloads, infinity, a subnormal and 1.5. Only a
# comparison of bytes tells all of them apart.
VALUES = [0, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800000, 1, 0x3FC00000]


@dataclass
class Twice:
    """An episode as it is appended, and its next values stored a second time."""

    data: dict[str, Any]
    following: dict[str, np.ndarray]  # field -> (T, ...)
    present: np.ndarray  # (T,) whether every field that has next values has one here
    streamed: bool

    @property
    def num_steps(self) -> int:
        return len(self.present)


def floats(draw: st.DrawFn, *shape: int) -> np.ndarray:
    number = int(np.prod(shape))
    drawn = draw(st.lists(st.sampled_from(VALUES), min_size=number, max_size=number))
    return np.array(drawn, np.uint32).view(np.float32).reshape(shape)


@st.composite
def episodes(draw: st.DrawFn, has_goal: bool) -> Twice:
    num_steps = draw(st.sampled_from([1, 1, 2, 3, 7]))
    data: dict[str, Any] = {"action": np.arange(num_steps, dtype=np.int8)}
    following, present = {}, np.ones(num_steps, bool)
    kinds = {"observation": ["neither", "final", "next", "next and final"]}
    if has_goal:
        kinds["goal"] = ["neither", "next"]
    for name, possible in kinds.items():
        rows = floats(draw, num_steps, 2)
        kind = draw(st.sampled_from(possible))
        after = np.concatenate([rows[1:], floats(draw, 1, 2)])
        if kind.startswith("next"):
            gaps = draw(st.lists(st.integers(0, num_steps - 1), max_size=2))
            after[gaps] = floats(draw, len(gaps), 2)
            data[f"next_{name}"] = after.copy()
        data[name] = np.concatenate([rows, after[-1:]]) if kind.endswith("final") else rows
        if kind == "neither":
            after[-1], present[-1] = 0, False
        following[name] = after
    following["action"] = np.append(data["action"][1:], np.int8(0))
    return Twice(data, following, present, draw(st.booleans()))


@st.composite
def recordings(draw: st.DrawFn) -> list[Twice]:
    """Episodes of a store; the first one decides whether `goal` has next values."""
    if not draw(st.booleans()):
        return draw(st.lists(episodes(has_goal=False), min_size=1, max_size=5))
    known = episodes(has_goal=True)
    first = draw(known.filter(lambda episode: "next_goal" in episode.data))
    return [first, *draw(st.lists(known, max_size=4))]


def write(path: Path, recorded: list[Twice], **settings: Any) -> None:
    with writer(path, **settings) as out:
        for episode in recorded:
            if not episode.streamed:
                out.append(episode.data)
                continue
            with out.episode() as stream:
                for step in steps_of(episode.data, episode.num_steps):
                    stream.add(step)
                if len(episode.data["observation"]) > episode.num_steps:
                    stream.add({"observation": episode.data["observation"][-1]})


def joined(recorded: list[Twice]) -> dict[str, np.ndarray]:
    expected = {
        f"next_{name}": np.concatenate([episode.following[name] for episode in recorded])
        for name in recorded[0].following
    }
    return {**expected, "has_next": np.concatenate([episode.present for episode in recorded])}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """So that streamed episodes of a few steps consist of several blocks."""
    monkeypatch.setattr(streaming, "BLOCK_STEPS", 2)


@given(recorded=recordings(), layout=st.sampled_from(["mapped", "coded"]), data=st.data())
def test_next_values_are_read_as_if_they_were_stored_twice(recorded, layout, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.exp"
        write(path, recorded, layout=layout)
        opened = expstore.open(path)
        expected = joined(recorded)
        steps = np.array(
            data.draw(st.lists(st.integers(0, opened.num_steps - 1), max_size=12)), np.int64
        )
        every = np.arange(opened.num_steps)
        assert_same(opened.read(every, list(expected)), expected)
        assert_same(opened.read(steps, list(expected)), {n: a[steps] for n, a in expected.items()})
        assert expstore.verify(path).is_sound


@given(recorded=recordings(), data=st.data())
def test_next_values_of_views_and_unions_are_those_of_their_stores(recorded, data):
    with tempfile.TemporaryDirectory() as folder:
        cut = data.draw(st.integers(1, len(recorded)))
        parts = [recorded[:cut], [recorded[0], *recorded[cut:]]]
        paths = [Path(folder) / name for name in ("a.exp", "b.exp")]
        for path, part in zip(paths, parts, strict=True):
            write(path, part)
        chosen = [
            data.draw(st.lists(st.booleans(), min_size=len(part), max_size=len(part)))
            for part in parts
        ]
        view = expstore.open(paths).filter([kept for kept in chosen[0] + chosen[1]])
        steps = view.spans.steps_at(np.arange(view.num_steps))
        kept = [e for part, keep in zip(parts, chosen, strict=True)
                for e, k in zip(part, keep, strict=True) if k]  # fmt: skip
        if kept:
            expected = joined(kept)
            assert_same(view.read(steps, list(expected)), expected)
        else:
            assert len(view) == 0


@given(recorded=recordings())
def test_a_streamed_episode_and_an_appended_one_are_the_same_bytes(recorded):
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("appended.exp", "streamed.exp")]
        for path, streamed in zip(paths, (False, True), strict=True):
            write(path, [Twice(e.data, e.following, e.present, streamed) for e in recorded])
        files = [
            {
                entry.relative_to(path): entry.read_bytes()
                for part in ("steps", "next", "episodes")
                for entry in (path / part).rglob("c.*")
            }
            for path in paths
        ]
        assert files[0] == files[1]


# -- the rules, one by one -----------------------------------------------------------------------


def exceptions(path: Path, field: str = "observation") -> dict[str, list[Any]]:
    """What is stored under `next/`."""
    reader = expstore.open(path).snapshots[0].following[field]
    steps, present, values = reader.between(0, 1 << 40)
    return {"step": steps.tolist(), "present": present.tolist(), "value": values.tolist()}


def test_only_the_end_of_an_episode_is_stored(tmp_path):
    store(tmp_path / "a.exp", {"observation": np.arange(10, 14.0), "reward": np.ones(3)})
    assert exceptions(tmp_path / "a.exp") == {"step": [2], "present": [True], "value": [13.0]}


def test_next_values_that_say_what_the_next_row_says_are_not_stored(tmp_path):
    rows = np.arange(10, 14.0)
    store(tmp_path / "a.exp", {"observation": rows[:3], "next_observation": rows[1:]})
    assert exceptions(tmp_path / "a.exp") == {"step": [2], "present": [True], "value": [13.0]}


def test_a_gap_in_the_middle_is_stored(tmp_path):
    data = {"observation": np.array([1.0, 2.0, 3.0]), "next_observation": np.array([9.0, 3.0, 4.0])}
    store(tmp_path / "a.exp", data)
    assert exceptions(tmp_path / "a.exp") == {
        "step": [0, 2],
        "present": [True, True],
        "value": [9.0, 4.0],
    }


def test_without_a_next_value_nothing_is_pretended(tmp_path):
    opened = store(tmp_path / "a.exp", {"observation": [1.0, 2.0]}, {"observation": [5.0]})
    assert exceptions(tmp_path / "a.exp") == {
        "step": [1, 2],
        "present": [False, False],
        "value": [0.0, 0.0],
    }
    got = opened.read([0, 1, 2], ["next_observation", "has_next"])
    assert got["next_observation"].tolist() == [2.0, 0.0, 0.0]
    assert got["has_next"].tolist() == [True, False, False]


def test_zeros_of_different_signs_are_different_values(tmp_path):
    data = {"observation": np.array([1.0, 0.0]), "next_observation": np.array([-0.0, 2.0])}
    opened = store(tmp_path / "a.exp", data)
    assert exceptions(tmp_path / "a.exp")["step"] == [0, 1]
    assert_same(
        opened.read([0, 1], "next_observation"), {"next_observation": np.array([-0.0, 2.0])}
    )


def test_a_nan_equals_itself_and_no_other(tmp_path):
    one, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    rows = np.array([1.0, one, one], np.float32)
    opened = store(
        tmp_path / "a.exp",
        {"observation": rows, "next_observation": np.array([one, other, 2.0], np.float32)},
    )
    assert exceptions(tmp_path / "a.exp")["step"] == [1, 2]
    got = opened.read([0, 1], "next_observation")["next_observation"]
    assert got.view(np.uint32).tolist() == [0x7FC00000, 0x7FC00001]


def test_the_last_step_of_a_cut_episode_knows_what_came_after(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append({"observation": [1.0, 2.0, 3.0], "action": [0, 0]})
        out.append({"observation": [3.0, 4.0], "action": [0]})
    opened = expstore.open(tmp_path / "a.exp")
    assert opened.episodes["end_reason"].tolist() == ["cut", "cut"]
    got = opened.read([0, 1, 2], ["next_observation", "has_next"])
    assert got["next_observation"].tolist() == [2.0, 3.0, 4.0]
    assert got["has_next"].tolist() == [True, True, True]


def test_other_fields_have_next_values_where_the_first_episode_brought_them(tmp_path):
    opened = store(
        tmp_path / "a.exp",
        {"reward": [1.0, 2.0], "next_reward": [2.0, 7.0]},
        {"reward": [3.0, 4.0]},
    )
    got = opened.read(range(4), ["next_reward", "has_next"])
    assert got["next_reward"].tolist() == [2.0, 7.0, 4.0, 0.0]
    assert got["has_next"].tolist() == [True, True, True, False]
    assert opened.episode(0)["next_reward"].tolist() == [2.0, 7.0]
    assert "next_reward" not in opened.episode(1)


def test_fields_without_next_values_take_the_following_row_and_end_in_zero(tmp_path):
    opened = store(tmp_path / "a.exp", {"reward": [1.0, 2.0]}, {"reward": [3.0]})
    got = opened.read(range(3), ["next_reward", "has_next"])
    assert got["next_reward"].tolist() == [2.0, 0.0, 0.0]
    assert got["has_next"].tolist() == [True, False, False]


def test_an_observation_with_a_final_row_beside_one_without(tmp_path):
    opened = store(
        tmp_path / "a.exp",
        {"observation": {"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0]}, "action": [0, 0]},
    )
    got = opened.read([0, 1], ["next_observation", "has_next"])
    assert got["next_observation"]["a"].tolist() == [2.0, 3.0]
    assert got["next_observation"]["b"].tolist() == [5.0, 0.0]
    assert got["has_next"].tolist() == [True, False]
    assert_same(
        opened.episode(0)["observation"],
        {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([4.0, 5.0])},
    )


def test_the_last_step_of_a_store_of_a_union_does_not_look_into_the_next_one(tmp_path):
    store(tmp_path / "a.exp", {"observation": [1.0, 2.0]})
    store(tmp_path / "b.exp", {"observation": [5.0, 6.0]})
    both = expstore.open([tmp_path / "a.exp", tmp_path / "b.exp"])
    got = both.read([1, STRIDE, STRIDE + 1], ["next_observation", "has_next"])
    assert got["next_observation"].tolist() == [0.0, 6.0, 0.0]
    assert got["has_next"].tolist() == [False, True, False]


@pytest.mark.parametrize("layout", ["mapped", "coded"])
def test_many_exceptions_run_over_several_chunks(tmp_path, layout):
    image = np.random.default_rng(0).integers(0, 255, (4000, 100, 30), np.uint8)
    with writer(tmp_path / "a.exp", layout=layout) as out:
        for first in range(0, 4000, 2):
            out.append({"observation": image[first : first + 2], "action": [0]})
    opened = expstore.open(tmp_path / "a.exp")
    steps = np.random.default_rng(1).integers(0, 2000, 100)
    got = opened.read(steps, ["next_observation"])["next_observation"]
    assert np.array_equal(got, image[2 * steps + 1])
