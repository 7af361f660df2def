"""history: the commits, with what each of them held."""

from __future__ import annotations

import json

import numpy as np
import pytest

import expstore
from expstore.errors import NotAStoreError
from expstore.storage import commits
from tests.storage.made import episode, writer


def test_every_commit_is_there_with_what_it_held(tmp_path):
    path = tmp_path / "a.exp"
    with writer(path) as out:
        for length in (3, 4, 5):
            out.append(episode(length, length))
            out.commit()
    expstore.delete(path, [0, 2], durable=False)
    found = expstore.history(path)
    assert [commit.number for commit in found] == [0, 1, 2, 3, 4]
    assert [commit.num_episodes for commit in found] == [0, 1, 2, 3, 1]
    assert [commit.num_steps for commit in found] == [0, 3, 7, 12, 4]
    assert [commit.num_deleted for commit in found] == [0, 0, 0, 0, 2]
    times = [commit.time for commit in found]
    assert times == sorted(times)
    for commit in found:
        store = expstore.open(path, at=commit.number)
        assert (store.num_episodes, store.num_steps) == (commit.num_episodes, commit.num_steps)


def test_what_was_evicted_is_counted(tmp_path):
    path = tmp_path / "a.exp"
    with writer(path, capacity_steps=10) as out:
        for number in range(6):
            out.append(episode(4, number))
            out.commit()
    found = expstore.history(path)
    assert [commit.num_evicted for commit in found] == [0, 0, 0, 1, 1, 1, 1]
    assert [commit.num_episodes for commit in found] == [0, 1, 2, 2, 2, 2, 2]


def test_a_damaged_line_is_left_out_and_survives_the_next_writer(tmp_path):
    """A writer cut everything off after it, and with it commits that could be read."""
    path = tmp_path / "a.exp"
    with writer(path) as out:
        for number in range(4):
            out.append(episode(2, number))
            out.commit()
    file = path / "__expstore/commits"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b"x" + lines[1][1:], *lines[2:]]))
    writer(path).close()
    assert [commit.number for commit in expstore.history(path)] == [0, 2, 3, 4]
    assert expstore.open(path, at=3).num_episodes == 3


def test_a_commit_that_was_never_published_is_not_there(tmp_path):
    path = tmp_path / "a.exp"
    with writer(path) as out:
        out.append(episode(2, 0))
    root = (path / "zarr.json").read_bytes()
    with writer(path) as out:
        out.append(episode(2, 1))
    (path / "zarr.json").unlink()
    (path / "zarr.json").write_bytes(root)
    assert [commit.number for commit in expstore.history(path)] == [0, 1]


def test_the_newest_commit_is_there_without_a_history(tmp_path):
    path = tmp_path / "a.exp"
    with writer(path) as out:
        out.append(episode(2, 0))
    (path / "__expstore/commits").unlink()
    (commit,) = expstore.history(path)
    document = json.loads((path / "zarr.json").read_text())
    assert (commit.number, commit.num_episodes, commit.num_deleted) == (1, 1, 0)
    assert commit.time == document["attributes"]["expstore"]["commit"]["time"]


def test_a_store_without_fields_has_one_commit(tmp_path):
    writer(tmp_path / "a.exp").close()
    assert [commit.num_steps for commit in expstore.history(tmp_path / "a.exp")] == [0]
    with pytest.raises(NotAStoreError):
        expstore.history(tmp_path / "b.exp")


def test_tombstones_that_a_repair_wrote_anew_are_not_deleted_again(tmp_path):
    path = tmp_path / "a.exp"
    with writer(path) as out:
        for number in range(6):
            out.append(episode(2, number))
    expstore.delete(path, [0, 1, 2], durable=False)
    with (path / "deleted/length/c.0").open("r+b") as file:
        file.write(np.int64(7).tobytes())
    expstore.repair(path)
    found = expstore.history(path)
    assert [commit.num_deleted for commit in found] == [0, 0, 3, 0]
    assert [commit.num_episodes for commit in found] == [0, 6, 3, 4]


def test_a_long_history_is_thinned_and_keeps_its_newest_lines(tmp_path, monkeypatch):
    """A commit every five seconds would have written 1 GB in a year, all read at each opening."""
    monkeypatch.setattr(commits, "MOST_HISTORY_BYTES", 8000)
    path, sizes = tmp_path / "a.exp", []
    with writer(path) as out:
        for _ in range(150):
            out.append({"reward": np.ones(2)})
            out.commit()
            sizes.append((path / "__expstore/commits").stat().st_size)
    numbers = [commit.number for commit in expstore.history(path)]
    assert max(sizes) < 8000 + 200
    assert numbers[0] == 0
    assert numbers[-20:] == list(range(131, 151))
    assert len(numbers) < 80
    assert expstore.open(path, at=140).num_episodes == 140
    assert expstore.verify(path).is_sound
