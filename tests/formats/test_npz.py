"""Folders of `.npz` files, and how sources are recognised."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expstore.errors import SourceError
from expstore.formats import FORMATS, Imported, SourceEpisode, open_source


def write(path: Path, **arrays: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **arrays)


def steps(length: int) -> dict[str, Any]:
    return {
        "observation/state": np.arange(2.0 * (length + 1)).reshape(length + 1, 2),
        "action": np.arange(length),
    }


def read(path: Path) -> tuple[list[SourceEpisode], list[tuple[str, str]]]:
    source = open_source(path)
    episodes = list(source.episodes())
    return episodes, [(failure.key, failure.reason) for failure in source.account.failures]


def test_each_file_is_an_episode_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        write(tmp_path / f"ep{number}.npz", **steps(number))

    episodes, failures = read(tmp_path)

    assert [episode.key for episode in episodes] == ["ep1.npz", "ep9.npz", "ep10.npz"]
    assert failures == []
    np.testing.assert_array_equal(episodes[0].data["action"], [0])
    np.testing.assert_array_equal(episodes[0].data["observation/state"], [[0, 1], [2, 3]])


def test_arrays_without_axes_are_metadata(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", **steps(2), seed=np.int64(7), task="reach", end_reason="incomplete")

    ((episode,), _) = read(tmp_path)

    assert episode.metadata == {"seed": 7, "task": "reach"}
    assert episode.end_reason == "incomplete"


def test_an_episode_says_of_which_bytes_it_is(tmp_path: Path) -> None:
    import hashlib

    write(tmp_path / "a.npz", **steps(2))

    ((episode,), _) = read(tmp_path)

    content = (tmp_path / "a.npz").read_bytes()
    assert episode.provenance == {
        "format": "npz",
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_names_are_not_guessed(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", obs=np.zeros(3), actions=np.zeros(3))

    ((episode,), _) = read(tmp_path)

    assert list(episode.data) == ["obs", "actions"]


def test_episodes_that_a_store_has_are_left_out(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.npz", **steps(1))

    left = open_source(tmp_path).episodes(Imported(frozenset({"0.npz", "2.npz"})))

    assert [episode.key for episode in left] == ["1.npz"]


def cut_off(content: bytes) -> bytes:
    return content[: len(content) // 2]


def overwritten(content: bytes) -> bytes:
    return content[:60] + bytes(40) + content[100:]


def replaced(content: bytes) -> bytes:
    return b"no archive"


def pickled(content: bytes) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, action=np.array([{"any": "object"}], object))
    return buffer.getvalue()


def bytes_text(content: bytes) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **steps(1), task=np.bytes_("reach"))
    return buffer.getvalue()


def numbered_reason(content: bytes) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **steps(1), end_reason=3)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (cut_off, "cannot be read: File is not a zip file"),
        (overwritten, "cannot be read: "),
        (replaced, "cannot be read: "),
        (lambda _: b"", "cannot be read: No data left in file"),
        (pickled, "cannot be read: Object arrays cannot be loaded when allow_pickle=False"),
        (bytes_text, "'task' must be a number, a text or one row per step, got dtype |S5"),
        (numbered_reason, "'end_reason' must be a text, got 3"),
    ],
)
def test_a_broken_file_is_named_and_the_others_are_read(
    tmp_path: Path, damage: Any, text: str
) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.npz", **steps(4))
    broken = tmp_path / "1.npz"
    broken.write_bytes(damage(broken.read_bytes()))

    episodes, failures = read(tmp_path)

    assert [episode.key for episode in episodes] == ["0.npz", "2.npz"]
    ((key, reason),) = failures
    assert key == "1.npz"
    assert reason.startswith(text)


def test_every_truncation_of_a_file_is_a_failure_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "whole.npz", **steps(3))
    content = (tmp_path / "whole.npz").read_bytes()
    cut = tmp_path / "cut.npz"

    for size in range(len(content)):
        cut.write_bytes(content[:size])
        episodes, failures = read(tmp_path)
        assert [episode.key for episode in episodes] == ["whole.npz"]
        assert [key for key, _ in failures] == ["cut.npz"]


def test_hidden_and_other_files_are_not_episodes(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", **steps(1))
    write(tmp_path / ".b.npz", **steps(1))
    (tmp_path / "notes.txt").write_text("no episode")
    (tmp_path / "c.npz").mkdir()

    source = open_source(tmp_path)

    assert source.num_episodes == 1
    assert source.describe() == f"1 .npz file in {tmp_path.resolve()}"


@pytest.mark.parametrize("format", [None, "npz"])
def test_what_is_not_there_is_an_error(tmp_path: Path, format: str | None) -> None:
    with pytest.raises(SourceError, match=r"there is nothing at .*nowhere to import"):
        open_source(tmp_path / "nowhere", format)


def test_an_unknown_source_lists_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "fake.npz").write_text("not one, whatever its name says")

    with pytest.raises(SourceError, match=r"looked for .*a folder of \.npz files \(npz\)"):
        open_source(tmp_path)


def test_a_named_format_is_taken_at_its_word(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"there are no \.npz files in"):
        open_source(tmp_path, "npz")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", **steps(1))

    with pytest.raises(SourceError, match=r"give the folder that holds the \.npz files"):
        open_source(tmp_path / "a.npz", "npz")


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"must be one of {', '.join(FORMATS)}, got 'x'"):
        open_source(tmp_path, "x")
