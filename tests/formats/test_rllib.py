"""RLlib's Parquet columns, one row per step."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

WRITTEN = Path(__file__).parent / "data" / "rllib"  # by scripts/clients/rllib_fixture.py
FLAGS = ("terminateds", "truncateds")


def rows(eps_id: str, length: int, end: str | None = "terminateds", **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    observations = rng.normal(size=(length + 1, 4)).astype(np.float32)
    columns: dict[str, Any] = {
        "eps_id": [eps_id] * length,
        "agent_id": [None] * length,
        "module_id": [None] * length,
        "obs": observations[:-1].tolist(),
        "actions": rng.integers(0, 2, length),
        "rewards": rng.normal(size=length),
        "new_obs": observations[1:].tolist(),
    }
    for flag in FLAGS:
        columns[flag] = [False] * (length - 1) + [flag == end]
    return {**columns, "action_logp": rng.normal(size=length).astype(np.float32), **more}


def table_of(*episodes: dict[str, Any]) -> Any:
    kinds = {"obs": pa.list_(pa.float32()), "new_obs": pa.list_(pa.float32())}
    kinds |= {"agent_id": pa.string(), "module_id": pa.string()}
    tables = [
        pa.table({n: pa.array(v, type=kinds.get(n)) for n, v in columns.items()})
        for columns in episodes
    ]
    return pa.concat_tables(tables)


def write(folder: Path, *files: list[dict[str, Any]], **options: Any) -> Path:
    """Files in the folder of a run, in which RLlib puts them."""
    inner = folder / "cartpole-v1" / "run-000001-00001"
    inner.mkdir(parents=True)
    for number, episodes in enumerate(files):
        pq.write_table(table_of(*episodes), inner / f"{number}_000000.parquet", **options)
    return folder


def file(folder: Path, number: int) -> Path:
    return folder / "cartpole-v1" / "run-000001-00001" / f"{number}_000000.parquet"


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    target = path.parent / "a.exp"
    report = expstore.ingest_from(path, target, **options)
    return expstore.open(target), report


def test_rows_arrive_byte_for_byte(tmp_path: Path) -> None:
    given = [rows("a", 4), rows("b", 3, "truncateds"), rows("c", 2, None)]

    store, report = ingest(write(tmp_path / "out", given[:2], given[2:]))

    assert store.episodes["length"].tolist() == [4, 3, 2]
    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated", "cut"]
    for number, columns in enumerate(given):
        back = store.episode(number)
        assert back["action"].tobytes() == columns["actions"].tobytes()
        assert back["reward"].tobytes() == columns["rewards"].tobytes()
        observations = np.array([*columns["obs"], columns["new_obs"][-1]], np.float32)
        assert back["observation"].tobytes() == observations.tobytes()
    assert store.episodes[1]["eps_id"] == "b"
    assert store.episodes[1]["source"]["file"] == "cartpole-v1/run-000001-00001/0_000000.parquet"
    assert report.final_observations == 3
    assert report.flags == {"terminateds": 1, "truncateds": 1}
    assert report.remarks == {"no end flag is set, so it is kept as cut": 1}
    assert report.left_out == {"action_logp": "comes with --infos (infos=True)"}


def test_extras_come_on_request(tmp_path: Path) -> None:
    given = rows("a", 4)

    store, report = ingest(write(tmp_path / "out", [given]), infos=True)

    back = store.read(np.arange(4))["infos"]["action_logp"]
    assert back.tobytes() == given["action_logp"].tobytes()
    assert report.left_out == {}


def test_an_episode_may_lie_in_two_files_and_several_row_groups(tmp_path: Path) -> None:
    whole = rows("a", 7)
    parts = [{n: v[:3] for n, v in whole.items()}, {n: v[3:] for n, v in whole.items()}]

    store, report = ingest(write(tmp_path / "out", parts[:1], parts[1:], row_group_size=2))

    assert store.episodes["length"].tolist() == [7]
    assert store.read(np.arange(7))["reward"].tobytes() == whole["rewards"].tobytes()
    assert report.failures == ()


def test_an_episode_that_was_written_twice_is_imported_once(tmp_path: Path) -> None:
    first, second = rows("a", 3), rows("b", 2)

    store, report = ingest(write(tmp_path / "out", [first], [first, second]))

    assert store.episodes["length"].tolist() == [3, 2]
    assert report.dropped_steps == {"rows of an episode that RLlib had written before": 3}
    assert report.failures == ()


def test_an_episode_of_several_files_names_first_and_last(tmp_path: Path) -> None:
    whole = rows("a", 3)
    parts = [[{n: v[i : i + 1] for n, v in whole.items()}] for i in range(3)]
    path = write(tmp_path / "out", *parts)  # RLlib may write a file for each row

    store, _ = ingest(path)

    found = store.episodes[0]["source"]
    assert found["file"].endswith("/0_000000.parquet")
    assert found["last_file"].endswith("/2_000000.parquet")
    assert found["num_bytes"] == sum(file(path, i).stat().st_size for i in range(3))


def test_ids_without_a_type_are_none(tmp_path: Path) -> None:
    columns = rows("a", 3)
    path = write(tmp_path / "out", [columns])
    table = pq.read_table(file(path, 0), partitioning=None).drop(["agent_id"])
    pq.write_table(table.append_column("agent_id", pa.nulls(3)), file(path, 0))

    store, report = ingest(path)

    assert (store.episodes["length"].tolist(), report.failures) == ([3], ())


def test_agents_are_episodes_of_their_own(tmp_path: Path) -> None:
    given = [rows("a", 3, agent_id=["left"] * 3), rows("a", 2, agent_id=["right"] * 2)]

    store, _ = ingest(write(tmp_path / "out", given))

    assert [store.episodes[i]["source"]["episode"] for i in range(2)] == ["a/left", "a/right"]
    assert store.episodes[1]["agent_id"] == "right"


def test_rows_that_lie_apart_are_named(tmp_path: Path) -> None:
    _, report = ingest(write(tmp_path / "out", [rows("a", 3), rows("b", 2), rows("a", 4)]))

    assert [(f.key, f.reason) for f in report.failures] == [
        ("a", "4 more rows of it lie apart from the first")
    ]


def test_a_file_that_is_cut_off_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "out", [rows("a", 3)], [rows("b", 2)], [rows("c", 4)])
    file(path, 1).write_bytes(file(path, 1).read_bytes()[:-8])

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [3, 4]
    assert ("1_000000.parquet", True) in [
        (f.key, "has no footer" in f.reason) for f in report.failures
    ]


def test_an_episode_before_a_file_that_is_cut_off_is_not_kept_as_whole(tmp_path: Path) -> None:
    whole = rows("a", 7)
    parts = [{n: v[:3] for n, v in whole.items()}, {n: v[3:] for n, v in whole.items()}]
    path = write(tmp_path / "out", parts[:1], parts[1:], [rows("b", 2)])
    file(path, 1).write_bytes(file(path, 1).read_bytes()[:-8])

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [2]
    assert [failure.key for failure in report.failures] == ["1_000000.parquet", "a"]


def test_tensors_of_ray_keep_their_shape(tmp_path: Path) -> None:
    images = np.arange(3 * 2 * 2 * 3, dtype=np.uint8).reshape(3, 2, 2, 3)
    table = table_of(rows("a", 3)).drop(["obs", "new_obs"])
    metadata = {
        "ARROW:extension:name": "ray.data.arrow_tensor",
        "ARROW:extension:metadata": json.dumps([2, 2, 3]),
    }
    kind = pa.list_(pa.uint8())
    field = pa.field("obs", kind, metadata=metadata)
    table = table.append_column(field, pa.array(images.reshape(3, -1).tolist(), kind))
    (tmp_path / "out").mkdir()
    pq.write_table(table, tmp_path / "out" / "0.parquet")

    store, _ = ingest(tmp_path / "out")

    assert store.fields["observation"].shape == (2, 2, 3)
    assert store.read([0, 1, 2])["observation"].tobytes() == images.tobytes()


def test_packed_observations_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "out", [rows("a", 3)])
    table = pq.read_table(file(path, 0), partitioning=None).drop(["obs", "new_obs"])
    pq.write_table(table.append_column("obs", pa.array(["BCJN"] * 3)), file(path, 0))

    _, report = ingest(path)

    assert "output_compress_columns=[]" in report.failures[0].reason


def test_whole_episodes_in_one_column_are_refused_with_the_way_out(tmp_path: Path) -> None:
    pq.write_table(pa.table({"item": [b"\x80"]}), tmp_path / "0.parquet")

    with pytest.raises(SourceError, match="output_write_episodes=False"):
        open_source(tmp_path)


def test_another_table_under_the_right_name_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"words": ["a"]}), tmp_path / "0_000000.parquet")

    with pytest.raises(SourceError, match="is not of RLlib: eps_id, obs, actions, rewards missing"):
        open_source(tmp_path, "rllib")
    with pytest.raises(SourceError, match="of no format that is known"):
        open_source(tmp_path)


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(tmp_path: Path) -> None:
    given = [rows("a", 4), rows("b", 3), rows("c", 2)]
    path = write(tmp_path / "out", given)

    expstore.ingest_from(path, tmp_path / "a.exp", episodes=2)
    expstore.ingest_from(path, tmp_path / "a.exp", resume=True)

    back = expstore.open(tmp_path / "a.exp").read(np.arange(9))["reward"]
    assert back.tobytes() == np.concatenate([e["rewards"] for e in given]).tobytes()


def test_what_rllib_itself_wrote_arrives_byte_for_byte(tmp_path: Path) -> None:
    shutil.unpack_archive(WRITTEN.with_suffix(".zip"), tmp_path / "out")
    given = np.load(WRITTEN.with_suffix(".npz"))

    store, report = ingest(tmp_path / "out")

    assert store.episodes["length"].tolist() == given["lengths"].tolist()
    assert store.episodes["end_reason"].tolist() == ["terminated", "terminated"]
    for number in range(2):
        back = store.episode(number)
        assert back["observation"].tobytes() == given[f"obs_{number}"].tobytes()
        assert back["reward"].tobytes() == given[f"rewards_{number}"].tobytes()
        assert back["action"].tolist() == given[f"actions_{number}"].tolist()
    # The runner writes its first episode again with the second.
    assert report.dropped_steps == {
        "rows of an episode that RLlib had written before": given["lengths"][0]
    }
    assert report.failures == ()
