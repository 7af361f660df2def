"""The benchmarks run, and every contestant returns the same bytes before any is timed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
MISSING = [n for n in ("torch", "torchrl", "minari") if importlib.util.find_spec(n) is None]
needs_peers = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
NAMES = [
    "windows-vectors",
    "windows-frames",
    "windows-atari",
    "append-atari",
    "memory",
    "open",
    "append",
    "expand",
]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@needs_peers
@pytest.mark.slow
def test_every_workload_runs_on_tiny_data_and_writes_json(tmp_path):
    out = tmp_path / "bench.json"

    run = bench("--tiny", "--folder", str(tmp_path), "--out", str(out))

    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    found = json.loads(out.read_text())
    assert found["scale"] == "tiny"
    assert found["machine"]["packages"]["torchrl"]
    assert [workload["workload"] for workload in found["workloads"]] == NAMES
    for workload in found["workloads"]:
        assert workload["figures"]
        assert all(figure["median"] > 0 for figure in workload["figures"])
        assert {type(goal["is_reached"]) for goal in workload["goals"]} == {bool}
        assert f"| {workload['workload']} " in run.stderr
    assert list(tmp_path.iterdir()) == [out]


@needs_peers
def test_only_runs_what_is_named_and_stdout_is_json():
    run = bench("--tiny", "--only", "append")

    assert run.returncode == 0, run.stderr
    assert [w["workload"] for w in json.loads(run.stdout)["workloads"]] == ["append"]


def test_an_unknown_workload_is_refused_with_the_known_ones():
    run = bench("--only", "speed")

    assert run.returncode == 2
    assert "windows-vectors" in run.stderr


@needs_peers
def test_a_contestant_that_returns_other_bytes_is_found():
    from benchmarks.experience import vectors
    from benchmarks.peers.arrays import Plain
    from benchmarks.readers import check_same_bytes
    from benchmarks.results import Mismatch

    experience = vectors(200, 50)
    columns = {name: rows.copy() for name, rows in experience.columns.items()}
    check_same_bytes({"right": Plain(experience, columns, 4, 10)}, experience, 4, 10)
    columns["action"] = np.roll(columns["action"], 1, axis=0)

    with pytest.raises(Mismatch, match="wrong does not return the bytes of field 'action'"):
        check_same_bytes({"wrong": Plain(experience, columns, 4, 10)}, experience, 4, 10)
