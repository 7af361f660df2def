"""LeRobot data sets of versions 2.0, 2.1 and 3.0."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import MissingExtraError, SourceError
from expstore.formats import open_source
from tests.formats.lerobot_fixtures import (
    CAMERA,
    FEATURES,
    IMAGE,
    TASKS,
    VIDEO,
    png,
    rows,
    table_of,
    write_v2,
    write_v3,
    write_video,
)

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

LENGTHS = (4, 3, 5)
COLUMNS = {"observation.state": "observation", "action": "action", "next.reward": "reward"}
WRITTEN = Path(__file__).parent / "data"  # by scripts/clients/lerobot_fixture.py
DATA = "data/chunk-000/file-000.parquet"


def episodes(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    firsts = np.cumsum((0, *lengths))
    return [rows(i, n, int(firsts[i])) for i, n in enumerate(lengths)]


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    target = path.parent / "a.exp"
    report = expstore.ingest_from(path, target, **options)
    return expstore.open(target), report


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_rows_arrive_byte_for_byte(tmp_path: Path, version: str) -> None:
    given = episodes()
    path = tmp_path / "pick"
    if version == "v3.0":
        write_v3(path, given)
    else:
        write_v2(path, given, version=version)

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == list(LENGTHS)
    for number, columns in enumerate(given):
        back = store.episode(number)
        for old, name in COLUMNS.items():
            found = back["observation"]["state"] if name == "observation" else back[name]
            assert (found.dtype, found.tobytes()) == (columns[old].dtype, columns[old].tobytes())
        assert back["timestamp"].tobytes() == columns["timestamp"].tobytes()
        assert back["task"] == [TASKS[number % 2]] * len(columns["action"])
    assert set(store.fields) == {
        *("observation/state", "action", "reward", "timestamp", "task"),
    }
    assert report.final_observations == 0
    assert (report.failures, report.dropped_steps) == ((), {})
    assert version in report.description


def test_without_texts_the_numbers_of_tasks_are_kept(tmp_path: Path) -> None:
    path = write_v3(tmp_path / "pick", episodes())
    (path / "meta/tasks.parquet").unlink()

    store, report = ingest(path)

    assert store.read([0, 4])["task_index"].tolist() == [[0], [1]]
    assert report.remarks["there is no meta/tasks.parquet, so tasks are not known by text"] == 0
    assert report.left_out["frame_index"] == "only counts"


def test_done_ends_nothing_but_the_rows(tmp_path: Path) -> None:
    store, report = ingest(write_v3(tmp_path / "pick", episodes()))

    assert store.episodes["end_reason"].tolist() == ["cut"] * 3
    assert report.flags == {"next.done": 3}
    text = "next.done does not tell termination from truncation, so it is kept as cut"
    assert report.remarks == {text: 3}
    assert report.left_out["next.done"] == "says only where an episode ends"


def test_with_truncated_the_flags_are_known(tmp_path: Path) -> None:
    features = {**FEATURES, "next.truncated": FEATURES["next.done"]}
    given = episodes()
    for number, columns in enumerate(given):
        columns["next.truncated"] = columns["next.done"] & (number == 1)
    given[2]["next.done"] = np.zeros(5, bool)

    store, report = ingest(write_v3(tmp_path / "pick", given, features))

    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated", "cut"]
    assert report.flags["next.truncated"] == 1


def test_an_episode_says_where_it_came_from(tmp_path: Path) -> None:
    path = write_v3(tmp_path / "pick", episodes())

    store, _ = ingest(path)

    found = store.episodes[1]
    assert found["tasks"] == [TASKS[1]]
    assert found["dataset"]["robot_type"] == "so100"
    assert found["dataset"]["names"] == {"observation/state": ["x", "y", "z"], "action": ["a", "b"]}
    assert found["source"]["file"] == DATA
    assert found["source"]["sha256"] == hashlib.sha256((path / DATA).read_bytes()).hexdigest()


def test_images_are_decoded_or_kept(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3)).astype(np.uint8)
    files = [png(frame) for frame in pixels]
    given = episodes((4,))
    given[0][CAMERA] = files
    path = write_v3(tmp_path / "pick", given, {**FEATURES, CAMERA: IMAGE})

    store, _ = ingest(path)
    expstore.ingest_from(path, tmp_path / "kept.exp", keep_encoded=True)

    assert store.episode(0)["observation"]["images"]["top"].tobytes() == pixels.tobytes()
    kept = expstore.open(tmp_path / "kept.exp").episode(0)["observation"]["images"]["top"]
    assert [row.tobytes() for row in kept] == files


def in_files(folder: Path, paths: str) -> tuple[Path, list[bytes]]:
    """One episode whose images lie beside the table, which has their paths."""
    rng = np.random.default_rng(0)
    files = [png(rng.integers(0, 256, (6, 8, 3)).astype(np.uint8)) for _ in range(4)]
    given = episodes((4,))
    path = write_v3(folder, given, FEATURES | {CAMERA: IMAGE})
    (data,) = path.glob("data/*/*.parquet")
    table = pq.read_table(data)
    place = f"images/{CAMERA}/episode_000000"
    (path / place).mkdir(parents=True)
    column = []
    for number, content in enumerate(files):
        name = f"frame_{number:06d}.png"
        (path / place / name).write_bytes(content)
        column.append({"bytes": None, "path": paths.format(place=place, name=name)})
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    pq.write_table(table.append_column(CAMERA, pa.array(column, kind)), data)
    return path, files


@pytest.mark.parametrize("paths", ["{name}", "{place}/{name}"])
def test_images_in_files_of_their_own_are_found(tmp_path: Path, paths: str) -> None:
    pytest.importorskip("PIL")
    path, files = in_files(tmp_path / "pick", paths)

    store, report = ingest(path, keep_encoded=True)

    assert report.failures == ()
    kept = store.episode(0)["observation"]["images"]["top"]
    assert [row.tobytes() for row in kept] == files
    found = store.episodes[0]["source"]["images"][CAMERA]
    assert found["num_bytes"] == sum(map(len, files)) and len(found["sha256"]) == 64


@pytest.mark.parametrize("paths", ["/etc/{name}", "../{name}", "images/none/{name}"])
def test_an_image_that_is_missing_or_elsewhere_loses_its_episode(
    tmp_path: Path, paths: str
) -> None:
    pytest.importorskip("PIL")
    path, _ = in_files(tmp_path / "pick", paths)

    _, report = ingest(path)

    assert [failure.key for failure in report.failures] == ["episode 0"]
    text = "cannot be read: images/none" if "none" in paths else "leads out of the data set"
    assert text in report.failures[0].reason


def with_video(folder: Path, version: str) -> tuple[Path, Any]:
    """Three episodes of flat colours, and their frames."""
    shades = np.arange(sum(LENGTHS), dtype=np.uint8) * 20 + 5
    frames = np.repeat(shades, 32 * 48 * 3).reshape(-1, 32, 48, 3)
    features = {**FEATURES, CAMERA: VIDEO}
    if version == "v3.0":
        write_v3(folder, episodes(), features)
        write_video(folder / f"videos/{CAMERA}/chunk-000/file-000.mp4", frames)
        return folder, frames
    write_v2(folder, episodes(), features)
    for i, first in enumerate(np.cumsum((0, *LENGTHS[:-1])).tolist()):
        path = folder / f"videos/chunk-000/{CAMERA}/episode_{i:06d}.mp4"
        write_video(path, frames[first : first + LENGTHS[i]])
    return folder, frames


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_frames_of_videos_are_decoded_at_their_times(tmp_path: Path, version: str) -> None:
    pytest.importorskip("av")
    path, frames = with_video(tmp_path / "pick", version)

    store, report = ingest(path)

    assert report.failures == ()
    back = store.read(np.arange(sum(LENGTHS)))["observation"]["images"]["top"]
    assert back.shape == frames.shape
    assert np.abs(back.astype(int) - frames).max() <= 2
    assert CAMERA in store.episodes[0]["source"]["videos"]


def test_videos_can_be_left_out_without_a_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_v3(tmp_path / "pick", episodes(), {**FEATURES, CAMERA: VIDEO})
    monkeypatch.setitem(sys.modules, "av", None)

    with pytest.raises(
        MissingExtraError, match=r"observation/images/top .*expstore\[video\].*--drop"
    ):
        open_source(path)
    source = open_source(path, drop=("observation/images/top",))

    assert [len(episode.data["action"]) for episode in source.episodes()] == list(LENGTHS)
    assert source.account.left_out["observation/images/top"] == "as asked for"


def test_a_video_that_ends_too_early_loses_its_episodes_only(tmp_path: Path) -> None:
    pytest.importorskip("av")
    path, frames = with_video(tmp_path / "pick", "v3.0")
    write_video(path / f"videos/{CAMERA}/chunk-000/file-000.mp4", frames[:9])

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [4, 3]
    assert [failure.key for failure in report.failures] == ["episode 2"]
    assert report.failures[0].reason.startswith("observation/images/top has no frame at 0.900 s")


def test_rows_are_found_by_their_number_where_the_table_has_gaps(tmp_path: Path) -> None:
    given = episodes((4, 3, 5, 2))
    path = write_v3(tmp_path / "pick", given, listed=[0, 2, 3])  # that of 1 was lost in a crash

    store, report = ingest(path)

    assert [store.episodes[i]["source"]["episode"] for i in range(3)] == [0, 2, 3]
    for number, index in enumerate((0, 2, 3)):
        assert store.episode(number)["action"].tobytes() == given[index]["action"].tobytes()
    assert report.dropped_steps == {"rows that meta/episodes does not have there": 3}
    assert report.remarks["info.json says 4 episodes, meta/episodes has 3"] == 0
    assert report.remarks["1 of the episode numbers up to 3 are missing"] == 0


def test_rows_that_are_missing_are_named(tmp_path: Path) -> None:
    given = episodes()
    path = write_v3(tmp_path / "pick", given)
    pq.write_table(table_of({n: v[:2] for n, v in given[0].items()}), path / DATA)

    _, report = ingest(path)

    reasons = {failure.key: failure.reason for failure in report.failures}
    assert reasons["episode 0"].startswith("meta/episodes says it has 4 frames, but there are 2")
    assert reasons["episode 2"] == f"there are no rows of it in {DATA}"


def test_large_row_groups_with_many_episodes_are_taken_apart(tmp_path: Path) -> None:
    given = episodes()
    path = write_v3(tmp_path / "pick", given)
    whole = pq.read_table(path / DATA, partitioning=None)
    pq.write_table(whole, path / DATA, row_group_size=5)  # the second cuts an episode

    store, report = ingest(path)

    assert report.failures == ()
    assert store.episodes["length"].tolist() == list(LENGTHS)
    back = store.read(np.arange(12))["action"]
    assert back.tobytes() == np.concatenate([e["action"] for e in given]).tobytes()


def test_a_recording_that_was_killed_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    path = write_v3(tmp_path / "pick", episodes())
    (path / DATA).write_bytes((path / DATA).read_bytes()[:-8])

    with pytest.raises(SourceError, match=r"file-000\.parquet is missing or without a footer"):
        open_source(path)

    table = path / "meta/episodes/chunk-000/file-000.parquet"
    table.write_bytes(table.read_bytes()[:-8])
    with pytest.raises(SourceError, match=r"meta/episodes/.* has no footer.* writer was killed"):
        open_source(path)

    table.unlink()
    with pytest.raises(SourceError, match=r"has no meta/episodes/chunk-000/file-000\.parquet"):
        open_source(path)


def test_one_file_without_a_footer_loses_its_episodes_only(tmp_path: Path) -> None:
    path = write_v3(tmp_path / "pick", episodes(), files=[0, 1, 1])
    broken = path / "data/chunk-000/file-001.parquet"
    broken.write_bytes(broken.read_bytes()[:-8])

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [4]
    assert report.failures[0].key == "data/chunk-000/file-001.parquet"
    assert "with it, episodes 1, 2 are missing" in report.failures[0].reason


def test_a_line_that_was_not_written_whole_is_named(tmp_path: Path) -> None:
    path = write_v2(tmp_path / "pick", episodes())
    lines = path / "meta/episodes.jsonl"
    lines.write_bytes(lines.read_bytes()[:-6])

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [4, 3]
    assert [(f.key, f.reason) for f in report.failures] == [
        ("meta/episodes.jsonl", "line 3 is no JSON: it was not written whole")
    ]
    assert report.left_out["data/chunk-000/episode_000002.parquet"]


def test_paths_cannot_lead_out_of_the_data_set(tmp_path: Path) -> None:
    path = write_v3(tmp_path / "pick", episodes())
    info = path / "meta/info.json"
    document = {**json.loads(info.read_text()), "data_path": "../../{chunk_index}.parquet"}
    info.write_text(json.dumps(document))

    with pytest.raises(
        SourceError, match=r"data_path of meta/info\.json leads out of the data set"
    ):
        open_source(path)


def test_a_version_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = write_v3(tmp_path / "pick", episodes())
    info = path / "meta/info.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "codebase_version": "v1.6"}))

    with pytest.raises(SourceError, match=r"codebase_version of v2.0, v2.1, v3.0, got 'v1.6'"):
        open_source(path)


@pytest.mark.parametrize(
    ("name", "line"),
    [("tasks", '{"task": "no number"}'), ("episodes", '{"episode_index": 0, "length": "x"}')],
)
def test_lines_that_are_not_as_lerobot_has_them_are_refused(
    tmp_path: Path, name: str, line: str
) -> None:
    path = write_v2(tmp_path / "pick", episodes())
    (path / f"meta/{name}.jsonl").write_text(line)

    with pytest.raises(SourceError, match="meta is not as LeRobot has it"):
        open_source(path)


def test_a_feature_of_another_shape_than_announced_is_named(tmp_path: Path) -> None:
    features = {**FEATURES, "action": {"dtype": "float32", "shape": [3]}}

    _, report = ingest(write_v3(tmp_path / "pick", episodes(), features))

    assert report.failures[0].reason == "action must have shape (3,) in each row, got (2,)"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"is not of LeRobot: meta/info.json is missing"):
        open_source(tmp_path, "lerobot")


@pytest.mark.parametrize("write", [write_v2, write_v3])
def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(
    tmp_path: Path, write: Any
) -> None:
    given = episodes()
    path = write(tmp_path / "pick", given)

    expstore.ingest_from(path, tmp_path / "a.exp", episodes=1)
    report = expstore.ingest_from(path, tmp_path / "a.exp", resume=True)

    back = expstore.open(tmp_path / "a.exp").read(np.arange(12))["action"]
    assert back.tobytes() == np.concatenate([e["action"] for e in given]).tobytes()
    assert (report.dropped_steps, report.failures) == ({}, ())


@pytest.mark.parametrize("name", ["lerobot-v2", "lerobot-v3"])
def test_what_lerobot_itself_wrote_arrives_byte_for_byte(tmp_path: Path, name: str) -> None:
    for extra in ("av", "PIL"):
        pytest.importorskip(extra)
    given = np.load(WRITTEN / f"{name}.npz")

    report = expstore.ingest_from(WRITTEN / name, tmp_path / "a.exp")
    store = expstore.open(tmp_path / "a.exp")

    assert (report.failures, report.dropped_steps) == ((), {})
    assert store.episodes["length"].tolist() == list(LENGTHS)
    back = store.read(np.arange(sum(LENGTHS)))
    assert back["observation"]["state"].tobytes() == given["observation.state"].tobytes()
    assert back["action"].tobytes() == given["action"].tobytes()
    assert back["reward"].tobytes() == given["next.reward"].tobytes()
    images = back["observation"]["images"]
    assert images["wrist"].tobytes() == given["observation.images.wrist"].tobytes()
    away = np.abs(images["top"].astype(int) - given["observation.images.top"])
    assert away.max() <= 8  # AV1 with loss; a frame's neighbours are 20 away
    texts = [store.episode(number)["task"] for number in range(3)]
    assert texts == [[TASKS[0]] * 4, [TASKS[1]] * 3, [TASKS[0]] * 5]
    assert report.flags == {"next.done": 3}
