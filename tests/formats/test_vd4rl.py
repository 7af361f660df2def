"""V-D4RL's HDF5 files, in the layout of its downloads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

h5py = pytest.importorskip("h5py")


def rows(lengths: tuple[int, ...] = (5, 4), unfinished: int = 0) -> dict[str, Any]:
    """Episodes of so many rows, the first of each of them a reset."""
    num_rows = sum(lengths) + unfinished
    rng = np.random.default_rng(num_rows)
    kinds = np.ones(num_rows, np.int64)
    kinds[np.cumsum([0, *lengths])[: len(lengths) + (unfinished > 0)]] = 0
    kinds[np.cumsum(lengths) - 1] = 2
    return {
        "observation": rng.integers(0, 256, (num_rows, 3, 4, 4)).astype(np.uint8),
        "action": rng.normal(size=(num_rows, 2)).astype(np.float32),
        "reward": rng.normal(size=num_rows).astype(np.float32),
        "discount": np.ones(num_rows, np.float32),
        "step_type": kinds,
    }


def write(path: Path, given: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in given.items():
            file[name] = values
    return path


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    report = expstore.ingest_from(path, path.with_suffix(".exp"), **options)
    return expstore.open(path.with_suffix(".exp")), report


def test_an_action_belongs_to_the_previous_observation(tmp_path: Path) -> None:
    given = rows((5, 4))

    store, report = ingest(write(tmp_path / "walker.hdf5", given))

    assert store.episodes["length"].tolist() == [4, 3]
    back = store.read(np.arange(7))
    kept = [1, 2, 3, 4, 6, 7, 8]
    for name in ("action", "reward", "discount"):
        assert back[name].tobytes() == given[name][kept].tobytes()
    at = [0, 1, 2, 3, 5, 6, 7]
    assert back["observation"].tobytes() == given["observation"][at].tobytes()
    last = store.read([3, 6], fields=["next_observation"])["next_observation"]
    assert last.tobytes() == given["observation"][[4, 8]].tobytes()
    assert report.final_observations == 2
    assert report.dropped_steps == {"the row of a reset, whose action and reward are dummies": 2}


def test_a_discount_of_0_on_the_last_row_terminates(tmp_path: Path) -> None:
    given = rows((5, 4), unfinished=3)
    given["discount"][4] = 0

    store, report = ingest(write(tmp_path / "walker.hdf5", given))

    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated", "incomplete"]
    assert report.flags == {"step_type 2": 2}


def test_a_reset_ends_an_episode_without_a_last_row(tmp_path: Path) -> None:
    given = rows((5, 4))
    given["step_type"][4] = 1

    store, _ = ingest(write(tmp_path / "walker.hdf5", given))

    assert store.episodes["end_reason"].tolist() == ["cut", "truncated"]


def test_an_episode_that_does_not_begin_with_a_reset_is_named(tmp_path: Path) -> None:
    given = {name: values[2:] for name, values in rows((5, 4)).items()}

    store, report = ingest(write(tmp_path / "walker.hdf5", given))

    assert store.num_steps == 3
    assert report.failures[0].reason == "row 0 must be of step_type 0, got 1"


def test_datasets_of_different_lengths_are_refused(tmp_path: Path) -> None:
    given = rows()
    given["observation"] = given["observation"][:-1]

    with pytest.raises(SourceError, match="must have equally many rows, got observation 8"):
        open_source(write(tmp_path / "walker.hdf5", given))


def test_a_file_that_is_cut_off_is_refused_with_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "walker.hdf5", rows((50,)))
    path.write_bytes(path.read_bytes()[:-900])

    with pytest.raises(SourceError, match="is cut off"):
        open_source(path)


def test_another_file_under_the_right_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "walker.hdf5", {"words": np.zeros(3)})

    with pytest.raises(SourceError, match="is not of V-D4RL; looked for an HDF5 file with"):
        open_source(path, "vd4rl")


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(tmp_path: Path) -> None:
    given = rows((4, 5, 3))
    path = write(tmp_path / "walker.hdf5", given)

    expstore.ingest_from(path, tmp_path / "a.exp", episodes=1)
    expstore.ingest_from(path, tmp_path / "a.exp", resume=True)

    back = expstore.open(tmp_path / "a.exp").read(np.arange(9))["reward"]
    assert back.tobytes() == given["reward"][given["step_type"] != 0].tobytes()
