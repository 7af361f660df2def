"""expstore verify."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import expstore
from expstore_cli.main import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        for length in (3, 2):
            writer.append({"action": np.arange(length), "reward": np.ones(length)})
    return tmp_path / "a.exp"


def flip(path: Path, step: int) -> None:
    """Flip one bit of a step's action."""
    (chunk,) = (path / "steps" / "action").glob("c.*")
    with chunk.open("r+b") as file:
        file.seek(8 * step)
        byte = file.read(1)[0]
        file.seek(8 * step)
        file.write(bytes([byte ^ 1]))


def test_a_sound_store(path: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(path)])

    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "sound: 2 episodes of commit 1, 125 B read\n".replace(
        "125 B", result.stderr.split(", ")[1].removesuffix(" read\n")
    )


def test_each_problem_is_a_line(path: Path) -> None:
    flip(path, 0)
    flip(path, 4)

    result = CliRunner().invoke(main, ["verify", str(path)])

    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "field 'action' of episode 0 fails its checksum",
        "field 'action' of episode 1 fails its checksum",
    ]
    assert result.stderr == "2 problems in 2 episodes of commit 1\n"


def test_as_json(path: Path) -> None:
    flip(path, 0)

    result = CliRunner().invoke(main, ["verify", str(path), "--json"])

    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert result.stderr == ""
    assert found["is_sound"] is False
    assert (found["commit"], found["num_episodes"], found["num_steps"]) == (1, 2, 5)
    assert found["problems"] == [
        {"what": "field", "text": "field 'action' of episode 0 fails its checksum", "episode": 0}
    ]


def test_an_empty_store_is_sound(tmp_path: Path) -> None:
    expstore.Writer(tmp_path / "a.exp").close()

    result = CliRunner().invoke(main, ["verify", str(tmp_path / "a.exp"), "--json"])

    assert result.exit_code == 0
    assert json.loads(result.stdout)["is_sound"] is True


def test_no_store_is_an_error_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "nowhere")])

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: there is nothing at ")
    assert result.stderr.count("\n") == 1


def test_without_a_store_it_is_called_wrongly() -> None:
    assert CliRunner().invoke(main, ["verify"]).exit_code == 2
