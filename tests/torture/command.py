"""`scripts/torture`: as many rounds of kill, check and go on, or power cuts, as wanted."""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.torture import power
from tests.torture.loaders import Loaders
from tests.torture.nursery import Nursery
from tests.torture.rounds import Tally, play_history, split_rounds

nursery: Nursery  # of this worker process
loaders: Loaders | None  # likewise; None where there is no torch


def main() -> int:
    options = _options()
    if options.keep:
        return run(options, options.keep)
    with tempfile.TemporaryDirectory() as directory:
        return run(options, Path(directory))


def run(options: argparse.Namespace, directory: Path) -> int:
    if options.power_cuts:
        seeds = power.power_seeds(options.seed, options.power_cuts)
        return _run(options, power.Tally(), [(_cut_power, directory, seed) for seed in seeds])
    keep, histories = options.keep is not None, split_rounds(options.rounds, options.seed)
    return _run(options, Tally(), [(_play, directory, *history, keep) for history in histories])


def _run(options: argparse.Namespace, total: Any, tasks: list[tuple[Any, ...]]) -> int:
    """Play all histories; an interrupt ends it early, with what was done by then."""
    begun, failures, num_done = time.monotonic(), [], 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=spawn, initializer=_start) as pool:
        futures = [pool.submit(*task) for task in tasks]
        try:
            for future in as_completed(futures):
                tally, failure = future.result()
                total += tally
                num_done += 1
                failures += [failure] if failure else []
                text = f"\r{num_done}/{len(tasks)} histories, {len(failures)} failures"
                print(text, end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    print(file=sys.stderr)
    seconds = round(time.monotonic() - begun, 1)
    summary: dict[str, Any] = {"seed": options.seed, "seconds": seconds, **vars(total)}
    print(json.dumps({**summary, "failures": failures}, indent=2))
    return 1 if failures else 0


def _start() -> None:
    global nursery, loaders
    # They end with their standard input, that is with this process.
    nursery, loaders = Nursery().__enter__(), None
    if importlib.util.find_spec("torch"):
        loaders = Loaders().__enter__()


def _play(directory: Path, seed: int, rounds: int, keep: bool) -> tuple[Tally, str | None]:
    try:
        tally = play_history(nursery, directory, seed, rounds, keep=keep, loaders=loaders)
        return tally, None
    except AssertionError:
        _start()  # the old one may be in the middle of something
        return Tally(), traceback.format_exc()


def _cut_power(directory: Path, seed: int) -> tuple[power.Tally, str | None]:
    try:
        return power.play_power_cuts(directory / f"power-{seed}", seed, num_sessions=3), None
    except AssertionError:
        return power.Tally(), traceback.format_exc()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/torture",
        description="Kill writers at random moments, check what is left in four ways, and go on; "
        "or cut the power of a simulated disk.",
        epilog="example: scripts/torture --rounds 500 --seed 1 --jobs 2",
    )
    parser.add_argument("--rounds", type=int, default=100, help="writers to run (default: 100)")
    parser.add_argument(
        "--power-cuts",
        type=int,
        metavar="N",
        help="instead, N stores on a simulated disk, each through 60 power cuts",
    )
    parser.add_argument("--seed", type=int, default=0, help="what all else follows from")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the stores in DIR")
    return parser.parse_args()
