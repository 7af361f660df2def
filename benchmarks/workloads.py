"""Every workload by name: a function of an empty folder and a scale, in a module of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import Result

SCALES = ("full", "quick", "tiny")  # tiny proves that all runs; its figures mean nothing

# Imported when run: a workload brings the packages of its peers with it.
WORKLOADS = {
    "windows-vectors": "benchmarks.windows:run_vectors",
    "windows-frames": "benchmarks.windows:run_frames",
    "windows-atari": "benchmarks.atari:run_windows",
    "append-atari": "benchmarks.atari:run_append",
    "memory": "benchmarks.memory:run_memory",
    "open": "benchmarks.opening:run_opening",
    "append": "benchmarks.append:run_append",
    "expand": "benchmarks.expanding:run_expand",
}


def workload(name: str) -> Callable[[Path, str], Result]:
    """The function that runs the workload in a folder at a scale."""
    module, function = WORKLOADS[name].split(":")
    found: Callable[[Path, str], Result] = getattr(importlib.import_module(module), function)
    return found
