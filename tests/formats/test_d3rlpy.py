"""d3rlpy's files: version 2.1 as it wrote them itself, version 1 as it reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

h5py = pytest.importorskip("h5py")

WRITTEN = Path(__file__).parent / "data" / "d3rlpy.h5"
TUPLE = WRITTEN.with_name("d3rlpy-tuple.h5")


def ingest(path: Path, store: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    report = expstore.ingest_from(path, store, **options)
    return expstore.open(store), report


def copy(path: Path) -> Any:
    path.write_bytes(WRITTEN.read_bytes())
    return h5py.File(path, "a")


def rows_of_version_1(num_rows: int = 9) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    terminals = np.isin(np.arange(num_rows), [2]).astype(np.float32)
    return {
        "observations": rng.normal(size=(num_rows, 3)).astype(np.float32),
        "actions": rng.normal(size=(num_rows, 2)).astype(np.float32),
        "rewards": rng.normal(size=num_rows).astype(np.float32),
        "terminals": terminals,
        "episode_terminals": np.isin(np.arange(num_rows), [2, 6]).astype(np.float32),
        "discrete_action": False,
        "version": "1.0",
    }


def write(path: Path, rows: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in rows.items():
            file[name] = values
    return path


def test_what_d3rlpy_wrote_arrives_byte_for_byte(tmp_path: Path) -> None:
    given = np.load(WRITTEN.with_suffix(".npz"))

    store, report = ingest(WRITTEN, tmp_path / "a.exp", format=None)

    assert store.episodes["length"].tolist() == [5, 4]
    back = store.read(np.arange(9))
    for name, old in {
        "observation": "observations",
        "action": "actions",
        "reward": "rewards",
    }.items():
        assert back[name].tobytes() == given[old][:9].tobytes()
        assert back[name].dtype == given[old].dtype
    assert report.shape_changes == {"reward": "(1,) to ()"}
    assert report.final_observations == 0
    assert report.flags == {"terminated": 1}


def test_what_was_not_terminated_is_a_cut(tmp_path: Path) -> None:
    store, report = ingest(WRITTEN, tmp_path / "a.exp")

    assert store.episodes["end_reason"].tolist() == ["terminated", "cut"]
    assert np.flatnonzero(store.read(np.arange(9))["terminated"]).tolist() == [4]
    text = "not terminated, and d3rlpy does not say why it ended, so it is kept as cut"
    assert report.remarks == {text: 1}


def test_observations_of_several_parts_are_nested(tmp_path: Path) -> None:
    store, _ = ingest(TUPLE, tmp_path / "a.exp")

    assert store.fields["observation/0"].shape == (3,)
    assert store.fields["observation/1"].shape == (1, 4, 4)
    assert store.num_steps == 4


def test_an_episode_that_is_not_whole_is_named(tmp_path: Path) -> None:
    with copy(tmp_path / "cut.h5") as file:
        del file["rewards_0"]
        file["num_episodes"][()] = 3

    store, report = ingest(tmp_path / "cut.h5", tmp_path / "a.exp")

    assert store.episodes["length"].tolist() == [4]
    assert [(f.key, f.reason) for f in report.failures] == [
        ("episode 0", "rewards_0 is missing: it was not written whole"),
        ("episode 2", "observations_2 is missing: it was not written whole"),
    ]


def test_columns_of_different_lengths_are_named(tmp_path: Path) -> None:
    with copy(tmp_path / "cut.h5") as file:
        short = file["actions_1"][:-1]
        del file["actions_1"]
        file["actions_1"] = short

    _, report = ingest(tmp_path / "cut.h5", tmp_path / "a.exp")

    assert report.failures[0].key == "episode 1"
    assert "action has 3 rows, but there are 4 rewards" in report.failures[0].reason


def test_a_file_that_is_cut_off_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "cut.h5").write_bytes(WRITTEN.read_bytes()[:-900])

    with pytest.raises(SourceError, match="is cut off"):
        open_source(tmp_path / "cut.h5")


def test_version_2_0_is_refused(tmp_path: Path) -> None:
    with copy(tmp_path / "old.h5") as file:
        del file["version"]
        file["version"] = "2.0"

    with pytest.raises(SourceError, match=r"is of version 2\.0, which d3rlpy has given up"):
        open_source(tmp_path / "old.h5")


def test_version_1_tells_truncated_from_terminated(tmp_path: Path) -> None:
    given = rows_of_version_1()

    store, report = ingest(write(tmp_path / "v1.h5", given), tmp_path / "a.exp")

    assert store.episodes["length"].tolist() == [3, 4, 2]
    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated", "incomplete"]
    back = store.read(np.arange(9))
    assert back["observation"].tobytes() == given["observations"].tobytes()
    assert back["action"].tobytes() == given["actions"].tobytes()
    assert back["reward"].tobytes() == given["rewards"].tobytes()
    assert np.flatnonzero(back["truncated"]).tolist() == [6]
    assert store.episodes[0]["dataset"] == {"discrete_action": False, "version": "1.0"}
    assert report.flags == {"terminals": 1, "episode_terminals": 2}


def test_rows_of_different_lengths_are_refused(tmp_path: Path) -> None:
    given = rows_of_version_1()
    given["actions"] = given["actions"][:-1]

    with pytest.raises(SourceError, match="must have equally many rows, got actions 8"):
        open_source(write(tmp_path / "v1.h5", given))


def test_another_file_under_the_right_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d3rlpy.h5", {"words": np.zeros(3)})

    with pytest.raises(SourceError, match="is not of d3rlpy; looked for an HDF5 file with"):
        open_source(path, "d3rlpy")
    with pytest.raises(SourceError, match="of no format that is known"):
        open_source(path)


@pytest.mark.parametrize("version", [1, 2])
def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(
    tmp_path: Path, version: int
) -> None:
    path = WRITTEN if version == 2 else write(tmp_path / "v1.h5", rows_of_version_1())
    expected, _ = ingest(path, tmp_path / "a.exp")

    expstore.ingest_from(path, tmp_path / "b.exp", episodes=1)
    expstore.ingest_from(path, tmp_path / "b.exp", resume=True)

    back, steps = expstore.open(tmp_path / "b.exp"), np.arange(9)
    assert back.read(steps)["reward"].tobytes() == expected.read(steps)["reward"].tobytes()
