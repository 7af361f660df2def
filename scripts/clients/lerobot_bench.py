"""LeRobot as a contestant of `scripts/bench`, in an environment of its own.

LeRobot pins a torch that is not ours. The benchmark starts this file with the Python that
EXPSTORE_BENCH_LEROBOT names and asks it for batches over its standard input:

    python -m venv /tmp/lerobot && /tmp/lerobot/bin/pip install lerobot==0.4.4
    EXPSTORE_BENCH_LEROBOT=/tmp/lerobot/bin/python scripts/bench --only lerobot
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from torch.utils.data import default_collate

FPS = 10
THEIRS = {"observation": "observation.state", "action": "action", "reward": "next.reward"}


def main(folder: Path) -> None:
    """Answer each line: `read FILE ANCHOR...` and `sample ANCHOR...`."""
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    given = np.load(folder / "columns.npz")
    size = json.loads((folder / "size.json").read_text())
    root = folder / "dataset"
    write(given, size["episode_steps"], root)
    times = [step / FPS for step in range(size["length"])]
    dataset = LeRobotDataset(
        "bench/vectors", root=root, delta_timestamps=dict.fromkeys(THEIRS.values(), times)
    )
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        file = words.pop(0) if command == "read" else None
        batch = default_collate([dataset[int(word)] for word in words])
        if file:
            np.savez(file, **{ours: batch[name].numpy() for ours, name in THEIRS.items()})
        print("done", file=answers, flush=True)


def write(given: dict[str, np.ndarray], episode_steps: int, root: Path) -> None:
    """The rows as a data set of version 3, frame by frame as its recorder does."""
    shapes = {name: given[name].reshape(len(given[name]), -1).shape[1:] for name in THEIRS}
    features = {
        THEIRS[name]: {
            "dtype": "float32",
            "shape": shape,
            "names": [f"{number}" for number in range(shape[0])],
        }
        for name, shape in shapes.items()
    }
    dataset = LeRobotDataset.create("bench/vectors", fps=FPS, features=features, root=root)
    for row in range(len(given["reward"])):
        frame = {THEIRS[name]: given[name][row].reshape(shape) for name, shape in shapes.items()}
        dataset.add_frame({**frame, "task": "run"})
        if (row + 1) % episode_steps == 0:
            dataset.save_episode()
    dataset.finalize()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
