"""RLDS data sets, written by TensorFlow Datasets itself; damage is done to copies of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source
from expstore.formats.tf_example import parse_example
from expstore.formats.tfrecord import masked_crc

WRITTEN = Path(__file__).parent / "data" / "rlds"
TRAIN = "arm-train.tfrecord-00000-of-00001"
ROWS = (4, 3, 5)
STEPS = (3, 2, 5)  # the last one has no row with is_last


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN, tmp_path / "arm")
    return tmp_path / "arm"


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    report = expstore.ingest_from(path, path.parent / "arm.exp", **options)
    return expstore.open(path.parent / "arm.exp"), report


def given(name: str) -> list[Any]:
    with np.load(WRITTEN.with_suffix(".npz")) as arrays:
        return [arrays[f"{number}/{name}"] for number in range(3)]


def records(file: Path) -> list[bytes]:
    """Each record with what stands around it."""
    content, found, at = file.read_bytes(), [], 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        found.append(content[at : at + length + 16])
        at += length + 16
    return found


def test_what_tensorflow_datasets_wrote_arrives_byte_for_byte(copied: Path) -> None:
    pytest.importorskip("PIL")

    store, report = ingest(copied)

    assert store.episodes["length"].tolist() == list(STEPS)
    names = {
        "image": "observation/image",
        "state": "observation/state",
        "packed": "observation/packed",
        "count": "observation/count",
        "grip": "action/grip",
        "move": "action/move",
        "reward": "reward",
    }
    back = store.read(np.arange(10), fields=list(names.values()))
    for old, name in names.items():
        expected = np.concatenate([a[:n] for a, n in zip(given(old), STEPS, strict=True)])
        found: Any = back
        for part in name.split("/"):
            found = found[part]
        assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes()), name
    assert report.failures == ()


def test_the_row_with_is_last_is_the_final_observation(copied: Path) -> None:
    pytest.importorskip("PIL")

    store, report = ingest(copied)

    last = store.read([2, 4], fields=["next_observation"])["next_observation"]
    for name in ("state", "image"):
        expected = np.stack([given(name)[0][3], given(name)[1][2]])
        assert last[name].tobytes() == expected.tobytes()
    assert report.final_observations == 2
    text = "the row with is_last, whose action and reward RLDS has as invalid"
    assert report.dropped_steps == {text: 2}
    assert report.remarks["the action of the row with is_last is not zero, yet left out"] == 2


def test_is_terminal_terminates_and_is_last_alone_truncates(copied: Path) -> None:
    store, report = ingest(copied, keep_encoded=True)

    assert store.episodes["end_reason"].tolist() == ["terminated", "truncated", "incomplete"]
    assert np.flatnonzero(store.read(np.arange(10))["truncated"]).tolist() == [4]
    assert report.flags == {"is_last": 2, "is_terminal": 1}


def test_texts_and_lists_of_any_length_are_kept(copied: Path) -> None:
    store, _ = ingest(copied, keep_encoded=True)

    episode = store.episode(1)
    assert episode["language_instruction"][0] == "pick the cube 1"
    contacts = np.concatenate(list(store.episode(0)["observation"]["contacts"]))
    assert contacts.tobytes() == given("contacts")[0].tobytes()


def test_images_stay_encoded_on_request(copied: Path) -> None:
    store, _ = ingest(copied, keep_encoded=True)

    first = store.episode(0)["observation"]["image"][0]
    assert bytes(first)[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_episode_says_where_it_came_from(copied: Path) -> None:
    store, _ = ingest(copied, keep_encoded=True)

    found = store.episodes[1]
    assert found["episode_metadata"] == {"file_path": "raw/1.npy"}
    assert found["dataset"] == {"name": "arm", "version": "1.0.0"}
    assert (found["split"], store.episodes[2]["split"]) == ("train", "val")
    assert found["source"]["episode"] == f"{TRAIN}/1"
    assert found["source"]["num_bytes"] == (copied / "1.0.0" / TRAIN).stat().st_size


@pytest.mark.parametrize("given_path", [".", "1.0.0", f"1.0.0/{TRAIN}"])
def test_the_folder_its_version_and_one_file_can_be_given(copied: Path, given_path: str) -> None:
    source = open_source(copied / given_path, keep_encoded=True)

    assert len(list(source.episodes())) == (2 if TRAIN in given_path else 3)


def test_another_file_beside_the_records_is_refused(copied: Path) -> None:
    with pytest.raises(SourceError, match="is not of RLDS"):
        open_source(copied / "1.0.0" / "features.json", "rlds")


def test_a_record_that_is_damaged_costs_itself(copied: Path) -> None:
    file = copied / "1.0.0" / TRAIN
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)

    store, report = ingest(copied, keep_encoded=True)

    assert store.episodes["length"].tolist() == [2, 5]
    assert [(f.key, f.reason) for f in report.failures] == [
        (f"{TRAIN}/0", "its checksum is not that of its bytes: it is damaged")
    ]


def test_a_damaged_length_ends_its_file(copied: Path) -> None:
    file = copied / "1.0.0" / TRAIN
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)

    store, report = ingest(copied, keep_encoded=True)

    assert store.num_episodes == 1
    assert "the length of a record is damaged" in report.failures[0].reason


def test_of_a_file_that_is_cut_off_every_whole_episode_arrives(copied: Path) -> None:
    file = copied / "1.0.0" / TRAIN
    file.write_bytes(file.read_bytes()[:-10])

    store, report = ingest(copied, keep_encoded=True)

    assert store.episodes["length"].tolist() == [3, 5]
    assert report.failures[0].key == f"{TRAIN} after its record 0"
    assert "the file is cut off: " in report.failures[0].reason


def test_a_file_with_too_few_records_is_named(copied: Path) -> None:
    file = copied / "1.0.0" / TRAIN
    file.write_bytes(records(file)[0])

    store, report = ingest(copied, keep_encoded=True)

    assert store.num_episodes == 2
    assert report.failures[0].reason == "has 1 records, but is to have 2"


def test_a_file_that_is_gone_is_named(copied: Path) -> None:
    (copied / "1.0.0" / TRAIN).unlink()

    store, report = ingest(copied, keep_encoded=True)

    assert store.num_episodes == 1
    assert [failure.key for failure in report.failures] == [TRAIN]


def test_another_form_of_files_is_refused(copied: Path) -> None:
    info = json.loads((copied / "1.0.0" / "dataset_info.json").read_text())
    info["fileFormat"] = "array_record"
    (copied / "1.0.0" / "dataset_info.json").write_text(json.dumps(info))

    with pytest.raises(SourceError, match="is in the form array_record; this reads tfrecord"):
        open_source(copied)


def test_several_versions_are_to_be_chosen_from(copied: Path) -> None:
    shutil.copytree(copied / "1.0.0", copied / "1.1.0")

    with pytest.raises(SourceError, match=r"several versions, 1\.0\.0, 1\.1\.0; give the folder"):
        open_source(copied)


def test_a_data_set_without_steps_is_refused(copied: Path) -> None:
    features = copied / "1.0.0" / "features.json"
    tree = json.loads(features.read_text())
    del tree["featuresDict"]["features"]["steps"]
    features.write_text(json.dumps(tree))

    with pytest.raises(SourceError, match="is not of RLDS; looked for a data set"):
        open_source(copied, "rlds")


def test_a_name_that_leads_out_of_the_folder_is_refused(copied: Path) -> None:
    info = json.loads((copied / "1.0.0" / "dataset_info.json").read_text())
    info["splits"][0]["filepathTemplate"] = "../../{SPLIT}"
    (copied / "1.0.0" / "dataset_info.json").write_text(json.dumps(info))

    with pytest.raises(SourceError, match="which is not beside it"):
        open_source(copied)


def test_rows_that_a_list_does_not_give_are_refused(copied: Path) -> None:
    features = copied / "1.0.0" / "features.json"
    tree = json.loads(features.read_text())
    step = tree["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]
    move = step["features"]["action"]["featuresDict"]["features"]["move"]
    move["tensor"]["shape"]["dimensions"] = ["3"]
    features.write_text(json.dumps(tree))

    _, report = ingest(copied, keep_encoded=True)

    reasons = [failure.reason for failure in report.failures]
    assert "steps/action/move has 8 values, which are no rows of shape (3,)" in reasons


def test_a_packed_row_that_is_larger_than_its_shape_is_refused(copied: Path) -> None:
    features = copied / "1.0.0" / "features.json"
    tree = json.loads(features.read_text())
    step = tree["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]
    packed = step["features"]["observation"]["featuresDict"]["features"]["packed"]
    packed["tensor"]["shape"]["dimensions"] = ["1"]
    features.write_text(json.dumps(tree))

    _, report = ingest(copied, keep_encoded=True)

    assert "a row of steps/observation/packed must have 8 bytes" in report.failures[0].reason


def test_features_that_are_not_read_are_left_out_with_the_reason(copied: Path) -> None:
    features = copied / "1.0.0" / "features.json"
    tree = json.loads(features.read_text())
    step = tree["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]
    step["features"]["film"] = {"pythonClassName": "tensorflow_datasets.x.Video", "video": {}}
    features.write_text(json.dumps(tree))

    store, report = ingest(copied, keep_encoded=True)

    assert store.num_episodes == 3
    assert report.left_out == {"film": "is a Video, which is not read"}


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(copied: Path) -> None:
    expstore.ingest_from(copied, copied.parent / "b.exp", episodes=1, keep_encoded=True)
    expstore.ingest_from(copied, copied.parent / "b.exp", resume=True, keep_encoded=True)

    back = expstore.open(copied.parent / "b.exp").read(np.arange(10))["reward"]
    expected = [a[:n] for a, n in zip(given("reward"), STEPS, strict=True)]
    assert back.tobytes() == np.concatenate(expected).tobytes()


def test_the_checksum_is_that_of_the_specification() -> None:
    # CRC32C of 32 zero bytes is 0x8a9136aa; the mask is that of TFRecord.
    crc = 0x8A9136AA
    assert masked_crc(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_every_truncation_of_a_record_is_an_error_and_nothing_else() -> None:
    content = records(WRITTEN / "1.0.0" / TRAIN)[1][12:-4]

    for length in range(1, len(content), 7):
        try:
            parse_example(content[:length])
        except SourceError:
            continue
        pytest.fail(f"{length} of {len(content)} bytes were taken for the record")


@pytest.mark.parametrize(
    ("feature", "expected"),
    [
        (b"\x1a\x0b\x0a\x09\x01\x96\x01\xac\x02\x80\x80\x80\x08", [1, 150, 300, 2**24]),
        (b"\x1a\x0c\x0a\x0a" + b"\xff" * 9 + b"\x01", [-1]),
        (b"\x1a\x04\x08\x05\x08\x07", [5, 7]),  # not packed
        (b"\x12\x0a\x0d\x00\x00\x80\x3f\x0d\x00\x00\x00\x40", [1.0, 2.0]),  # not packed
        (b"\x12\x06\x0a\x04\x00\x00\x80\x3f", [1.0]),
        (b"", []),
    ],
)
def test_numbers_are_read_packed_or_not(feature: bytes, expected: list[float]) -> None:
    entry = b"\x0a\x01a\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    example = b"\x0a" + bytes([len(features)]) + features

    assert list(parse_example(example)["a"]) == expected
