"""The demo runs, learns, and runs again on the store that it made."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import expstore

DEMO = Path(__file__).parents[1] / "scripts/demo.py"


def run_demo(folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(DEMO), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def error_of(output: str, predictor: str) -> float:
    (found,) = re.findall(rf"^  {re.escape(predictor)} +([\d.]+)", output, re.MULTILINE)
    return float(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_learns_and_runs_again_on_the_same_store(tmp_path: Path) -> None:
    for extra in ("torch", "gymnasium", "mujoco", "ale_py"):
        pytest.importorskip(extra)

    output = run_demo(tmp_path, "made here", "--quick")
    again = run_demo(tmp_path, "made here", "--quick")

    path = tmp_path / "made here/cheetah.exp"
    assert expstore.open(path).num_episodes == 6
    assert str(path) in output
    for text in (output, again):
        after = error_of(text, "after training")
        assert after < 0.5 * error_of(text, "before training")
        assert after < 0.5 * error_of(text, "next = current")
        assert error_of(text, "frames, trained") < 0.7 * error_of(text, "frames, before")
    assert expstore.verify(path).is_sound
    frames = tmp_path / "made here/pong.exp"
    assert expstore.open(frames).fields["observation"].layout == "coded"
    assert expstore.verify(frames).is_sound


def test_an_option_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    command = [sys.executable, str(DEMO), "--quik"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []
