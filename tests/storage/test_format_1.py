"""A store that was written when format 1 was new: every later version opens it."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import EvictedError
from expstore.storage.priorities import load_state
from tests.format_reader import FormatReader
from tests.storage.data.make_format_1 import LENGTHS, SCHEMA, episode
from tests.storage.made import digest, writer

ARCHIVE = Path(__file__).parent / "data" / "format-1.tar.gz"
LIVE = [3, 5, 6]  # 0 to 2 were evicted, 4 was deleted


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody writes to it, so it is unpacked once."""
    home = tmp_path_factory.mktemp("format-1")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(home, filter="data")
    return home / "format-1.exp"


def flat(data: Any, name: str) -> Any:
    for part in name.split("/"):
        data = data[part]
    return data


def rows_of(column: Any) -> list[bytes]:
    """One entry per step, whether its values are arrays, numbers or text."""
    return [row.encode() if isinstance(row, str) else np.asarray(row).tobytes() for row in column]


def test_it_holds_what_it_always_held(path: Path) -> None:
    store = expstore.open(path)

    assert store.episode_numbers.tolist() == LIVE
    assert store.episodes["start"].tolist() == [9, 15, 21]
    assert store.episodes["length"].tolist() == [2, 6, 2]
    assert store.episodes["end_reason"].tolist() == ["terminated", "cut", "terminated"]
    assert store.episodes["return"].tolist() == [30 / 8 + 31 / 8, 315 / 8, 60 / 8 + 61 / 8]
    assert store.episodes["seed"].tolist() == [3, 5, None]
    assert store.episodes["metadata"] == [
        {"policy": "p3", "tags": [3, None, "é"]},
        {"policy": "p5", "tags": [5, None, "é"]},
        {},
    ]
    assert {name: (f.shape, f.dtype, f.ragged) for name, f in store.fields.items()} == {
        name: (f.shape, f.dtype, f.ragged) for name, f in SCHEMA.fields.items()
    }
    assert store.fields["observation/frame"].layout == "coded"


@pytest.mark.parametrize("number", LIVE)
def test_every_value_of_every_field_is_as_it_was(path: Path, number: int) -> None:
    store, expected = expstore.open(path), episode(number)

    found = store.episode(number)
    for name in SCHEMA.fields:
        assert rows_of(flat(found, name)) == rows_of(flat(expected, name)), name
    steps = store.spans.start[LIVE.index(number)] + np.arange(LENGTHS[number])
    following = store.read(steps, ["next_observation"])["next_observation"]
    for name in ("state", "frame", "points", "deep/er"):
        after = rows_of(flat(expected["observation"], name))[1:]
        assert rows_of(flat(following, name)) == after, name


def test_a_gap_in_the_next_values_is_as_it_was(path: Path) -> None:
    store = expstore.open(path)

    found = store.read(np.arange(15, 21), ["next_reward", "has_next"])
    assert found["next_reward"].tolist() == [51 / 8, 52 / 8, -1.0, 54 / 8, 55 / 8, 99.0]
    assert found["has_next"].tolist() == [True] * 6
    assert store.read([10], ["has_next"])["has_next"].tolist() == [False]


def test_all_bytes_of_all_columns_are_as_they_were(path: Path) -> None:
    """The values above follow from this version's own arithmetic; these do not."""
    store = expstore.open(path)
    names = sorted(name for name, f in store.fields.items() if not f.ragged)
    found = store.read(store.spans.start[:, None] + np.arange(2), [*names, "done", "episode"])

    whole = hashlib.sha256()
    for name in [*names, "done", "episode"]:
        whole.update(flat(found, name).tobytes())
    assert whole.hexdigest() == "a72806e72f695e6c1ebdf334d354cebbc0556c966fe28c89f1df1c57648391b7"
    assert store.identities()[0]["store_id"] == "43b513c4cde3cd43642e1242a17b1224"
    assert store.commit == 9


def test_it_is_sound_and_its_history_is_there(path: Path) -> None:
    before = digest(path)

    assert expstore.verify(path).is_sound
    commits = expstore.history(path)
    assert [commit.num_episodes for commit in commits] == [0, 0, 1, 2, 3, 4, 5, 3, 4, 3]
    assert [commit.num_evicted for commit in commits] == [0, 0, 0, 0, 0, 0, 0, 3, 0, 0]
    assert expstore.open(path, at=8).episode_numbers.tolist() == [3, 4, 5, 6]
    assert digest(path) == before


def test_its_priorities_are_there(path: Path) -> None:
    state = load_state(path / "priorities/per")
    assert state is not None
    (stream,) = state["sampler"]["streams"]
    assert stream["runs"].tolist() == [[9, 23]]
    assert stream["raw"].tolist() == [
        1.0,
        1.0,
        2.0,
        1.0,
        1.0,
        4.0,
        1.0,
        1.0,
        3.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
    ]
    assert expstore.inspect(path).priorities[0].num_steps == 14


def test_a_reader_written_from_the_document_agrees(path: Path) -> None:
    reader = FormatReader(path)
    assert reader.expstore["format"] == 1
    assert reader.array("steps/reward")[-2:].tolist() == [60 / 8, 61 / 8]


def test_it_can_be_continued(path: Path, tmp_path: Path) -> None:
    path = shutil.copytree(path, tmp_path / "copy.exp")
    with writer(path) as out:
        data = episode(6)
        bits = pytest.importorskip("torch").from_numpy(data["observation"]["deep"]["er"])
        data["observation"]["deep"]["er"] = bits.view(pytest.importorskip("torch").bfloat16)
        assert out.append(data) == 7
    store = expstore.open(path)
    assert store.episode_numbers.tolist() == [*LIVE, 7]
    assert rows_of(store.episode(7)["note"]) == rows_of(store.episode(6)["note"])
    assert expstore.verify(path).is_sound


def test_what_was_evicted_is_said_to_be(path: Path) -> None:
    with pytest.raises(EvictedError):
        expstore.open(path, at=3).read([0])
