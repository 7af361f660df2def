"""Opening: what is no store, who may write, and what a writer mends that another one left."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

import expstore
from expstore import Field, Schema
from expstore.errors import (
    FormatError,
    NotAStoreError,
    SchemaError,
    StorageError,
    StoreLockedError,
    WriterStateError,
)
from expstore.storage.commits import read_history
from tests.storage.made import assert_same, digest, episode, store, writer

OPENERS = [expstore.open, expstore.verify, expstore.Writer]
NAMES = ["open", "verify", "Writer"]


# -- what is no store ----------------------------------------------------------------------------


@pytest.mark.parametrize("opener", OPENERS[:2], ids=NAMES[:2])
def test_nothing_is_no_store(tmp_path, opener):
    with pytest.raises(NotAStoreError) as raised:
        opener(tmp_path / "a.exp")
    assert str(raised.value) == (
        f"there is nothing at {tmp_path / 'a.exp'}; a Writer creates a store, expstore ingest "
        "fills one"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("opener", OPENERS, ids=NAMES)
@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_is_no_store(tmp_path, opener, below):
    (tmp_path / "a.exp").write_text("text")
    with pytest.raises((NotAStoreError, StorageError), match=r"a\.exp"):
        opener(tmp_path / "a.exp" / below)
    assert (tmp_path / "a.exp").read_text() == "text"


@pytest.mark.parametrize("opener", OPENERS, ids=NAMES)
def test_a_directory_with_other_things_is_no_store_and_stays_as_it_is(tmp_path, opener):
    (tmp_path / "notes.txt").write_text("mine")
    before = digest(tmp_path)
    with pytest.raises(NotAStoreError, match=r"is not an expstore store: it has no zarr\.json"):
        opener(tmp_path)
    assert digest(tmp_path) == before


@pytest.mark.parametrize("opener", OPENERS, ids=NAMES)
@pytest.mark.parametrize("kind", ["group", "array", "other attributes"])
def test_another_zarr_is_no_store_and_stays_as_it_is(tmp_path, opener, kind):
    path = tmp_path / "a.zarr"
    if kind == "array":
        zarr.create_array(path, shape=(3,), dtype="i4")
    else:
        attributes = {} if kind == "group" else {"expstores": {"format": 1}}
        zarr.open_group(path, mode="w", attributes=attributes).create_array("x", data=np.ones(3))
    before = digest(path)
    with pytest.raises(NotAStoreError, match="not that of an expstore store; give the directory"):
        opener(path)
    assert digest(path) == before


@pytest.mark.parametrize("opener", OPENERS, ids=NAMES)
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_root_that_is_no_json_is_no_store(tmp_path, opener, text):
    (tmp_path / "zarr.json").write_bytes(text)
    with pytest.raises(NotAStoreError, match=r"has a zarr\.json, but not that of an expstore"):
        opener(tmp_path)


def edit_root(path: Path, **changed: object) -> None:
    document = json.loads((path / "zarr.json").read_bytes())
    document["attributes"]["expstore"].update(changed)
    (path / "zarr.json").write_text(json.dumps(document))


@pytest.mark.parametrize("opener", OPENERS, ids=NAMES)
def test_a_newer_format_is_refused_and_nothing_is_touched(tmp_path, opener):
    store(tmp_path / "a.exp", episode(3))
    edit_root(tmp_path / "a.exp", format=2)
    before = digest(tmp_path / "a.exp")
    with pytest.raises(FormatError) as raised:
        opener(tmp_path / "a.exp")
    assert str(raised.value) == (
        f"{tmp_path / 'a.exp'} has format 2, but this version of expstore reads up to 1; install a "
        "newer expstore"
    )
    assert digest(tmp_path / "a.exp") == before


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        ("2.1", "install a newer expstore, 2.1 or later"),
        ("2.1.0", "install a newer expstore, 2.1.0 or later"),
        ("rm -rf /", "install a newer expstore"),
        (7, "install a newer expstore"),
    ],
)
def test_a_newer_format_says_which_version_it_needs(tmp_path, needs, text):
    store(tmp_path / "a.exp", episode(3))
    edit_root(tmp_path / "a.exp", format=2, needs=needs)
    with pytest.raises(FormatError) as raised:
        expstore.open(tmp_path / "a.exp")
    assert str(raised.value).endswith(f"reads up to 1; {text}")


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, None])
def test_a_format_that_is_no_version_is_refused(tmp_path, version):
    store(tmp_path / "a.exp", episode(3))
    edit_root(tmp_path / "a.exp", format=version)
    with pytest.raises(FormatError, match="the format must be a positive integer, got"):
        expstore.open(tmp_path / "a.exp")


@pytest.mark.parametrize("opener", OPENERS, ids=NAMES)
@pytest.mark.parametrize(
    "changed", [{"store_id": "0"}, {"commit": {}}, {"commit": 3}, {"schema": {}}]
)
def test_a_root_that_was_edited_is_refused_and_nothing_is_touched(tmp_path, opener, changed):
    store(tmp_path / "a.exp", episode(3))
    edit_root(tmp_path / "a.exp", **changed)
    before = digest(tmp_path / "a.exp")
    with pytest.raises(FormatError, match=r"fails its checksum: .* restore it|is not a valid root"):
        opener(tmp_path / "a.exp")
    assert digest(tmp_path / "a.exp") == before


# -- stores with little in them ------------------------------------------------------------------


@pytest.mark.parametrize("prepare", [lambda path: None, Path.mkdir], ids=["nothing", "directory"])
def test_a_writer_creates_an_empty_store(tmp_path, prepare):
    path = tmp_path / "a.exp"
    prepare(path)
    writer(path).close()
    opened = expstore.open(path)
    assert (opened.fields, opened.num_episodes, len(opened)) == ({}, 0, 0)
    assert opened.read([]) == {}
    assert repr(opened) == f"Store({path}: 0 episodes, 0 steps)"


def test_missing_parents_are_created(tmp_path):
    writer(tmp_path / "a" / "b" / "c.exp").close()
    assert expstore.open(tmp_path / "a" / "b" / "c.exp").num_episodes == 0


def test_a_creation_that_was_killed_is_taken_up(tmp_path):
    path = tmp_path / "a.exp"
    (path / "__expstore").mkdir(parents=True)
    (path / "__expstore" / "lock").touch()
    (path / "zarr.json.partial").write_text("{")
    with writer(path) as out:
        out.append(episode(3))
    assert expstore.open(path).num_episodes == 1
    assert not (path / "zarr.json.partial").exists()


@pytest.mark.parametrize("name", ["ünï cødé 猫", "with space", "percent%20", "#hash", "a.b.c"])
def test_paths_may_have_any_characters(tmp_path, name):
    store(tmp_path / name, episode(3))
    assert_same(expstore.open(str(tmp_path / name)).episode(0), episode(3))


def test_a_writer_and_a_store_stay_where_they_were_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with writer("a.exp") as out:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        out.append(episode(3))
    assert expstore.open(tmp_path / "a.exp").num_episodes == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


# -- a file system that cannot be written --------------------------------------------------------


@pytest.fixture
def read_only(monkeypatch):
    """Makes the operating system refuse every write, as a read-only mount does, also to root."""

    def make() -> None:
        real_open = os.open

        def refuse(path: object, *rest: object, **named: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))  # type: ignore[call-overload]

        def open_only(path, flags, *rest, **named):
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                refuse(path)
            return real_open(path, flags, *rest, **named)

        monkeypatch.setattr(os, "open", open_only)
        for name in ("mkdir", "replace", "rename", "unlink", "truncate"):
            monkeypatch.setattr(os, name, refuse)

    return make


def test_a_store_cannot_be_created_in_a_read_only_directory(tmp_path, read_only):
    read_only()
    with pytest.raises(StorageError) as raised:
        expstore.Writer(tmp_path / "a.exp")
    assert "Read-only file system; the file system is read-only: choose another place" in str(
        raised.value
    )
    assert raised.value.errno == errno.EROFS
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_store_can_be_read_but_not_written(tmp_path, read_only):
    store(tmp_path / "a.exp", episode(3))
    before = digest(tmp_path / "a.exp")
    read_only()
    for lock in (True, False):
        with pytest.raises(StorageError, match=r"a\.exp/.*: Read-only .* choose another place"):
            expstore.Writer(tmp_path / "a.exp", lock=lock)
    assert_same(expstore.open(tmp_path / "a.exp").episode(0), episode(3))
    assert expstore.verify(tmp_path / "a.exp").is_sound
    assert digest(tmp_path / "a.exp") == before


# -- one writer at a time ------------------------------------------------------------------------


def test_a_second_writer_in_the_same_process_is_refused_and_leaves_no_trace(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append(episode(3))
        before = digest(tmp_path / "a.exp")
        with pytest.raises(StoreLockedError) as raised:
            writer(tmp_path / "a.exp")
        assert str(raised.value) == (
            f"{tmp_path / 'a.exp'} is being written by process {os.getpid()} on "
            f"{socket.gethostname()}; close that writer first"
        )
        assert digest(tmp_path / "a.exp") == before
        out.append(episode(2))
    with writer(tmp_path / "a.exp") as again:
        assert again.num_episodes == 2


@pytest.fixture
def other_process(tmp_path):
    """Another process that holds a writer of `a.exp` until it is killed."""
    code = (
        "import sys, expstore; out = expstore.Writer(sys.argv[1]); print('open', flush=True);"
        "sys.stdin.read()"
    )
    search = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "a.exp"],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": search},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield process
        process.kill()


def test_a_second_writer_in_another_process_is_refused_until_that_one_dies(tmp_path, other_process):
    with pytest.raises(StoreLockedError) as raised:
        writer(tmp_path / "a.exp")
    text = f"is being written by process {other_process.pid} on {socket.gethostname()}; close"
    assert text in str(raised.value)
    assert expstore.open(tmp_path / "a.exp").num_episodes == 0
    other_process.kill()
    other_process.wait()
    with writer(tmp_path / "a.exp") as out:
        out.append(episode(3))


def test_without_the_lock_nobody_is_asked(tmp_path):
    with writer(tmp_path / "a.exp") as out, writer(tmp_path / "b.exp", lock=False) as free:
        writer(tmp_path / "a.exp", lock=False).close()
        free.append(episode(3))
        out.append(episode(3))
    assert not (tmp_path / "b.exp/__expstore/lock").exists()
    assert expstore.open(tmp_path / "b.exp").num_episodes == 1


def test_a_writer_that_failed_to_open_holds_no_lock(tmp_path):
    store(tmp_path / "a.exp", {"x": [1.0]})
    with pytest.raises(SchemaError):
        writer(tmp_path / "a.exp", schema=Schema({"x": Field((), "int8")}))
    writer(tmp_path / "a.exp").close()


def in_child(action) -> int:
    """The exit code of a forked child: 0 where the action ended as it should."""
    if not (child := os.fork()):
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_cannot_write_and_does_not_disturb_its_parent(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append(episode(3))

        def child() -> None:
            for call in (lambda: out.append(episode(3)), out.commit, out.discard, out.episode):
                with pytest.raises(WriterStateError, match="a forked child cannot write: give it"):
                    call()
            out.close()

        assert in_child(child) == 0
        with pytest.raises(StoreLockedError, match=f"written by process {os.getpid()} on"):
            writer(tmp_path / "a.exp")
        assert expstore.open(tmp_path / "a.exp").num_episodes == 0
        out.append(episode(4))
    assert_same(expstore.open(tmp_path / "a.exp").episode(1), episode(4))
    assert expstore.verify(tmp_path / "a.exp").is_sound


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_that_forgets_the_writer_does_not_release_the_lock(tmp_path):
    held = [writer(tmp_path / "a.exp")]

    def child() -> None:
        held.clear()
        gc.collect()

    assert in_child(child) == 0
    with pytest.raises(StoreLockedError, match="is being written by process"):
        writer(tmp_path / "a.exp")
    held[0].close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_what_its_parent_opened(tmp_path):
    opened = store(tmp_path / "a.exp", episode(30))
    opened.read([3])
    assert in_child(lambda: assert_same(opened.episode(0), episode(30))) == 0


# -- opening again -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["mapped", "coded"])
def test_a_recording_goes_on_after_reopening(tmp_path, layout):
    lengths = [3, 1, 400, 70, 2]
    for number, length in enumerate(lengths):
        with writer(tmp_path / "a.exp", layout=layout, chunk_steps=64) as out:
            assert out.append(episode(length, number), seed=number, name=f"n{number}") == number
            assert out.recovery == type(out.recovery)()
    opened = expstore.open(tmp_path / "a.exp")
    assert opened.episodes["length"].tolist() == lengths
    assert opened.episodes["seed"].tolist() == list(range(5))
    assert opened.episodes["name"] == [f"n{number}" for number in range(5)]
    for number, length in enumerate(lengths):
        assert_same(opened.episode(number), episode(length, number))
    assert expstore.verify(tmp_path / "a.exp").is_sound


def test_the_schema_of_a_store_stays(tmp_path):
    store(tmp_path / "a.exp", {"x": np.zeros(3, np.float32)})
    with writer(tmp_path / "a.exp") as out:
        assert out.schema["x"].dtype == "float32"
        with pytest.raises(SchemaError, match="field 'x' must have dtype float32, got float64"):
            out.append({"x": np.zeros(3)})


def test_opening_without_writing_makes_no_commit(tmp_path):
    store(tmp_path / "a.exp", {"x": [1]})
    before = digest(tmp_path / "a.exp")
    writer(tmp_path / "a.exp").close()
    assert digest(tmp_path / "a.exp") == before


def test_the_schema_of_a_store_may_be_given_again(tmp_path):
    schema = Schema({"x": Field((2,), "int8"), "observation": Field((), "float32")})
    for _ in range(2):
        with writer(tmp_path / "a.exp", schema=schema) as out:
            out.append({"x": np.zeros((3, 2), np.int8), "observation": np.zeros(4, np.float32)})
    assert expstore.open(tmp_path / "a.exp").num_episodes == 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"x": Field((2,), "int16")},
            r"field 'x' is .*int8.* in the store and .*int16.* in the gi",
        ),
        ({"x": Field((3,), "int8")}, r"field 'x' is .*\(2,\).* in the store and .*\(3,\)"),
        ({}, "field 'x' is .* in the store and missing in the given schema; leave schema= out"),
        ({"x": Field((2,), "int8"), "y": Field((), "int8")}, "field 'y' is missing in the store"),
    ],
    ids=["dtype", "shape", "missing", "more"],
)
def test_another_schema_is_refused_and_leaves_no_trace(tmp_path, fields, text):
    store(tmp_path / "a.exp", {"x": np.zeros((3, 2), np.int8)})
    before = digest(tmp_path / "a.exp")
    with pytest.raises(SchemaError, match=text):
        writer(tmp_path / "a.exp", schema=Schema(fields))
    assert digest(tmp_path / "a.exp") == before


def test_a_schema_may_be_given_to_a_store_without_one(tmp_path):
    writer(tmp_path / "a.exp").close()
    writer(tmp_path / "a.exp", schema=Schema({"x": Field((), "int8")})).close()
    assert list(expstore.open(tmp_path / "a.exp").fields) == ["x"]


# -- recovery ------------------------------------------------------------------------------------


def killed(path: Path, *uncommitted: int, flush: bool = False, **settings) -> Path:
    """What a writer leaves that committed two episodes, appended more and was killed."""
    left = path.with_name("killed.exp")
    with writer(path, **settings) as out:
        out.append(episode(3, 1))
        out.append(episode(4, 2))
        out.commit()
        for length in uncommitted:
            out.append(episode(length, 3))
        shutil.copytree(path, left)
        out.discard()
    return left


@pytest.mark.parametrize("layout", ["mapped", "coded"])
@pytest.mark.parametrize(("lengths", "steps"), [((), 0), ((5,), 5), ((5, 100_000, 7), 100_012)])
def test_what_was_lost_is_reported_once(tmp_path, layout, lengths, steps):
    left = killed(tmp_path / "a.exp", *lengths, layout=layout)
    with writer(left, layout=layout) as out:
        assert (out.recovery.lost_episodes, out.recovery.lost_steps) == (len(lengths), steps)
        assert out.append(episode(6, 4)) == 2
    with writer(left, layout=layout) as out:
        assert (out.recovery.lost_episodes, out.recovery.lost_steps) == (0, 0)
    opened = expstore.open(left)
    for number, data in enumerate([episode(3, 1), episode(4, 2), episode(6, 4)]):
        assert_same(opened.episode(number), data)
    assert expstore.verify(left).is_sound


def test_discarded_episodes_are_not_reported_as_lost(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append(episode(3))
        out.discard()
    with writer(tmp_path / "a.exp") as out:
        assert out.recovery.lost_episodes == 0


def test_files_that_no_commit_counts_are_removed_and_others_stay(tmp_path):
    path = tmp_path / "a.exp"
    store(path, episode(3))
    kept = digest(path)
    ours = [
        *("zarr.json.partial", "steps/zarr.json.partial", "steps/reward/c.0.partial"),
        *("steps/reward/c.7", "episodes/start/c.1", "next/observation/value/c.9.0"),
    ]
    mine = ["notes.txt", "steps/notes.txt", "c.7"]
    for name in (*ours, *mine):
        (path / name).write_bytes(b"x")
    with writer(path) as out:
        assert out.recovery.removed_files == len(ours)
    after = digest(path)
    assert set(after) - set(kept) == set(mine)
    assert {name: after[name] for name in kept} == kept


def test_chunk_files_of_lost_episodes_are_removed(tmp_path):
    left = killed(tmp_path / "a.exp", 100_000)
    assert (left / "steps/observation/c.1.0").exists()
    with writer(left) as out:
        assert out.recovery.removed_files >= 1
    assert not (left / "steps/observation/c.1.0").exists()


def test_chunk_files_of_a_store_whose_first_episodes_were_lost_are_removed(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append({"x": np.zeros(100_000)})
        shutil.copytree(tmp_path / "a.exp", tmp_path / "killed.exp")
    with writer(tmp_path / "killed.exp") as out:
        assert out.recovery.lost_episodes == 1
        out.append({"x": np.zeros(3, np.uint8)})
    opened = expstore.open(tmp_path / "killed.exp")
    assert opened.fields["x"].dtype == "uint8"
    assert expstore.verify(tmp_path / "killed.exp").is_sound


def test_metadata_of_arrays_and_groups_is_brought_up_to_the_commit(tmp_path):
    path = tmp_path / "a.exp"
    store(path, episode(3))
    old = {file: file.read_bytes() for file in path.rglob("zarr.json") if file.parent != path}
    store(path, episode(4))
    for file, data in old.items():
        file.write_bytes(data)
    (path / "steps/action/zarr.json").unlink()
    assert zarr.open_array(path / "steps/reward", mode="r").shape == (3,)
    writer(path).close()
    assert zarr.open_array(path / "steps/reward", mode="r").shape == (7,)
    assert zarr.open_array(path / "steps/action", mode="r").shape == (7, 2)
    assert zarr.open_group(path / "steps", mode="r")["reward"].shape == (7,)


def test_the_history_names_every_commit_and_torn_lines_are_cut(tmp_path):
    path = tmp_path / "a.exp"
    for length in (3, 4):
        store(path, episode(length))
    history = path / "__expstore/commits"
    entries = [(e["number"], e["dims"]["step"]) for e in read_history(path)]
    assert entries == [(0, [0, 0]), (1, [0, 3]), (2, [0, 7])]
    whole = history.read_bytes()
    history.write_bytes(
        whole + whole.splitlines(keepends=True)[1].replace(b'"number":1', b'"number":9')
    )
    with history.open("ab") as opened:
        opened.write(b'{"number":3,"ti')
    assert [(e["number"], e["dims"]["step"]) for e in read_history(path)] == entries
    writer(path).close()
    assert history.read_bytes() == whole


def test_history_of_a_commit_that_was_never_published_is_cut(tmp_path):
    path = tmp_path / "a.exp"
    store(path, episode(3))
    root, whole = (path / "zarr.json").read_bytes(), (path / "__expstore/commits").read_bytes()
    store(path, episode(4))
    (path / "zarr.json").write_bytes(root)
    with writer(path) as out:
        assert (path / "__expstore/commits").read_bytes() == whole
        out.append(episode(5))
    assert [e["number"] for e in read_history(path)] == [0, 1, 2]
    assert_same(expstore.open(path).episode(1), episode(5))


def test_a_writer_whose_store_was_replaced_does_not_publish_over_the_new_one(tmp_path):
    import shutil

    path = tmp_path / "a.exp"
    data = {"reward": np.zeros(3)}
    old = expstore.Writer(path, commit_interval_s=1e9)
    old.append(data)
    old.commit()
    old.append(data)
    shutil.rmtree(path)
    with expstore.Writer(path) as new:
        for _ in range(3):
            new.append({"reward": np.ones(3)})
        new.commit()
        with pytest.raises(WriterStateError, match="removed or replaced"):
            old.commit()
        old.close()
    assert expstore.open(path).read(np.arange(9))["reward"].tolist() == [1.0] * 9


UNCLOSED = """
import sys, numpy as np, expstore
writer = expstore.Writer(sys.argv[1], commit_interval_s=1e9)
writer.append({"reward": np.ones(3)})
"""


def test_a_writer_that_nobody_closed_commits_when_the_interpreter_ends(tmp_path):
    import subprocess
    import sys

    command = [sys.executable, "-c", UNCLOSED, str(tmp_path / "a.exp")]
    subprocess.run(command, check=True, capture_output=True)
    assert expstore.open(tmp_path / "a.exp").num_steps == 3


def test_an_older_commit_can_be_opened(tmp_path):
    path = tmp_path / "a.exp"
    with expstore.Writer(path, commit_interval_s=1e9) as writer:
        for length in (3, 4, 5):
            writer.append({"reward": np.full(length, length)})
            writer.commit()
    assert [expstore.open(path, at=n).num_steps for n in (0, 1, 2, 3)] == [0, 3, 7, 12]
    assert expstore.open(path, at=2).read([6])["reward"].tolist() == [4]
    assert expstore.open(path, at=1).latest().num_steps == 12
    assert expstore.open([path, path], at=[1, 3]).num_steps == 15
    with pytest.raises(
        expstore.errors.StepRangeError, match="has no commit 9; the newest one is 3"
    ):
        expstore.open(path, at=9)
