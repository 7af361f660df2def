"""Write tests/formats/data/lerobot-v2 or -v3 with LeRobot itself, in an environment of its own.

LeRobot pins a torch that is not ours, so this runs by hand, and the files are checked in. Version
0.3.3 writes data sets of version 2.1, and 0.4.4 those of 3.0:

    python -m venv /tmp/lerobot && /tmp/lerobot/bin/pip install lerobot==0.4.4 "numpy<2.3"
    /tmp/lerobot/bin/python scripts/clients/lerobot_fixture.py

Its OpenCV asks for numpy below 2.3, which is older than ours.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import CODEBASE_VERSION, LeRobotDataset

IS_V3 = CODEBASE_VERSION.startswith("v3")
DATA = Path(__file__).parents[2] / "tests" / "formats" / "data"
FOLDER = DATA / ("lerobot-v3" if IS_V3 else "lerobot-v2")
LENGTHS = (4, 3, 5)
TASKS = ("pick the cube", "größer stapeln")
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["a", "b"]},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "observation.images.wrist": {
        "dtype": "image",
        "shape": (6, 8, 3),
        "names": ["height", "width", "channel"],
    },
    "observation.images.top": {
        "dtype": "video",
        "shape": (64, 64, 3),
        "names": ["height", "width", "channel"],
    },
}


def main() -> None:
    """Write the data set, and beside it what was given to it, frame by frame."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    dataset = LeRobotDataset.create("test/pick", fps=10, features=FEATURES, root=FOLDER)
    rng = np.random.default_rng(0)
    given: dict[str, list[np.ndarray]] = {name: [] for name in FEATURES}
    for episode, length in enumerate(LENGTHS):
        for step in range(length):
            shade = 20 * (sum(LENGTHS[:episode]) + step) + 5
            frame = {
                "observation.state": rng.normal(size=3).astype(np.float32),
                "action": rng.normal(size=2).astype(np.float32),
                "next.reward": rng.normal(size=1).astype(np.float32),
                "next.done": np.array([step == length - 1]),
                "observation.images.wrist": rng.integers(0, 256, (6, 8, 3)).astype(np.uint8),
                "observation.images.top": np.full((64, 64, 3), shade, np.uint8),
            }
            task = TASKS[episode % 2]
            if IS_V3:
                dataset.add_frame({**frame, "task": task})
            else:
                dataset.add_frame(frame, task=task)
            for name, value in frame.items():
                given[name].append(value)
        dataset.save_episode()
    if IS_V3:
        dataset.finalize()
    shutil.rmtree(FOLDER / "images", ignore_errors=True)
    np.savez_compressed(FOLDER.with_suffix(".npz"), **{n: np.stack(v) for n, v in given.items()})


if __name__ == "__main__":
    main()
