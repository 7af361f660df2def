"""Columns added later: whole or not at all, beside files that nobody touches."""

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

import expstore
from expstore.errors import SchemaError, StateError, StoreLockedError
from expstore.storage import files, new_column
from tests.format_reader import FormatReader
from tests.torture.episodes import Chunks
from tests.torture.faults import Operation, frozen, interposed, small_chunks

SMALL_CHUNKS = Chunks(rows=8, inner_rows=2, page_bytes=8, write_bytes=16)
EACH = 1 if settings.get_current_profile_name() == "thorough" else 12  # of the states
LENGTHS = (3, 9, 1, 6)
STEPS = sum(LENGTHS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four episodes in files of a few rows."""
    path = tmp_path / "store.exp"
    with small_chunks(SMALL_CHUNKS), expstore.Writer(path) as writer:
        for number, length in enumerate(LENGTHS):
            writer.append(episode_of(number, length), policy=f"p{number}")
    return path


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small files for new columns, and what is done noted after each episode."""
    monkeypatch.setattr(new_column, "NOTE_BYTES", 1)
    monkeypatch.setattr(new_column, "NOTE_S", 1e9)
    with small_chunks(SMALL_CHUNKS):
        yield


def episode_of(number: int, length: int) -> dict[str, Any]:
    reward = np.arange(length) + 10.0 * number
    return {"observation": np.arange(length + 1) + 100 * number, "reward": reward}


def doubled(episode: dict[str, Any]) -> Any:
    return (2 * episode["reward"]).astype(np.float32)


def words(episode: dict[str, Any]) -> list[str]:
    return ["x" * (int(r) % 4) for r in episode["reward"]]


def images(episode: dict[str, Any]) -> Any:
    return np.repeat(episode["reward"].astype(np.uint8), 1024).reshape(-1, 1024)


def column(path: Path, name: str) -> Any:
    store = expstore.open(path)
    return store.read(store.spans.steps_at(np.arange(store.num_steps)), name)[name]


def content(path: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and hash of every file of chunks."""
    return {
        str(file.relative_to(path)): (
            file.stat().st_ino,
            hashlib.sha256(file.read_bytes()).digest(),
        )
        for file in sorted(path.rglob("c.*"))
    }


def resealed(path: Path) -> list[Any]:
    reader = FormatReader(path)
    assert reader.index_checksums() == list(reader.array("episodes/index_crc32c"))
    return [reader.field_checksums(name) for name in reader.fields]


@pytest.mark.parametrize(
    ("function", "layout", "dtype"),
    [
        (doubled, "auto", "float32"),
        (doubled, "coded", "float32"),
        (words, "auto", "text"),
        (images, "auto", "uint8"),
    ],
)
def test_every_kind_of_column_reads_back(
    path: Path, function: Callable[..., Any], layout: str, dtype: str
) -> None:
    added = expstore.add_field(path, "extra/new", function, layout=layout)

    store = expstore.open(path)
    assert (added.commit, added.num_steps, added.resumed_at) == (store.commit, STEPS, 0)
    assert added.field == store.fields["extra/new"]
    assert (added.field.dtype, added.field.added) == (dtype, store.commit)
    for number, length in enumerate(LENGTHS):
        expected = function(episode_of(number, length))
        np.testing.assert_array_equal(store.episode(number)["extra"]["new"], expected)
    assert expstore.verify(path).is_sound
    resealed(path)


def test_frames_that_shrink_become_coded(path: Path) -> None:
    assert expstore.add_field(path, "frames", images).field.layout == "coded"


def test_an_array_is_cut_into_episodes(path: Path) -> None:
    expstore.add_field(path, "number", np.arange(STEPS))

    assert column(path, "number").tolist() == list(range(STEPS))


def test_no_other_file_changes(path: Path) -> None:
    before = content(path)

    expstore.add_field(path, "new", doubled)

    after = content(path)
    assert {name: after[name] for name in before} == before
    assert {name.rsplit("/", 1)[0] for name in after.keys() - before.keys()} == {
        "steps/new",
        "episodes/crc32c/new",
    }


def test_readers_of_older_commits_do_not_see_it(path: Path) -> None:
    old = expstore.open(path)
    expstore.add_field(path, "new", words)

    assert "new" not in old.fields
    assert "new" in old.latest().fields
    again = expstore.open(path, at=old.commit)
    assert "new" not in again.fields
    assert again.episode(1)["reward"].tolist() == old.episode(1)["reward"].tolist()


def test_appended_episodes_must_bring_it(path: Path) -> None:
    expstore.add_field(path, "new", doubled)
    more = episode_of(4, 5)

    with expstore.Writer(path) as writer:
        with pytest.raises(SchemaError, match="'new'"):
            writer.append(more)
        writer.append({**more, "new": doubled(more)})

    assert column(path, "new")[-5:].tolist() == [80, 82, 84, 86, 88]
    assert expstore.verify(path).is_sound
    resealed(path)


def test_a_second_column_and_a_copy(path: Path, tmp_path: Path) -> None:
    expstore.add_field(path, "one", doubled)
    expstore.add_field(path, "two", lambda episode: episode["one"] + 1)
    copy = expstore.compact(path, tmp_path / "copy.exp")

    assert (column(path, "two") == column(path, "one") + 1).all()
    assert (column(Path(copy.path), "two") == column(path, "two")).all()
    assert expstore.open(copy.path).fields["two"].added is None
    assert expstore.verify(copy.path).is_sound


@pytest.mark.parametrize("layout", ["mapped", "coded"])
@pytest.mark.parametrize("function", [doubled, words])
def test_evicted_and_deleted_episodes_have_no_values(
    tmp_path: Path, layout: str, function: Callable[..., Any]
) -> None:
    path, seen = tmp_path / "ring.exp", []
    with expstore.Writer(path, capacity_steps=16) as writer:
        for number, length in enumerate((5, *LENGTHS)):
            writer.append(episode_of(number, length))
    expstore.delete(path, [2])

    def watched(episode: dict[str, Any]) -> Any:
        seen.append(len(episode["reward"]))
        return function(episode)

    expstore.add_field(path, "new", watched, layout=layout)

    store = expstore.open(path)
    assert store.episode_numbers.tolist() == [3, 4]
    assert seen == [1, 6]
    for number in (3, 4):
        np.testing.assert_array_equal(store.episode(number)["new"], function(store.episode(number)))
    assert expstore.verify(path).is_sound
    with expstore.Writer(path, capacity_steps=16) as writer:
        for number in (5, 6):
            more = episode_of(number, 6)
            writer.append({**more, "new": function(more)})
    store = expstore.open(path)
    np.testing.assert_array_equal(store.episode(6)["new"], function(episode_of(6, 6)))
    assert expstore.verify(path).is_sound


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("reward", doubled, "there is a field 'reward' already"),
        ("observation", doubled, "there is a field 'observation' already"),
        ("terminated", doubled, "cannot be added later"),
        ("reward/dense", doubled, "lies under field 'reward'"),
        ("done", doubled, "reserved name"),
        ("new", np.zeros(STEPS - 1), f"each of {STEPS} steps, got {STEPS - 1} rows"),
        ("new", 3.0, "got a float"),
        ("new", lambda episode: np.zeros(2), "must have 3 rows in episode 0, got 2"),
        ("new", lambda episode: 1, "must have 3 rows in episode 0, got int"),
        ("new", lambda e: np.zeros((len(e["reward"]), len(e["reward"]))), "'new'.* in episode 1"),
    ],
)
def test_what_does_not_fit_is_refused(path: Path, name: str, values: Any, text: str) -> None:
    before = expstore.open(path)

    with pytest.raises(SchemaError, match=text):
        expstore.add_field(path, name, values)

    assert expstore.open(path).commit == before.commit
    assert expstore.verify(path).is_sound


def test_an_open_writer_is_in_the_way(path: Path) -> None:
    with expstore.Writer(path), pytest.raises(StoreLockedError, match="close that writer"):
        expstore.add_field(path, "new", doubled)


def test_a_store_without_steps_is_refused(tmp_path: Path) -> None:
    expstore.Writer(tmp_path / "empty.exp").close()

    with pytest.raises(SchemaError, match="no steps yet"):
        expstore.add_field(tmp_path / "empty.exp", "new", doubled)


# -- killed --------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def failing_in(number: int) -> Callable[[dict[str, Any]], Any]:
    calls = itertools.count()

    def function(episode: dict[str, Any]) -> Any:
        if next(calls) == number:
            raise Stop
        return doubled(episode)

    return function


def test_it_resumes_where_a_function_raised(path: Path) -> None:
    with pytest.raises(Stop):
        expstore.add_field(path, "new", failing_in(2))
    with expstore.Writer(path) as writer:  # who comes in between does no harm
        writer.append(episode_of(4, 2))
    seen = []

    def watched(episode: dict[str, Any]) -> Any:
        seen.append(len(episode["reward"]))
        return doubled(episode)

    added = expstore.add_field(path, "new", watched, resume=True)

    assert (added.resumed_at, seen) == (2, [1, 6, 2])
    assert (column(path, "new") == 2 * column(path, "reward")).all()
    assert expstore.verify(path).is_sound


def test_without_resume_all_is_computed_anew(path: Path) -> None:
    with pytest.raises(Stop):
        expstore.add_field(path, "new", failing_in(2))

    assert expstore.add_field(path, "new", doubled).resumed_at == 0
    assert not (path / "__expstore/adding").exists()


def test_another_field_is_not_resumed(path: Path) -> None:
    with pytest.raises(Stop):
        expstore.add_field(path, "new", failing_in(2))

    with pytest.raises(StateError, match="what was not finished is field 'new'"):
        expstore.add_field(path, "other", doubled, resume=True)


@pytest.mark.parametrize("kind", ["mapped", "coded", "ragged"])
def test_a_kill_at_any_operation_leaves_a_commit(
    path: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy before each operation, and within each write, is what a kill leaves there.

    It has the column whole or not at all; the next call finishes it, with or without what a
    writer did in between.
    """
    monkeypatch.setattr(files, "together", lambda calls: [call() for call in calls] and None)
    function, layout = (words, "auto") if kind == "ragged" else (doubled, kind)
    before = expstore.open(path).commit
    states: set[bytes] = set()
    counts = {"without": 0, "with": 0, "resumed": 0, "looking": 0}

    def look(operation: Operation) -> None:
        if counts["looking"]:
            return  # what a look does itself
        names = sorted(file for file in path.rglob("*") if file.is_file())
        listed = "".join(f"{n}{n.stat().st_size}{n.stat().st_mtime_ns}" for n in names)
        state = hashlib.sha256(listed.encode()).digest()
        is_others = state in states or len(states) % EACH
        states.add(state)
        if is_others:
            return
        copy = tmp_path / "copy.exp"
        shutil.copytree(path, copy)
        counts["looking"] = 1
        assert_consistent(copy, operation)
        counts["looking"] = 0
        shutil.rmtree(copy)

    def assert_consistent(copy: Path, operation: Operation) -> None:
        store = expstore.open(copy)
        if store.commit == before:
            assert "new" not in store.fields
            if counts["without"] % 2:
                expstore.Writer(copy).close()
            added = expstore.add_field(copy, "new", function, layout=layout, resume=True)
            counts["without"] += 1
            counts["resumed"] += bool(added.resumed_at)
        else:
            counts["with"] += 1
            expstore.Writer(copy, durable=False).close()
        store = expstore.open(copy)
        for number, length in enumerate(LENGTHS):
            expected = function(episode_of(number, length))
            np.testing.assert_array_equal(store.episode(number)["new"], expected, str(operation))
        assert expstore.verify(copy).is_sound, operation

    with interposed(frozen(look)):
        expstore.add_field(path, "new", function, layout=layout, durable=False)

    assert counts["without"] * EACH > 60
    assert counts["with"] * EACH > 2
    assert counts["resumed"] * EACH > 20


@pytest.mark.parametrize("kind", ["mapped", "coded", "ragged"])
def test_a_root_that_is_damaged_after_a_kill_keeps_the_new_column(
    path: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy may be of the commit before, and lack the column.

    If the kill came before the root itself, all of the commit is there but its root.
    """
    monkeypatch.setattr(files, "together", lambda calls: [call() for call in calls] and None)
    function, layout = (words, "auto") if kind == "ragged" else (doubled, kind)
    copies: list[Path] = []

    def look(operation: Operation) -> None:
        name = operation.path.removeprefix(f"{path}/")
        if operation.call == "replace" and name in ("zarr.json", "__expstore/root"):
            copies.append(tmp_path / f"copy-{len(copies)}.exp")
            shutil.copytree(path, copies[-1])

    with interposed(frozen(look)):
        expstore.add_field(path, "new", function, layout=layout, durable=False)
    assert len(copies) == 2
    assert all(b"new" not in (copy / "__expstore/root").read_bytes() for copy in copies)
    for copy in copies:
        whole = (copy / "zarr.json").read_bytes()
        (copy / "zarr.json").write_bytes(whole[: len(whole) // 2])
        repaired = expstore.repair(copy)
        assert repaired.lost == []
        assert b"new" not in whole or (copy / "zarr.json").read_bytes() == whole
        store = expstore.open(copy)
        for number, length in enumerate(LENGTHS):
            expected = function(episode_of(number, length))
            np.testing.assert_array_equal(store.episode(number)["new"], expected)
        assert expstore.verify(copy).is_sound
        shutil.rmtree(copy)
