"""Saved priorities that are known by a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from expstore.storage.commits import read_root
from expstore.storage.layout import PRIORITIES
from expstore.storage.priorities import load_state, save_state

NUM_ROWS = 3000


def save(path: Path, number: int) -> None:
    """Save the state of this number beside the store."""
    save_state(path / PRIORITIES / "run", _state(number), (read_root(path).store_id,))


def saved_number(path: Path) -> int | None:
    """The number of the saved state, all of which must be as it was; None where none was."""
    state = load_state(path / PRIORITIES / "run")
    if state is None:
        return None
    np.testing.assert_array_equal(state["raw"], _state(state["number"])["raw"])
    return int(state["number"])


def _state(number: int) -> dict[str, Any]:
    return {"number": number, "raw": np.random.default_rng(number).random(NUM_ROWS)}
