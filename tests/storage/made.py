"""Episodes to append, and how tests compare what comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import expstore
from expstore.storage import files

needs_map_fixed = pytest.mark.skipif(
    not files.can_map_in_place(), reason="files cannot be mapped in place: see EXPSTORE_WITHOUT"
)


def episode(num_steps: int, seed: int = 0, *, end: str | None = "terminated") -> dict[str, Any]:
    """Random rows of the usual fields; `end` is the flag that is true at the last step."""
    rng = np.random.default_rng([seed, num_steps])
    flags = {flag: np.zeros(num_steps, bool) for flag in ("terminated", "truncated")}
    if end is not None:
        flags[end][-1] = True
    return {
        "observation": rng.normal(size=(num_steps + 1, 3)).astype(np.float32),
        "action": rng.normal(size=(num_steps, 2)).astype(np.float32),
        "reward": rng.normal(size=num_steps),
        **flags,
    }


def steps_of(data: Mapping[str, Any], num_steps: int) -> list[dict[str, Any]]:
    """An episode as one mapping per step, for `EpisodeStream.add`; without its final row."""
    return [_at(data, step) for step in range(num_steps)]


def _at(data: Mapping[str, Any], step: int) -> dict[str, Any]:
    return {
        name: _at(value, step) if isinstance(value, Mapping) else value[step]
        for name, value in data.items()
    }


def assert_same(got: Any, expected: Any, what: str = "") -> None:
    """Nested mappings of arrays, equal in names, shapes, dtypes and every byte."""
    if isinstance(expected, Mapping):
        assert isinstance(got, Mapping), what
        assert sorted(got) == sorted(expected), what
        for name in expected:
            assert_same(got[name], expected[name], f"{what}/{name}")
        return
    expected = np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype.newbyteorder("<"), expected.shape), what
    assert got.tobytes() == little_endian(expected).tobytes(), what


def little_endian(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(array.dtype.newbyteorder("<"))


def digest(path: Path) -> dict[str, str]:
    """Every file below a directory with a hash of its bytes, every directory with none."""
    return {
        str(entry.relative_to(path)): (
            hashlib.sha256(entry.read_bytes()).hexdigest() if entry.is_file() else ""
        )
        for entry in sorted(path.rglob("*"))
    }


def writer(path: Path, **settings: Any) -> expstore.Writer:
    """A writer that does not wait for the disk; what kills do is tested elsewhere."""
    return expstore.Writer(path, **{"durable": False, **settings})


def store(path: Path, *episodes: Mapping[str, Any], **settings: Any) -> expstore.Store:
    """A store of the given episodes, in one commit."""
    with writer(path, **settings) as opened:
        for data in episodes:
            opened.append(data)
    return expstore.open(path)
