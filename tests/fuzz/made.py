"""Sound stores and sets of priorities, small but with every kind of file in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import expstore
from expstore.storage.priorities import save_state
from tests.storage.made import writer

SCHEMA = expstore.Schema(
    {
        "observation/frame": expstore.Field((8, 8), "uint8"),
        "observation/state": expstore.Field((3,), "float32"),
        "action": expstore.Field((2,), "float32"),
        "note": expstore.Field((), "text"),
        "points": expstore.Field((2,), "float32", ragged=True),
        "reward": expstore.Field((), "float64"),
        "terminated": expstore.Field((), "bool"),
    }
)
LENGTHS = (3, 1, 5, 2, 4, 1)


def episode(number: int) -> dict[str, Any]:
    rng, n = np.random.default_rng(number), LENGTHS[number % len(LENGTHS)]
    return {
        "observation": {
            "frame": rng.integers(0, 4, (n + 1, 8, 8), np.uint8),
            "state": rng.normal(size=(n + 1, 3)).astype(np.float32),
        },
        "action": rng.normal(size=(n, 2)).astype(np.float32),
        "note": [f"note {number}/{step}" * (step % 2) for step in range(n)],
        "points": [rng.normal(size=(step % 3, 2)).astype(np.float32) for step in range(n)],
        "reward": rng.normal(size=n),
        "terminated": np.arange(n) == n - 1,
    }


def make_store(path: Path, **settings: Any) -> Path:
    """Two commits of episodes, one of a deletion; mapped, coded and ragged columns; priorities."""
    options = {"schema": SCHEMA, "layout": {"observation/frame": "coded"}, "chunk_steps": 16}
    with writer(path, **{**options, **settings}) as out:
        for number in range(6):
            out.append(episode(number), seed=number, policy=f"p{number}", tags=[1, {"a": None}])
            if number == 2:
                out.commit()
    expstore.delete(path, [4], durable=False)
    make_priorities(path / "priorities" / "per", [expstore.open(path).identities()[0]["store_id"]])
    return path


def make_priorities(path: Path, store_ids: list[str]) -> Path:
    streams = [{"raw": np.ones(5, np.float32), "runs": np.array([[0, 5]]), "first_slot": 0}]
    state = {"seed": 7, "sampler": {"kind": "prioritized", "streams": streams, "alpha": 0.6}}
    save_state(path, state, store_ids)
    return path
