"""Stores whose every value says which step it belongs to."""

from pathlib import Path
from typing import Any

import numpy as np

import expstore


def episode(first: int, length: int) -> dict[str, Any]:
    """Steps `first`, `first + 1`, ...; the final observation is minus the step after."""
    steps = np.arange(first, first + length)
    final = -(first + length)
    return {
        "observation": {
            "state": np.append(steps, final)[:, None].astype(np.float32).repeat(3, axis=1),
            "image": np.append(steps, final).astype(np.uint8)[:, None, None].repeat(40, 1)
            .repeat(40, 2),
        },
        "action": steps.astype(np.int64),
        "reward": steps.astype(np.float64) / 2,
        "terminated": steps == first + length - 1,
    }  # fmt: skip


def fill(path: Path, lengths: list[int], **options: Any) -> expstore.Store:
    """Append episodes of the given lengths."""
    with expstore.Writer(path, **options) as writer:
        for length in lengths:
            writer.append(episode(writer.num_steps, length), tag=length)
    return expstore.open(path)
