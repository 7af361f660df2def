"""Batches out: indices, samplers of ours and of users, priorities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import expstore
from expstore.buffer import (
    AllDataSampler,
    BaseSampler,
    BatchSampler,
    DataBuffer,
    SamplerConfig,
    UniformSampler,
)
from expstore.errors import ArgumentTypeError, SchemaError, StateError
from tests.buffer.feeding import feed_episode, numbers_of, opened


def filled(path: Path, *lengths: int, **options: Any) -> DataBuffer:
    """Episodes of these lengths; observations count from 0 over all of them."""
    buffer = opened(path, **options)
    first = 0
    for length in lengths:
        feed_episode(buffer, first, length)
        first += length
    return buffer


# -- indices -------------------------------------------------------------------------------------


def test_transitions_by_index_are_in_the_order_of_insertion(tmp_path: Path) -> None:
    with filled(tmp_path / "b.exp", 3, 2) as buffer:
        assert numbers_of(buffer) == [0, 1, 2, 3, 4]
        assert buffer[1]["observation"].tolist() == [1, 1]
        assert buffer[-1]["observation"].tolist() == [4, 4]
        for index in (slice(1, 4, 2), np.array([1, 3]), torch.tensor([1, 3]), [1, -2]):
            assert buffer[index]["observation"][:, 0].tolist() == [1, 3]
        mask = np.array([False, True, False, True, False])
        assert buffer[mask]["action"].tolist() == [1, 3]
        assert buffer[0, 2]["action"].item() == 2
        assert buffer.get({"storage_idx": 0, "indices": [2, 0]})["action"].tolist() == [2, 0]
        assert buffer[:]["action"].tolist() == [0, 1, 2, 3, 4]
        assert buffer[[]]["action"].tolist() == []


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_wrong_indices_are_refused(tmp_path: Path, unit: str) -> None:
    with filled(tmp_path / "b.exp", 3, unit=unit) as buffer:
        size = buffer.size()
        for index in (size, -size - 1, [0, size]):
            with pytest.raises(IndexError, match=f"out of range for a buffer of {size}"):
                buffer[index]
        for index in (None, 1.0, object(), "0", np.array([0.5]), True):
            with pytest.raises(TypeError, match="index must be"):
                buffer.get(index)
        with pytest.raises(IndexError, match="one storage"):
            buffer[1, 0]


def test_episodes_by_index_keep_their_order_when_one_is_evicted(tmp_path: Path) -> None:
    with filled(tmp_path / "b.exp", *[2] * 12, unit="episode", capacity=20) as buffer:
        firsts = [buffer[i]["observation"][0, 0].item() for i in range(len(buffer))]
        assert firsts == [4, 6, 8, 10, 12, 14, 16, 18, 20, 22]


def test_episodes_are_stacked_if_they_are_of_one_length(tmp_path: Path) -> None:
    with filled(tmp_path / "b.exp", 3, 3, 2, unit="episode") as buffer:
        assert buffer.size() == len(buffer) == buffer.num_episodes == 3
        assert buffer[0]["observation"].shape == (3, 2)
        assert buffer[[0, 1]]["observation"].shape == (2, 3, 2)
        assert [episode["action"].tolist() for episode in buffer[1:]] == [[3, 4, 5], [6, 7]]
        assert buffer[[2]]["action"].tolist() == [[6, 7]]


def test_what_comes_out_is_the_callers_to_change(tmp_path: Path) -> None:
    with filled(tmp_path / "b.exp", 3) as buffer:
        for _ in range(2):
            for batch in (buffer.sample(3)[0], buffer.get_all(), buffer[0:2]):
                assert (batch["reward"] > 0).all()
                batch["reward"].zero_()


# -- samplers ------------------------------------------------------------------------------------


def test_uniform_repeats_batch_never_does_and_all_returns_every_index() -> None:
    uniform = UniformSampler(seed=3)
    assert len(set(uniform.sample(50, 10).tolist())) <= 10
    assert set(uniform.sample(1000, 10).tolist()) == set(range(10))
    assert sorted(BatchSampler().sample(10, 10).tolist()) == list(range(10))
    everything = AllDataSampler()
    assert everything.sample(None, 4).tolist() == [0, 1, 2, 3]
    assert sorted(everything.sample(None, 50, shuffle=True).tolist()) == list(range(50))
    assert everything.sample(None, 50, shuffle=True).tolist() != list(range(50))
    with pytest.warns(UserWarning, match="takes all 4 entries, not 3"):
        everything.sample(3, 4)
    with pytest.raises(ValueError, match="at most 4"):
        BatchSampler().sample(5, 4)
    assert (uniform.replacement, BatchSampler().replacement) == (True, False)


def test_uniform_draws_are_even() -> None:
    counts = np.bincount(UniformSampler(seed=0).sample(20_000, 20), minlength=20)

    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # 19 degrees of freedom: p = 1e-4


@pytest.mark.parametrize("kind", ["uniform", "all", "batch", "prioritized"])
def test_the_same_seed_gives_the_same_batches(tmp_path: Path, kind: str) -> None:
    batches = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        options = {"sampler": {"type": kind, "seed": seed}}
        with filled(tmp_path / name, 30, **options) as buffer:
            batches.append(buffer.sample(30)[0]["action"].tolist())

    assert batches[0] == batches[1]
    assert batches[0] != batches[2]


def test_a_replay_buffer_keeps_its_data_and_refuses_larger_batches(tmp_path: Path) -> None:
    with filled(tmp_path / "b.exp", 4) as buffer:
        assert len(buffer.sample(3)) == 1
        assert buffer.sample(4)[0]["observation"].shape == (4, 2)
        assert buffer.sample()[0]["observation"].shape == (4, 2)
        with pytest.raises(ValueError, match="at most 4"):
            buffer.sample(5)
        assert buffer.size() == 4
        for wrong in (0, -1, 2.0, True):
            with pytest.raises(ValueError, match="batch_size must be an integer"):
                buffer.sample(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["ReplayBuffer", "RolloutBuffer", "DataBuffer"])
def test_an_empty_buffer_has_one_error(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path / "b.exp", kind, sampler={"type": "uniform"}) as buffer:
        for batch_size in (None, 3):
            with pytest.raises(SchemaError, match="the buffer is empty"):
                buffer.sample(batch_size)


def test_a_rollout_buffer_is_empty_after_a_sample(tmp_path: Path) -> None:
    with filled(tmp_path / "b.exp", 3, 2, type="RolloutBuffer") as buffer:
        (batch,) = buffer.sample(shuffle=False)
        assert batch["action"].tolist() == [0, 1, 2, 3, 4]
        assert (buffer.size(), buffer.num_episodes) == (0, 0)

        feed_episode(buffer, 10, 2)
        assert numbers_of(buffer) == [10, 11]
        assert sorted(buffer.sample()[0]["action"].tolist()) == [10, 11]


def test_a_rollout_buffers_other_samplers_heed_the_batch_size(tmp_path: Path) -> None:
    options: dict[str, Any] = {"type": "RolloutBuffer", "sampler": {"type": "batch"}}
    with filled(tmp_path / "b.exp", 4, **options) as buffer:
        with pytest.raises(ValueError, match="at most 4"):
            buffer.sample(5)
        with pytest.warns(UserWarning, match="1 of 4 entries are cleared without being sampled"):
            assert len(buffer.sample(3)[0]["action"]) == 3
        assert buffer.size() == 0


def test_an_open_episode_goes_on_over_a_rollouts_end(tmp_path: Path) -> None:
    with filled(tmp_path / "b.exp", 2, type="RolloutBuffer") as buffer:
        from tests.buffer.feeding import feed

        feed(buffer, [50, 51])
        buffer.sample()
        feed(buffer, [52], cut=True)
        assert numbers_of(buffer) == [50, 51]


# -- samplers of one's own -----------------------------------------------------------------------


class Recording(BaseSampler):
    """Draws in proportion to priorities that it keeps by id, and writes everything down."""

    def __init__(self) -> None:
        super().__init__(replacement=True)
        self.events: list[Any] = []
        self.priority: dict[int, float] = {}

    def bind(self, buffer: Any) -> None:
        self.events.append(("bind", buffer.path.name))

    def on_push(self, ids: NDArray[np.int64]) -> None:
        self.events.append(("push", ids.tolist()))
        self.priority.update(dict.fromkeys(ids.tolist(), 1.0))

    def on_evict(self, ids: NDArray[np.int64]) -> None:
        self.events.append(("evict", ids.tolist()))
        for i in ids.tolist():
            del self.priority[i]

    def update_priorities(self, ids: NDArray[np.int64], priorities: NDArray[Any]) -> None:
        self.priority.update(zip(ids.tolist(), priorities.tolist(), strict=True))

    def sample(self, batch_size: Any, data_size: int, shuffle: bool = False) -> Any:
        self.events.append(("sample", batch_size, data_size, shuffle))
        assert len(self.priority) == data_size
        best = np.argsort([-p for p in self.priority.values()], kind="stable")[:batch_size]
        return best, 1.0 / (1 + np.arange(len(best)))


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_a_custom_sampler_is_told_of_pushes_evictions_and_priorities(
    tmp_path: Path, unit: str
) -> None:
    with filled(tmp_path / "b.exp", 2, 2, capacity=4, unit=unit) as buffer:
        buffer.sampler = sampler = Recording()
        feed_episode(buffer, 10, 2)
        buffer.size()

        pushed, evicted = ([0, 1, 2, 3], [0, 1]) if unit == "transition" else ([0, 1], [0])
        new = [4, 5] if unit == "transition" else [2]
        assert sampler.events == [("bind", "b.exp"), ("push", pushed), ("push", new),
                                  ("evict", evicted)]  # fmt: skip
        (_,), info = buffer.sample(2, return_info=True)
        assert info["index"].tolist() == ([2, 3] if unit == "transition" else [1, 2])
        assert info["weight"].tolist() == [1.0, 0.5]
        buffer.update_priorities(info["index"], torch.tensor([0.5, 9.0]))
        (batch,), info = buffer.sample(1, return_info=True)
        assert info["index"].tolist() == ([3] if unit == "transition" else [2])
        assert batch["action"].reshape(-1)[0].item() == (3 if unit == "transition" else 10)


def test_a_sampler_with_the_three_arguments_only_is_enough(tmp_path: Path) -> None:
    class Last:
        def sample(self, batch_size: int, data_size: int, shuffle: bool) -> Any:
            return torch.arange(data_size - batch_size, data_size)

    with filled(tmp_path / "b.exp", 5) as buffer:
        buffer.sampler = Last()
        assert buffer.sample(2)[0]["action"].tolist() == [3, 4]
        with pytest.raises(StateError, match="Last has no priorities"):
            buffer.update_priorities([0], [1.0])
        buffer.init()  # again: the sampler and the data stay
        assert isinstance(buffer.sampler, Last)
        assert buffer.size() == 5


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ([[0]], "one-dimensional array of integers"),
        ([0.5], "one-dimensional array of integers"),
        ([5], "positions from 0 to 4, got 5"),
        ([-1], "positions from 0 to 4, got -1"),
    ],
)
def test_what_a_sampler_may_not_return(tmp_path: Path, positions: Any, text: str) -> None:
    class Wrong(BaseSampler):
        def sample(self, batch_size: Any, data_size: int, shuffle: bool = False) -> Any:
            return positions

    with filled(tmp_path / "b.exp", 5) as buffer:
        buffer.sampler = Wrong()
        with pytest.raises(SchemaError, match=text):
            buffer.sample(1)
        with pytest.raises(StateError, match="Wrong has no priorities"):
            buffer.update_priorities([0], [1.0])
        with pytest.raises(ArgumentTypeError, match="a sampler must be"):
            buffer.sampler = "uniform"


# -- prioritized ---------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_prioritized_sampling_follows_what_it_is_given(tmp_path: Path, unit: str) -> None:
    sampler = {"type": "prioritized", "alpha": 1.0, "beta": 1.0}
    with filled(tmp_path / "b.exp", 1, 1, 1, 1, sampler=sampler, unit=unit) as buffer:
        _, info = buffer.sample(4, return_info=True)
        assert set(info["weight"].tolist()) == {1.0}
        buffer.update_priorities([0, 1, 2, 3, 3], torch.tensor([0.0, 0, 1, 3, 1]))

        drawn = np.concatenate(
            [buffer.sample(4, return_info=True)[1]["index"].numpy() for _ in range(500)]
        )
        assert set(drawn.tolist()) == {2, 3}
        assert (drawn == 3).mean() == pytest.approx(0.75, abs=0.04)  # the larger of two counts
        feed_episode(buffer, 10, 1)  # it enters at the largest priority
        late = [buffer.sample(4, return_info=True)[1]["index"].tolist() for _ in range(20)]
        assert any(4 in batch for batch in late)


def test_priorities_of_what_has_left_are_ignored(tmp_path: Path) -> None:
    sampler = {"type": "prioritized"}
    with filled(tmp_path / "b.exp", 2, 2, sampler=sampler, capacity=4) as buffer:
        _, info = buffer.sample(4, return_info=True)
        feed_episode(buffer, 10, 4)
        buffer.update_priorities(info["index"], np.ones(4))
        assert buffer.size() == 4
        buffer.clear()
        buffer.update_priorities(info["index"], np.ones(4))
        feed_episode(buffer, 20, 3)
        assert set(buffer.sample(3)[0]["action"].tolist()) <= {20, 21, 22}


def test_wrong_priorities_change_nothing(tmp_path: Path) -> None:
    with filled(tmp_path / "b.exp", 3, sampler={"type": "prioritized"}) as buffer:
        for ids, given in [([0], [-1.0]), ([0], [float("nan")]), ([0, 1], [1.0])]:
            with pytest.raises(SchemaError):
                buffer.update_priorities(ids, given)


def test_a_sampler_of_expstore_can_be_assigned(tmp_path: Path) -> None:
    with filled(tmp_path / "b.exp", 6) as buffer:
        buffer.sampler = expstore.WithoutReplacement()
        seen = [number for _ in range(3) for number in buffer.sample(2)[0]["action"].tolist()]
        assert sorted(seen) == [0, 1, 2, 3, 4, 5]


def test_the_usual_sampler_is_that_of_the_type(tmp_path: Path) -> None:
    assert SamplerConfig("batch").seed == 0
    for kind, expected in (("ReplayBuffer", UniformSampler), ("RolloutBuffer", AllDataSampler)):
        with opened(tmp_path / kind, kind) as buffer:
            assert type(buffer.sampler) is expected
