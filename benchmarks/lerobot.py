"""Windows of vectors beside LeRobot v3, which runs in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.experience import Columns, Experience, vectors
from benchmarks.measure import timed_in_turns
from benchmarks.readers import Expstore
from benchmarks.results import Figure, Mismatch, Result
from benchmarks.run import LEROBOT_PYTHON, Run
from benchmarks.windows import Size

CLIENT = Path(__file__).parents[1] / "scripts" / "clients" / "lerobot_bench.py"
SIZES = {
    "full": Size(20_000, 1000, 64, 50, rounds=10, calls=1),
    "quick": Size(4_000, 1000, 64, 50, rounds=3, calls=1),
    "tiny": Size(400, 100, 4, 20, rounds=1, calls=1),
}
FIELDS = ("observation", "action", "reward")
EXPSTORE = "expstore Replay.sample"
LEROBOT = "LeRobot v3 data set with delta_timestamps, collated"


class LeRobot:
    """A process that holds the data set, and gives a batch for each line that it is sent."""

    def __init__(self, experience: Experience, folder: Path, length: int):
        folder.mkdir()
        self.folder = folder
        np.savez(folder / "columns.npz", **experience.columns)
        size = {"episode_steps": experience.episode_steps, "length": length}
        (folder / "size.json").write_text(json.dumps(size))
        self.process = subprocess.Popen(
            [os.environ[LEROBOT_PYTHON], str(CLIENT), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        self._await("ready")

    def ask(self, command: str, anchors: NDArray[np.int64]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {' '.join(map(str, anchors.tolist()))}\n")
        self.process.stdin.flush()
        self._await("done")

    def read(self, anchors: NDArray[np.int64]) -> Columns:
        file = self.folder / "found.npz"
        self.ask(f"read {file}", anchors)
        return dict(np.load(file))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _await(self, word: str) -> None:
        assert self.process.stdout is not None
        if (line := self.process.stdout.readline().strip()) != word:
            raise RuntimeError(f"{CLIENT} said {line!r} instead of {word!r}; see what it printed")


def run_lerobot(folder: Path, run: Run) -> Result:
    """Observation, action and reward; one thread each."""
    size = run.of(SIZES)
    about = (
        f"warm, one thread, {size.batch_size} windows x {size.length} steps of 17+6 float32 and "
        f"reward; {size.num_steps:,} steps in episodes of {size.episode_steps:,}"
    )
    if not run.wants("lerobot"):
        return Result("lerobot", about, [], [])
    given = vectors(size.num_steps, size.episode_steps)
    store = given.write(folder / "vectors.exp")
    experience = Experience({name: given.columns[name] for name in FIELDS}, size.episode_steps)
    ours = Expstore(store, *size.at, num_threads=1, fields=FIELDS)
    theirs = LeRobot(experience, folder / "lerobot", size.length)
    anchors = drawn(size)
    check_same_bytes(ours, theirs, next(anchors), experience, size.length)
    contestants = {
        EXPSTORE: ours.sample,
        LEROBOT: lambda: theirs.ask("sample", next(anchors)),
    }
    seconds = timed_in_turns(contestants, rounds=size.rounds)
    theirs.close()
    figures = [Figure.of(n, [s * 1e3 for s in values], "ms") for n, values in seconds.items()]
    return Result("lerobot", about, figures, [])


def drawn(size: Size) -> Iterator[NDArray[np.int64]]:
    rng = np.random.default_rng(1)
    while True:
        yield rng.integers(0, size.num_steps, size.batch_size)


def check_same_bytes(
    ours: Expstore,
    theirs: LeRobot,
    anchors: NDArray[np.int64],
    experience: Experience,
    length: int,
) -> None:
    """Both read the same windows; LeRobot, too, repeats the last step of an episode.

    Raises:
        Mismatch: names the contestant and the field.
    """
    rows = experience.rows(anchors, length).reshape(-1)
    batches = {EXPSTORE: ours.columns(ours.read(anchors)), LEROBOT: theirs.read(anchors)}
    for name, found in batches.items():
        for field, column in experience.columns.items():
            if found[field].tobytes() != column[rows].tobytes():
                raise Mismatch(f"{name} does not return the bytes of field {field!r}")
