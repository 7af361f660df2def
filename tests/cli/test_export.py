"""expstore export."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import expstore
from expstore.exporting import FORMATS
from expstore_cli import export
from expstore_cli.main import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with expstore.Writer(tmp_path / "a.exp") as writer:
        for number in range(3):
            rows = {"observation": np.zeros((4, 2)), "reward": np.full(3, float(number))}
            writer.append(rows, policy="sac", tags=[1])
    return tmp_path / "a.exp"


def test_losses_are_one_line_and_exit_code_1(path: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["export", str(path), str(tmp_path / "o"), "--format", "npz"])

    assert run.exit_code == 1
    assert run.stderr.startswith("error: npz cannot express all of the store, and would lose: ")
    assert "metadata 'tags' of 3 episodes; give --lossy" in run.stderr
    assert not (tmp_path / "o").exists()


def test_it_writes_what_was_asked_for(path: Path, tmp_path: Path) -> None:
    asked = ["export", str(path), str(tmp_path / "o"), "--format", "npz", "--lossy"]

    run = CliRunner().invoke(main, [*asked, "--where", "return >= 3", "--json"])

    assert run.exit_code == 0
    assert json.loads(run.stdout) == {
        "path": str(tmp_path / "o"),
        "format": "npz",
        "num_episodes": 2,
        "num_steps": 6,
        "losses": ["metadata 'tags' of 2 episodes"],
    }


def test_what_was_left_out_is_told(path: Path, tmp_path: Path) -> None:
    asked = ["export", str(path), str(tmp_path / "o"), "--format", "npz", "--lossy"]

    run = CliRunner().invoke(main, asked)

    assert run.stdout == f"wrote {tmp_path / 'o'}: 3 episodes, 9 steps\n"
    assert run.stderr == "left out: metadata 'tags' of 3 episodes\n"


def test_the_command_knows_every_format() -> None:
    assert list(export.FORMATS) == sorted(FORMATS)
