"""expstore: a persistent experience store for reinforcement learning.

Finished episodes are appended to a directory of plain Zarr v3 arrays and come back as
sequence windows. Start with `Writer`, `open` and `Replay`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from expstore import errors
from expstore.errors import ExpstoreError
from expstore.schema import Field, Schema
from expstore.storage.store import Store
from expstore.storage.store import open_store as open
from expstore.storage.writer import Writer

if TYPE_CHECKING:
    from expstore.sampling.sequence import Sequence

__version__ = "0.1.0"

# Loaded when first asked for: they bring torch, numba or optional packages with them.
_LAZY = {
    "Sequence": "expstore.sampling.sequence",
}

__all__ = [
    "ExpstoreError",
    "Field",
    "Schema",
    "Sequence",
    "Store",
    "Writer",
    "errors",
    "open",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'expstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
