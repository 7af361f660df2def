"""A store with everything in it that can be damaged, and single bits flipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from expstore.storage.reading import Snapshot
from tests.storage.made import episode, writer

NUM_EPISODES = 11


def image_episode(number: int) -> dict[str, object]:
    data = episode(1 + number % 4, number, end="terminated" if number % 2 else None)
    rng = np.random.default_rng(number)
    frames = rng.integers(0, 4, (len(data["observation"]), 8, 8), np.uint8)
    return {**data, "observation": {"image": frames, "state": data["observation"]}}


def store_to_damage(path: Path) -> Path:
    """Mapped and coded columns, several commits, metadata in some episodes, a gap in one."""
    with writer(path, layout={"observation/image": "coded"}, chunk_steps=16) as out:
        for number in range(NUM_EPISODES):
            data = image_episode(number)
            if number == 7:
                image = data["observation"]["image"]  # type: ignore[index]
                data["next_observation"] = {"image": image[1:].copy()}
                data["next_observation"]["image"][0] ^= 1  # type: ignore[index]
            out.append(data, seed=number, **({"policy": f"p{number}"} if number % 3 else {}))
            if number == 5:
                out.commit()
    return path


def flip(file: Path, offset: int, bit: int = 0) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        (value,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([value ^ 1 << bit]))


def committed(path: Path) -> dict[Path, int]:
    """Every chunk file, with how many of its bytes hold committed data."""
    root = Snapshot.of(path).root
    found = {}
    for layout in root.arrays.values():
        _, stop = root.commit.dims[layout.dimension]
        for chunk in range(-(-stop // layout.chunk_rows)):
            file = path / layout.chunk_path(chunk)
            rows = min(layout.chunk_rows, stop - chunk * layout.chunk_rows)
            found[file] = file.stat().st_size if layout.is_coded else rows * layout.row_bytes
    return found
