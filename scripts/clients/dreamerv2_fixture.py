"""Write tests/formats/data/dreamerv2 with Dreamer V2's own replay, in an environment of its own.

It runs by hand, and the files are checked in:

    python -m venv /tmp/dreamer && /tmp/dreamer/bin/pip install tensorflow-cpu
    /tmp/dreamer/bin/pip install --no-deps 'dreamerv2==2.2.0'
    /tmp/dreamer/bin/python scripts/clients/dreamerv2_fixture.py

Only `common/replay.py` is loaded, without the package around it, which needs an old TensorFlow.
The packages of Dreamer V3 and `embodied` cannot be installed (their sources lack a file of
requirements), V1 and DrQ-v2 are no packages: the tests write their layouts with numpy.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[2] / "tests" / "formats" / "data" / "dreamerv2"


def load_replay() -> Any:
    """The module with the class that writes episodes."""
    package = importlib.util.find_spec("dreamerv2")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "common" / "replay.py"
    spec = importlib.util.spec_from_file_location("replay", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Two episodes, a row at a time, as Dreamer's driver gives them; and the rows beside them."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    replay = load_replay().Replay(FOLDER)
    rng = np.random.default_rng(0)
    given: dict[str, list[Any]] = {}
    for num_steps, is_terminal in ((3, True), (4, False)):
        for t in range(num_steps + 1):
            is_last = t == num_steps
            row = {
                "image": rng.integers(0, 256, (4, 4, 3)).astype(np.uint8),
                "action": np.zeros(2, np.float32) if t == 0 else rng.normal(size=2),
                "reward": 0.0 if t == 0 else float(rng.normal()),
                "is_first": t == 0,
                "is_last": is_last,
                "is_terminal": is_last and is_terminal,
                "discount": 1.0 - (is_last and is_terminal),
            }
            replay.add_step(row)
            for name, value in row.items():
                given.setdefault(name, []).append(value)
    arrays = {name: np.array(values) for name, values in given.items()}
    np.savez_compressed(FOLDER.with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    sys.exit(main())
