"""`scripts/long-life`: what a store is like after a million episodes, a thousand writers, a year.

Times are given as ratios within one run where they can be: these mean something on any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import expstore
from expstore.storage import files
from expstore.storage.commits import read_root
from expstore.storage.mapping import MAX_MAPS
from expstore.summary import allocated_below

STEPS = 5  # of a tiny episode
NEVER_S = 1e9


def episode(number: int, num_steps: int = STEPS) -> dict[str, Any]:
    return {
        "observation": np.full((num_steps + 1, 4), number, np.float32),
        "action": np.zeros((num_steps, 2), np.float32),
        "reward": np.full(num_steps, number % 7, np.float64),
        "terminated": np.arange(num_steps) == num_steps - 1,
    }


def count_files(path: Path) -> int:
    return sum(1 for file in path.rglob("*") if file.is_file())


def seconds(action: Callable[[], Any], rounds: int = 5) -> dict[str, float]:
    """The median of some rounds, and what of it this process was at work: others may be, too."""
    taken, worked = [], []
    for _ in range(rounds):
        start, begun = time.perf_counter(), time.process_time()
        kept = action()
        taken.append(time.perf_counter() - start)
        worked.append(time.process_time() - begun)
        del kept
        gc.collect()
    return {name: round(statistics.median(t), 4) for name, t in (("wall", taken), ("cpu", worked))}


class Clock:
    """Times of what is done again and again, by the wall and by this process's own work."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        now = time.perf_counter(), time.process_time()
        self._taken.append((now[0] - self._start[0], now[1] - self._start[1]))

    def ends(self) -> dict[str, float]:
        """Medians of the first and the last tenth, in milliseconds, and the ratio of both."""
        part = max(5, len(self._taken) // 10)
        found = {}
        for name, times in zip(("wall", "cpu"), zip(*self._taken, strict=True), strict=True):
            early, late = statistics.median(times[5 : 5 + part]), statistics.median(times[-part:])
            found[f"{name}_ms_at_start"] = round(early * 1e3, 3)
            found[f"{name}_ms_at_end"] = round(late * 1e3, 3)
            found[f"{name}_ratio"] = round(late / early, 3)
        return found


def tiny_episodes(home: Path, scale: float) -> dict[str, Any]:
    """A million episodes of five steps: does the millionth cost more than the first?"""
    path, count = home / "tiny.exp", int(1_000_000 * scale)
    block = max(100, count // 50)
    taken = []
    with expstore.Writer(path) as writer:
        for first in range(0, count, block):
            start = time.perf_counter()
            for number in range(first, first + block):
                writer.append(episode(number), seed=number, policy="p")
            taken.append((time.perf_counter() - start) / block)
    ends = len(taken) // 10 or 1
    early, late = (statistics.median(part) for part in (taken[1 : 1 + ends], taken[-ends:]))

    def opened() -> Any:
        store = expstore.open(path)
        assert store.num_episodes == len(taken) * block
        return store.read(store.spans.start[-64:], ["reward"])

    return {
        "episodes": count,
        "append_us_at_start": round(early * 1e6, 1),
        "append_us_at_end": round(late * 1e6, 1),
        "ratio": round(late / early, 3),
        "open_s": seconds(opened),
        "files": count_files(path),
        "megabytes": round(allocated_below(path) / 1e6, 1),
        "history_bytes": (path / "__expstore/commits").stat().st_size,
        "commits": read_root(path).commit.number,
    }


def reopenings(home: Path, scale: float) -> dict[str, Any]:
    """A thousand writers, one after the other, each with one commit."""
    path, count = home / "reopened.exp", int(1000 * scale)
    clock = Clock()
    for number in range(count):
        with clock, expstore.Writer(path, durable=False) as writer:
            writer.append(episode(number))
    return {
        "commits": count,
        "reopen": clock.ends(),
        "open_s": seconds(lambda: expstore.open(path)),
        "files": count_files(path),
        "history_bytes": (path / "__expstore/commits").stat().st_size,
    }


def commits(home: Path, scale: float) -> dict[str, Any]:
    """A thousand commits of one writer, which a reader follows."""
    path, count = home / "commits.exp", int(1000 * scale)
    taken, followed = Clock(), Clock()
    with expstore.Writer(path, commit_interval_s=NEVER_S) as writer:
        writer.append(episode(0))
        writer.commit()
        store = expstore.open(path)
        for number in range(1, count):
            with taken:
                writer.append(episode(number))
                writer.commit()
            with followed:
                store = store.latest()
                len(store)
    return {"commits": count, "commit": taken.ends(), "latest": followed.ends()}


def union(home: Path, scale: float) -> dict[str, Any]:
    """A hundred stores as one."""
    count = 100
    paths = [home / "union" / f"{number}.exp" for number in range(count)]
    for path in paths:
        with expstore.Writer(path, durable=False) as writer:
            for number in range(max(2, int(100 * scale))):
                writer.append(episode(number), seed=number)

    def opened() -> Any:
        store = expstore.open(paths)
        return len(store), store

    def read() -> Any:
        store = expstore.open(paths)
        return store.read(store.spans.start[:: max(1, store.num_episodes // 256)])

    return {
        "stores": count,
        "open_s": seconds(opened),
        "open_and_read_256_steps_s": seconds(read),
    }


def eviction(home: Path, scale: float) -> dict[str, Any]:
    """A store with a capacity, filled many times over: what it takes on disk must not grow."""
    path, capacity = home / "evicting.exp", max(2000, int(100_000 * scale))
    rounds = 30
    sizes, numbers = [], []
    with expstore.Writer(
        path, capacity_steps=capacity, durable=False, commit_interval_s=NEVER_S
    ) as writer:
        for turn in range(rounds):
            for number in range(capacity // 50):
                writer.append(episode(turn * capacity + number, 50))
                if number % 64 == 0:
                    writer.commit()
            writer.commit()
            sizes.append(allocated_below(path))
            numbers.append(count_files(path))
    store = expstore.open(path)
    return {
        "capacity_steps": capacity,
        "steps_written": rounds * capacity,
        "steps_held": len(store),
        "megabytes_after_2_fillings": round(sizes[1] / 1e6, 2),
        "most_megabytes_since": round(max(sizes[2:]) / 1e6, 2),
        "growth": round(sizes[-1] / sizes[1], 3),
        "files_after_2_fillings": numbers[1],
        "most_files_since": max(numbers[2:]),
    }


def sparse_store(path: Path, num_columns: int, num_steps: int) -> Path:
    """One episode of so many steps that hardly takes space, as a checksum of zeros would have it.

    Its rows were never written, so it can be read, but does not verify.
    """
    with expstore.Writer(path, durable=False) as writer:
        zeros = {f"column{number:02}": np.zeros(1, np.float32) for number in range(num_columns)}
        writer.append(zeros)
    document = json.loads((path / "zarr.json").read_bytes())
    ours, entries = document["attributes"]["expstore"], document["consolidated_metadata"]
    ours["commit"]["dims"]["step"] = [0, num_steps]
    for name, entry in entries["metadata"].items():
        if entry["node_type"] == "array" and entry["dimension_names"][0] == "step":
            entry["shape"][0] = num_steps
            file = path / name / "c.0"
            num_bytes = file.stat().st_size
            rows = entry["chunk_grid"]["configuration"]["chunk_shape"][0]
            for chunk in range(1, -(-num_steps // rows)):
                with (path / name / f"c.{chunk}").open("wb") as made:
                    made.truncate(num_bytes)
    with (path / "episodes/length/c.0").open("r+b") as lengths:
        lengths.write(num_steps.to_bytes(8, "little"))
    from expstore.storage.layout import canonical_json

    ours["commit"].pop("crc32c")
    ours["commit"]["crc32c"] = files.crc32c(canonical_json(document))
    (path / "zarr.json").write_text(json.dumps(document))
    return path


def num_maps() -> int:
    """Maps of this process, of the 65,530 that Linux allows."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def many_maps(home: Path, scale: float) -> dict[str, Any]:
    """A store of 1e8 steps and 20 columns, opened three times at once."""
    num_steps = max(10**6, int(1e8 * scale))
    path = sparse_store(home / "sparse.exp", 20, num_steps)
    before, most, taken = num_maps(), 0, []
    rng = np.random.default_rng(0)
    stores = []
    for turn in range(3):
        link = home / f"view-{turn}.exp"  # by another path each time: nothing is shared
        link.symlink_to(path)
        start = time.perf_counter()
        store = expstore.open(link)
        for _ in range(20):
            found = store.read(rng.integers(0, num_steps, 256))
            assert not any(rows.any() for rows in found.values())
        taken.append(time.perf_counter() - start)
        stores.append(store)
        most = max(most, num_maps())
    return {
        "steps": num_steps,
        "chunk_files": count_files(path),
        "seconds_each": [round(value, 2) for value in taken],
        "maps_before": before,
        "most_maps": most,
        "budget": MAX_MAPS,
        "is_within": most - before <= MAX_MAPS + 64 * len(stores) * 25,
    }


PARTS: dict[str, Callable[[Path, float], dict[str, Any]]] = {
    "tiny-episodes": tiny_episodes,
    "reopenings": reopenings,
    "commits": commits,
    "union": union,
    "eviction": eviction,
    "maps": many_maps,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/long-life",
        description="Measure a store after a long life.",
        epilog="example: scripts/long-life --quick --only union eviction",
    )
    parser.add_argument("--quick", action="store_true", help="a hundredth of it")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="parts")
    options = parser.parse_args()
    found: dict[str, Any] = {"load_average": [round(os.getloadavg()[0], 2)]}
    for name in options.only or PARTS:
        with tempfile.TemporaryDirectory() as home:
            start = time.perf_counter()
            found[name] = PARTS[name](Path(home), 0.01 if options.quick else 1.0)
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    found["load_average"].append(round(os.getloadavg()[0], 2))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
