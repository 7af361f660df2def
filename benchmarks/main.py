"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.plots import draw
from benchmarks.report import machine, markdown
from benchmarks.results import Result
from benchmarks.run import PEERS, SCALES, Run
from benchmarks.workloads import WORKLOADS, workload

EXAMPLE = "example: scripts/bench --quick --only windows-vectors append --out bench.json"


def main(arguments: list[str] | None = None) -> None:
    """Run workloads; JSON to stdout or a file, progress and tables to stderr."""
    options = parser().parse_args(arguments)
    # Libraries that greet on stdout must not spoil the JSON.
    with (
        contextlib.redirect_stdout(sys.stderr),
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder,
    ):
        load = [os.getloadavg()[0]]
        asked = Run(options.scale, None if options.peer is None else frozenset(options.peer))
        results = run(options.only or list(WORKLOADS), asked, Path(folder))
        load.append(os.getloadavg()[0])
        found = document(results, options.scale, Path(folder), load)
    print(f"\n{markdown(found['workloads'])}", file=sys.stderr)
    if options.plot:
        draw(found, options.plot)
    text = json.dumps(found, indent=2) + "\n"
    if options.out:
        options.out.write_text(text)
    else:
        sys.stdout.write(text)


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(
        "scripts/bench", description="Measure expstore beside its peers.", epilog=EXAMPLE
    )
    scale = described.add_mutually_exclusive_group()
    small = "less data and fewer rounds: minutes become seconds"
    scale.add_argument("--quick", dest="scale", action="store_const", const="quick", help=small)
    none = "hardly any data: shows that everything runs, measures nothing"
    scale.add_argument("--tiny", dest="scale", action="store_const", const="tiny", help=none)
    described.set_defaults(scale=SCALES[0])
    peers = f"beside these only, of: {', '.join(PEERS)}; all that are installed by default"
    described.add_argument("--peer", nargs="+", choices=PEERS, metavar="NAME", help=peers)
    plot = "draw a plot of each workload into DIR (needs matplotlib, the extra `plot`)"
    described.add_argument("--plot", type=Path, metavar="DIR", help=plot)
    names = f"workloads, of: {', '.join(WORKLOADS)}"
    described.add_argument("--only", nargs="+", choices=WORKLOADS, metavar="NAME", help=names)
    described.add_argument("--out", type=Path, metavar="FILE", help="for the JSON, else stdout")
    where = "where the data is built, and removed again; it decides which disk is measured"
    described.add_argument("--folder", type=Path, metavar="DIR", help=where)
    return described


def run(names: list[str], asked: Run, folder: Path) -> list[Result]:
    """Run the workloads one after the other, each in an empty folder that is removed after it."""
    results = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as own:
            results.append(workload(name)(Path(own), asked))
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return results


def document(results: list[Result], scale: str, folder: Path, load: list[float]) -> dict[str, Any]:
    """All that is known, for the JSON."""
    return {
        "scale": scale,
        "machine": machine(folder),
        "load_average": load,  # before and after; above the cores, others ran
        "workloads": [result.document() for result in results],
    }
