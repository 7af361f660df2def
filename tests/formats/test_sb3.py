"""Replay buffers of Stable-Baselines3, written by itself; and pickles that are none."""

import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source
from expstore.formats.pickles import InFile, first_class, read_pickle

pytest.importorskip("torch")
buffers = pytest.importorskip("stable_baselines3.common.buffers")
save_util = pytest.importorskip("stable_baselines3.common.save_util")
gymnasium = pytest.importorskip("gymnasium")

BOX = gymnasium.spaces.Box(-1, 1, (3,))


def filled(num_rows: int, capacity: int = 10, ends: str = "", envs: int = 1, **options: Any) -> Any:
    """A buffer whose row t has t in every observation; `ends` gives t, l or . for each row."""
    buffer = buffers.ReplayBuffer(
        capacity * envs, BOX, gymnasium.spaces.Box(-1, 1, (2,)), n_envs=envs, **options
    )
    for t in range(num_rows):
        end = ends[t] if t < len(ends) else "."
        offset = 100 * np.arange(envs, dtype=np.float32)[:, None]
        buffer.add(
            np.full((envs, 3), t, np.float32) + offset,
            np.full((envs, 3), t + 0.5, np.float32) + offset,
            np.full((envs, 2), t / 100, np.float32),
            np.full(envs, t, np.float32),
            np.full(envs, end != "."),
            [{"TimeLimit.truncated": end == "l"}] * envs,
        )
    return buffer


def save(path: Path, buffer: Any) -> Path:
    save_util.save_to_pkl(path, buffer)
    return path


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    report = expstore.ingest_from(path, path.with_suffix(".exp"), **options)
    return expstore.open(path.with_suffix(".exp")), report


@pytest.mark.parametrize("trust", [False, True])
def test_rows_arrive_byte_for_byte(tmp_path: Path, trust: bool) -> None:
    buffer = filled(7, ends="..t..l")

    store, report = ingest(save(tmp_path / "rb.pkl", buffer), trust=trust)

    assert store.episodes["length"].tolist() == [3, 3, 1]
    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated", "incomplete"]
    back = store.read(np.arange(7), fields=["observation", "action", "reward", "next_observation"])
    for name, old in {
        "observation": buffer.observations,
        "next_observation": buffer.next_observations,
        "action": buffer.actions,
        "reward": buffer.rewards,
    }.items():
        assert back[name].tobytes() == old[:7, 0].tobytes(), name
        assert back[name].dtype == old.dtype
    assert report.flags == {"dones": 2, "timeouts": 1}
    assert report.final_observations == 3
    assert (any("trusted" in remark for remark in report.remarks)) == trust


def test_a_timeout_that_also_ends_is_truncated_and_not_terminated(tmp_path: Path) -> None:
    store, _ = ingest(save(tmp_path / "rb.pkl", filled(3, ends="..l")))

    assert not store.read(np.arange(3))["terminated"].any()
    assert store.read([2])["truncated"].tolist() == [True]


def test_a_ring_that_wraps_inside_an_episode_starts_with_its_oldest_row(tmp_path: Path) -> None:
    store, report = ingest(save(tmp_path / "rb.pkl", filled(14, ends="." * 7 + "t...l")))

    # Rows 0 to 3 were overwritten; 8 to 11 lie on both sides of the end of the ring.
    assert store.read(np.arange(10))["reward"].tolist() == list(range(4, 14))
    assert store.episodes["length"].tolist() == [4, 4, 2]
    assert store.episodes[1]["source"]["rows"] == [8, 2]
    text = "rows before the first had been overwritten, perhaps of the same episode"
    assert report.remarks[text] == 1


def test_each_environment_is_a_stream_of_its_own(tmp_path: Path) -> None:
    store, _ = ingest(save(tmp_path / "rb.pkl", filled(4, ends=".t", envs=2)))

    keys = [store.episodes[i]["source"]["episode"] for i in range(4)]
    assert keys == ["0/0", "0/1", "1/0", "1/1"]
    first = store.read(np.arange(8))["observation"][:, 0]
    assert first.tolist() == [0, 1, 2, 3, 100, 101, 102, 103]


def test_observations_of_a_dictionary_are_nested(tmp_path: Path) -> None:
    space = gymnasium.spaces.Dict({"arm": BOX, "goal": BOX})
    buffer = buffers.DictReplayBuffer(5, space, BOX)
    rows = {name: np.ones((1, 3), np.float32) for name in ("arm", "goal")}
    for t in range(3):
        buffer.add(rows, rows, np.ones((1, 3)), np.ones(1), np.array([t == 2]), [{}])

    store, _ = ingest(save(tmp_path / "rb.pkl", buffer))

    assert store.fields["observation/goal"].shape == (3,)
    assert store.episodes["end_reason"].tolist() == ["terminated"]


def test_a_compact_buffer_has_one_next_observation(tmp_path: Path) -> None:
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False}

    store, report = ingest(save(tmp_path / "rb.pkl", filled(5, ends="..t", **options)))

    assert store.episodes["end_reason"].tolist() == ["cut", "incomplete"]
    assert store.read([2])["dones"].tolist() == [True]
    assert report.final_observations == 1
    assert store.read([4], fields=["next_observation"])["next_observation"].tolist() == [[4.5] * 3]


def test_a_full_compact_buffer_lost_its_oldest_observation(tmp_path: Path) -> None:
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False}

    store, report = ingest(save(tmp_path / "rb.pkl", filled(13, **options)))

    assert store.read(np.arange(9))["reward"].tolist() == list(range(4, 13))
    text = "the oldest row, whose observation was overwritten by the newest one"
    assert report.dropped_steps == {text: 1}


def test_large_arrays_stay_in_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "rb.pkl", filled(5, capacity=20_000))

    found = read_pickle(path, ("stable_baselines3", "gymnasium", "torch"))

    assert isinstance(found.observations._content, InFile)
    assert found.observations[3:5][:, 0, 0].tolist() == [3, 4]


def test_the_pickle_is_never_whole_in_memory(tmp_path: Path) -> None:
    space = gymnasium.spaces.Box(-1, 1, (1000,))
    buffer = buffers.ReplayBuffer(4000, space, BOX)
    buffer.dones[99::100], buffer.full = 1, True
    path = save(tmp_path / "rb.pkl", buffer)  # 32 MB
    del buffer

    tracemalloc.start()
    lengths = [len(episode.data["action"]) for episode in open_source(path).episodes()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert lengths == [100] * 40
    assert peak < 6e6  # an episode has 0.8 MB


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    buffer = filled(3, capacity=9000, ends="..t")
    (tmp_path / "rb.pkl").write_bytes(pickle.dumps(buffer, protocol))

    store, _ = ingest(tmp_path / "rb.pkl")

    assert store.read(np.arange(3))["reward"].tolist() == [0, 1, 2]


class Planted:
    """A pickle that makes a file where it is run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_a_planted_payload_does_not_run_without_trust(tmp_path: Path) -> None:
    buffer = filled(3, ends="..t")
    buffer.payload = Planted(tmp_path / "run")
    path = save(tmp_path / "rb.pkl", buffer)

    with pytest.raises(SourceError, match=r"names posix\.mkdir, .* use --trust \(trust=True\)"):
        open_source(path)
    assert not (tmp_path / "run").exists()

    assert ingest(path, trust=True)[0].num_steps == 3
    assert (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.getattr", "numpy.load"])
def test_nothing_that_does_something_can_be_named(tmp_path: Path, name: str) -> None:
    module, function = name.rsplit(".", 1)
    path = tmp_path / "rb.pkl"
    path.write_bytes(b"\x80\x02c" + f"{module}\n{function}\n".encode() + b"(tR.")

    with pytest.raises(SourceError, match="unpickling it would run code"):
        open_source(path, "sb3")


def test_functions_of_known_packages_are_not_called(tmp_path: Path) -> None:
    call = b"\x80\x02cstable_baselines3.common.save_util\nopen_path\n(X\x03\x00\x00\x00/etU\x01wtR."
    (tmp_path / "rb.pkl").write_bytes(call)

    with pytest.raises(SourceError, match="is no replay buffer"):
        open_source(tmp_path / "rb.pkl", "sb3")


def test_a_class_of_ones_own_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "rb.pkl").write_bytes(b"\x80\x02c__main__\nMyBuffer\n)\x81.")

    with pytest.raises(SourceError, match=r"names __main__\.MyBuffer, .* --trust"):
        open_source(tmp_path / "rb.pkl", "sb3")


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "rb.pkl", filled(5, capacity=20_000))
    content = path.read_bytes()

    for length in (len(content) - 5, len(content) // 2, 500):
        path.write_bytes(content[:length])
        with pytest.raises(SourceError, match="is cut off"):
            open_source(path)


def test_another_buffer_is_refused(tmp_path: Path) -> None:
    buffer = buffers.RolloutBuffer(4, BOX, BOX)

    with pytest.raises(SourceError, match="is no replay buffer of Stable-Baselines3: dones, "):
        open_source(save(tmp_path / "rb.pkl", buffer))


def test_another_pickle_under_the_right_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rb.pkl").write_bytes(pickle.dumps({"observations": [1]}))

    assert first_class(tmp_path / "rb.pkl") is None
    with pytest.raises(SourceError, match="of no format that is known"):
        open_source(tmp_path / "rb.pkl")
    with pytest.raises(SourceError, match="is no replay buffer"):
        open_source(tmp_path / "rb.pkl", "sb3")


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(tmp_path: Path) -> None:
    path = save(tmp_path / "rb.pkl", filled(9, ends="..t..t..t"))

    expstore.ingest_from(path, tmp_path / "a.exp", episodes=1)
    expstore.ingest_from(path, tmp_path / "a.exp", resume=True)

    assert expstore.open(tmp_path / "a.exp").read(np.arange(9))["reward"].tolist() == [*range(9)]
