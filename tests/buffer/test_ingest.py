"""Rows in: every ingest method, cuts, half-rows, vector environments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore.buffer import (
    BatchedData,
    DataBuffer,
    EnvMeta,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
)
from expstore.errors import ArgumentTypeError, SchemaError, UnknownEnvError, WriterStateError
from tests.buffer.feeding import env_ret, feed, feed_episode, numbers_of, opened, response


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[DataBuffer]:
    with opened(tmp_path / "b.exp") as buffer:
        yield buffer


@pytest.fixture
def auto(tmp_path: Path) -> Iterator[DataBuffer]:
    with opened(tmp_path / "b.exp", auto_truncate_episode=True) as buffer:
        yield buffer


def transitions(buffer: DataBuffer) -> list[tuple[float, float, float, int, bool]]:
    """(observation, next observation, reward, action, terminated) of each transition."""
    rows = buffer.get_all()
    return list(
        zip(
            rows["observation"].reshape(len(rows["reward"]), -1)[:, 0].tolist(),
            rows["next_observation"].reshape(len(rows["reward"]), -1)[:, 0].tolist(),
            rows["reward"].tolist(),
            rows["action"].tolist(),
            rows["terminated"].tolist(),
            strict=True,
        )
    )


def test_n_plus_1_rows_become_n_transitions(buffer: DataBuffer) -> None:
    feed(buffer, [0, 1, 2, 3], end="terminated")
    buffer.truncate_one_episode("env")

    assert transitions(buffer) == [
        (0, 1, 1, 0, False),
        (1, 2, 2, 1, False),
        (2, 3, 3, 2, True),
    ]


def test_before_init_the_error_says_what_to_call(tmp_path: Path) -> None:
    buffer = DataBuffer({"type": "DataBuffer", "capacity": 10})

    with pytest.raises(WriterStateError, match=r"call init\(\) first"):
        buffer.size()
    with pytest.raises(WriterStateError, match=r"call init\(\) first"):
        buffer.add_transition("env", env_ret(0), response(0))


def test_an_inline_cut_ends_the_episode_after_the_row_and_sets_no_flag(buffer: DataBuffer) -> None:
    feed(buffer, [0, 1, 2], cut=True)

    assert buffer.num_episodes == 1
    assert buffer.get_all()["truncated"].tolist() == [False, False]
    assert expstore.open(buffer.path).episodes["end_reason"].tolist() == ["cut"]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_auto_truncation_ends_the_episode_with_its_flag(auto: DataBuffer, end: str) -> None:
    feed(auto, [0, 1, 2], end=end)
    feed(auto, [50, 51], end="terminated")

    assert numbers_of(auto) == [0, 1, 50]
    assert auto.get_all()[end].tolist()[:2] == [False, True]
    assert expstore.open(auto.path).episodes["end_reason"].tolist() == [end, "terminated"]


def test_auto_and_an_inline_and_a_manual_cut_of_the_same_row_are_one(auto: DataBuffer) -> None:
    feed(auto, [0, 1, 2], end="terminated", cut=True)
    auto.truncate_one_episode("env")

    assert auto.num_episodes == 1


def test_rows_fed_as_next_step_autoreset_gives_them_are_the_true_transitions(
    auto: DataBuffer,
) -> None:
    for number, end in [(0, ""), (1, ""), (2, "terminated"), (50, ""), (51, "terminated")]:
        auto.add_transition("env", env_ret(number, end=end), response(number))

    assert transitions(auto) == [(0, 1, 1, 0, False), (1, 2, 2, 1, True), (50, 51, 51, 50, True)]


def test_rows_fed_as_same_step_autoreset_needs_them_are_the_true_transitions(
    auto: DataBuffer,
) -> None:
    """Two rows on the step that ends an episode: its final observation, then the reset's."""
    rows = [(0, ""), (1, ""), (2, "terminated"), (50, ""), (51, ""), (52, "truncated"), (90, "")]
    for number, end in rows:
        auto.add_transition("env", env_ret(number, end=end), response(number))

    assert [row[:2] for row in transitions(auto)] == [(0, 1), (1, 2), (50, 51), (51, 52)]
    assert [row[4] for row in transitions(auto)] == [False, True, False, False]


def test_both_flags_are_kept_and_the_termination_decides(auto: DataBuffer) -> None:
    feed(auto, [0])
    both = env_ret(1, end="terminated")
    both.last_truncated = True
    auto.add_transition("env", both, response(1))

    rows = auto.get_all()
    assert (rows["terminated"].tolist(), rows["truncated"].tolist()) == ([True], [True])
    assert auto.path is not None and expstore.open(auto.path).episodes[0]["end_reason"] == (
        "terminated"
    )


def test_a_stream_that_goes_on_after_a_flag_is_split_there(buffer: DataBuffer) -> None:
    for number, end in [(0, ""), (1, ""), (2, "terminated"), (50, ""), (51, "")]:
        buffer.add_transition("env", env_ret(number, end=end), response(number))
    buffer.truncate_one_episode("env")

    assert transitions(buffer) == [
        (0, 1, 1, 0, False),
        (1, 2, 2, 1, True),
        (50, 51, 51, 50, False),
    ]
    assert buffer.report.split_episodes == 1


def test_a_reset_signal_closes_the_open_episode(buffer: DataBuffer) -> None:
    feed(buffer, [0, 1])
    buffer.add_transition("env", env_ret(50, is_first=True), response(50))
    feed(buffer, [51], cut=True)

    assert [row[:2] for row in transitions(buffer)] == [(0, 1), (50, 51)]


def test_an_episode_without_a_step_is_counted_and_not_stored(buffer: DataBuffer) -> None:
    feed(buffer, [0], cut=True)

    assert (buffer.num_episodes, buffer.report.empty_episodes) == (0, 1)
    buffer.add_episode({"other": torch.zeros(3)})  # it has not decided the columns
    assert buffer.num_episodes == 1


def test_an_environment_that_uses_its_observation_again_is_recorded_as_it_was(
    buffer: DataBuffer,
) -> None:
    observation, action = np.zeros(2), torch.zeros(1)
    for number in (1.0, 2.0, 3.0):
        observation[:], action[:] = number, number
        buffer.add_transition(
            "env", EnvRet("env", observation), PolicyResponse("env", action=action)
        )
    buffer.truncate_one_episode("env")

    assert buffer.get_all()["next_observation"].tolist() == [[2, 2], [3, 3]]
    assert buffer.get_all()["action"].tolist() == [[1], [2]]


# -- errors --------------------------------------------------------------------------------------


def test_ids_that_differ_are_refused(buffer: DataBuffer) -> None:
    for ids in (("a", "b", "b"), ("a", "a", "b"), ("b", "a", "a")):
        with pytest.raises(SchemaError, match="ids must be the same"):
            buffer.add_transition(ids[0], env_ret(0, ids[1]), response(0, ids[2]))
    with pytest.raises(SchemaError, match="ids must be the same"):
        buffer.add_data_async("a", env_ret(0, "b"))


def test_a_field_that_is_missing_or_new_is_named_with_its_row(buffer: DataBuffer) -> None:
    feed(buffer, [0, 1], value=0.5)

    with pytest.raises(SchemaError, match="'value' is missing in row 2 of the episode of env"):
        buffer.add_transition("env", env_ret(2), response(2))
    with pytest.raises(SchemaError, match="'extra' is new in row 2"):
        buffer.add_transition("env", env_ret(2), response(2, value=0.5, extra=1))
    feed(buffer, [2], value=0.5, cut=True)
    assert numbers_of(buffer, "value") == [0.5, 0.5]


def test_a_cut_needs_an_id_with_an_open_episode(buffer: DataBuffer) -> None:
    feed(buffer, [0, 1])

    with pytest.raises(KeyError, match="env 'nobody' has no open episode"):
        buffer.truncate_one_episode("nobody")
    with pytest.raises(TypeError, match="env_id"):
        buffer.truncate_one_episode(3)
    with pytest.raises(ArgumentTypeError, match="env_id"):
        buffer.truncate_episodes(["env", object()])
    with pytest.raises(UnknownEnvError):
        buffer.truncate_episodes(["env", "nobody"])
    assert buffer.num_episodes == 0  # all were looked at before the first cut
    buffer.truncate_one_episode("nobody", missing_ok=True)
    buffer.truncate_one_episode(env_ret(0))  # anything with an env_id
    assert buffer.num_episodes == 1
    with pytest.raises(KeyError):
        buffer.truncate_one_episode("env")  # a second cut by hand


def test_is_eval_drops_the_row_and_counts_it(buffer: DataBuffer) -> None:
    buffer.add_transition("env", env_ret(0), response(0), is_eval=True)
    feed(buffer, [1, 2], cut=True)

    assert (numbers_of(buffer), buffer.report.eval_rows) == ([1], 1)


# -- batches -------------------------------------------------------------------------------------


def batch(number: int, ids: tuple[str, ...] = ("a", "b")) -> tuple[BatchedData, BatchedData]:
    return (
        BatchedData(ids, [env_ret(number + 10 * k, i) for k, i in enumerate(ids)]),
        BatchedData(ids, [response(number + 10 * k, i) for k, i in enumerate(ids)]),
    )


def test_batches_feed_each_environment(buffer: DataBuffer) -> None:
    for number in range(3):
        assert buffer.add_batched_transition(*batch(number)) is buffer
    buffer.add_batched_transition(*batch(3), truncations=[True, False])
    assert numbers_of(buffer) == [0, 1, 2]

    buffer.truncate_episodes(["b"])
    assert numbers_of(buffer) == [0, 1, 2, 10, 11, 12]


def test_batches_that_do_not_fit_are_refused_whole(buffer: DataBuffer) -> None:
    returned, responses = batch(0)
    turned = BatchedData(("b", "a"), responses.values()[::-1])

    with pytest.raises(SchemaError, match="same ids in the same order"):
        buffer.add_batched_transition(returned, turned)
    with pytest.raises(TypeError, match="must be a list"):
        buffer.add_batched_transition(returned, responses, (True, False))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one entry for each of 2"):
        buffer.add_batched_transition(returned, responses, [True])
    with pytest.raises(TypeError, match="must be a list"):
        buffer.add_batched_data_async(returned, np.array([True, False]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one entry for each of 2"):
        buffer.add_batched_data_async(returned, [True])
    with pytest.raises(UnknownEnvError):
        buffer.truncate_one_episode("a")


def test_an_id_twice_in_a_batch_is_two_rows_of_its_episode(buffer: DataBuffer) -> None:
    ids = ("a", "a")
    buffer.add_batched_transition(
        BatchedData(ids, [env_ret(0, "a"), env_ret(1, "a")]),
        BatchedData(ids, [response(0, "a"), response(1, "a")]),
        [False, True],
    )

    assert numbers_of(buffer) == [0]


def test_half_rows_in_batches_take_one_bool_for_all(buffer: DataBuffer) -> None:
    for number in range(3):
        returned, responses = batch(number)
        buffer.add_batched_data_async(returned)
        buffer.add_batched_data_async(responses, truncations=number == 2)

    assert numbers_of(buffer) == [0, 1, 10, 11]


# -- half-rows -----------------------------------------------------------------------------------


def test_half_rows_make_the_same_transitions(buffer: DataBuffer) -> None:
    for number in range(3):
        buffer.add_data_async("env", env_ret(number))
        buffer.add_data_async("env", response(number), truncated=number == 2)

    assert [row[:4] for row in transitions(buffer)] == [(0, 1, 1, 0), (1, 2, 2, 1)]


def test_an_unanswered_observation_at_the_cut_is_the_last_row(buffer: DataBuffer) -> None:
    buffer.add_data_async("env", env_ret(0))
    buffer.add_data_async("env", response(0))
    buffer.add_data_async("env", env_ret(1))
    buffer.truncate_one_episode("env")

    assert [row[:4] for row in transitions(buffer)] == [(0, 1, 1, 0)]


def test_a_terminal_observation_without_an_answer_ends_its_episode(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", auto_truncate_episode=True) as auto:
        auto.add_data_async("env", env_ret(0))
        auto.add_data_async("env", response(0))
        auto.add_data_async("env", env_ret(1, end="terminated"))
        auto.add_data_async("env", env_ret(50))
        auto.add_data_async("env", response(50))
        auto.add_data_async("env", env_ret(51, end="truncated"), truncated=True)

        assert transitions(auto) == [(0, 1, 1, 0, True), (50, 51, 51, 50, False)]


def test_a_replaced_half_row_is_counted(buffer: DataBuffer) -> None:
    buffer.add_data_async("env", env_ret(7))
    buffer.add_data_async("env", env_ret(0))
    buffer.add_data_async("env", response(0))
    feed(buffer, [1], cut=True)

    assert numbers_of(buffer) == [0]
    assert buffer.report.replaced_half_rows == 1


def test_an_answer_to_nothing_is_refused(buffer: DataBuffer) -> None:
    with pytest.raises(SchemaError, match="answers nothing"):
        buffer.add_data_async("env", response(0))
    buffer.add_data_async("env", env_ret(0))
    buffer.add_data_async("env", response(0))
    with pytest.raises(SchemaError, match="answered already"):
        buffer.add_data_async("env", response(0))
    with pytest.raises(TypeError, match="EnvRet or a PolicyResponse"):
        buffer.add_data_async("env", {"action": 1})  # type: ignore[arg-type]


def test_a_last_row_without_an_answer_keeps_the_last_transition(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(raw: Any) -> dict[str, Any]:
        seen.append((raw.policy_valid, raw["value"][-1], raw["action"][-1]))
        return expstore.buffer.default_postprocess_fn(raw)

    with opened(tmp_path / "b.exp", functions={"postprocess_fn": look}) as buffer:
        feed(buffer, [0, 1], value=0.5)
        buffer.add_transition("env", env_ret(2), None)

        assert numbers_of(buffer) == [0, 1]
    assert [(valid, np.isnan(value), action) for valid, value, action in seen] == [(False, True, 0)]


# -- vector environments -------------------------------------------------------------------------


def vector(number: int, ends: tuple[str, str] = ("", ""), **more: Any) -> EnvRet:
    """Two environments with the observations [number, 0] and [number + 100, 0]."""
    observation = np.array([[number, 0], [number + 100, 0]], np.float32)
    if number == 0:
        return EnvRet("env", observation, **more)
    return EnvRet(
        "env",
        observation,
        last_reward=np.array([number, number + 100], np.float32),
        last_terminated=np.array([end == "terminated" for end in ends]),
        last_truncated=np.array([end == "truncated" for end in ends]),
        **more,
    )


def vector_response(number: int) -> PolicyResponse:
    return PolicyResponse("env", action=np.array([number, number + 100]))


METAS = [EnvMeta("env", num_envs=2)]


def test_worked_example_b_is_one_environment_after_the_other(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", metas=METAS) as buffer:
        for number in range(4):
            buffer.add_transition("env", vector(number), vector_response(number))
        buffer.truncate_one_episode("env")

        assert numbers_of(buffer) == [0, 1, 2, 100, 101, 102]
        assert numbers_of(buffer, "next_observation") == [1, 2, 3, 101, 102, 103]
        assert numbers_of(buffer, "action") == [0, 1, 2, 100, 101, 102]
        assert numbers_of(buffer, "reward") == [1, 2, 3, 101, 102, 103]
        names = [row["env_id"] for row in expstore.open(buffer.path).episodes]
        assert names == ["env/0", "env/1"]


def test_worked_example_b_in_episode_unit_is_stacked(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", metas=METAS, unit="episode") as buffer:
        for number in range(4):
            buffer.add_transition("env", vector(number), vector_response(number))
        buffer.truncate_one_episode("env")

        assert buffer.size() == 2
        assert buffer.sample(2)[0]["observation"].shape == (2, 3, 2)


def test_sub_environments_end_when_their_own_flag_is_set(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", metas=METAS, auto_truncate_episode=True) as buffer:
        buffer.add_transition("env", vector(0, info={"a": 1}), vector_response(0))
        buffer.add_transition("env", vector(1, info={"a": 1}), vector_response(1))
        buffer.add_transition("env", vector(2, ("terminated", "")), vector_response(2))
        assert numbers_of(buffer) == [0, 1]
        buffer.add_transition("env", vector(3), vector_response(3))

        buffer.truncate_one_episode("env")  # env/0 has a reset row only
        assert numbers_of(buffer) == [0, 1, 100, 101, 102]


def test_the_parents_cut_skips_those_that_have_just_ended(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", metas=METAS, auto_truncate_episode=True) as buffer:
        for number, ends in [(0, ("", "")), (1, ("terminated", ""))]:
            buffer.add_transition("env", vector(number, ends), vector_response(number))
        buffer.truncate_one_episode("env/1")
        buffer.truncate_one_episode("env", missing_ok=True)

        assert numbers_of(buffer) == [0, 100]


def test_flags_inside_of_batched_rows_split_each_environment_by_itself(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", metas=METAS) as buffer:
        for number, ends in enumerate([("", ""), ("terminated", ""), ("", ""), ("", "")]):
            buffer.add_transition("env", vector(number, ends), vector_response(number))
        buffer.truncate_one_episode("env")

        assert numbers_of(buffer) == [0, 2, 100, 101, 102]
        assert buffer.report.split_episodes == 1


def test_a_vector_environment_without_metadata_is_explained(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", auto_truncate_episode=True) as buffer:
        buffer.add_transition("env", vector(0), vector_response(0))
        with pytest.raises(SchemaError, match="num_envs=2"):
            buffer.add_transition("env", vector(1), vector_response(1))


def test_a_field_that_is_no_batch_is_named(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "b.exp", metas=METAS, auto_truncate_episode=True) as buffer,
        pytest.raises(SchemaError, match=r"'action' of env 'env' must have 2 entries"),
    ):
        buffer.add_transition("env", vector(0), PolicyResponse("env", action=np.zeros(3)))


def test_with_metadata_an_unknown_id_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", metas=METAS) as buffer:
        feed_episode(buffer, 0, 2, "env/1")
        for env_id in ("other", "env/2", "env/x"):
            with pytest.raises(KeyError, match="is not among 'env'"):
                buffer.add_transition(env_id, env_ret(0, env_id), response(0, env_id))


# -- finished episodes, several agents -----------------------------------------------------------


def test_a_finished_episode_is_stored_as_it_is(buffer: DataBuffer) -> None:
    episode = {"observation": torch.ones(3, 2), "advantages": torch.arange(3.0)}
    buffer.add_episode(episode, env_id="somewhere")

    assert buffer.get_all()["advantages"].tolist() == [0, 1, 2]
    assert expstore.open(buffer.path).episodes[0]["env_id"] == "somewhere"


def test_finished_episodes_of_several_environments_are_split(buffer: DataBuffer) -> None:
    buffer.add_episode({"reward": torch.tensor([[0.0, 10], [1, 11]])}, num_envs=2)

    assert (numbers_of(buffer, "reward"), buffer.num_episodes) == ([0, 1, 10, 11], 2)
    with pytest.raises(SchemaError, match=r"must have shape \(T, 3, ...\)"):
        buffer.add_episode({"reward": torch.zeros(2, 2)}, num_envs=3)


def test_a_finished_episode_with_flags_inside_is_split_there(buffer: DataBuffer) -> None:
    flags = torch.tensor([False, True, False])
    buffer.add_episode({"reward": torch.arange(3.0), "terminated": flags})

    assert buffer.num_episodes == 2
    assert expstore.open(buffer.path).episodes["length"].tolist() == [2, 1]
    assert expstore.open(buffer.path).episodes["end_reason"].tolist() == ["terminated", "cut"]


def test_several_agents_have_their_own_rewards_and_flags(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", auto_truncate_episode=True) as buffer:
        for number in range(3):
            returned = MultiAgentEnvRet(
                "env",
                {"left": np.full(2, number), "right": np.full(3, number)},
                {"left": float(number), "right": -float(number)} if number else {},
                {"left": number == 2, "right": number >= 1} if number else {},
                {"left": False, "right": False} if number else {},
            )
            answer = MultiAgentPolicyResponse("env", action={"left": 1, "right": number})
            buffer.add_transition("env", returned, answer)

        rows = buffer.get_all()
        assert rows["reward"]["right"].tolist() == [-1, -2]
        assert rows["terminated"]["left"].tolist() == [False, True]
        assert rows["next_observation"]["right"].shape == (2, 3)
        assert rows["action"]["right"].tolist() == [0, 1]
        assert expstore.open(buffer.path).episodes["end_reason"].tolist() == ["terminated"]
