"""How a workload is run: at what scale, and beside which peers."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

SCALES = ("full", "quick", "tiny")  # tiny proves that all runs; its figures mean nothing
# The package that each peer needs; without it the peer is left out, and that is said.
PEERS = {
    "cpprb": "cpprb",
    "h5py": "h5py",
    "lerobot": "lerobot",
    "minari": "minari",
    "numpy": "numpy",
    "tensorstore": "tensorstore",
    "torchrl": "torchrl",
    "zarr": "zarr",
}
LEROBOT_PYTHON = "EXPSTORE_BENCH_LEROBOT"  # a Python that has LeRobot; ours cannot have it
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What was asked for on the command line."""

    scale: str
    peers: frozenset[str] | None = None  # None: all that are installed

    def of(self, sizes: Mapping[str, T]) -> T:
        """The size of a workload at this scale."""
        return sizes[self.scale]

    def wants(self, peer: str) -> bool:
        """Whether a peer takes part."""
        if self.peers is not None and peer not in self.peers:
            return False
        if peer == "lerobot":
            if LEROBOT_PYTHON not in os.environ:
                print(f"  lerobot is left out: {LEROBOT_PYTHON} names no Python", file=sys.stderr)
            return LEROBOT_PYTHON in os.environ
        if importlib.util.find_spec(PEERS[peer]) is None:
            print(f"  {peer} is not installed; left out", file=sys.stderr)
            return False
        return True
