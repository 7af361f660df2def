"""Write tests/formats/data/d3rlpy.h5 with d3rlpy itself, in an environment of its own.

It runs by hand, and the files are checked in:

    python -m venv /tmp/d3rlpy && /tmp/d3rlpy/bin/pip install 'd3rlpy==2.8.1'
    /tmp/d3rlpy/bin/python scripts/clients/d3rlpy_fixture.py

Files of version 1 are not here: the releases of d3rlpy that wrote them need a Python and a torch
that are gone. The tests write them as d3rlpy 2.8.1 reads them (`d3rlpy.dataset.load_v1`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from d3rlpy.dataset import MDPDataset

FOLDER = Path(__file__).parents[2] / "tests" / "formats" / "data"


def main() -> None:
    """One episode that terminated and one that did not; d3rlpy drops the rows after them."""
    rng = np.random.default_rng(0)
    given = {
        "observations": rng.normal(size=(12, 3)).astype(np.float32),
        "actions": rng.normal(size=(12, 2)).astype(np.float32),
        "rewards": rng.normal(size=12).astype(np.float32),
    }
    terminals, timeouts = np.zeros(12), np.zeros(12)
    terminals[4] = timeouts[8] = 1
    dataset = MDPDataset(**given, terminals=terminals, timeouts=timeouts)
    with open(FOLDER / "d3rlpy.h5", "w+b") as file:
        dataset.dump(file)
    np.savez_compressed(FOLDER / "d3rlpy.npz", **given)
    pixels = rng.integers(0, 256, (4, 1, 4, 4), dtype=np.uint8)
    given = {name: values[:4] for name, values in given.items()}
    joined = MDPDataset(
        **{**given, "observations": (given["observations"], pixels)},
        terminals=np.array([0, 0, 0, 1]),
    )
    with open(FOLDER / "d3rlpy-tuple.h5", "w+b") as file:
        joined.dump(file)


if __name__ == "__main__":
    main()
