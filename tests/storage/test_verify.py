"""Every kind of damage is found, and named by what it concerns."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

import expstore
from expstore.errors import FormatError, NotAStoreError
from expstore.storage.priorities import save_state
from tests.storage.damage import NUM_EPISODES, committed, flip, image_episode, store_to_damage
from tests.storage.made import digest, writer


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """Mapped and coded columns, several commits, metadata in some episodes, a gap in one."""
    return store_to_damage(tmp_path_factory.mktemp("verify") / "a.exp")


@pytest.fixture
def path(original, tmp_path) -> Path:
    copy = tmp_path / "copy.exp"
    shutil.copytree(original, copy)
    return copy


def problems(path: Path) -> list[tuple[str, int | None]]:
    return [(problem.what, problem.episode) for problem in expstore.verify(path).problems]


# -- sound stores --------------------------------------------------------------------------------


def test_a_sound_store_is_sound_and_nothing_is_changed(path):
    before = digest(path)
    seen: list[tuple[int, int]] = []
    result = expstore.verify(path, progress=lambda *done: seen.append(done))
    assert result.is_sound
    assert (result.commit, result.num_episodes, result.num_steps) == (2, NUM_EPISODES, 26)
    assert result.num_bytes > 26 * (64 + 12 + 8 + 8 + 2)
    assert seen == [(done, NUM_EPISODES) for done in range(1, NUM_EPISODES + 1)]
    assert digest(path) == before


@pytest.mark.parametrize("fields", [None, {"x": expstore.Field((), "int8")}])
def test_an_empty_store_is_sound(tmp_path, fields):
    schema = None if fields is None else expstore.Schema(fields)
    writer(tmp_path / "a.exp", schema=schema).close()
    assert expstore.verify(tmp_path / "a.exp").is_sound


def test_rows_that_are_not_committed_are_nobodys_business(path):
    with writer(path) as out:
        out.append(image_episode(3))
        with out.episode() as block:
            block.add({name: np.zeros(f.shape, f.dtype) for name, f in out.schema.fields.items()})
            result = expstore.verify(path)
            block.discard()
        out.discard()
    assert (result.is_sound, result.num_episodes) == (True, NUM_EPISODES)


def test_the_bytes_behind_the_committed_rows_may_be_anything(path):
    for file, size in committed(path).items():
        if size < file.stat().st_size:
            flip(file, size)
    assert expstore.verify(path).is_sound


# -- flipped bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["steps", "next", "episodes"])
def test_every_flipped_bit_of_committed_rows_is_found(path, part):
    rng = random.Random(f"{part} flips")
    files = {f: n for f, n in committed(path).items() if f.relative_to(path).parts[0] == part}
    assert files
    unnoticed = []
    for file, size in files.items():
        for _ in range(max(4, 300 // len(files))):
            offset, bit = rng.randrange(size), rng.randrange(8)
            flip(file, offset, bit)
            if expstore.verify(path).is_sound:
                unnoticed.append((file.relative_to(path), offset, bit))
            flip(file, offset, bit)
    assert unnoticed == []
    assert expstore.verify(path).is_sound


def test_every_flipped_bit_of_the_root_is_a_format_error(path):
    rng = random.Random("root flips")
    root = path / "zarr.json"
    for offset in rng.sample(range(root.stat().st_size), 1500):
        bit = rng.randrange(8)
        flip(root, offset, bit)
        with pytest.raises(FormatError):
            expstore.open(path)
        flip(root, offset, bit)
    assert expstore.verify(path).is_sound


def test_every_flipped_bit_of_other_metadata_is_found(path):
    rng = random.Random("metadata flips")
    files = [file for file in sorted(path.rglob("zarr.json")) if file.parent != path]
    unnoticed = []
    for file in [*files, path / "__expstore/root", *rng.choices(files, k=80 - len(files))]:
        offset, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        flip(file, offset, bit)
        if ("metadata file", None) not in problems(path):
            unnoticed.append((file.relative_to(path), offset, bit))
        flip(file, offset, bit)
    assert unnoticed == []


def test_every_flipped_bit_of_the_copy_of_the_root_is_found(path):
    rng = random.Random("copy flips")
    copy = path / "__expstore/root"
    for offset in rng.sample(range(copy.stat().st_size), 40):
        bit = rng.randrange(8)
        flip(copy, offset, bit)
        (problem,) = expstore.verify(path).problems
        assert problem.text.startswith(f"{copy} is not a copy of the root"), (offset, bit)
        flip(copy, offset, bit)
    assert expstore.verify(path).is_sound


def test_every_flipped_bit_of_the_index_of_a_shard_is_found(path):
    rng = random.Random("shard flips")
    (file, *_) = sorted((path / "steps/observation/image").glob("c.*"))
    size = file.stat().st_size
    for offset in range(size - 20, size):  # one inner chunk: 16 bytes, and their checksum
        bit = rng.randrange(8)
        flip(file, offset, bit)
        assert ("file", None) in problems(path), (offset, bit)
        flip(file, offset, bit)
    assert expstore.verify(path).is_sound


def test_every_flipped_bit_of_saved_priorities_is_found(tmp_path):
    path = tmp_path / "a.exp"
    with writer(path) as out:
        out.append({"reward": np.ones(2)})
    state = {"raw": np.arange(300, dtype=np.float32), "at": {"runs": np.array([[0, 300]])}}
    save_state(path / "priorities/per", state, ["ab" * 16])
    committed_bytes = {"raw": 300 * 4, "runs": 16}
    rng = random.Random("priority flips")
    files = [file for file in sorted((path / "priorities/per").rglob("*")) if file.is_file()]
    files = [file for file in files if "__expstore" not in file.parts]
    assert len(files) == 7  # the pointer, the generation, a group and two arrays
    unnoticed = []
    for file in files:
        size = committed_bytes.get(file.parent.name) if file.name != "zarr.json" else None
        for _ in range(25):
            offset, bit = rng.randrange(size or file.stat().st_size), rng.randrange(8)
            flip(file, offset, bit)
            if ("priorities", None) not in problems(path):
                unnoticed.append((file.relative_to(path), offset, bit))
            flip(file, offset, bit)
    assert unnoticed == []
    assert expstore.verify(path).is_sound


def test_a_damaged_root_is_an_error_of_verify_too(path):
    flip(path / "zarr.json", 100)
    with pytest.raises(FormatError):
        expstore.verify(path)


# -- what is named -------------------------------------------------------------------------------


def start_of(path: Path, number: int) -> int:
    return int(expstore.open(path).episodes["start"][number])


def test_damage_of_a_field_names_the_field_and_the_episode(path):
    flip(path / "steps/reward/c.0", start_of(path, 3) * 8)
    assert [(p.what, p.text, p.episode) for p in expstore.verify(path).problems] == [
        ("field", "field 'reward' of episode 3 fails its checksum", 3)
    ]


def test_damage_of_a_next_value_names_the_field_and_the_episode(path):
    flip(path / "next/observation/state/value/c.0.0", 4 * 12)
    assert [(p.what, p.text, p.episode) for p in expstore.verify(path).problems] == [
        ("field", "field 'observation/state' of episode 4 fails its checksum", 4)
    ]


def test_damage_of_a_compressed_chunk_names_the_file(path):
    flip(path / "steps/observation/image/c.0.0.0", 40)
    found = expstore.verify(path).problems
    assert {p.what for p in found} == {"field"}
    assert all("'observation/image' of episode" in p.text for p in found)
    assert all(p.text.endswith("c.0.0.0 fails its checksum") for p in found)


def test_damage_of_flags_is_named(path):
    flip(path / "steps/done/c.0", start_of(path, 3))
    assert problems(path) == [("flags", 3)]
    flip(path / "steps/done/c.0", start_of(path, 3))
    flip(path / "steps/episode/c.0", start_of(path, 5) * 8)
    assert problems(path) == [("flags", 5)]


@pytest.mark.parametrize(
    ("column", "row_bytes"),
    [
        *(("start", 8), ("length", 8), ("end_reason", 1), ("return", 8), ("seed", 8)),
        *(("index_crc32c", 4), ("crc32c/action", 4)),
    ],
)
def test_damage_of_the_index_names_its_episode_and_no_other(path, column, row_bytes):
    flip(path / f"episodes/{column}/c.0", 6 * row_bytes)
    assert problems(path) == [("index", 6)]


def test_damage_of_metadata_is_named(path):
    values = path / "episodes/metadata/values/c.0"
    assert values.read_bytes().startswith(b'{"policy":"p1"}{"policy":"p2"}{"policy":"p4"}')
    flip(values, 0)
    flip(values, 40)
    assert problems(path) == [("index", 1), ("index", 4)]


def test_metadata_that_would_lie_elsewhere_is_named(path):
    flip(path / "episodes/metadata/end/c.0", 4 * 8 + 6)
    found = problems(path)
    assert ("metadata", 4) in found
    assert {number for _, number in found} == {4, 5}


# -- files ---------------------------------------------------------------------------------------


def chunk_files(path: Path) -> list[Path]:
    return sorted(committed(path))


def test_every_missing_chunk_file_is_found(path):
    for file in chunk_files(path):
        data = file.read_bytes()
        file.unlink()
        first, *others = expstore.verify(path).problems
        assert first.text == f"{file} is missing, but the commit counts rows in it"
        assert "file" not in {problem.what for problem in others}
        file.write_bytes(data)
    assert expstore.verify(path).is_sound


def test_every_chunk_file_of_another_size_is_found(path):
    for file in chunk_files(path):
        data = file.read_bytes()
        for other in (data[:-1], b"", data + b"\0"):
            file.unlink()  # never cut in place: others may have mapped it
            file.write_bytes(other)
            result = expstore.verify(path)
            assert [p.what for p in result.problems][:1] == ["file"], (file, len(other))
            assert str(file) in result.problems[0].text
        file.unlink()
        file.write_bytes(data)
    assert expstore.verify(path).is_sound


def test_a_directory_in_place_of_a_chunk_file_is_found(path):
    file = path / "steps/reward/c.0"
    file.unlink()
    file.mkdir()
    assert problems(path)[0] == ("file", None)


def test_several_problems_are_found_at_once(path):
    (path / "steps/reward/c.0").unlink()
    (path / "next/observation/state/step/c.0").unlink()
    assert problems(path)[:2] == [("file", None)] * 2


def test_episodes_are_checked_also_when_a_file_is_missing_or_cut(path):
    """It stopped at the file, and told nobody which episodes there were no more."""
    flip(path / "steps/action/c.0.0", start_of(path, 9) * 8)
    reward, ends = path / "steps/reward/c.0", start_of(path, 4)
    data = reward.read_bytes()
    reward.unlink()
    reward.write_bytes(data[: ends * 8])
    found = problems(path)
    assert found[0] == ("file", None)
    assert found[1:] == [
        *(("field", number) for number in range(4, 9)),
        *[("field", 9)] * 2,
        ("field", 10),
    ]


def test_a_damaged_step_of_a_next_value_hides_no_other_one(path):
    """They are looked up by bisection: one flipped bit in the middle made half of them fail."""
    flip(path / "next/observation/state/step/c.0", 5 * 8 + 6)
    assert problems(path) == [("order", None)]
    flip(path / "next/observation/image/step/c.0", 5 * 8 + 6)  # where one episode has a gap
    assert problems(path) == [("order", None), ("order", None)]


def test_every_damaged_line_of_the_history_is_found(path):
    rng = random.Random("history flips")
    file = path / "__expstore/commits"
    for offset in rng.sample(range(file.stat().st_size - 1), 60):
        bit = rng.randrange(8)
        flip(file, offset, bit)
        assert ("history", None) in problems(path), (offset, bit)
        flip(file, offset, bit)
    assert expstore.verify(path).is_sound


def test_a_line_that_a_kill_has_torn_is_no_damage(path):
    file = path / "__expstore/commits"
    with file.open("ab") as opened:
        opened.write(file.read_bytes()[:40])
    assert expstore.verify(path).is_sound


def test_every_flipped_bit_of_tombstones_is_found(path):
    expstore.delete(path, [3, 8], durable=False)
    rng = random.Random("tombstone flips")
    for name, row_bytes in (("episode", 8), ("length", 8), ("crc32c", 4)):
        for _ in range(20):
            offset, bit = rng.randrange(2 * row_bytes), rng.randrange(8)
            flip(path / f"deleted/{name}/c.0", offset, bit)
            assert problems(path)[0] == ("deleted", None), (name, offset, bit)
            flip(path / f"deleted/{name}/c.0", offset, bit)
    assert expstore.verify(path).is_sound


def test_deleted_episodes_are_not_checked(path):
    start = start_of(path, 3)
    expstore.delete(path, [3], durable=False)
    flip(path / "steps/reward/c.0", start * 8)
    result = expstore.verify(path)
    assert (result.is_sound, result.num_episodes, result.num_steps) == (True, 10, 22)


def test_missing_and_broken_metadata_of_an_array_is_found_and_a_writer_mends_it(path):
    for damage in (Path.unlink, lambda file: file.write_bytes(b"{")):
        damage(path / "steps/reward/zarr.json")
        (problem,) = expstore.verify(path).problems
        assert "steps/reward/zarr.json is" in problem.text
        assert "open the store with a Writer once" in problem.text
        writer(path).close()
        assert expstore.verify(path).is_sound


def test_an_array_that_shows_more_than_the_commit_is_found(path):
    file = path / "steps/reward/zarr.json"
    document = json.loads(file.read_bytes())
    document["shape"][0] += 1
    file.write_text(json.dumps(document))
    (problem,) = expstore.verify(path).problems
    assert "steps/reward/zarr.json is not as the commit says" in problem.text


def test_arrays_that_lag_behind_the_commit_are_no_damage(path):
    """A kill after the root's rename leaves the metadata of arrays as of the commit before."""
    lagging = [*path.rglob("*/zarr.json"), path / "__expstore/root"]
    before = {file: file.read_bytes() for file in lagging if file.parent != path}
    with writer(path) as out:
        out.append(image_episode(3), policy="p")
    for file, data in before.items():
        file.write_bytes(data)
    assert expstore.verify(path).is_sound
    writer(path).close()
    assert expstore.verify(path).is_sound
    assert {file for file, data in before.items() if file.read_bytes() == data} == set()


def test_damage_is_found_also_while_the_store_is_open_in_this_process(path):
    opened = expstore.open(path)
    opened.read(range(26), [*opened.fields, "next_observation"])
    for file, size in committed(path).items():
        for offset in (0, size - 1):
            flip(file, offset, 3)
            assert not expstore.verify(path).is_sound, (file, offset)
            flip(file, offset, 3)


def test_what_is_no_store_cannot_be_verified(tmp_path):
    with pytest.raises(NotAStoreError, match="there is nothing at"):
        expstore.verify(tmp_path / "nothing")


def test_relative_paths_are_reported_whole(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    assert expstore.verify(os.path.join(".", path.name)).path == str(path)
