"""`scripts/fuzz`: hostile files without end, each kind in a process of its own."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.limits import limit_memory
from tests.fuzz.targets import TARGETS, Bench

KEPT_FAILURES = 5  # of a target, in full


def main() -> int:
    options = _options()
    begun = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, dict[str, Any]] = {}
    for name in options.only or TARGETS:
        receiver, sender = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_work, args=(name, options.rounds, options.seed, sender))
        process.start()
        sender.close()
        tally: dict[str, Any] = {"tried": 0, "refused": 0, "failures": [], "num_failures": 0}
        while True:
            try:
                tally = receiver.recv()
            except EOFError:
                break
        process.join()
        if process.exitcode:
            tally["failures"].append(f"the process ended with {process.exitcode}: {tally['seed']}")
            tally["num_failures"] += 1
        found[name] = tally
        line = f"{name}: {tally['tried']} tried, {tally['refused']} refused"
        print(f"{line}, {tally['num_failures']} failures", file=sys.stderr, flush=True)
    failures = sum(tally["num_failures"] for tally in found.values())
    summary = {
        "seed": options.seed,
        "seconds": round(time.monotonic() - begun, 1),
        "tried": sum(tally["tried"] for tally in found.values()),
        "refused": sum(tally["refused"] for tally in found.values()),
        "failures": failures,
        "targets": found,
    }
    print(json.dumps(summary, indent=2))
    return 1 if failures else 0


def _work(name: str, rounds: int, seed: int, sender: Any) -> None:
    limit_memory()
    tally: dict[str, Any] = {"tried": 0, "refused": 0, "failures": [], "num_failures": 0}
    seen = set()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(name, Path(directory))
        for number in range(rounds):
            own = f"{name} {seed} {number}"
            sender.send({**tally, "seed": own})
            tally["tried"] += 1
            try:
                tally["refused"] += bench.try_one(Random(own))
            except BaseException as error:
                tally["num_failures"] += 1
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(error).__name__} {frame.filename}:{frame.lineno}"
                if where not in seen and len(seen) < KEPT_FAILURES:
                    seen.add(where)
                    tally["failures"].append(f"{own}: {traceback.format_exc()}")
    sender.send({**tally, "seed": ""})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz",
        description="Replace files by hostile ones, and read them in every way there is.",
        epilog="example: scripts/fuzz --rounds 1000 --seed 1 --only root pointer",
    )
    parser.add_argument("--rounds", type=int, default=300, help="files of each kind (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="what all else follows from")
    parser.add_argument("--only", nargs="+", choices=TARGETS, metavar="KIND", help="kinds of file")
    return parser.parse_args()
