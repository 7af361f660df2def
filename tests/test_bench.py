"""The benchmarks run, and every contestant returns the same bytes before any is timed.

Workloads that start processes or emulate Atari for seconds are left to `scripts/bench --tiny`.
"""

import gc
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PEERS = ("torch", "torchrl", "minari", "h5py", "cpprb", "tensorstore", "zarr")
MISSING = [name for name in PEERS if importlib.util.find_spec(name) is None]
needs_peers = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
FEW = frozenset({"numpy", "h5py", "cpprb"})
ALL = None


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    """Workloads set the threads of torch and zarr for their own process."""
    torch, zarr = pytest.importorskip("torch"), pytest.importorskip("zarr")
    threads, names = torch.get_num_threads(), ("threading.max_workers", "async.concurrency")
    config = {name: zarr.config.get(name) for name in names}
    gc.freeze()  # every round collects: what the libraries hold would be looked at each time
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    zarr.config.set(config)


@needs_peers
@pytest.mark.parametrize(
    ("name", "peers"),
    [
        ("windows-vectors", ALL),
        ("windows-frames", FEW),
        ("steps", ALL),
        ("prioritized", FEW),
        ("growth", FEW),
        ("append", FEW),
        ("append-large", FEW),
        ("step-by-step", FEW),
        ("d4rl", FEW),
    ],
)
def test_a_workload_runs_on_tiny_data(name, peers, tmp_path):
    from benchmarks.run import Run
    from benchmarks.workloads import workload

    result = workload(name)(tmp_path, Run("tiny", peers))

    assert result.workload == name
    assert all(figure.median > 0 for figure in result.figures)
    document = json.loads(json.dumps(result.document()))
    assert len(document["figures"]) >= 2
    assert {type(goal["is_reached"]) for goal in document["goals"]} <= {bool}


@needs_peers
def test_every_workload_has_a_function():
    from benchmarks.workloads import WORKLOADS, workload

    assert all(callable(workload(name)) for name in WORKLOADS)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@needs_peers
def test_only_runs_what_is_named_and_stdout_is_json(tmp_path):
    run = bench("--tiny", "--only", "append", "--peer", "numpy", "--folder", str(tmp_path))

    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [w["workload"] for w in found["workloads"]] == ["append"]
    assert found["machine"]["packages"]["torchrl"]
    assert not any("Minari" in f["contestant"] for f in found["workloads"][0]["figures"])
    assert "| append " in run.stderr
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc")
def test_a_forgotten_file_is_read_from_the_disk_again(tmp_path):
    from benchmarks.disk import forget, read_bytes

    data = np.arange(1 << 20, dtype=np.uint8)
    data.tofile(tmp_path / "data")
    mapped = np.memmap(tmp_path / "data", np.uint8, "r")
    assert mapped[::4096].sum() >= 0
    forget(tmp_path)
    before = read_bytes()

    assert np.array_equal(mapped, data)

    fetched = read_bytes() - before
    if fetched == 0:
        pytest.skip("a file system in memory has no colder place")
    assert fetched >= len(data)


def test_a_plot_is_drawn_for_each_workload(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.plots import draw
    from benchmarks.results import Figure, Result

    figures = [Figure.of("expstore", [1.0, 2.0], "ms"), Figure.of("peer", [9.0, 90.0], "ms")]
    document = {"workloads": [Result("windows", "64 x 50", figures, []).document()]}

    (path,) = draw(document, tmp_path / "plots")

    assert path.name == "windows.svg"
    assert "peer" in path.read_text()
