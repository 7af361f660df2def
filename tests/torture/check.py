"""What a store holds, read in four ways: `expstore`, its `verify`, zarr-python and tensorstore."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import zarr
from numpy.typing import NDArray

import expstore
from expstore.errors import NotAStoreError
from expstore.storage.commits import read_history
from expstore.storage.layout import DELETED
from expstore.storage.verification import verify
from tests.torture.episodes import (
    Known,
    Plan,
    expected_arrays,
    known_episode,
    live_ranges,
    nothing,
    stacked,
)

NOT_EXPECTED = ("episodes/crc32c/", "episodes/index_crc32c", f"{DELETED}/")


@dataclass(frozen=True)
class Found:
    """What every reader agreed on."""

    num_episodes: int  # that were ever committed; those that were evicted among them
    num_steps: int
    first_episode: int  # the oldest that is still held
    commit: int  # number of the newest, -1 where there is no store yet
    num_lagging: int  # single arrays that are shorter than the commit, or not there yet
    deleted: frozenset[int] = frozenset()  # numbers of live episodes that were deleted


def check_store(path: Path, seed: int, allowed: Collection[int], *, sample: int = 0) -> Found:
    """Read the whole store in every way and compare it, byte by byte, with what it must be.

    Args:
        allowed: numbers of episodes that may be committed.
        sample: how many episodes `Store.episode` is asked for, 0 for all.

    Raises:
        AssertionError: something is not as it must be.
    """
    try:
        store = expstore.open(path)
    except NotAStoreError:
        assert 0 in allowed and not (path / "zarr.json").exists(), f"no store, allowed: {allowed}"
        return Found(0, 0, 0, -1, 0)
    plan, commit = Plan.of(seed), store.snapshots[0].root.commit
    first, num_episodes = commit.dims["episode"]
    assert num_episodes in allowed, f"{num_episodes} episodes, allowed: {allowed}"
    assert first < num_episodes or not first, f"nothing but {first} evicted episodes"
    episodes = [known_episode(seed, number) for number in range(num_episodes)]
    arrays = expected_arrays(plan, episodes) if store.fields else {}
    gone = frozenset(range(first, num_episodes)) - set(store.episode_numbers.tolist())
    if episodes:
        dims = {name: live for name, live in commit.dims.items() if name != DELETED}
        assert dims == live_ranges(plan, arrays, first)
    _check_with_expstore(store, plan, episodes, sample)
    live = {n: commit.dims[a.dimension][0] for n, a in store.snapshots[0].root.arrays.items()}
    whole = _check_with_zarr(path, arrays, live)
    lagging = _check_with_tensorstore(path, whole, _lengths(path))
    verified = verify(path)
    assert verified.is_sound, verified.problems
    assert (verified.num_episodes, verified.num_steps) == (len(store.episodes), store.num_steps)
    _check_history(path, commit.number)
    return Found(num_episodes, sum(map(len, episodes)), first, commit.number, lagging, gone)


def _check_with_expstore(
    store: expstore.Store, plan: Plan, episodes: list[Known], sample: int
) -> None:
    rng = np.random.default_rng(len(episodes))
    numbers: Collection[int] = store.episode_numbers.tolist()
    live = set(numbers)
    assert store.num_steps == sum(len(episodes[number]) for number in numbers)
    if sample and len(numbers) > sample:
        numbers = sorted({min(live), max(live), *rng.choice(sorted(live), sample).tolist()})
    for number in numbers:
        check_episode(store, number, episodes[number], plan)
    if live:
        located = [(episode, t) for episode in episodes for t in range(len(episode))]
        steps = rng.choice([s for s, (e, _) in enumerate(located) if e.number in live], 50)
        check_steps(store, steps, [located[step] for step in steps], plan)


def check_episode(store: expstore.Store, number: int, known: Known, plan: Plan) -> None:
    """One episode and its row in the table."""
    flat = _flat(store.episode(number))
    expected = dict(known.columns)
    for name in plan.next_fields:
        last, found = known.next_value(name, len(known) - 1), known.exceptions(name)
        if last is None:
            continue
        if name != "reward":
            expected[name] = stacked([*known.columns[name], last], known.columns[name])
        if name == "reward" or len(found) > 1:
            values = [known.next_value(name, t) for t in range(len(known))]
            given = [value for value in values if value is not None]
            expected[f"next_{name}"] = stacked(given, known.columns[name])
    _same_arrays(flat, expected, f"episode {number}")
    row = store.filter([number]).episodes[0]
    assert row["length"] == len(known)
    assert row["end_reason"] == known.end_reason
    assert row["seed"] == known.metadata.get("seed")
    assert row["metadata"] == {k: v for k, v in known.metadata.items() if k != "seed"}
    np.testing.assert_array_equal(row["return"], known.total_reward)


def check_steps(
    store: expstore.Store, steps: NDArray[np.int64], located: list[tuple[Known, int]], plan: Plan
) -> None:
    """Any steps with their next values; `located` has the episode and the offset of each."""
    names = [*plan.fields, "done", "has_next", *(f"next_{name}" for name in plan.next_fields)]
    flat = _flat(store.read(steps, names))
    for at, (known, offset) in enumerate(located):
        nexts = {name: known.next_value(name, offset) for name in plan.next_fields}
        expected = {name: known.columns[name][offset] for name in plan.fields}
        expected["done"] = np.bool_(offset == len(known) - 1)
        expected["has_next"] = np.bool_(all(value is not None for value in nexts.values()))
        for name, value in nexts.items():
            missing = nothing(known.columns[name])
            expected[f"next_{name}"] = missing if value is None else value
        _same_arrays({name: flat[name][at] for name in names}, expected, f"step {steps[at]}")


def _check_with_zarr(
    path: Path, expected: dict[str, NDArray[Any]], live: dict[str, int]
) -> dict[str, NDArray[Any]]:
    """Through the root, as any reader of Zarr does; returns all arrays.

    Below its live rows an array has what was there, or fill where the file is gone.
    """
    found = asyncio.run(read_group(path))
    data = {name: array for name, array in found.items() if not name.startswith(NOT_EXPECTED)}
    known = {}
    for name, array in expected.items():
        rows = data.get(name, array[:0])[: live.get(name, 0)]
        assert len(rows) == live.get(name, 0), name
        known[name] = array.copy()
        if len(rows):  # compared by bytes: -0.0 is no fill
            in_bytes = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
            known[name][: len(rows)][(in_bytes == 0).all(axis=1)] = 0
    returns = data.pop("episodes/return", None), known.pop("episodes/return", None)
    if returns[0] is not None and returns[1] is not None:
        np.testing.assert_array_equal(returns[0], returns[1])  # a NaN has many spellings
    _same_arrays(data, known, "zarr")
    return found


async def read_group(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays at once, which spares a change of threads for each."""
    group = await zarr.api.asynchronous.open_group(path, mode="r")
    arrays = {
        name: array
        async for name, array in group.members(max_depth=None)
        if isinstance(array, zarr.AsyncArray)
    }
    rows = await asyncio.gather(*(array.getitem(...) for array in arrays.values()))
    return {name: np.asarray(found) for name, found in zip(arrays, rows, strict=True)}


def _check_with_tensorstore(
    path: Path, whole: dict[str, NDArray[Any]], lengths: dict[str, set[int]]
) -> int:
    """Every single array through its own `zarr.json`: a committed prefix, never more."""
    lagging = 0
    for name, array in whole.items():
        if not (path / name / "zarr.json").exists():
            lagging += 1
            continue
        single = read_single(path / name)
        assert len(single) <= len(array), f"{name} leads: {len(single)} > {len(array)}"
        lagging += len(single) < len(array)
        assert single.tobytes() == array[: len(single)].tobytes(), name
        dimension = json.loads((path / name / "zarr.json").read_bytes())["dimension_names"][0]
        assert len(single) in lengths[dimension] | {0}, f"{name}: {len(single)} was never committed"
    return lagging


def read_single(path: Path) -> NDArray[Any]:
    """One array by its own metadata."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return np.asarray(tensorstore.open(spec, read=True).result().read().result())


def _lengths(path: Path) -> dict[str, set[int]]:
    """The lengths that each dimension had at one of the commits."""
    lengths: dict[str, set[int]] = {}
    for entry in read_history(path):
        for name, (_, stop) in entry["dims"].items():
            lengths.setdefault(name, set()).add(stop)
    return lengths


def _check_history(path: Path, newest: int) -> None:
    """All commits once and in order; one more where the kill came just before its root."""
    numbers = [entry["number"] for entry in read_history(path)]
    assert numbers in (list(range(newest + 1)), list(range(newest + 2))), (numbers, newest)


def _same_arrays(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert sorted(found) == sorted(expected), where
    for name, array in expected.items():
        what = f"{name} of {where}"
        if isinstance(array, str) or array.dtype == object:
            assert list(found[name]) == list(array), what
            continue
        assert found[name].dtype == array.dtype, what
        assert found[name].shape == array.shape, what
        assert found[name].tobytes() == array.tobytes(), what


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}/"))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
