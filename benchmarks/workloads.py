"""Every workload by name: a function of an empty folder and a run, in a module of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import Result
from benchmarks.run import Run

# Imported when run: a workload brings the packages of its peers with it.
WORKLOADS = {
    "windows-vectors": "benchmarks.windows:run_vectors",
    "windows-frames": "benchmarks.windows:run_frames",
    "windows-atari": "benchmarks.atari:run_windows",
    "cold-atari": "benchmarks.cold:run_cold",
    "steps": "benchmarks.steps:run_steps",
    "prioritized": "benchmarks.prioritized:run_prioritized",
    "growth": "benchmarks.growth:run_growth",
    "lift": "benchmarks.lift:run_lift",
    "lerobot": "benchmarks.lerobot:run_lerobot",
    "append-atari": "benchmarks.atari:run_append",
    "memory": "benchmarks.memory:run_memory",
    "open": "benchmarks.opening:run_opening",
    "append": "benchmarks.append:run_append",
    "append-large": "benchmarks.append:run_append_large",
    "step-by-step": "benchmarks.recording:run_step_by_step",
    "record": "benchmarks.recording:run_record",
    "d4rl": "benchmarks.d4rl:run_d4rl",
    "expand": "benchmarks.expanding:run_expand",
}


def workload(name: str) -> Callable[[Path, Run], Result]:
    """The function that runs the workload in an empty folder."""
    module, function = WORKLOADS[name].split(":")
    found: Callable[[Path, Run], Result] = getattr(importlib.import_module(module), function)
    return found
