"""What stays: capacity, clearing, restarts, kills, journals, quarantine, fingerprints."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore.buffer import (
    DataBuffer,
    EnvRet,
    NormalizePreprocessor,
    PolicyResponse,
    default_postprocess_fn,
    load_data_buffer,
)
from expstore.buffer.returns import GeneralizedAdvantage, RewardScaling
from expstore.buffer.row_codec import decode, encode, record, records
from expstore.errors import (
    BufferFullError,
    CapacityError,
    NotAStoreError,
    PostprocessError,
    SchemaError,
    StoreLockedError,
    WriterStateError,
)
from expstore.storage import files
from tests.buffer.feeding import env_ret, feed, feed_episode, numbers_of, opened, response

# -- capacity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_whole_oldest_episodes_leave(tmp_path: Path, unit: str) -> None:
    with opened(tmp_path / "b.exp", capacity=5, unit=unit) as buffer:
        feed_episode(buffer, 0, 3)
        feed_episode(buffer, 10, 4)

        assert (buffer.num_transitions, buffer.num_episodes) == (4, 1)
        assert expstore.open(buffer.path).num_steps == 4


def test_an_episode_longer_than_the_capacity_is_refused_and_stays_open(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", capacity=3) as buffer:
        feed_episode(buffer, 0, 2)
        with pytest.raises(CapacityError, match="has 4 transitions, but the buffer may hold 3"):
            feed_episode(buffer, 10, 4)
        assert numbers_of(buffer) == [0, 1]
        with pytest.raises(CapacityError, match="may hold 3"):
            buffer.add_episode({"observation": torch.zeros(4, 2)})
        buffer.clear(open_episodes=True)
        feed_episode(buffer, 20, 3)
        assert numbers_of(buffer) == [20, 21, 22]


def test_a_fixed_buffer_that_is_full_refuses_before_anything_is_written(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", capacity=5, mode="fixed") as buffer:
        feed_episode(buffer, 0, 3)
        feed_episode(buffer, 10, 2)  # exactly full
        for _ in range(2):
            with pytest.raises(RuntimeError, match="room for 0 of its 5 transitions"):
                buffer.add_episode(buffer[0:1])
        with pytest.raises(BufferFullError, match="room for 0"):
            feed_episode(buffer, 20, 1)
        assert numbers_of(buffer) == [0, 1, 2, 10, 11]

        buffer.clear()
        buffer.truncate_one_episode("env")  # it was kept open
        assert numbers_of(buffer) == [20]


def test_episodes_of_sub_environments_come_all_or_none(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", capacity=5, mode="fixed") as buffer:
        buffer.add_episode({"reward": torch.zeros(2)})
        with pytest.raises(BufferFullError, match="room for 3"):
            buffer.add_episode({"reward": torch.zeros(2, 2)}, num_envs=2)
        assert buffer.size() == 2


# -- columns that do not fit ---------------------------------------------------------------------


def test_columns_that_drift_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        buffer.add_episode({"a": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.int64)})
        for episode, text in [
            (
                {"a": torch.zeros(2, 3), "b": torch.zeros(2).long(), "c": torch.zeros(2)},
                "'c' is new",
            ),
            ({"a": torch.zeros(2, 3)}, "'b' is missing"),
            ({"a": torch.zeros(2, 4), "b": torch.zeros(2).long()}, r"'a' must have shape \(3,\)"),
            ({"a": torch.zeros(2, 3), "b": torch.tensor([1.7, 1])}, "'b' must have dtype int64"),
            ({"a": torch.zeros(2, 3), "b": torch.zeros(3).long()}, "'b' must have 2 rows"),
            ({}, "at least one column"),
            (None, "at least one column"),
        ]:
            with pytest.raises(ValueError, match=text):
                buffer.add_episode(episode)  # type: ignore[arg-type]
        assert (buffer.num_episodes, len(buffer.quarantine)) == (1, 0)


def test_float32_columns_fit_a_float64_store(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        buffer.add_episode({"reward": torch.ones(1, dtype=torch.float64)})
        buffer.add_episode({"reward": torch.ones(1)})
        with pytest.raises(SchemaError, match="dtype float64"):
            buffer.add_episode({"reward": np.array([2**60])})
        assert buffer.get_all()["reward"].dtype == torch.float64


@pytest.mark.parametrize("key", ["done", "episode", "next_value", "has_next", "given.x"])
def test_names_of_the_stores_own_come_back_as_they_were(tmp_path: Path, key: str) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        buffer.add_episode({key: torch.arange(3), "reward": torch.zeros(3)})
        assert buffer.get_all()[key].tolist() == [0, 1, 2]
        assert set(buffer[0]) == {key, "reward"}


# -- clearing ------------------------------------------------------------------------------------


def test_clear_forgets_finished_episodes_and_open_ones_if_asked(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        feed_episode(buffer, 0, 3)
        feed(buffer, [50, 51])
        buffer.clear()
        assert (buffer.size(), buffer.num_episodes) == (0, 0)
        feed(buffer, [52], cut=True)
        assert numbers_of(buffer) == [50, 51]

        feed(buffer, [60, 61])
        buffer.clear(open_episodes=True)
        feed(buffer, [70, 71], cut=True)
        assert numbers_of(buffer) == [70]


def test_a_cleared_buffer_takes_other_columns(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        feed_episode(buffer, 0, 3)
        buffer.sample(2)
        buffer.clear()
        buffer.add_episode({"pixels": torch.zeros(4, 2, 2)})
        assert set(buffer.get_all()) == {"pixels"}
        buffer.clear()
        buffer.add_episode({"pixels": torch.zeros(4, 3)})
        assert buffer.get_all()["pixels"].shape == (4, 3)
    with opened(tmp_path / "b.exp") as buffer:
        assert buffer.get_all()["pixels"].shape == (4, 3)


def test_what_was_cleared_stays_cleared(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        feed_episode(buffer, 0, 3)
        buffer.clear()
        feed_episode(buffer, 10, 2)
    with opened(tmp_path / "b.exp", unit="episode") as buffer:
        assert (buffer.num_transitions, buffer.size()) == (2, 1)
        assert buffer[0]["action"].tolist() == [10, 11]


# -- restarts ------------------------------------------------------------------------------------


def test_a_temporary_buffer_says_where_it_is_and_goes_when_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "expstore.buffer"), opened(None) as buffer:
        feed_episode(buffer, 0, 3)
        buffer.save()
        path = buffer.path
        assert expstore.open(path).num_steps == 3
    assert str(path.parent) in caplog.text
    assert not path.parent.exists()
    with pytest.raises(WriterStateError, match="closed"):
        buffer.size()


def test_a_buffer_reopens_with_everything_that_was_finished(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        feed_episode(buffer, 0, 3)
        feed(buffer, [10, 11])  # closing cuts it
    with opened(tmp_path / "b.exp") as buffer:
        assert numbers_of(buffer) == [0, 1, 2, 10]
        assert buffer.report.messages == []
        feed_episode(buffer, 20, 1)
        assert numbers_of(buffer) == [0, 1, 2, 10, 20]


def test_a_buffer_is_loaded_by_its_path_as_it_was_configured(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", capacity=77, unit="episode", sampler={"type": "batch"}) as one:
        feed_episode(one, 0, 3)
    with load_data_buffer(tmp_path / "b.exp") as buffer:
        assert buffer.config.to_dict() == one.config.to_dict()
        assert (type(buffer), buffer.size()) == (type(one), 1)
    with pytest.raises(NotAStoreError, match="holds no buffer"):
        load_data_buffer(tmp_path / "other")


def test_two_buffers_do_not_share_a_path(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp"), pytest.raises(StoreLockedError):
        opened(tmp_path / "b.exp")


@pytest.mark.parametrize("kind", ["uniform", "batch", "prioritized"])
def test_a_reopened_sampler_goes_on_where_it_stood(tmp_path: Path, kind: str) -> None:
    drawn = []
    for name, restarts in (("a", False), ("b", True)):
        buffer = opened(tmp_path / name, sampler={"type": kind, "alpha": 1.0})
        feed_episode(buffer, 0, 20)
        buffer.sample(4)
        if kind == "prioritized":
            buffer.update_priorities(range(20), np.arange(20.0))
        if restarts:
            buffer.close()
            buffer = opened(tmp_path / name, sampler={"type": kind, "alpha": 1.0})
        drawn.append(buffer.sample(8)[0]["action"].tolist())
        buffer.close()

    assert drawn[0] == drawn[1]


def test_states_of_functions_survive(tmp_path: Path) -> None:
    def functions() -> dict[str, Any]:
        return {
            "reward_preprocessor": NormalizePreprocessor(),
            "postprocess_fn": RewardScaling(),
        }

    with opened(tmp_path / "b.exp", functions=functions()) as one:
        feed_episode(one, 0, 3)
    with opened(tmp_path / "b.exp", functions=functions()) as two:
        assert two.functions["reward_preprocessor"].count == 3
        assert two.functions["postprocess_fn"].deviation.count == 3
        assert two.report.messages == []


def test_a_function_that_changed_is_reported(tmp_path: Path) -> None:
    def bind(gamma: float) -> Any:
        return functools.partial(_scaled, gamma=gamma)

    for before, after in [
        (default_postprocess_fn, GeneralizedAdvantage()),
        (GeneralizedAdvantage(0.9), GeneralizedAdvantage(0.8)),
        (bind(0.5), bind(0.6)),
        (_closure(1), _closure(2)),
    ]:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        opened(path, functions={"postprocess_fn": before}).close()
        with opened(path, functions={"postprocess_fn": before}) as same:
            assert same.report.messages == []
        with opened(path, functions={"postprocess_fn": after}) as changed:
            assert "postprocess_fn is" in changed.report.messages[0]


def _scaled(raw: Any, gamma: float) -> Any:
    return {name: column * gamma for name, column in default_postprocess_fn(raw).items()}


def _closure(factor: int) -> Any:
    return lambda raw: {"x": torch.ones(2) * factor}


def test_the_metadata_says_what_made_an_episode(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        feed_episode(buffer, 0, 3)
        buffer.save()
        (row,) = expstore.open(buffer.path).episodes

    assert row["env_id"] == "env"
    assert row["postprocess"].startswith("expstore.buffer.postprocess:default_postprocess_fn#")


def test_a_durable_commit_is_made_when_it_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = files.sync
    monkeypatch.setattr(files, "sync", lambda d, path: (synced.append(str(path)), real(d, path)))

    with opened(tmp_path / "b.exp", commit_interval_s=1e9) as buffer:
        feed_episode(buffer, 0, 3)
        assert buffer.size() == 3
        assert synced == []  # read, and so committed, without a sync
        buffer.save()
        assert any("steps/action/c.0" in path for path in synced)
    synced.clear()
    with opened(tmp_path / "c.exp", commit_interval_s=0) as buffer:
        feed_episode(buffer, 0, 3)
        assert any("steps/action/c.0" in path for path in synced)


# -- kills ---------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from tests.buffer.feeding import feed, feed_episode, opened
buffer = opened(sys.argv[1], journal=sys.argv[2] == "True", type=sys.argv[3], commit_interval_s=0.0)
feed_episode(buffer, 0, 3)
assert buffer.size() == 3
feed(buffer, [10, 11, 12])
buffer.save()
if sys.argv[3] == "RolloutBuffer":
    assert len(buffer.sample()[0]["action"]) == 3
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path: Path, journal: bool, type: str = "ReplayBuffer") -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(journal), type],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == -signal.SIGKILL, run.stderr


def test_a_kill_loses_the_open_episode_and_says_so(tmp_path: Path) -> None:
    killed(tmp_path / "b.exp", journal=False)

    with opened(tmp_path / "b.exp") as buffer:
        assert numbers_of(buffer) == [0, 1, 2]
        assert "env 'env' is lost, of which 3 rows were noted" in buffer.report.messages[0]
    with opened(tmp_path / "b.exp") as buffer:
        assert buffer.report.messages == []


def test_with_a_journal_the_open_episode_is_stored_as_incomplete(tmp_path: Path) -> None:
    killed(tmp_path / "b.exp", journal=True)

    for _ in range(2):  # once, however often it is opened
        with opened(tmp_path / "b.exp", journal=True) as buffer:
            assert numbers_of(buffer) == [0, 1, 2, 10, 11]
            reasons = expstore.open(buffer.path).episodes["end_reason"].tolist()
            assert reasons == ["cut", "incomplete"]


def test_a_rollout_is_there_again_when_its_reader_is_killed(tmp_path: Path) -> None:
    killed(tmp_path / "b.exp", journal=False, type="RolloutBuffer")

    with opened(tmp_path / "b.exp", "RolloutBuffer") as buffer:
        assert buffer.size() == 3
        buffer.sample()
    with opened(tmp_path / "b.exp", "RolloutBuffer") as buffer:
        assert buffer.size() == 0


def test_a_journal_of_an_episode_that_is_stored_is_not_stored_twice(tmp_path: Path) -> None:
    path = tmp_path / "b.exp"
    with opened(path, journal=True) as buffer:
        feed(buffer, [0, 1, 2])
        directory = path / "__expstore/buffer/journal"
        (file,) = directory.iterdir()
        kept = file.read_bytes()
        buffer.truncate_one_episode("env")
        assert buffer.size() == 2
        assert list(directory.iterdir()) == []
    file.write_bytes(kept)  # as a kill between commit and removal leaves it

    with opened(path, journal=True) as buffer:
        assert (buffer.size(), buffer.report.messages) == (2, [])
    assert not file.exists()


def test_a_torn_record_ends_the_journal(tmp_path: Path) -> None:
    killed(tmp_path / "b.exp", journal=True)
    (file,) = (tmp_path / "b.exp/__expstore/buffer/journal").iterdir()
    file.write_bytes(file.read_bytes()[:-3])

    with opened(tmp_path / "b.exp") as buffer:
        assert numbers_of(buffer) == [0, 1, 2, 10]


def test_a_row_that_has_no_bytes_is_refused_with_a_journal(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", journal=True) as buffer:
        feed(buffer, [0, 1])
        with pytest.raises(SchemaError, match="which has no bytes"):
            buffer.add_transition("env", env_ret(2, info={"a": object()}), response(2))
        feed(buffer, [3], cut=True)
        assert numbers_of(buffer) == [0, 1]


def test_rows_survive_the_way_through_bytes() -> None:
    row = {
        "array": np.arange(6, dtype=">i2").reshape(2, 3), "scalar": np.float32(0.5),
        "complex": np.array([1 + 2j], np.complex64), "date": np.array(["2020-01-01"], "M8[s]"),
        "tensor": torch.tensor([[1.5, 2]], dtype=torch.bfloat16), "empty": np.zeros((0, 3)),
        "nested": {"a": [1, (2.5, None)], 3: b"\x00\xff"}, "text": "ä", "flag": True,
        "mask": torch.tensor([True, False]), "nan": float("nan"), "scalars": torch.tensor(3),
        "infos": np.array([{"a": 1}, None], object),
    }  # fmt: skip
    back = decode(encode(row, "here"))

    assert repr(back) == repr(row)
    assert records(record(b"one") + record(b"two")[:-1]) == [b"one"]
    broken = bytearray(record(b"one") + record(b"two"))
    broken[-1] ^= 1
    assert records(bytes(broken)) == [b"one"]


# -- quarantine ----------------------------------------------------------------------------------


class Failing:
    """Fails on episodes with an observation of 13 until it is mended."""

    def __init__(self) -> None:
        self.is_mended = False

    def __call__(self, raw: Any) -> Any:
        if not self.is_mended and any(float(obs[0]) == 13 for obs in raw["observation"]):
            raise ZeroDivisionError("thirteen")
        return default_postprocess_fn(raw)


def test_a_postprocess_function_that_raises_loses_nothing(tmp_path: Path) -> None:
    failing = Failing()
    with opened(tmp_path / "b.exp", functions={"postprocess_fn": failing}) as buffer:
        feed_episode(buffer, 0, 2)
        with pytest.raises(PostprocessError, match=r"Failing failed on the episode .* of env 'x'"):
            feed_episode(buffer, 12, 2, "x")
        assert numbers_of(buffer) == [0, 1]
        (kept,) = buffer.quarantine
        assert (kept.env_id, kept.error) == ("x", "ZeroDivisionError: thirteen")
        assert kept.function.endswith(":Failing")
        assert kept.rows["action"] == [12, 13, 14]
        feed_episode(buffer, 20, 1, "x")  # the environment goes on

    with opened(tmp_path / "b.exp", functions={"postprocess_fn": failing}) as buffer:
        with pytest.raises(PostprocessError, match="failed again on the episode"):
            buffer.retry_quarantine()
        assert len(buffer.quarantine) == 1
        failing.is_mended = True
        assert buffer.retry_quarantine() == 1
        assert numbers_of(buffer) == [0, 1, 20, 12, 13]
        assert len(buffer.quarantine) == 0
        assert buffer.retry_quarantine() == 0


def test_a_retry_may_bring_another_function(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp", functions={"postprocess_fn": Failing()}) as buffer:
        with pytest.raises(PostprocessError):
            feed_episode(buffer, 13, 2)
        assert buffer.retry_quarantine(default_postprocess_fn) == 1
        assert numbers_of(buffer) == [13, 14]


def test_what_a_function_may_not_return_is_quarantined(tmp_path: Path) -> None:
    for wrong in ({}, None, {"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.tensor(1)}):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        function = functools.partial(_constant, value=wrong)
        with opened(path, functions={"postprocess_fn": function}) as buffer:
            with pytest.raises(RuntimeError, match="its rows are in quarantine"):
                feed_episode(buffer, 0, 2)
            assert len(buffer.quarantine) == 1


def _constant(raw: Any, value: Any) -> Any:
    return value


def test_the_other_environments_of_a_batch_are_recorded_all_the_same(tmp_path: Path) -> None:
    from expstore.buffer import BatchedData

    options: dict[str, Any] = {"functions": {"postprocess_fn": Failing()}}
    with opened(tmp_path / "b.exp", auto_truncate_episode=True, **options) as buffer:
        ids = ["a", "b"]
        for step, end in enumerate(["", "terminated"]):
            numbers = [12 + step, 20 + step]
            returned = [env_ret(n, i, end) for n, i in zip(numbers, ids, strict=True)]
            answers = [response(n, i) for n, i in zip(numbers, ids, strict=True)]
            batch = BatchedData(ids, returned), BatchedData(ids, answers)
            if end:
                with pytest.raises(PostprocessError, match="env 'a'"):
                    buffer.add_batched_transition(*batch)
            else:
                buffer.add_batched_transition(*batch)

        assert numbers_of(buffer) == [20]
        assert [kept.env_id for kept in buffer.quarantine] == ["a"]


def test_an_episode_with_rows_that_have_no_bytes_stays_in_memory(tmp_path: Path) -> None:
    failing = Failing()
    with opened(tmp_path / "b.exp", functions={"postprocess_fn": failing}) as buffer:
        for number in (13, 14):
            returned = EnvRet("env", np.full(2, number), info={"handle": object()})
            buffer.add_transition("env", returned, PolicyResponse("env", action=number))
        with pytest.raises(PostprocessError):
            buffer.truncate_one_episode("env")
        assert len(buffer.quarantine) == 1
        failing.is_mended = True
        assert buffer.retry_quarantine() == 1


def test_a_buffer_of_another_version_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "b.exp").close()
    document = tmp_path / "b.exp/__expstore/buffer/buffer.json"
    document.write_text(document.read_text().replace('"version": 1', '"version": 2'))

    with pytest.raises(ValueError, match="has version 2, this expstore reads 1"):
        opened(tmp_path / "b.exp")
    document.write_text(document.read_text().replace('"version": 2', '"version": 1'))
    opened(tmp_path / "b.exp").close()  # the lock was given back


def test_an_ordinary_store_can_become_a_buffer(tmp_path: Path) -> None:
    with expstore.Writer(tmp_path / "b.exp") as writer:
        writer.append({"observation": np.zeros((4, 2)), "action": np.arange(3)})

    with opened(tmp_path / "b.exp") as buffer:
        assert buffer.size() == 3
        assert buffer.get_all()["action"].tolist() == [0, 1, 2]
        assert buffer.get_all()["next_observation"].shape == (3, 2)


def test_expstore_reads_the_buffers_store_while_it_writes(tmp_path: Path) -> None:
    with opened(tmp_path / "b.exp") as buffer:
        feed_episode(buffer, 0, 3)
        buffer.size()
        unit = expstore.Sequence(length=2)
        replay = expstore.Replay(expstore.open(buffer.path), batch_size=4, unit=unit, follow=True)
        assert replay.sample()["observation"].shape == (4, 2, 2)
        feed_episode(buffer, 10, 3)
        buffer.size()
        replay.sample()
        assert replay.store.num_steps == 6
    expstore.verify(tmp_path / "b.exp")


def test_an_empty_data_buffer_is_true() -> None:
    buffer = DataBuffer({"type": "DataBuffer", "capacity": 1})
    assert buffer
    buffer.close()
