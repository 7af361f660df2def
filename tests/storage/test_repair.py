"""A repair keeps every episode that verifies, takes the others out, and destroys nothing."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

import expstore
from expstore.errors import FormatError, NotAStoreError, StoreLockedError
from expstore.storage import files
from expstore.storage.salvage import in_ascent, in_order
from tests.storage.damage import NUM_EPISODES, committed, flip, image_episode, store_to_damage
from tests.storage.made import assert_same, digest, writer
from tests.torture.faults import Operation, frozen, interposed

IS_THOROUGH = settings.get_current_profile_name() == "thorough"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return store_to_damage(tmp_path_factory.mktemp("repair") / "a.exp")


@pytest.fixture
def path(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy.exp"))


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch) -> None:
    """Nothing waits for the disk; what a power cut leaves is tested elsewhere."""
    monkeypatch.setattr(files, "sync", lambda descriptor, path: None)
    monkeypatch.setattr(files, "sync_directory", lambda path: None)


def start_of(path: Path, number: int) -> int:
    return int(expstore.open(path).episodes["start"][number])


def check_kept(path: Path, original: Path, lost: set[int]) -> None:
    """All others are there, to the bit, under their numbers, and the store can be written."""
    assert expstore.verify(path).is_sound
    before, after = expstore.open(original), expstore.open(path)
    assert after.episode_numbers.tolist() == [n for n in range(NUM_EPISODES) if n not in lost]
    for number in after.episode_numbers.tolist():
        assert_same(after.episode(number), before.episode(number))
        row = after.episodes[after.episode_numbers.tolist().index(number)]
        assert dict(row) == dict(before.episodes[number])
    with writer(path) as out:
        assert out.append(image_episode(2), policy="new") == NUM_EPISODES
    assert expstore.verify(path).is_sound
    assert_same(expstore.open(path).episode(NUM_EPISODES), image_episode(2))


# -- nothing to do -------------------------------------------------------------------------------


def test_a_sound_store_is_left_as_it_is(path):
    before = digest(path)
    result = expstore.repair(path)
    assert result.was_sound
    assert (result.num_episodes, result.lost, result.mended) == (NUM_EPISODES, [], [])
    assert result.quarantine is None
    after = digest(path)
    del before["__expstore/holder"], after["__expstore/holder"]
    assert after == before


def test_it_needs_the_lock(path):
    with writer(path), pytest.raises(StoreLockedError, match="close that writer first"):
        expstore.repair(path)


def test_what_is_no_store_cannot_be_repaired(tmp_path):
    with pytest.raises(NotAStoreError, match="there is nothing at"):
        expstore.repair(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    with pytest.raises(NotAStoreError, match="is not an expstore store"):
        expstore.repair(tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())


# -- episodes that are taken out -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "row_bytes", "lost"),
    [
        ("steps/reward/c.0", 8, {4}),
        ("steps/action/c.0.0", 8, {4}),
        ("next/observation/state/value/c.0.0", None, {4}),
        ("episodes/seed/c.0", None, {4}),
        ("episodes/end_reason/c.0", None, {4}),
        ("episodes/return/c.0", None, {4}),
        ("episodes/crc32c/action/c.0", None, {4}),
        ("episodes/index_crc32c/c.0", None, {4}),
        # These follow from others: nothing is lost.
        ("episodes/start/c.0", None, set()),
        ("episodes/length/c.0", None, set()),
        ("episodes/metadata/end/c.0", None, set()),
        ("next/observation/state/step/c.0", None, set()),
        ("next/observation/image/step/c.0", None, set()),
        ("steps/done/c.0", 1, set()),
        ("steps/episode/c.0", 8, set()),
    ],
)
def test_one_flipped_bit_costs_at_most_its_episode(path, original, file, row_bytes, lost):
    rows = start_of(path, 4) if row_bytes else 4
    widths = {"value": 12, "end_reason": 1, "crc32c": 4, "action": 4, "index_crc32c": 4}
    width = row_bytes or widths.get(file.split("/")[-2], 8)
    flip(path / file, rows * width)
    result = expstore.repair(path)
    assert not result.was_sound
    assert {episode.number for episode in result.lost} == lost
    assert result.num_episodes == NUM_EPISODES - len(lost)
    assert bool(result.mended) == (not lost)
    check_kept(path, original, lost)


def test_what_is_taken_out_lies_in_the_quarantine(path):
    start = start_of(path, 6)
    reward = np.array(expstore.open(path).episode(6)["reward"])
    flip(path / "steps/reward/c.0", start * 8)
    result = expstore.repair(path)
    (episode,) = result.lost
    assert (episode.number, episode.start, episode.length) == (6, start, 3)
    assert episode.problems == ["field 'reward' of episode 6 fails its checksum"]
    home = Path(str(result.quarantine)) / "episode-6"
    assert home == path / "__expstore/quarantine/3/episode-6"
    kept = np.load(home / "steps/reward.npy")
    assert kept.tobytes()[1:] == reward.tobytes()[1:]
    assert kept.tobytes()[0] == reward.tobytes()[0] ^ 1
    assert np.load(home / "next/observation/image/value.npy").shape == (1, 8, 8)
    assert np.load(home / "episodes/seed.npy").tolist() == [6]
    report = json.loads((home.parent / "report.json").read_text())
    assert [lost["number"] for lost in report["lost"]] == [6]
    assert report["problems"][0]["text"] == "field 'reward' of episode 6 fails its checksum"


def test_an_older_commit_still_has_what_was_taken_out(path):
    flip(path / "steps/reward/c.0", start_of(path, 6) * 8)
    expstore.repair(path)
    assert expstore.open(path, at=2).num_episodes == NUM_EPISODES
    assert expstore.open(path).num_episodes == NUM_EPISODES - 1


def test_every_flipped_bit_can_be_repaired(path, original):
    """And costs the episodes that it lies in, of which an inner chunk holds several."""
    rng = random.Random("repairs")
    sizes = committed(path)
    with expstore.Writer(path, durable=False):
        pass
    for file, size in rng.choices(sorted(sizes.items()), k=200 if IS_THOROUGH else 10):
        copy = Path(shutil.copytree(original, path.parent / "one.exp"))
        flip(copy / file.relative_to(path), rng.randrange(size), rng.randrange(8))
        result = expstore.repair(copy)
        assert not result.was_sound
        is_coded = "image" in str(file) and "/c." in str(file)
        assert len(result.lost) <= (NUM_EPISODES if is_coded else 2), file
        check_kept(copy, original, {episode.number for episode in result.lost})
        shutil.rmtree(copy)


def test_several_damages_at_once(path, original):
    for number in (1, 5, 9):
        flip(path / "steps/reward/c.0", start_of(path, number) * 8)
    flip(path / "episodes/start/c.0", 3 * 8 + 2)
    flip(path / "episodes/start/c.0", 4 * 8 + 2)
    flip(path / "episodes/length/c.0", 4 * 8)
    flip(path / "next/observation/state/step/c.0", 7 * 8 + 5)
    (path / "steps/action/zarr.json").write_bytes(b"{")
    flip(path / "__expstore/commits", 5)
    result = expstore.repair(path)
    assert {episode.number for episode in result.lost} == {1, 5, 9}
    check_kept(path, original, {1, 5, 9})
    assert [commit.number for commit in expstore.history(path)] == [1, 2, 3, 4]


def test_deleted_episodes_stay_deleted(path, original):
    expstore.delete(path, [2, 7], durable=False)
    flip(path / "steps/reward/c.0", start_of(original, 4) * 8)
    flip(path / "steps/reward/c.0", start_of(original, 7) * 8)
    assert [episode.number for episode in expstore.repair(path).lost] == [4]
    check_kept(path, original, {2, 4, 7})


def test_a_damaged_tombstone_brings_its_episode_back_and_no_other(path, original):
    expstore.delete(path, [2, 7, 8], durable=False)
    flip(path / "deleted/episode/c.0", 8)
    result = expstore.repair(path)
    assert result.mended == ["the list of deleted episodes, without the rows that were damaged"]
    check_kept(path, original, {2, 8})


# -- files ---------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[: len(data) // 2])


DAMAGES: list[Callable[[Path], None]] = [Path.unlink, cut, lambda file: file.write_bytes(b"")]


@pytest.mark.parametrize("part", range(3))
def test_every_chunk_file_can_be_replaced(path, original, part):
    """Each one is missing, cut or empty; all three if the tests are to be thorough."""
    for at, file in enumerate(sorted(committed(path))):
        if not IS_THOROUGH and at % 6 != 2 * part:
            continue
        damage = DAMAGES[part if IS_THOROUGH else at // 6 % 3]
        copy = Path(shutil.copytree(original, path.parent / "one.exp"))
        name = file.relative_to(path)
        data = (copy / name).read_bytes()
        broken = copy / name
        broken.unlink()
        broken.write_bytes(data)
        damage(broken)
        left = broken.read_bytes() if broken.exists() else None
        result = expstore.repair(copy)
        check_kept(copy, original, {episode.number for episode in result.lost})
        if left is not None:
            assert (Path(str(result.quarantine)) / "files" / name).read_bytes() == left
        shutil.rmtree(copy)


def test_a_file_that_holds_none_of_an_episode_costs_it_nothing(path, original):
    (path / "steps/observation/image/c.1.0.0").unlink()
    first = next(n for n in range(NUM_EPISODES) if start_of(path, n + 1) > 16)
    lost = {episode.number for episode in expstore.repair(path).lost}
    assert lost == set(range(first, NUM_EPISODES))
    check_kept(path, original, lost)


def test_where_episodes_start_is_found_again_when_the_file_is_gone(path, original):
    for name in ("start", "length"):
        (path / f"episodes/{name}/c.0").unlink()
    result = expstore.repair(path)
    assert result.lost == []
    check_kept(path, original, set())


def test_the_steps_of_next_values_are_found_again_when_the_file_is_gone(path, original):
    (path / "next/observation/state/step/c.0").unlink()
    assert expstore.repair(path).lost == []
    check_kept(path, original, set())


def test_the_index_of_a_shard_is_found_again(path, original):
    shard = path / "steps/observation/image/c.0.0.0"
    data = bytearray(shard.read_bytes())
    data[-20] ^= 4
    shard.unlink()
    shard.write_bytes(data)
    assert expstore.repair(path).lost == []
    check_kept(path, original, set())


# -- the root and other metadata -----------------------------------------------------------------


@pytest.mark.parametrize("damage", [lambda file: flip(file, 700), *DAMAGES])
def test_a_damaged_root_is_restored(path, original, damage):
    with writer(path) as out:  # the copy of the root is of an older commit than the history
        out.append(image_episode(2))
        out.commit()
        out.append(image_episode(3))
        shutil.copy(path / "__expstore/root", path.parent / "older")
    shutil.copy(path.parent / "older", path / "__expstore/root")
    before = (path / "zarr.json").read_bytes()
    (path / "zarr.json").unlink()
    (path / "zarr.json").write_bytes(before)
    damage(path / "zarr.json")
    with pytest.raises(FormatError):
        expstore.open(path)
    result = expstore.repair(path)
    assert [problem.what for problem in result.problems] == ["root", "metadata file"][:1]
    assert "the root, as of commit 4, from its copy and the history" in result.mended
    assert (path / "zarr.json").read_bytes() == before
    assert expstore.verify(path).is_sound
    assert expstore.open(path).num_episodes == NUM_EPISODES + 2


def test_a_root_without_a_sound_copy_is_left_alone(path):
    flip(path / "zarr.json", 700)
    flip(path / "__expstore/root", 700)
    before = digest(path)
    with pytest.raises(FormatError, match=r"fails its checksum.*, but .*fails its checksum"):
        expstore.repair(path)
    after = digest(path)
    del before["__expstore/holder"], after["__expstore/holder"]
    assert after == before


def test_a_store_of_a_newer_version_is_left_alone(path):
    document = json.loads((path / "zarr.json").read_text())
    document["attributes"]["expstore"]["format"] = 2
    (path / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(FormatError, match="install a newer"):
        expstore.repair(path)


def test_metadata_of_arrays_is_mended_and_what_was_there_is_kept(path, original):
    (path / "steps/reward/zarr.json").write_bytes(b"{")
    (path / "episodes/zarr.json").unlink()
    flip(path / "__expstore/root", 80)
    result = expstore.repair(path)
    assert result.lost == []
    assert set(result.mended) == {
        *("steps/reward/zarr.json", "episodes/zarr.json", "__expstore/root"),
    }
    kept = Path(str(result.quarantine)) / "files/steps/reward/zarr.json"
    assert kept.read_bytes() == b"{"
    check_kept(path, original, set())


# -- kills ---------------------------------------------------------------------------------------


def test_a_repair_that_is_killed_can_be_made_again(path, original, monkeypatch):
    """At any operation the store can be opened, and the next repair brings it to the same end."""
    flip(path / "steps/reward/c.0", start_of(path, 4) * 8)
    flip(path / "episodes/start/c.0", 3 * 8 + 2)
    cut(path / "next/observation/image/value/c.0.0.0")
    (path / "steps/action/zarr.json").write_bytes(b"{")
    copy, looks = path.parent / "killed.exp", 0
    first = Path(shutil.copytree(path, path.parent / "first.exp"))
    lost = {episode.number for episode in expstore.repair(first).lost}
    monkeypatch.setattr("expstore.storage.files.together", lambda calls: [c() for c in calls])

    def look(operation: Operation) -> None:
        nonlocal looks
        if not operation.path.startswith(str(path)):  # of a repair in here
            return
        looks += 1
        if looks % (3 if IS_THOROUGH else 151):
            return
        shutil.copytree(path, copy)
        expstore.open(copy)
        again = {episode.number for episode in expstore.repair(copy).lost}
        assert again in (lost, set())
        assert expstore.verify(copy).is_sound
        numbers = expstore.open(copy).episode_numbers.tolist()
        assert numbers == [n for n in range(NUM_EPISODES) if n not in lost]
        shutil.rmtree(copy)

    with interposed(frozen(look)):
        expstore.repair(path)
    assert looks > 200
    check_kept(path, original, lost)


# -- the order of next values --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_one_damaged_step_is_found_or_at_least_hides_no_other(seed):
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, 9, 40)) - 1
    gaps = np.setdiff1d(rng.integers(0, ends[-1], 20), ends)
    steps = np.union1d(ends, gaps)
    for at in range(len(steps)):
        damaged = steps.copy()
        damaged[at] ^= 1 << int(rng.integers(62))
        found = in_order(damaged, 0, int(ends[-1]) + 1, ends)
        assert (np.diff(found) > 0).all()
        wrong = np.flatnonzero(found != steps)
        assert len(wrong) <= 2, (at, wrong)


def test_steps_of_a_file_that_is_gone_are_some_that_ascend():
    ends = np.array([4, 9, 14, 19])
    steps = np.array([2, 4, 9, 12, 14, 19])
    damaged = np.array([2, 0, 0, 0, 14, 19])
    found = in_order(damaged, 0, 20, ends)
    assert set(ends.tolist()) <= set(found.tolist())
    assert (np.diff(found) > 0).all()
    assert len(steps) == len(damaged)


@pytest.mark.parametrize("at", range(6))
def test_one_damaged_end_moves_no_other(at):
    ends = np.array([3, 3, 5, 9, 9, 14])
    for bit in range(62):
        damaged = ends.copy()
        damaged[at] ^= 1 << bit
        found = in_ascent(damaged, 0, 14)
        assert (np.diff(found) >= 0).all()
        assert (found[0] >= 0, found[-1]) == (True, 14)
        assert set(np.flatnonzero(found != ends).tolist()) <= {at - 1, at, at + 1}
