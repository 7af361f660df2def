"""`scripts/torture`: as many rounds of kill, check and go on as wanted."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.torture.nursery import Nursery
from tests.torture.rounds import Tally, play_history, split_rounds

nursery: Nursery  # of this worker process


def main() -> int:
    options = _options()
    if options.keep:
        return run(options, options.keep)
    with tempfile.TemporaryDirectory() as directory:
        return run(options, Path(directory))


def run(options: argparse.Namespace, directory: Path) -> int:
    begun, total, failures = time.monotonic(), Tally(), []
    histories = split_rounds(options.rounds, options.seed)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=spawn, initializer=_start) as pool:
        futures = {
            pool.submit(_play, directory, seed, rounds, options.keep is not None): rounds
            for seed, rounds in histories
        }
        for future in as_completed(futures):
            tally, failure = future.result()
            total += tally
            failures += [failure] if failure else []
            print(
                f"\r{total.rounds}/{options.rounds} rounds, {len(failures)} failures",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print(file=sys.stderr)
    seconds = round(time.monotonic() - begun, 1)
    summary: dict[str, Any] = {"seed": options.seed, "seconds": seconds, **total.to_json()}
    print(json.dumps({**summary, "failures": failures}, indent=2))
    return 1 if failures else 0


def _start() -> None:
    global nursery
    nursery = Nursery().__enter__()  # ends with its standard input, that is with this process


def _play(directory: Path, seed: int, rounds: int, keep: bool) -> tuple[Tally, str | None]:
    try:
        return play_history(nursery, directory, seed, rounds, keep=keep), None
    except AssertionError:
        _start()  # the old one may be in the middle of something
        return Tally(), traceback.format_exc()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/torture",
        description="Kill writers at random moments, check what is left in four ways, and go on.",
        epilog="example: scripts/torture --rounds 500 --seed 1 --jobs 2",
    )
    parser.add_argument("--rounds", type=int, default=100, help="writers to run (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="what all else follows from")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the stores in DIR")
    return parser.parse_args()
