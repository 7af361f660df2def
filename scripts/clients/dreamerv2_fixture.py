"""Write tests/formats/data/dreamerv2 with Dreamer V2's own replay, in an environment of its own.

It runs by hand, and the files are checked in:

    python -m venv /tmp/dreamer && /tmp/dreamer/bin/pip install tensorflow-cpu
    /tmp/dreamer/bin/pip install --no-deps 'dreamerv2==2.2.0'
    /tmp/dreamer/bin/python scripts/clients/dreamerv2_fixture.py

Only `common/driver.py` and `common/replay.py` are loaded, without the package around them, which
needs an old TensorFlow.
Dreamer V3 has a script of its own; V1 and DrQ-v2 are no packages: the tests write their layouts
with numpy.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[2] / "tests" / "formats" / "data" / "dreamerv2"


LENGTHS = (3, 4)  # of the episodes; only the first one terminates


class Arm:
    """An environment as Dreamer V2 knows them, which remembers what it gave."""

    def __init__(self) -> None:
        self.act_space = {"action": np.zeros(2)}
        self.given: list[dict[str, Any]] = []
        self._rng = np.random.default_rng(0)
        self._episode, self._step = -1, 0

    def reset(self) -> dict[str, Any]:
        self._episode, self._step = self._episode + 1, 0
        return self._row(np.zeros(2), 0.0)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        self._step += 1
        return self._row(action["action"], float(self._rng.normal()))

    def _row(self, action: Any, reward: float) -> dict[str, Any]:
        is_last = self._step == LENGTHS[self._episode]
        row = {
            "image": self._rng.integers(0, 256, (4, 4, 3)).astype(np.uint8),
            "reward": reward,
            "is_first": self._step == 0,
            "is_last": is_last,
            "is_terminal": is_last and self._episode == 0,
        }
        self.given.append({**row, "action": action})
        return row


def load(name: str) -> Any:
    """A module of Dreamer V2 without its package."""
    package = importlib.util.find_spec("dreamerv2")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "common" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Two episodes, driven and saved by Dreamer; and beside them what the environment gave."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    replay = load("replay").Replay(FOLDER)
    arm, rng = Arm(), np.random.default_rng(1)
    driver = load("driver").Driver([arm])
    driver.on_step(replay.add_step)
    driver.on_reset(replay.add_step)
    driver(lambda obs, state: ({"action": rng.normal(size=(1, 2))}, state), episodes=2)
    arrays = {name: np.array([row[name] for row in arm.given]) for name in arm.given[0]}
    np.savez_compressed(FOLDER.with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    main()
