"""A recording that is interrupted or killed, and resumed, in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import expstore

pytest.importorskip("gymnasium")

# Test runners may ignore Ctrl-C, which a child inherits; a terminal never does.
COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from expstore_cli.main import main; main(prog_name='expstore')"
)
# Ends its own process in the middle of an episode, once.
POLICY = """
import os
import signal

calls = 0


def act(observation):
    global calls
    calls += 1
    if calls == int(os.environ.get("AT_CALL", -1)):
        os.kill(os.getpid(), getattr(signal, os.environ["BY"]))
    return int(observation[2] > 0)
"""
RECORDING = ("gym:CartPole-v1", "--episodes", "8", "--policy", "policy_for_interrupts:act")


def ingest(
    folder: Path, store: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "policy_for_interrupts.py").write_text(POLICY)
    source, *rest = RECORDING
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "ingest", source, store, *rest, *options],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def data(store: Path) -> dict[str, bytes]:
    """Every chunk file of a store."""
    return {
        str(file.relative_to(store)): file.read_bytes()
        for file in sorted(store.rglob("c.*"))
        if file.is_file()
    }


@pytest.mark.parametrize(("by", "exit_code"), [("SIGINT", 130), ("SIGKILL", -9)])
def test_a_resumed_recording_is_that_which_was_never_interrupted(
    tmp_path: Path, by: str, exit_code: int
) -> None:
    whole = ingest(tmp_path, "whole.exp")

    first = ingest(tmp_path, "parts.exp", AT_CALL="170", BY=by)
    kept = expstore.open(tmp_path / "parts.exp").num_episodes
    second = ingest(tmp_path, "parts.exp", "--resume")

    assert (whole.returncode, first.returncode, second.returncode) == (0, exit_code, 0)
    if by == "SIGINT":
        assert 0 < kept < 8
        assert first.stderr == f"interrupted: {kept} whole episodes kept; continue with --resume\n"
        assert f"{kept} episodes, " in first.stdout
    assert expstore.verify(tmp_path / "parts.exp").is_sound
    assert data(tmp_path / "parts.exp") == data(tmp_path / "whole.exp")


def test_after_ctrl_c_json_says_so(tmp_path: Path) -> None:
    import json

    result = ingest(tmp_path, "a.exp", "--json", AT_CALL="170", BY="SIGINT")

    report = json.loads(result.stdout)
    assert result.returncode == 130
    assert report["is_interrupted"] is True
    assert report["num_episodes"] == expstore.open(tmp_path / "a.exp").num_episodes


def test_ctrl_c_from_outside_at_any_moment_keeps_whole_episodes(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "ingest", "gym:CartPole-v1", "a.exp", "--steps", "9999999"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for_episodes(tmp_path / "a.exp", process)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 130
    kept = expstore.open(tmp_path / "a.exp").num_episodes
    assert kept > 0
    plural = "" if kept == 1 else "s"
    assert errors == f"interrupted: {kept:,} whole episode{plural} kept; continue with --resume\n"
    assert f"{kept:,} episode{plural}, " in output
    assert expstore.verify(tmp_path / "a.exp").is_sound


def _wait_for_episodes(store: Path, process: subprocess.Popen[str]) -> None:
    """Until some episodes were appended, whether committed or not."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        noted = store / "__expstore" / "writing"
        if noted.exists() and '"episodes":0' not in noted.read_text() and noted.stat().st_size:
            return
        time.sleep(0.02)
    pytest.fail(f"no episode came: {process.communicate()}")
