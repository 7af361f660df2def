"""OGBench files, written with numpy as OGBench writes them."""

import io
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source


def rows(lengths: tuple[int, ...] = (4, 3), unfinished: int = 0) -> dict[str, Any]:
    n = sum(lengths) + unfinished
    rng = np.random.default_rng(n)
    terminals = np.zeros(n, bool)
    terminals[np.cumsum(lengths) - 1] = True
    return {
        "observations": rng.normal(size=(n, 5)).astype(np.float32),
        "actions": rng.normal(size=(n, 2)).astype(np.float32),
        "terminals": terminals,
        "qpos": rng.normal(size=(n, 3)).astype(np.float32),
        "button_states": rng.integers(0, 2, (n, 2)),
    }


def write(path: Path, data: dict[str, Any]) -> Path:
    np.savez_compressed(path, **data)
    return path


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    report = expstore.ingest_from(path, path.with_suffix(".exp"), **options)
    return expstore.open(path.with_suffix(".exp")), report


def test_the_last_row_is_the_final_observation_and_its_action_is_left_out(tmp_path: Path) -> None:
    data = rows((4, 3))

    store, report = ingest(write(tmp_path / "cube.npz", data))

    assert store.episodes["length"].tolist() == [3, 2]
    kept = [0, 1, 2, 4, 5]
    back = store.read(np.arange(5))
    names = ("observation", "action", "qpos", "button_states")
    for name, old in zip(names, ("observations", "actions", *names[2:]), strict=True):
        assert back[name].dtype == data[old].dtype
        assert back[name].tobytes() == data[old][kept].tobytes()
    final = store.read([2, 4], fields=["next_observation", "next_qpos"])
    assert final["next_observation"].tobytes() == data["observations"][[3, 6]].tobytes()
    assert final["next_qpos"].tobytes() == data["qpos"][[3, 6]].tobytes()
    assert report.final_observations == 2
    assert report.dropped_steps == {
        "the last action of a trajectory, whose result is not stored": 2
    }


def test_the_end_of_a_trajectory_is_a_cut(tmp_path: Path) -> None:
    store, report = ingest(write(tmp_path / "cube.npz", rows()))

    assert store.episodes["end_reason"].tolist() == ["cut", "cut"]
    assert not {"terminated", "truncated", "reward"} & set(store.fields)
    assert report.flags == {"terminals": 2}


def test_rows_after_the_last_end_are_incomplete(tmp_path: Path) -> None:
    store, report = ingest(write(tmp_path / "cube.npz", rows((4,), unfinished=3)))

    assert store.episodes["length"].tolist() == [3, 2]
    assert store.episodes["end_reason"].tolist() == ["cut", "incomplete"]
    assert report.remarks == {"no end on the last rows, so they are kept as incomplete": 1}


def test_a_trajectory_of_one_row_has_no_step(tmp_path: Path) -> None:
    store, report = ingest(write(tmp_path / "cube.npz", rows((3, 1, 3))))

    assert store.episodes["length"].tolist() == [2, 2]
    assert report.skipped_episodes == {"no steps in it": 1}


def test_an_episode_says_where_it_came_from(tmp_path: Path) -> None:
    path = write(tmp_path / "cube.npz", rows())

    store, _ = ingest(path)

    found = store.episodes[1]["source"]
    assert (found["rows"], found["num_bytes"]) == ([4, 7], path.stat().st_size)
    assert len(found["sha256"]) == 64


def test_the_file_is_never_whole_in_memory(tmp_path: Path) -> None:
    num_rows, width = 4000, 4000  # 64 MB, of which an episode is 1.6 MB
    terminals = np.arange(num_rows) % 100 == 99
    data = {"observations": np.zeros((num_rows, width), np.float32), "terminals": terminals}
    path = write(tmp_path / "cube.npz", {**data, "actions": np.zeros((num_rows, 1), np.float32)})
    del data

    source = open_source(path)
    tracemalloc.start()
    lengths = [len(episode.data["action"]) for episode in source.episodes()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    source.close()

    assert lengths == [99] * 40
    assert peak < 16e6


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "cube.npz", rows())
    path.write_bytes(path.read_bytes()[:-60])

    with pytest.raises(SourceError, match="is cut off: the list of what is in a zip"):
        open_source(path)


def test_damage_that_looks_like_data_is_refused(tmp_path: Path) -> None:
    data = {"terminals": np.arange(5000) % 50 == 49}
    data["actions"] = np.random.default_rng(0).random((5000, 20))
    data["observations"] = data["actions"].copy()
    path = write(tmp_path / "cube.npz", data)
    content = bytearray(path.read_bytes())
    at = content.index(b"observations.npy") + 300_000
    content[at : at + 40] = bytes(40)
    path.write_bytes(content)

    with pytest.raises(SourceError, match=r"observations\.npy of .* is damaged, and nothing says"):
        ingest(path)

    assert expstore.open(path.with_suffix(".exp")).num_episodes == 0


def test_arrays_of_different_lengths_are_refused(tmp_path: Path) -> None:
    data = rows()
    data["qpos"] = data["qpos"][:-1]

    with pytest.raises(SourceError, match=r"qpos of .* has 6 rows, but terminals have 7"):
        ingest(write(tmp_path / "cube.npz", data))


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    data = {**rows(), "notes": np.array([{"a": 1}], object)}

    with pytest.raises(SourceError, match="notes holds pickled objects"):
        ingest(write(tmp_path / "cube.npz", data))


@pytest.mark.parametrize("more", ["rewards", "next_observations"])
def test_files_with_rewards_are_another_format(tmp_path: Path, more: str) -> None:
    path = write(tmp_path / "cube.npz", {**rows(), more: np.zeros(7)})

    with pytest.raises(SourceError, match=r"is not of OGBench; looked for an .npz file"):
        open_source(path, "ogbench")


def test_a_zip_of_something_else_is_of_no_known_format(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez(file, words=np.zeros(3))
    (tmp_path / "cube.npz").write_bytes(file.getvalue())

    with pytest.raises(SourceError, match=r"of no format that is known .* \(ogbench\)"):
        open_source(tmp_path / "cube.npz")


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(tmp_path: Path) -> None:
    data = rows((3, 4, 5))
    path = write(tmp_path / "cube.npz", data)

    expstore.ingest_from(path, tmp_path / "a.exp", episodes=1)
    expstore.ingest_from(path, tmp_path / "a.exp", resume=True)

    back = expstore.open(tmp_path / "a.exp").read(np.arange(9))["action"]
    kept = np.flatnonzero(~data["terminals"])
    assert back.tobytes() == data["actions"][kept].tobytes()
