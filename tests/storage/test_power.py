"""A power cut at any moment: the disk lost or kept, at random, whatever was not synced."""

from pathlib import Path

import numpy as np
import pytest

from expstore.storage import files
from tests.torture.disk import Directory, File
from tests.torture.episodes import SMALL
from tests.torture.power import play_power_cuts

RAGGED, FILE_BY_FILE = 292, 62  # seeds


def keep_none(count: int) -> int:
    return 0


def keep_all(count: int) -> int:
    return count


# -- the simulated disk, which must be able to lose things ---------------------------------------


def test_a_file_loses_what_was_not_synced_sector_by_sector() -> None:
    file = File(b"a" * 1024)
    file.changes += [(0, b"b" * 1024), (1024, b"c" * 10)]
    rng = np.random.default_rng(0)
    left = {file.left(lambda count: int(rng.integers(count + 1))) for _ in range(100)}

    assert file.left(keep_none) == b"a" * 1024
    assert file.left(keep_all) == b"b" * 1024 + b"c" * 10
    assert b"a" * 512 + b"b" * 512 in left
    assert b"b" * 1024 + bytes(10) in left  # the size came to the disk, the last sector did not
    file.sync()
    assert file.left(keep_none) == b"b" * 1024 + b"c" * 10


def test_a_file_that_was_shortened_has_nothing_behind_its_end() -> None:
    file = File(b"abcdef")
    file.changes += [3, (5, b"x")]

    assert file.left(keep_all) == b"abc\0\0x"
    assert file.left(keep_none) == b"abcdef"


def test_names_that_a_rename_connects_go_together_and_others_do_not() -> None:
    old, new, other = File(b"old"), File(b"new"), File()
    names = Directory({"root": old}, {"root": old})
    names.change({"partial": new})
    names.change({"other": other})
    names.change({"partial": None, "root": new})

    assert names.left(keep_none) == {"root": old}
    assert names.left(keep_all) == {"root": new, "other": other}
    counts = iter([1, 0])  # one group after the other
    assert names.left(lambda count: next(counts)) in (
        {"root": old, "other": other},
        {"root": old, "partial": new},
    )
    names.sync()
    assert names.left(keep_none) == {"root": new, "other": other}


# -- stores on it --------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "num_cuts"), [(SMALL, 25), (RAGGED, 8), (FILE_BY_FILE, 8)])
def test_a_power_cut_at_any_moment_loses_no_episode_that_was_committed(
    tmp_path: Path, seed: int, num_cuts: int
) -> None:
    """Mapped, coded, ragged and next values, a capacity, deletions, streams, saved priorities."""
    tally = play_power_cuts(tmp_path / "home", seed, num_cuts=num_cuts, num_moves=7)

    assert tally.power_cuts == 2 * num_cuts
    assert tally.episodes_read > 0


@pytest.mark.parametrize("sync", ["sync", "sync_directory"])
def test_a_writer_that_does_not_sync_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    """These tests are able to fail."""
    monkeypatch.setattr(files, sync, lambda *_: None)

    with pytest.raises(AssertionError, match="seed 396, session"):
        play_power_cuts(tmp_path / "home", SMALL, num_cuts=40, num_moves=7)
