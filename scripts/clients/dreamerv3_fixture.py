"""Write tests/formats/data/dreamerv3 with the chunks of Dreamer V3, in an environment of its own.

It runs by hand, and the files are checked in:

    python -m venv /tmp/dreamer3 && /tmp/dreamer3/bin/pip install elements 'numpy<2'
    tar xzf embodied-1.2.0.tar.gz  # from PyPI; pip cannot install it, for a file is missing in it
    /tmp/dreamer3/bin/python scripts/clients/dreamerv3_fixture.py embodied-1.2.0

Only `embodied/replay/chunk.py` is loaded, which writes the files. A stream of rows as Dreamer's
driver gives them goes through three chunks of 8 rows.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[2] / "tests" / "formats" / "data" / "dreamerv3"
SIZE = 8
LENGTHS = (5, 9, 4)  # steps of the episodes; the second one terminates, the last one goes on


def load(source: Path) -> Any:
    spec = importlib.util.spec_from_file_location("chunk", source / "embodied/replay/chunk.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Chunk


def rows() -> list[dict[str, Any]]:
    """What an environment gives at each step, with the action that is chosen there."""
    rng, given = np.random.default_rng(0), []
    for number, length in enumerate(LENGTHS):
        for step in range(length + 1):
            is_last = step == length and number < len(LENGTHS) - 1
            given.append(
                {
                    "image": rng.integers(0, 256, (4, 4, 3)).astype(np.uint8),
                    "reward": np.float32(rng.normal() if step else 0),
                    "is_first": np.bool_(step == 0),
                    "is_last": np.bool_(is_last),
                    "is_terminal": np.bool_(is_last and number == 1),
                    "action": rng.normal(size=2).astype(np.float32),
                }
            )
    return given


def main(source: Path) -> None:
    Chunk, given = load(source), rows()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    chunks = [Chunk(SIZE) for _ in range(-(-len(given) // SIZE))]
    for at, row in enumerate(given):
        chunks[at // SIZE].append(row)
    for chunk, following in itertools.pairwise(chunks):
        chunk.succ = following.uuid
    for chunk in chunks:
        chunk.save(FOLDER)
    np.savez_compressed(
        FOLDER.with_suffix(".npz"), **{n: np.array([row[n] for row in given]) for n in given[0]}
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
