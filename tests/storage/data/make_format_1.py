"""Made `format-1.tar.gz`, a store of format 1 that every later version must open.

It is not run again: what a writer makes today may differ in a byte. A new format gets a script
and a store of its own.

    python tests/storage/data/make_format_1.py TARGET.tar.gz
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import expstore
from expstore import Field, Schema

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SCHEMA = Schema(
    {
        "observation/state": Field((3,), "float32"),
        "observation/frame": Field((4, 4), "uint8"),
        "observation/points": Field((2,), "float16", ragged=True),
        "observation/deep/er": Field((), "bfloat16"),
        "action": Field((2,), "float64"),
        "reward": Field((), "float64", has_next=True),
        "terminated": Field((), "bool"),
        "truncated": Field((), "bool"),
        "note": Field((), "text"),
        **{f"kinds/{dtype}": Field((), dtype) for dtype in DTYPES},
    }
)
LENGTHS = (3, 1, 5, 2, 4, 6, 2)
CAPACITY = 16  # steps: the first episodes are evicted


def episode(number: int) -> dict[str, Any]:
    """Values that follow from the number of the episode and of the step; bfloat16 as its bits."""
    n = LENGTHS[number]
    t = np.arange(n + 1) + 10 * number
    bits = ((t.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16)
    ends = np.arange(n) == n - 1
    return {
        "observation": {
            "state": (t[:, None] + np.array([0, 0.25, -0.5])).astype(np.float32),
            "frame": np.broadcast_to(t[:, None, None] % 256, (n + 1, 4, 4)).astype(np.uint8),
            "points": [np.full((k % 3, 2), k, np.float16) for k in t.tolist()],
            "deep": {"er": bits},
        },
        "action": np.stack([t[:-1], -t[:-1]], 1) / 4,
        "reward": t[:-1] / 8,
        "terminated": ends & (number % 3 == 0),
        "truncated": ends & (number % 3 == 1),
        "note": [f"step {k} é" * (k % 2) for k in t[:-1].tolist()],
        "kinds": {dtype: (t[:-1] % 100).astype(dtype) for dtype in DTYPES},
    }


def make(path: Path) -> None:
    import torch

    layout = {"observation/frame": "coded"}
    settings: dict[str, Any] = {"schema": SCHEMA, "layout": layout, "chunk_steps": 1}
    with expstore.Writer(path, capacity_steps=CAPACITY, **settings) as writer:
        for number in range(len(LENGTHS)):
            data = episode(number)
            bits = data["observation"]["deep"]["er"]
            data["observation"]["deep"]["er"] = torch.from_numpy(bits).view(torch.bfloat16)
            if number == 5:  # a gap in the middle, and a next value that no observation has
                following = np.append(data["reward"][1:], 99.0)
                following[2] = -1.0
                data["next_reward"] = following
            metadata = {"policy": f"p{number}", "tags": [number, None, "é"]} if number % 2 else {}
            writer.append(data, seed=number if number % 2 else None, **metadata)
            writer.commit()
    store = expstore.open(path)
    sampler = expstore.Prioritized(alpha=0.5, beta=0.25)
    replay = expstore.Replay(store, batch_size=4, sampler=sampler, seed=3)
    batch = replay.sample()
    replay.update_priority(batch, np.arange(4) + 1.0)
    replay.save_priorities("per")
    expstore.delete(path, [4])


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        make(Path(directory) / "format-1.exp")
        with tarfile.open(target, "w:gz") as archive:
            archive.add(Path(directory) / "format-1.exp", "format-1.exp")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
