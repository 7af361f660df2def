"""States like those of samplers, for processes that save them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from expstore.storage.priorities import save_state
from tests.torture.faults import interposed, killed

IDS = ["ab" * 16]  # of the stores they belong to


def state_of(number: int, num_steps: int = 1500) -> dict[str, Any]:
    """A state like a sampler's, in which every value says which one it is."""
    return {
        "version": 1,
        "seed": 2**70 + number,
        "unit": "Step()",
        "beta": None,
        "largest": 0.1 + number,
        "ahead": [{"steps": [number], "weight": [0.5]}],
        "sampler": {
            "parts": [
                {"kind": "uniform", "next_draw": number},
                {
                    "seen": np.array([[0, num_steps]]),
                    "streams": [
                        {
                            "raw": np.full(num_steps, number, np.float32),
                            "runs": np.empty((0, 2), np.int64),
                        }
                    ],
                },
            ]
        },
    }


def main(path: str, task: str, first: int, count: int) -> None:
    """Save `count` states, or be killed by `kill -9` half way through operation `count`."""
    if task == "killed":
        with interposed(killed(count, "half")):
            save_state(Path(path), state_of(first), IDS)
    for number in range(first, first + count):
        save_state(Path(path), state_of(number), IDS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
