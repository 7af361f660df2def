"""Minari data sets in their Arrow and Parquet forms, written by Minari itself."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import MissingExtraError, SourceError
from expstore.formats import open_source

for package in ("h5py", "minari", "gymnasium"):  # of the module that is imported below
    pytest.importorskip(package)
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from tests.formats.test_minari import (  # noqa: E402
    assert_as_minari_reads_it,
    buffer,
    change,
    ingest,
    spaces,
    write,
)

FORMS = ("arrow", "parquet")


@pytest.mark.parametrize("form", FORMS)
def test_every_space_arrives_byte_for_byte(tmp_path: Path, form: str) -> None:
    observation = spaces.Dict(
        {
            "vector": spaces.Box(-1, 1, (3,), np.float32),
            "matrix": spaces.Box(-1, 1, (2, 3), np.float64),
            "scalar": spaces.Box(-1, 1, (), np.float32),
            "pair": spaces.Tuple((spaces.Discrete(5), spaces.MultiBinary([2, 2]))),
        }
    )
    action = spaces.Dict({"grip": spaces.Discrete(3), "arm": spaces.MultiDiscrete([2, 3])})
    episodes = [buffer(4, observation, action), buffer(1, observation, action, end="truncations")]
    more = {"observation_space": observation, "action_space": action}
    path = write(tmp_path, *episodes, data_format=form, **more)

    store, report = ingest(path)

    assert_as_minari_reads_it(store, path)
    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated"]
    assert (report.num_steps, report.final_observations) == (5, 2)
    assert report.flags == {"terminations": 1, "truncations": 1}
    assert (report.failures, report.dropped_steps, report.remarks) == ((), {}, {})


def test_an_episode_in_several_batches_stays_one(tmp_path: Path) -> None:
    discrete = spaces.Discrete(1000)
    path = write(
        tmp_path,
        buffer(33_000, discrete, discrete),  # Parquet files are read 32,768 rows at a time
        buffer(2, discrete, discrete),
        data_format="parquet",
        observation_space=discrete,
        action_space=discrete,
    )

    store, _ = ingest(path)

    assert store.episodes["length"].tolist() == [33_000, 2]
    given = pq.read_table(path / "data" / "0" / "part-0.parquet", partitioning=None)
    back = store.episode(0)
    assert back["observation"].tolist() == given["observations"].to_pylist()
    assert back["action"].tolist() == given["actions"].to_pylist()[:-1]


@pytest.mark.parametrize("keep_encoded", [False, True])
def test_jpeg_images_are_decoded_or_kept(tmp_path: Path, keep_encoded: bool) -> None:
    image = spaces.Dict({"camera": spaces.Box(0, 255, (32, 40, 3), np.uint8)})
    path = write(tmp_path, buffer(3, image), data_format="arrow", observation_space=image)

    store, _ = ingest(path, keep_encoded=keep_encoded)

    if not keep_encoded:
        assert_as_minari_reads_it(store, path)
        return
    with pa.ipc.open_file(str(path / "data" / "0" / "part-0.arrow")) as file:
        frames = [row["camera"] for row in file.read_all()["observations"].to_pylist()]
    back = store.read([0, 1, 2], fields=["observation/camera"])["observation"]["camera"]
    assert [row.tobytes() for row in back] == frames[:3]


def test_text_seed_options_and_infos_are_kept(tmp_path: Path) -> None:
    text = spaces.Text(12)
    infos = {"step": list(range(4)), "at": {"xy": [np.full((2, 1), i) for i in range(4)]}}
    episode = buffer(3, text, seed=5, options={"goal": [1, 2]}, infos=infos)
    path = write(tmp_path, episode, data_format="parquet", observation_space=text)

    store, _ = ingest(path, infos=True)

    table = pq.read_table(path / "data" / "0" / "part-0.parquet", partitioning=None)
    assert store.episode(0)["observation"] == table["observations"].to_pylist()
    assert store.episodes[0]["seed"] == 5
    assert store.episodes[0]["options"] == {"goal": [1, 2]}
    back = store.read([0, 1, 2])["infos"]
    assert back["step"].tolist() == [0, 1, 2]
    assert back["at"]["xy"].tolist() == [[[0], [0]], [[1], [1]], [[2], [2]]]


def test_infos_come_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3, infos={"step": list(range(4))}), data_format="arrow")

    store, report = ingest(path)

    assert "infos/step" not in store.fields
    assert report.left_out == {"infos": "come with --infos (infos=True)"}


def test_as_many_observations_as_actions_are_accepted(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3, final=False), data_format="parquet")

    store, report = ingest(path)

    # Minari takes the last row for one that fills up, and loses a step; total_steps counts it.
    table = pq.read_table(path / "data" / "0" / "part-0.parquet", partitioning=None)
    assert store.read([0, 1, 2])["action"].tolist() == table["actions"].to_pylist()
    assert report.final_observations == 0


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("cut off", "cannot be read|has no footer"),
        ("no table", "there is no part-0"),
        ("no metadata", "there is no metadata.json: it was not written whole"),
        ("fewer rows", "total_steps says 9, but there are 4 rows"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_an_episode_that_was_not_written_whole_is_named(
    tmp_path: Path, form: str, broken: str, reason: str
) -> None:
    path = write(tmp_path, buffer(3), buffer(2), data_format=form)
    folder = path / "data" / "0"
    table = folder / f"part-0.{form}"
    if broken == "cut off":
        table.write_bytes(table.read_bytes()[:-40])
    elif broken == "no table":
        table.unlink()
    elif broken == "no metadata":
        (folder / "metadata.json").unlink()
    else:
        (folder / "metadata.json").write_text(json.dumps({"id": 0, "total_steps": 9}))

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [2]
    assert [failure.key for failure in report.failures] == ["episode 0"]
    assert re.search(reason, report.failures[0].reason)


def test_an_episode_says_of_which_bytes_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3), buffer(2), data_format="arrow")

    store, _ = ingest(path)

    first, second = (store.episodes[i]["source"] for i in range(2))
    sizes = [sum(f.stat().st_size for f in (path / "data" / n).iterdir()) for n in ("0", "1")]
    assert [first["num_bytes"], second["num_bytes"]] == sizes
    assert first["sha256"] != second["sha256"]
    assert first["form"] == "arrow"


def test_a_recording_killed_before_its_first_episode_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3), data_format="parquet")
    (path / "data" / "0").rename(path / "data" / "kept-elsewhere")

    with pytest.raises(SourceError, match=r"has no episodes: it needs a folder 0 with part-0\.par"):
        open_source(path)


def test_totals_that_are_wrong_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3), data_format="parquet")
    change(path, total_steps=30)

    _, report = ingest(path)

    assert report.remarks == {"metadata.json says 30 steps, there are 3": 0}


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3), buffer(2), data_format="arrow")
    whole, _ = ingest(path)

    expstore.ingest_from(path, tmp_path / "b.exp", episodes=1)
    expstore.ingest_from(path, tmp_path / "b.exp", resume=True)

    parts = expstore.open(tmp_path / "b.exp")
    assert parts.episodes["length"].tolist() == whole.episodes["length"].tolist()
    assert parts.read([3])["reward"].tobytes() == whole.read([3])["reward"].tobytes()


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, buffer(3), data_format="arrow")
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(MissingExtraError, match=r"expstore\[arrow\]"):
        open_source(path)


def test_tables_of_something_else_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, buffer(3), data_format="parquet")
    other: Any = pa.table({"words": ["one", "two"]})
    pq.write_table(other, path / "data" / "0" / "part-0.parquet")

    _, report = ingest(path)

    assert "observations, actions, rewards" in report.failures[0].reason
