"""Write tests/formats/data/tianshou with Tianshou itself, in an environment of its own.

It runs by hand, and the files are checked in:

    python -m venv /tmp/tianshou && /tmp/tianshou/bin/pip install 'tianshou==2.0.1'
    /tmp/tianshou/bin/python scripts/clients/tianshou_fixture.py
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from tianshou.data import Batch, ReplayBuffer, VectorReplayBuffer

FOLDER = Path(__file__).parents[2] / "tests" / "formats" / "data" / "tianshou"
CAPACITY, NUM_ROWS = 6, 9
ENDS = {0: {2: "t", 6: "l"}, 1: {4: "b"}}  # environment -> row -> terminated, truncated, both


def row(environment: int, t: int) -> Batch:
    """Row t of an environment: every value tells both."""
    value = 100 * environment + t
    end = ENDS[environment].get(t, "")
    return Batch(
        obs=Batch(state=np.full(3, value, np.float32), pixels=np.full((2, 2), t, np.uint8)),
        act=np.full(2, value / 8, np.float32),
        rew=float(value),
        terminated=end in ("t", "b"),
        truncated=end in ("l", "b"),
        obs_next=Batch(
            state=np.full(3, value + 0.5, np.float32), pixels=np.full((2, 2), t + 1, np.uint8)
        ),
        info=Batch(lives=t % 3),
    )


def write(name: str, buffer: Any) -> None:
    buffer.save_hdf5(str(FOLDER / f"{name}.hdf5"))
    (FOLDER / f"{name}.pkl").write_bytes(pickle.dumps(buffer))


def main() -> None:
    """Two environments in one buffer, whose rings wrap; and one that is not full."""
    FOLDER.mkdir(exist_ok=True)
    vector = VectorReplayBuffer(2 * CAPACITY, buffer_num=2)
    for t in range(NUM_ROWS):
        vector.add(Batch.stack([row(0, t), row(1, t)]), buffer_ids=[0, 1])
    write("vector", vector)
    single = ReplayBuffer(12, ignore_obs_next=True)
    for t in range(5):
        single.add(row(0, t))
    write("single", single)


if __name__ == "__main__":
    main()
