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
    from expstore.ingest.report import IngestProgress as IngestProgress
    from expstore.ingest.report import IngestReport as IngestReport
    from expstore.ingesting import ingest_from as ingest_from
    from expstore.loading.batch import Batch as Batch
    from expstore.loading.dataset import SequenceDataset as SequenceDataset
    from expstore.loading.dataset import sequence_loader as sequence_loader
    from expstore.loading.replay import Replay as Replay
    from expstore.loading.units import Step as Step
    from expstore.sampling.mixture import Mixture as Mixture
    from expstore.sampling.prioritized import Prioritized as Prioritized
    from expstore.sampling.ring import Ring as Ring
    from expstore.sampling.sequence import Sequence as Sequence
    from expstore.sampling.sequence import SequenceConfig as SequenceConfig
    from expstore.sampling.uniform import Uniform as Uniform
    from expstore.sampling.uniform import WithoutReplacement as WithoutReplacement
    from expstore.storage.maintain import verify as verify
    from expstore.summary import EpisodeSummary as EpisodeSummary
    from expstore.summary import FieldRange as FieldRange
    from expstore.summary import FieldSummary as FieldSummary
    from expstore.summary import StoreSummary as StoreSummary
    from expstore.summary import inspect as inspect

__version__ = "0.1.0"

# Loaded when first asked for: they bring torch, numba or optional packages with them.
_LAZY = {
    "Batch": "expstore.loading.batch",
    "EpisodeSummary": "expstore.summary",
    "FieldRange": "expstore.summary",
    "FieldSummary": "expstore.summary",
    "IngestProgress": "expstore.ingest.report",
    "IngestReport": "expstore.ingest.report",
    "Mixture": "expstore.sampling.mixture",
    "Prioritized": "expstore.sampling.prioritized",
    "Replay": "expstore.loading.replay",
    "Ring": "expstore.sampling.ring",
    "Sequence": "expstore.sampling.sequence",
    "SequenceConfig": "expstore.sampling.sequence",
    "SequenceDataset": "expstore.loading.dataset",
    "Step": "expstore.loading.units",
    "StoreSummary": "expstore.summary",
    "Uniform": "expstore.sampling.uniform",
    "WithoutReplacement": "expstore.sampling.uniform",
    "ingest_from": "expstore.ingesting",
    "inspect": "expstore.summary",
    "sequence_loader": "expstore.loading.dataset",
    "verify": "expstore.storage.maintain",
}

__all__ = [
    "Batch",
    "EpisodeSummary",
    "ExpstoreError",
    "Field",
    "FieldRange",
    "FieldSummary",
    "IngestProgress",
    "IngestReport",
    "Mixture",
    "Prioritized",
    "Replay",
    "Ring",
    "Schema",
    "Sequence",
    "SequenceConfig",
    "SequenceDataset",
    "Step",
    "Store",
    "StoreSummary",
    "Uniform",
    "WithoutReplacement",
    "Writer",
    "errors",
    "ingest_from",
    "inspect",
    "open",
    "sequence_loader",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'expstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
