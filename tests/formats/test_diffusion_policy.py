"""diffusion_policy stores, written by zarr in its version 2."""

import json
import shutil
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

LENGTHS = (5, 1, 7)


def rows(n: int = sum(LENGTHS)) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    return {
        "action": rng.normal(size=(n, 2)).astype(np.float32),
        "state": rng.normal(size=(n, 5)).astype(np.float32),
        "img": rng.integers(0, 256, (n, 6, 6, 3)).astype(np.float32),
        "n_contacts": rng.integers(0, 9, (n, 1)).astype(np.int32),
    }


def write(path: Path, data: dict[str, Any], ends: Any = None, **attributes: Any) -> Path:
    """A folder, or a zip of it where the name ends so."""
    folder = path.with_suffix("") if path.suffix == ".zip" else path
    root = zarr.open_group(str(folder), mode="w", zarr_format=2)
    root.attrs.update(attributes)
    lz4 = numcodecs.Blosc("lz4", 5, numcodecs.Blosc.NOSHUFFLE)
    zstd = numcodecs.Blosc("zstd", 5, numcodecs.Blosc.BITSHUFFLE)
    for name, values in data.items():
        chunks = (4, *values.shape[1:])
        compressor = zstd if name == "img" else lz4
        array = root.create_array(
            f"data/{name}",
            shape=values.shape,
            chunks=chunks,
            dtype=values.dtype,
            compressors=compressor,
            config={"write_empty_chunks": True},
        )
        array[:] = values
    ends = np.cumsum(LENGTHS) if ends is None else np.asarray(ends, np.int64)
    array = root.create_array(
        "meta/episode_ends", shape=ends.shape, chunks=(64,), dtype="int64", compressors=None
    )
    array[:] = ends
    if path.suffix == ".zip":
        shutil.make_archive(str(folder), "zip", folder)
        shutil.rmtree(folder)
    return path


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    target = path.parent / "a.exp"
    report = expstore.ingest_from(path, target, **options)
    return expstore.open(target), report


@pytest.mark.parametrize("name", ["pusht.zarr", "pusht.zarr.zip"])
def test_rows_arrive_byte_for_byte(tmp_path: Path, name: str) -> None:
    data = rows()

    store, report = ingest(write(tmp_path / name, data, task="pusht"))

    assert store.episodes["length"].tolist() == list(LENGTHS)
    assert store.episodes["end_reason"].tolist() == ["cut"] * 3
    back = store.read(np.arange(sum(LENGTHS)))
    assert back["action"].tobytes() == data["action"].tobytes()
    for key in ("state", "img", "n_contacts"):
        found = back["observation"][key]
        assert (found.dtype, found.tobytes()) == (data[key].dtype, data[key].tobytes())
    assert report.final_observations == 0
    assert (report.failures, report.dropped_steps, report.remarks) == ((), {}, {})
    found = store.episodes[2]
    assert found["dataset"] == {"task": "pusht"}
    assert found["source"]["rows"] == [6, 13]
    assert len(found["source"]["sha256"]) == 64


def test_rows_after_the_last_end_are_dropped_and_counted(tmp_path: Path) -> None:
    data = rows(16)  # the writer was killed before it wrote the end of its last episode

    store, report = ingest(write(tmp_path / "pusht.zarr", data))

    assert store.num_steps == 13
    assert store.read(np.arange(13))["action"].tobytes() == data["action"][:13].tobytes()
    assert report.dropped_steps == {
        "rows after the last of episode_ends: of an episode that was not finished": 3
    }


def test_episodes_that_end_after_the_rows_are_named(tmp_path: Path) -> None:
    data = rows()
    data["state"] = data["state"][:6]

    store, report = ingest(write(tmp_path / "pusht.zarr", data))

    assert store.episodes["length"].tolist() == [5, 1]
    assert [(f.key, f.reason) for f in report.failures] == [
        (
            "episode 2",
            "observation/state has 6 rows, but the episode ends at 13: it was not written whole",
        )
    ]


def test_chunks_that_are_not_there_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "pusht.zarr", rows())
    (path / "data" / "state" / "1.0").unlink()

    _, report = ingest(path)

    assert report.remarks == {"1 chunks of data/state are not there; Zarr has them be 0.0": 0}


def test_a_damaged_chunk_loses_its_episodes_only(tmp_path: Path) -> None:
    path = write(tmp_path / "pusht.zarr", rows())
    chunk = path / "data" / "state" / "3.0"
    chunk.write_bytes(b"\0" * 20)

    store, report = ingest(path)

    assert store.episodes["length"].tolist() == [5, 1]
    assert report.failures[0].key == "episode 2"
    assert report.failures[0].reason.startswith("rows 6 to 13 of observation/state cannot be read")


def test_a_codec_that_is_not_registered_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "pusht.zarr", rows())
    head = path / "data" / "img" / ".zarray"
    document = json.loads(head.read_text())
    document["compressor"] = {"id": "imagecodecs_jpegxl", "level": 1}
    head.write_text(json.dumps(document))

    with pytest.raises(SourceError, match=r"imagecodecs_jpegxl.*register it before"):
        open_source(path)


def test_a_zip_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "pusht.zarr.zip", rows())
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(SourceError, match="is cut off"):
        open_source(path)


def test_ends_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="must be integers that ascend from 1"):
        open_source(write(tmp_path / "pusht.zarr", rows(), ends=[5, 5, 13]))


def test_another_store_under_the_right_name_is_refused(tmp_path: Path) -> None:
    zarr.open_group(str(tmp_path / "pusht.zarr"), mode="w", zarr_format=2)

    with pytest.raises(SourceError, match=r"is not of diffusion_policy; looked for a Zarr store"):
        open_source(tmp_path / "pusht.zarr", "diffusion_policy")


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(tmp_path: Path) -> None:
    data = rows()
    path = write(tmp_path / "pusht.zarr.zip", data)

    expstore.ingest_from(path, tmp_path / "a.exp", episodes=1)
    expstore.ingest_from(path, tmp_path / "a.exp", resume=True)

    back = expstore.open(tmp_path / "a.exp").read(np.arange(13))["action"]
    assert back.tobytes() == data["action"].tobytes()
