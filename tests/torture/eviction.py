"""How far a capacity lets the oldest episodes leave, worked out from what is left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expstore.storage.commits import Root, read_root
from expstore.storage.layout import ArrayLayout
from tests.torture.check import Found
from tests.torture.episodes import LENGTHS, TEXT, Plan, expected_arrays, known_episode, live_ranges

BLOCK_BYTES = 4096  # files take whole blocks


@dataclass(frozen=True)
class Limits:
    """What a writer is told to hold at most."""

    capacity_steps: int | None = None
    capacity_bytes: int | None = None

    @staticmethod
    def random(rng: np.random.Generator, plan: Plan) -> Limits:
        """None, either or both; every episode alone is within them."""
        which = rng.choice(["none", "steps", "bytes", "both"], p=[0.4, 0.3, 0.2, 0.1])
        steps = int(rng.integers(max(LENGTHS), 3 * max(LENGTHS)))
        least = max(LENGTHS) * _most_step_bytes(plan)
        num_bytes = int(np.exp(rng.uniform(np.log(least), np.log(least + (2 << 20)))))
        return Limits(
            steps if which in ("steps", "both") else None,
            num_bytes if which in ("bytes", "both") else None,
        )

    def first_by_steps(self, seed: int, num_episodes: int) -> int:
        """The oldest episode that may stay, the newest one in any case."""
        first, num_steps = num_episodes, 0
        while first and self.capacity_steps is not None:
            num_steps += len(known_episode(seed, first - 1))
            if num_steps > self.capacity_steps and first < num_episodes:
                break
            first -= 1
        return first if self.capacity_steps is not None else 0


def check_eviction(
    path: Path, seed: int, limits: Limits, before: Found, found: Found, *, is_closed: bool
) -> int:
    """Whether exactly those episodes have left that had to, and at the end their files.

    Args:
        before: as of the end of the round before, whose limits may have been other ones.
        is_closed: the writer came to its end, and so has removed what it evicted.

    Returns:
        How many chunk files were evicted so far.

    Raises:
        AssertionError: too many have left, or too few.
    """
    first, least = found.first_episode, before.first_episode
    if found.num_episodes > before.num_episodes:  # only an episode makes others leave
        least = max(least, limits.first_by_steps(seed, found.num_episodes))
    if found.num_episodes == before.num_episodes or limits.capacity_bytes is None:
        assert first == least, f"episodes before {first} have left, not those before {least}"
    root = read_root(path)
    if first > least:
        plan = Plan.of(seed)
        episodes = [known_episode(seed, number) for number in range(found.num_episodes)]
        ranges = live_ranges(plan, expected_arrays(plan, episodes), first - 1)
        needed, most = _most_bytes(path, root, ranges), limits.capacity_bytes
        assert most is not None and needed > most, f"{first - 1} left, {needed} of {most} bytes"
    elif first < least:
        raise AssertionError(f"episodes before {least} had to leave, those before {first} have")
    is_new = found.num_episodes > before.num_episodes
    if is_closed and is_new and limits.capacity_bytes and first < found.num_episodes - 1:
        whole = sum(
            _allocated(path / layout.chunk_path(chunk)) or 0
            for layout, chunks in _chunks(root, root.commit.dims)
            for chunk in chunks[:-1]
        )  # the last one may have rows that were discarded
        assert whole <= limits.capacity_bytes, (whole, limits)
    gone = [layout.chunk_path(chunk) for layout, chunks in _chunks(root, root.commit.dims)
            for chunk in range(chunks.start)]  # fmt: skip
    assert not is_closed or not any((path / name).exists() for name in gone)
    return len(gone)


def _most_bytes(path: Path, root: Root, ranges: dict[str, tuple[int, int]]) -> int:
    """At most so many bytes would be taken with these live ranges."""
    return sum(
        _allocated(path / layout.chunk_path(chunk)) or _most_chunk_bytes(layout)
        for layout, chunks in _chunks(root, ranges)
        for chunk in chunks
    )


def _chunks(root: Root, ranges: dict[str, tuple[int, int]]) -> list[tuple[ArrayLayout, range]]:
    found = []
    for layout in root.arrays.values():
        start, stop = ranges[layout.dimension]
        chunks = range(start // layout.chunk_rows, -(-stop // layout.chunk_rows))
        found.append((layout, chunks))
    return found


def _most_chunk_bytes(layout: ArrayLayout) -> int:
    """With what zstd adds to bytes that it cannot shrink, and the index."""
    num_bytes = layout.chunk_bytes
    if layout.is_coded:
        num_bytes += num_bytes // 64 + layout.chunks_per_shard * 128 + 4
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _allocated(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0


def _most_step_bytes(plan: Plan) -> int:
    def num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
        return 64 if dtype == TEXT else int(np.prod(shape)) * np.dtype(dtype).itemsize

    return sum(num_bytes(shape, dtype) for shape, dtype in plan.fields.values())
