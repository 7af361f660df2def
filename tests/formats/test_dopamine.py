"""Dopamine's checkpoints, written by Dopamine itself: two of one ring, of which one wraps."""

import gzip
import io
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

WRITTEN = Path(__file__).parent / "data" / "dopamine"
PADDING = "zero rows that Dopamine puts before an episode, to stack frames"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN, tmp_path / "replay_logs")
    return tmp_path / "replay_logs"


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    store = path.parent / "pong.exp"
    report = expstore.ingest_from(path, store, **options)
    return expstore.open(store), report


def without_ends(logs: Path) -> Path:
    """As the DQN Replay data set has it."""
    for file in logs.glob("episode_end_indices*"):
        file.unlink()
    return logs


def read(file: Path) -> Any:
    with gzip.open(file) as stream:
        return np.load(stream)


def write(file: Path, values: Any) -> None:
    with gzip.open(file, "wb") as stream:
        np.save(stream, values)


def test_checkpoints_of_one_ring_are_read_as_one_stream(logs: Path) -> None:
    store, report = ingest(logs)

    # The ring of the second checkpoint wraps inside the third episode.
    assert store.episodes["length"].tolist() == [8, 9, 7, 8]
    back = store.read(np.arange(32))
    frames = np.arange(1, 33, dtype=np.uint8)
    assert back["observation"].tobytes() == np.repeat(frames, 9).tobytes()
    assert back["action"].tobytes() == (1 + np.arange(32) % 4).astype(np.int32).tobytes()
    assert back["reward"].tobytes() == (np.arange(32) / 8).astype(np.float32).tobytes()
    assert report.dropped_steps == {PADDING: 12}
    assert report.failures == ()


def test_terminal_terminates_and_other_ends_truncate(logs: Path) -> None:
    store, report = ingest(logs)

    reasons = ["terminated", "truncated", "terminated", "incomplete"]
    assert store.episodes["end_reason"].tolist() == reasons
    assert np.flatnonzero(store.read(np.arange(32))["truncated"]).tolist() == [16]
    assert report.flags == {"episode_end_indices": 3, "terminal": 2}
    assert report.final_observations == 0


def test_without_other_ends_a_time_out_is_not_seen(logs: Path) -> None:
    store, report = ingest(without_ends(logs))

    # The zero rows between them are there, but the format does not say what they are.
    assert store.episodes["end_reason"].tolist() == ["terminated", "terminated", "incomplete"]
    assert store.episodes["length"].tolist() == [8, 9 + 3 + 7, 8]
    assert "truncated" not in store.fields
    assert "terminal may be the loss of a life, and does not mark time-outs" in report.remarks


def test_a_ring_that_has_lost_its_oldest_rows_says_so(logs: Path) -> None:
    for file in logs.glob("*.0.gz"):
        file.unlink()

    store, report = ingest(logs)

    assert store.episodes["length"].tolist() == [9, 7, 8]
    assert store.episodes[0]["source"]["episode"] == 14
    text = "rows before the first are not there, perhaps of the same episode"
    assert report.remarks[text] == 1


def test_rows_between_checkpoints_that_are_gone_part_an_episode(logs: Path) -> None:
    # The second one's ring is made one of 14, which has the rows 30 to 43.
    order = 30 + (np.arange(14) - 44) % 14
    for name in ("observation", "action", "reward", "terminal"):
        file = logs / f"$store$_{name}_ckpt.1.gz"
        write(file, read(file)[order % 30])
    with gzip.open(logs / "episode_end_indices_ckpt.1.gz", "wb") as stream:
        stream.write(pickle.dumps({32 % 14}))

    store, report = ingest(logs)

    # Row 29, of the third episode, is in neither.
    assert store.episodes["end_reason"].tolist() == [
        "terminated",
        "truncated",
        "incomplete",
        "terminated",
        "incomplete",
    ]
    assert store.episodes["length"].tolist() == [8, 9, 3, 3, 8]
    assert report.remarks["rows before the first are not there, perhaps of the same episode"] == 1


def test_the_files_are_never_whole_in_memory(logs: Path) -> None:
    for file in logs.glob("*.1.gz"):
        file.unlink()
    terminals = (np.arange(2000) % 50 == 49).astype(np.uint8)
    write(logs / "$store$_observation_ckpt.0.gz", np.ones((2000, 84, 84), np.uint8))  # 14 MB
    write(logs / "$store$_action_ckpt.0.gz", np.ones(2000, np.int32))
    write(logs / "$store$_reward_ckpt.0.gz", np.ones(2000, np.float32))
    write(logs / "$store$_terminal_ckpt.0.gz", terminals)
    write(logs / "add_count_ckpt.0.gz", np.array(2000))

    tracemalloc.start()
    lengths = [len(e.data["action"]) for e in open_source(without_ends(logs)).episodes()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert lengths == [50] * 40
    assert peak < 8e6  # an episode has 0.4 MB, a block 1 MB


def test_of_a_file_that_is_cut_off_whole_episodes_arrive(logs: Path) -> None:
    for file in logs.glob("*.1.gz"):
        file.unlink()
    observations = np.random.default_rng(0).integers(1, 256, (30, 60, 60)).astype(np.uint8)
    write(logs / "$store$_observation_ckpt.0.gz", observations)
    file = logs / "$store$_observation_ckpt.0.gz"
    file.write_bytes(file.read_bytes()[: 60 * 60 * 20])

    store, report = ingest(logs)

    assert store.episodes["length"].tolist() == [3 + 8]  # its padding has no zero frames here
    assert [failure.key for failure in report.failures] == ["rows 11 to 29 of checkpoint 0"]


def test_damage_that_looks_like_data_costs_its_checkpoint(logs: Path) -> None:
    file = logs / "$store$_reward_ckpt.0.gz"
    content = bytearray(file.read_bytes())
    content[-6] ^= 1  # of the checksum
    file.write_bytes(content)

    store, report = ingest(logs)

    assert store.episodes["length"].tolist() == [9, 7, 8]
    assert report.failures[0].key == "checkpoint 0"
    assert "is damaged, and nothing says which of its rows are" in report.failures[0].reason


def test_a_checkpoint_that_was_not_written_whole_is_named(logs: Path) -> None:
    (logs / "add_count_ckpt.1.gz").unlink()

    store, report = ingest(logs)

    assert store.num_episodes == 3
    assert report.failures[0].reason == "it was not written whole: add_count missing"


def test_a_planted_payload_does_not_run(logs: Path) -> None:
    with gzip.open(logs / "episode_end_indices_ckpt.0.gz", "wb") as stream:
        stream.write(b"cposix\nmkdir\n(X\x03\x00\x00\x00runtR.")

    _, report = ingest(logs)

    assert "names posix.mkdir" in report.failures[0].reason
    assert not Path("run").exists()


def test_the_folder_above_can_be_given(logs: Path) -> None:
    assert len(list(open_source(logs.parent).episodes())) == 4


def test_another_folder_under_the_right_name_is_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    with gzip.open(content, "wb") as stream:
        stream.write(b"words")
    (tmp_path / "$store$_observation_ckpt.0.gz").write_bytes(content.getvalue())

    with pytest.raises(SourceError, match="is not of Dopamine; looked for a folder"):
        open_source(tmp_path, "dopamine")
    with pytest.raises(SourceError, match="of no format that is known"):
        open_source(tmp_path)


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(logs: Path) -> None:
    expstore.ingest_from(logs, logs.parent / "b.exp", episodes=2)
    expstore.ingest_from(logs, logs.parent / "b.exp", resume=True)

    back = expstore.open(logs.parent / "b.exp").read(np.arange(32))["reward"]
    assert back.tobytes() == (np.arange(32) / 8).astype(np.float32).tobytes()
