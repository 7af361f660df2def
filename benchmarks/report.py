"""The results as Markdown tables, and what they were measured on.

`python -m benchmarks.report bench.json ...` prints the tables of earlier runs; of a workload that
several files have, the last one counts.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "expstore", "numpy", "torch", "numba", "zarr", "torchrl", "tensordict", "minari", "h5py",
    "cpprb", "tensorstore", "gymnasium", "mujoco",
)  # fmt: skip


def machine(folder: Path) -> dict[str, Any]:
    """What the figures depend on; nothing that tells one machine from another of its kind."""
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.system(),
        "file_system": _file_system(folder),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """Kind of the file system that holds the folder."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    holding = [m for m in mounts if folder.resolve().is_relative_to(m[1])]
    return max(holding, key=lambda m: len(m[1]))[2] if holding else "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def markdown(workloads: Sequence[dict[str, Any]]) -> str:
    """What each workload is, a table of goals and one of figures, from their documents."""
    figures = [["workload", "contestant", "median", "quartiles", "rounds"]]
    goals = [["workload", "goal", "found", "limit", ""]]
    for workload in workloads:
        name = workload["workload"]
        for f in workload["figures"]:
            low, high = map(_number, f["quartiles"])
            row = [f["contestant"], f"{_number(f['median'])} {f['unit']}", f"{low} - {high}"]
            figures.append([name, *row, str(f["num_rounds"])])
        for goal in workload["goals"]:
            unit = "" if goal["unit"] == "x" else f" {goal['unit']}"
            limit = f"{'<=' if goal['at_most'] else '>='} {_number(goal['limit'])}{unit}"
            verdict = "reached" if goal["is_reached"] else "MISSED"
            goals.append([name, goal["what"], f"{_number(goal['value'])}{unit}", limit, verdict])
    about = "\n".join(f"- `{w['workload']}`: {w['about']}." for w in workloads)
    return "\n\n".join([about, "\n".join(_table(goals)), "\n".join(_table(figures))])


def _number(value: float) -> str:
    """Three significant digits."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"


def merged(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The workloads of several files."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        workloads = json.loads(Path(path).read_text())["workloads"]
        found |= {workload["workload"]: workload for workload in workloads}
    return list(found.values())


if __name__ == "__main__":
    print(markdown(merged(sys.argv[1:])))
