"""Tianshou's buffers, written by Tianshou itself in both forms."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

try:
    import h5py
except ImportError:
    h5py = None

WRITTEN = Path(__file__).parent / "data" / "tianshou"
needs_h5py = pytest.mark.skipif(h5py is None, reason="needs h5py")
FORMS = (pytest.param("hdf5", marks=needs_h5py), "pkl")


def ingest(path: Path, store: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    report = expstore.ingest_from(path, store, **options)
    return expstore.open(store), report


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copy(WRITTEN / "vector.hdf5", tmp_path / "vector.hdf5"))


@pytest.mark.parametrize("form", FORMS)
def test_rings_that_wrap_inside_an_episode_start_with_their_oldest_row(
    tmp_path: Path, form: str
) -> None:
    store, report = ingest(WRITTEN / f"vector.{form}", tmp_path / "a.exp")

    # Each ring has rows 3 to 8 of nine; an episode lies on both sides of its end.
    assert [store.episodes[i]["source"]["episode"] for i in range(4)] == [
        "0/0",
        "0/1",
        "1/0",
        "1/1",
    ]
    assert store.episodes["length"].tolist() == [4, 2, 2, 4]
    assert store.episodes["end_reason"].tolist() == [
        "truncated",
        "incomplete",
        "terminated",
        "incomplete",
    ]
    values = np.array([3, 4, 5, 6, 7, 8, 103, 104, 105, 106, 107, 108], np.float64)
    names = ["observation", "action", "reward", "next_observation"]
    back = store.read(np.arange(12), fields=names)
    assert back["reward"].tobytes() == values.tobytes()
    assert back["action"].tobytes() == np.repeat(values / 8, 2).astype(np.float32).tobytes()
    state = np.repeat(values, 3).astype(np.float32)
    assert back["observation"]["state"].tobytes() == state.tobytes()
    assert back["next_observation"]["state"].tobytes() == (state + np.float32(0.5)).tobytes()
    assert store.episodes[0]["source"]["rows"] == [3, 1]
    text = "rows before the first had been overwritten, perhaps of the same episode"
    assert report.remarks[text] == 2


@pytest.mark.parametrize("form", FORMS)
def test_both_flags_are_kept_and_it_ended_as_terminated(tmp_path: Path, form: str) -> None:
    store, report = ingest(WRITTEN / f"vector.{form}", tmp_path / "a.exp")

    assert store.read([7])["truncated"].tolist() == [True]
    assert report.remarks["both flags set, so it ended as terminated; both are kept"] == 1
    assert report.flags == {"terminated": 1, "truncated": 2, "done": 2}


@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_that_is_not_full_has_only_what_was_written(tmp_path: Path, form: str) -> None:
    store, report = ingest(WRITTEN / f"single.{form}", tmp_path / "a.exp")

    assert store.read(np.arange(5))["reward"].tolist() == [0, 1, 2, 3, 4]
    assert store.episodes["end_reason"].tolist() == ["terminated", "incomplete"]
    assert report.final_observations == 0  # it was made with ignore_obs_next


@pytest.mark.parametrize("form", FORMS)
def test_infos_come_on_request(tmp_path: Path, form: str) -> None:
    store, report = ingest(WRITTEN / f"single.{form}", tmp_path / "a.exp", infos=True)
    _, without = ingest(WRITTEN / f"single.{form}", tmp_path / "b.exp")

    assert store.read(np.arange(5))["infos"]["lives"].tolist() == [0, 1, 2, 0, 1]
    assert "info/lives" not in report.left_out
    assert without.left_out["info/lives"] == "comes with --infos (infos=True)"


@needs_h5py
def test_done_alone_does_not_tell_how_an_episode_ended(tmp_path: Path, copied: Path) -> None:
    with h5py.File(copied, "a") as file:
        del file["_meta/terminated"], file["_meta/truncated"]

    store, _ = ingest(copied, tmp_path / "a.exp")

    assert store.episodes["end_reason"].tolist() == ["cut", "incomplete"] * 2
    assert np.flatnonzero(store.read(np.arange(12))["dones"]).tolist() == [3, 7]


@needs_h5py
def test_what_is_pickled_in_a_file_is_not_read(tmp_path: Path, copied: Path) -> None:
    with h5py.File(copied, "a") as file:
        for name in ("buffers", "_random_state"):
            file[name][:] = 0
        file["_meta/obs/notes"] = np.zeros(40, np.int8)

    store, report = ingest(copied, tmp_path / "a.exp")

    assert store.num_steps == 12
    assert report.left_out["obs/notes"] == "is not one row of numbers per step"


def test_a_planted_payload_does_not_run_without_trust(tmp_path: Path) -> None:
    call = b"cposix\nmkdir\n(X" + len(str(tmp_path / "run")).to_bytes(4, "little")
    planted = call + str(tmp_path / "run").encode() + b"tR"
    head = b"\x80\x02ctianshou.data.buffer.buffer_base\nReplayBuffer\n)\x81}X\x01\x00\x00\x00a"
    (tmp_path / "rb.pkl").write_bytes(head + planted + b"sb.")

    with pytest.raises(SourceError, match=r"names posix\.mkdir, .* use --trust \(trust=True\)"):
        open_source(tmp_path / "rb.pkl")
    assert not (tmp_path / "run").exists()


@needs_h5py
def test_trust_is_for_pickles(copied: Path) -> None:
    with pytest.raises(SourceError, match="is no pickle; leave out --trust"):
        open_source(copied, trust=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"cut.{form}"
    path.write_bytes((WRITTEN / f"vector.{form}").read_bytes()[:-2000])

    with pytest.raises(SourceError, match="is cut off"):
        open_source(path)


@needs_h5py
def test_another_file_under_the_right_name_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rb.hdf5", "w") as file:
        file["_meta/words"] = np.zeros(3)

    with pytest.raises(SourceError, match="is not of Tianshou; looked for a replay buffer"):
        open_source(tmp_path / "rb.hdf5", "tianshou")
    with pytest.raises(SourceError, match="of no format that is known"):
        open_source(tmp_path / "rb.hdf5")


@pytest.mark.parametrize("form", FORMS)
def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(
    tmp_path: Path, form: str
) -> None:
    path = WRITTEN / f"vector.{form}"

    expstore.ingest_from(path, tmp_path / "a.exp", episodes=1)
    expstore.ingest_from(path, tmp_path / "a.exp", resume=True)

    back = expstore.open(tmp_path / "a.exp").read(np.arange(12))["reward"]
    assert back.tolist() == [*range(3, 9), *range(103, 109)]
