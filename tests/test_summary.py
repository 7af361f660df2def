"""The numbers behind `expstore inspect`."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore.errors import NotAStoreError, StepRangeError
from expstore.summary import allocated_below, distribution


def episode(length: int, reward: Any = 1.0) -> dict[str, Any]:
    return {
        "observation": {"state": np.ones((length + 1, 3), np.float32)},
        "action": np.arange(length),
        "reward": np.full((length, *np.shape(reward)), reward),
        "terminated": np.arange(length) == length - 1,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append(episode(2), seed=5, task="reach")
        writer.append(episode(4))
        data = episode(9, 0.5)
        data["terminated"][:] = False
        writer.append(data)
    return tmp_path / "a.exp"


def test_counts_ends_and_commit(path: Path) -> None:
    found = expstore.inspect(path)

    assert found.path == str(path)
    assert (found.num_episodes, found.num_steps, found.commit) == (3, 15, 1)
    assert list(found.end_reasons.items()) == [("terminated", 2), ("cut", 1)]
    assert found.store_id == expstore.open(path).snapshots[0].root.store_id


def test_lengths_and_returns(path: Path) -> None:
    found = expstore.inspect(path)

    assert found.length is not None
    assert (found.length.min, found.length.median, found.length.max) == (2, 4, 9)
    assert found.length.mean == 5
    assert found.length.counts == (1, 0, 1, 0, 0, 0, 0, 1)
    assert list(found.returns) == ["return"]
    assert (found.returns["return"].min, found.returns["return"].max) == (2, 4.5)


def test_returns_of_vector_rewards_are_shown_one_by_one(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append(episode(2, (1.0, 3.0)))

    returns = expstore.inspect(tmp_path / "a.exp").returns

    assert {name: found.max for name, found in returns.items()} == {"return[0]": 2, "return[1]": 6}


def test_a_return_of_shape_one_is_a_return(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append(episode(2, (1.0,)))

    assert list(expstore.inspect(tmp_path / "a.exp").returns) == ["return"]


def test_bytes_on_disk_are_those_that_the_file_system_allocated(path: Path) -> None:
    found = expstore.inspect(path)

    state = found.fields[0]
    on_disk = sum(
        file.stat().st_blocks * 512
        for group in ("steps", "next")
        for file in (path / group / "observation" / "state").rglob("*")
        if file.is_file()
    )
    assert state.name == "observation/state"
    assert (state.shape, state.dtype, state.layout) == ((3,), "float32", "mapped")
    assert state.num_bytes == 15 * 12
    assert 0 < state.allocated_bytes == on_disk
    whole = sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file())
    assert found.allocated_bytes == whole == allocated_below(path)


def test_an_empty_store_can_be_inspected(tmp_path: Path) -> None:
    expstore.Writer(tmp_path / "a.exp").close()

    found = expstore.inspect(tmp_path / "a.exp")

    assert (found.num_episodes, found.num_steps, found.length) == (0, 0, None)
    assert (dict(found.returns), dict(found.end_reasons), found.fields) == ({}, {}, ())


def test_a_store_with_fields_and_without_episodes_can_be_inspected(tmp_path: Path) -> None:
    schema = expstore.Schema({"reward": expstore.Field((), "float32")})
    expstore.Writer(tmp_path / "a.exp", schema=schema).close()

    found = expstore.inspect(tmp_path / "a.exp")

    assert [field.name for field in found.fields] == ["reward"]
    assert (found.length, dict(found.returns)) == (None, {})


def test_a_store_that_is_being_written_is_shown_as_of_its_commit(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp", commit_interval_s=1000) as writer:
        writer.append(episode(1))
        writer.commit()
        writer.append(episode(1))

        assert expstore.inspect(tmp_path / "a.exp").num_episodes == 1
    assert expstore.inspect(tmp_path / "a.exp").num_episodes == 2


def test_one_episode(path: Path) -> None:
    found = expstore.inspect(path, episode=0)

    assert (found.number, found.start, found.length) == (0, 0, 2)
    assert (found.end_reason, found.returned, found.seed) == ("terminated", 2.0, 5)
    assert found.metadata == {"task": "reach"}
    assert found.has_final_observation
    action = found.fields[1]
    assert (action.name, action.min, action.mean, action.max) == ("action", 0, 0.5, 1)


def test_values_that_are_not_finite_are_counted_apart(tmp_path: Path) -> None:
    data = {"action": np.array([np.nan, 1.0, np.inf, 3.0]), "reward": np.array([np.nan] * 4)}
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append(data)
        writer.append({**data, "reward": np.ones(4)})

    action, reward = expstore.inspect(tmp_path / "a.exp", episode=0).fields

    assert (action.min, action.mean, action.max, action.num_not_finite) == (1, 2, 3, 2)
    assert (reward.min, reward.mean, reward.max, reward.num_not_finite) == (None, None, None, 4)
    returns = expstore.inspect(tmp_path / "a.exp").returns["return"]
    assert (returns.max, returns.num_not_finite) == (4, 1)


def test_an_episode_without_a_final_observation(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({"observation": np.zeros(3), "action": np.zeros(3)})

    found = expstore.inspect(tmp_path / "a.exp", episode=0)

    assert not found.has_final_observation
    assert found.returned is None


def test_an_episode_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expstore.summary.BLOCK_BYTES", 24)
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({"action": np.arange(100)})

    (action,) = expstore.inspect(tmp_path / "a.exp", episode=0).fields

    assert (action.min, action.mean, action.max) == (0, 49.5, 99)


def test_ragged_fields_and_text(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append(
            {
                "points": [np.full((n, 3), float(n), np.float32) for n in (2, 0, 5)],
                "words": ["one", "", "three"],
            }
        )

    points, words = expstore.inspect(tmp_path / "a.exp").fields
    in_episode, no_numbers = expstore.inspect(tmp_path / "a.exp", episode=0).fields

    assert (points.ragged, points.shape, points.num_bytes) == (True, (3,), 7 * 12 + 3 * 8)
    assert (words.ragged, words.dtype, words.num_bytes) == (True, "text", 8 + 3 * 8)
    assert (in_episode.min, in_episode.max) == (2, 5)
    assert in_episode.mean == pytest.approx(29 / 7)
    assert (no_numbers.min, no_numbers.mean, no_numbers.max) == (None, None, None)


def test_no_such_episode(path: Path) -> None:
    with pytest.raises(StepRangeError, match="episode 3 is not among the 3 episodes"):
        expstore.inspect(path, episode=3)


def test_no_such_store(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError, match="there is nothing at"):
        expstore.inspect(tmp_path / "nowhere")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@given(
    st.one_of(
        st.lists(st.floats(), max_size=50).map(lambda v: np.array(v, np.float64)),
        st.lists(st.integers(0, 1 << 60), max_size=50).map(lambda v: np.array(v, np.int64)),
    )
)
def test_a_distribution_has_every_finite_value_in_a_bin(values: Any) -> None:
    found = distribution(values)

    finite = values[np.isfinite(values)]
    if not len(finite):
        assert found is None
        return
    assert found is not None
    assert sum(found.counts) == len(finite)
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.num_not_finite == len(values) - len(finite)
    assert found.counts[0] and found.counts[-1]
    assert not math.isnan(found.mean)
