"""ALOHA files, in the layout that ACT writes."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

h5py = pytest.importorskip("h5py")
image_module = pytest.importorskip("PIL.Image")


def steps(length: int) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    return {
        "observations/qpos": rng.normal(size=(length, 14)).astype(np.float32),
        "observations/qvel": rng.normal(size=(length, 14)).astype(np.float32),
        "observations/images/top": rng.integers(0, 256, (length, 8, 6, 3)).astype(np.uint8),
        "action": rng.normal(size=(length, 14)).astype(np.float32),
    }


def jpeg(pixels: Any) -> bytes:
    file = io.BytesIO()
    image_module.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def padded(files: list[bytes]) -> Any:
    longest = max(map(len, files))
    return np.stack([np.frombuffer(f.ljust(longest, b"\0"), np.uint8) for f in files])


def write(path: Path, data: dict[str, Any], **attributes: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file.attrs.update({"sim": True, **attributes})
        for name, values in data.items():
            file.create_dataset(name, data=values)
    return path


def ingest(path: Path, target: Path, **options: Any) -> Any:
    report = expstore.ingest_from(path, target, **options)
    return expstore.open(target), report


def test_files_arrive_byte_for_byte_in_natural_order(tmp_path: Path) -> None:
    for number, length in ((10, 5), (9, 4)):
        write(tmp_path / "aloha" / f"episode_{number}.hdf5", steps(length))

    store, report = ingest(tmp_path / "aloha", tmp_path / "a.exp")

    assert store.episodes["length"].tolist() == [4, 5]
    assert store.episodes["end_reason"].tolist() == ["cut", "cut"]
    for number, length in enumerate((4, 5)):
        back, given = store.episode(number), steps(length)
        assert back["action"].tobytes() == given["action"].tobytes()
        assert back["observation"]["qpos"].tobytes() == given["observations/qpos"].tobytes()
        top = back["observation"]["images"]["top"]
        assert top.tobytes() == given["observations/images/top"].tobytes()
    assert report.final_observations == 0
    assert (report.failures, report.left_out, report.remarks) == ((), {}, {})


def test_an_episode_says_where_it_came_from(tmp_path: Path) -> None:
    path = write(tmp_path / "aloha" / "episode_0.hdf5", steps(3))

    store, _ = ingest(path, tmp_path / "a.exp")

    found = store.episodes[0]
    assert found["source"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["source"]["episode"] == "episode_0.hdf5"
    assert found["attributes"] == {"sim": True}


def test_padded_jpeg_images_are_decoded(tmp_path: Path) -> None:
    data = steps(3)
    files = [jpeg(pixels) for pixels in data["observations/images/top"]]
    data["observations/images/top"] = padded(files)
    data["compress_len"] = np.array([[len(file) for file in files]], np.float32)

    store, report = ingest(
        write(tmp_path / "episode_0.hdf5", data, compress=True), tmp_path / "a.exp"
    )

    back = store.episode(0)["observation"]["images"]["top"]
    given = np.stack([np.asarray(image_module.open(io.BytesIO(file))) for file in files])
    assert back.tobytes() == given.tobytes()
    assert report.left_out == {"compress_len": "the images are cut to these lengths"}
    assert "red first" in next(iter(report.remarks))


def test_padded_jpeg_images_can_be_kept_without_the_padding(tmp_path: Path) -> None:
    data = steps(3)
    files = [jpeg(pixels) for pixels in data["observations/images/top"]]
    data["observations/images/top"] = padded(files)

    store, _ = ingest(
        write(tmp_path / "episode_0.hdf5", data), tmp_path / "a.exp", keep_encoded=True
    )

    back = store.episode(0)["observation"]["images"]["top"]
    assert [row.tobytes() for row in back] == files


def test_a_file_that_is_cut_off_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "aloha" / f"episode_{number}.hdf5", steps(3))
    broken = tmp_path / "aloha" / "episode_0.hdf5"
    broken.write_bytes(broken.read_bytes()[:-900])

    store, report = ingest(tmp_path / "aloha", tmp_path / "a.exp")

    assert store.num_episodes == 2
    assert [failure.key for failure in report.failures] == ["episode_0.hdf5"]
    assert "is cut off" in report.failures[0].reason


def test_columns_of_different_lengths_are_named(tmp_path: Path) -> None:
    data = steps(3)
    data["observations/qvel"] = data["observations/qvel"][:2]

    _, report = ingest(write(tmp_path / "episode_0.hdf5", data), tmp_path / "a.exp")

    assert report.failures[0].reason.startswith("observations/qvel has 2 rows, but there are 3")


def test_another_format_under_the_right_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "aloha" / "episode_0.hdf5", {"words": np.zeros(3)})

    with pytest.raises(SourceError, match=r"of no format that is known .* observations/qpos"):
        open_source(tmp_path / "aloha")
    _, report = ingest(tmp_path / "aloha", tmp_path / "a.exp", format="aloha")
    assert report.failures[0].reason.startswith("it is not of ALOHA; looked for")
