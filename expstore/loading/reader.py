"""BatchReader: from anchors to a Batch, for `Replay` and `SequenceDataset` alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.loading.batch import Batch, Entry, Info
from expstore.loading.gather import Gather
from expstore.loading.units import Step, Unit
from expstore.sampling.draw import Draw
from expstore.storage.store import Store


class BatchReader:
    """Plans the windows of a draw, reads their rows and describes them."""

    def __init__(
        self,
        store: Store,
        unit: Unit,
        fields: Iterable[str] | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.unit = unit
        self.gather = Gather.of(store, fields, num_threads)

    def read(self, store: Store, draw: Draw) -> Batch:
        """The batch of a draw's anchors, which are positions in `store`."""
        spans, anchors = store.spans, draw.anchors
        plan = self.unit.plan(spans, anchors)
        shape = (len(anchors), self.unit.window)
        info: dict[str, Entry] = {
            "index": plan.steps,
            "anchor_index": lambda: spread(spans.steps_at(anchors)[:, None], shape),
            "validity_mask": plan.valid,
            "learning_mask": lambda: spread(self.unit.learning, shape),
            "sequence_id": lambda: spread(np.arange(shape[0])[:, None], shape),
            "step_in_sequence": lambda: spread(np.arange(shape[1]), shape),
            "weight": lambda: spread(draw.weight[:, None], shape),
        }
        steps = plan.steps
        if isinstance(self.unit, Step):
            steps = steps[:, 0]
            info = {name: partial(first_records, entry) for name, entry in info.items()}
        return Batch(self.gather.read(store, steps), Info(info))


def first_records(entry: Any) -> NDArray[Any]:
    """(B,) of an entry (B, 1), which may have to be made first."""
    return np.ascontiguousarray((entry() if callable(entry) else entry)[:, 0])


def spread(values: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """A new array of the shape with `values` broadcast into it."""
    out = np.empty(shape, values.dtype)
    out[:] = values
    return out
