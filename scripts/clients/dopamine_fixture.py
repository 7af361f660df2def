"""Write tests/formats/data/dopamine with Dopamine itself, in an environment of its own.

It runs by hand, and the files are checked in:

    python -m venv /tmp/dopamine && /tmp/dopamine/bin/pip install tensorflow-cpu gin-config
    /tmp/dopamine/bin/pip install --no-deps 'dopamine-rl==4.1.2'
    /tmp/dopamine/bin/python scripts/clients/dopamine_fixture.py

The files of the DQN Replay data set were written by an older release, which had no
`episode_end_indices`; the tests leave that file out.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from dopamine.tf.replay_memory.circular_replay_buffer import OutOfGraphReplayBuffer

FOLDER = Path(__file__).parents[2] / "tests" / "formats" / "data" / "dopamine"
CAPACITY, STACK = 30, 4
LENGTHS = (8, 9, 7, 8)  # of the episodes; the second is timed out, the last not finished
SAVED_AFTER = (20, 32)  # steps: checkpoints of the same ring, which overlap


def main() -> None:
    """Frame t of the recording has t + 1 everywhere; the second checkpoint's ring wraps."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    buffer = OutOfGraphReplayBuffer((3, 3), STACK, CAPACITY, batch_size=2)
    t = 0
    for number, length in enumerate(LENGTHS):
        for step in range(length):
            is_last = step == length - 1 and number != 3
            buffer.add(
                np.full((3, 3), t + 1, np.uint8),
                1 + t % 4,
                t / 8,
                int(is_last and number != 1),
                episode_end=is_last,
            )
            t += 1
            if t in SAVED_AFTER:
                buffer.save(str(FOLDER), SAVED_AFTER.index(t))


if __name__ == "__main__":
    main()
