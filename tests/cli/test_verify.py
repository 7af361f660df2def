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

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "sound: 2 episodes of commit 1, 80 B read\n"


def test_each_problem_is_a_line(path: Path) -> None:
    flip(path, 0)
    flip(path, 4)

    result = CliRunner().invoke(main, ["verify", str(path)])

    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "field 'action' of episode 0 fails its checksum",
        "field 'action' of episode 1 fails its checksum",
        "damaged: 2 problems in 2 episodes of commit 1; expstore repair keeps what is sound",
    ]
    assert result.stderr == ""


def test_as_json(path: Path) -> None:
    flip(path, 0)

    result = CliRunner().invoke(main, ["verify", str(path), "--json"])

    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert result.stderr == ""
    assert found["is_sound"] is False
    assert (found["commit"], found["num_episodes"], found["num_steps"]) == (1, 2, 5)
    assert found["problems"] == [
        {
            "what": "field",
            "text": "field 'action' of episode 0 fails its checksum",
            "episode": 0,
            "name": "action",
        }
    ]


def test_no_problem_says_to_do_what_was_just_done(path: Path) -> None:
    next((path / "steps" / "action").glob("c.*")).unlink()

    result = CliRunner().invoke(main, ["verify", str(path)])

    assert result.exit_code == 1
    assert "is missing, but the commit counts rows in it\n" in result.stdout
    assert "run expstore verify" not in result.stdout


@pytest.mark.parametrize("command", [["repair"], ["verify", "--repair"]])
def test_a_repair_says_what_it_did_and_its_exit_code_is_3(path: Path, command: list[str]) -> None:
    flip(path, 0)

    result = CliRunner().invoke(main, [command[0], str(path), *command[1:]])

    assert (result.exit_code, result.stderr) == (3, "")
    assert result.stdout.splitlines() == [
        "field 'action' of episode 0 fails its checksum",
        "lost: episode 0, 3 steps from 0",
        "repaired: 1 episode of commit 2, 1 episode lost, what was taken out is in "
        f"{path}/__expstore/quarantine/2",
    ]
    again = CliRunner().invoke(main, [command[0], str(path), *command[1:]])
    assert again.exit_code == 0
    assert again.stdout == "sound: 1 episode of commit 2, nothing to repair\n"


def test_a_repair_as_json(path: Path) -> None:
    (path / "steps" / "zarr.json").unlink()

    result = CliRunner().invoke(main, ["repair", str(path), "--json"])

    found = json.loads(result.stdout)
    assert (result.exit_code, found["was_sound"], found["lost"]) == (3, False, [])
    assert found["mended"] == ["steps/zarr.json"]


def test_what_cannot_be_repaired_is_an_error_in_one_line(path: Path) -> None:
    (path / "zarr.json").write_text("{}")
    (path / "__expstore" / "root").unlink()

    result = CliRunner().invoke(main, ["repair", str(path)])

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1


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
