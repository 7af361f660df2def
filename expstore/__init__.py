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
from expstore.storage.store import Store, union
from expstore.storage.store import open_store as open
from expstore.storage.writer import Writer

if TYPE_CHECKING:
    from expstore.exporting import Export as Export
    from expstore.exporting import export_to as export_to
    from expstore.ingest.report import IngestProgress as IngestProgress
    from expstore.ingest.report import IngestReport as IngestReport
    from expstore.ingesting import ingest_from as ingest_from
    from expstore.loading.batch import Batch as Batch
    from expstore.loading.dataset import SequenceDataset as SequenceDataset
    from expstore.loading.dataset import sequence_loader as sequence_loader
    from expstore.loading.goals import Goals as Goals
    from expstore.loading.hindsight import Hindsight as Hindsight
    from expstore.loading.nstep import NStep as NStep
    from expstore.loading.offline import OfflineDataset as OfflineDataset
    from expstore.loading.replay import Replay as Replay
    from expstore.loading.stack import Stack as Stack
    from expstore.loading.statistics import Statistics as Statistics
    from expstore.loading.to_go import ReturnToGo as ReturnToGo
    from expstore.loading.units import Step as Step
    from expstore.sampling.mixture import Mixture as Mixture
    from expstore.sampling.prioritized import Prioritized as Prioritized
    from expstore.sampling.ring import Ring as Ring
    from expstore.sampling.sequence import Sequence as Sequence
    from expstore.sampling.sequence import SequenceConfig as SequenceConfig
    from expstore.sampling.uniform import Uniform as Uniform
    from expstore.sampling.uniform import WithoutReplacement as WithoutReplacement
    from expstore.storage.adding import Addition as Addition
    from expstore.storage.adding import add_field as add_field
    from expstore.storage.copying import Copy as Copy
    from expstore.storage.copying import compact as compact
    from expstore.storage.copying import merge as merge
    from expstore.storage.deletion import Deletion as Deletion
    from expstore.storage.deletion import delete as delete
    from expstore.storage.history import CommitSummary as CommitSummary
    from expstore.storage.history import history as history
    from expstore.storage.repair import Repair as Repair
    from expstore.storage.repair import repair as repair
    from expstore.storage.verification import Verification as Verification
    from expstore.storage.verification import verify as verify
    from expstore.summary import EpisodeSummary as EpisodeSummary
    from expstore.summary import FieldRange as FieldRange
    from expstore.summary import FieldSummary as FieldSummary
    from expstore.summary import PrioritySummary as PrioritySummary
    from expstore.summary import StoreSummary as StoreSummary
    from expstore.summary import inspect as inspect

__version__ = "0.1.0"

# Loaded when first asked for: they bring torch, numba or optional packages with them.
_LAZY = {
    "Addition": "expstore.storage.adding",
    "Batch": "expstore.loading.batch",
    "CommitSummary": "expstore.storage.history",
    "Copy": "expstore.storage.copying",
    "Deletion": "expstore.storage.deletion",
    "EpisodeSummary": "expstore.summary",
    "Export": "expstore.exporting",
    "FieldRange": "expstore.summary",
    "FieldSummary": "expstore.summary",
    "Goals": "expstore.loading.goals",
    "Hindsight": "expstore.loading.hindsight",
    "IngestProgress": "expstore.ingest.report",
    "IngestReport": "expstore.ingest.report",
    "Mixture": "expstore.sampling.mixture",
    "NStep": "expstore.loading.nstep",
    "OfflineDataset": "expstore.loading.offline",
    "Prioritized": "expstore.sampling.prioritized",
    "PrioritySummary": "expstore.summary",
    "Repair": "expstore.storage.repair",
    "Replay": "expstore.loading.replay",
    "ReturnToGo": "expstore.loading.to_go",
    "Ring": "expstore.sampling.ring",
    "Sequence": "expstore.sampling.sequence",
    "SequenceConfig": "expstore.sampling.sequence",
    "SequenceDataset": "expstore.loading.dataset",
    "Stack": "expstore.loading.stack",
    "Statistics": "expstore.loading.statistics",
    "Step": "expstore.loading.units",
    "StoreSummary": "expstore.summary",
    "Uniform": "expstore.sampling.uniform",
    "Verification": "expstore.storage.verification",
    "WithoutReplacement": "expstore.sampling.uniform",
    "add_field": "expstore.storage.adding",
    "compact": "expstore.storage.copying",
    "delete": "expstore.storage.deletion",
    "export_to": "expstore.exporting",
    "history": "expstore.storage.history",
    "ingest_from": "expstore.ingesting",
    "inspect": "expstore.summary",
    "merge": "expstore.storage.copying",
    "repair": "expstore.storage.repair",
    "sequence_loader": "expstore.loading.dataset",
    "verify": "expstore.storage.verification",
}

__all__ = [
    "Addition",
    "Batch",
    "CommitSummary",
    "Copy",
    "Deletion",
    "EpisodeSummary",
    "Export",
    "ExpstoreError",
    "Field",
    "FieldRange",
    "FieldSummary",
    "Goals",
    "Hindsight",
    "IngestProgress",
    "IngestReport",
    "Mixture",
    "NStep",
    "OfflineDataset",
    "Prioritized",
    "PrioritySummary",
    "Repair",
    "Replay",
    "ReturnToGo",
    "Ring",
    "Schema",
    "Sequence",
    "SequenceConfig",
    "SequenceDataset",
    "Stack",
    "Statistics",
    "Step",
    "Store",
    "StoreSummary",
    "Uniform",
    "Verification",
    "WithoutReplacement",
    "Writer",
    "add_field",
    "compact",
    "delete",
    "errors",
    "export_to",
    "history",
    "ingest_from",
    "inspect",
    "merge",
    "open",
    "repair",
    "sequence_loader",
    "union",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'expstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
