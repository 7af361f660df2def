"""BatchReader: from anchors to a Batch, for `Replay` and `SequenceDataset` alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.loading.batch import Batch, Entry, Info
from expstore.loading.gather import Gather
from expstore.loading.rows import RAGGED_PARTS, Records, StoreRows, readable
from expstore.loading.units import Step, Unit, base_of, layers_of
from expstore.sampling.draw import Draw
from expstore.sampling.sequence import Sequence
from expstore.sampling.window import WindowPlan
from expstore.storage.reading import resolve
from expstore.storage.store import Store


class BatchReader:
    """Plans the windows of a draw, reads their rows and describes them.

    Attributes:
        fields: what the batches hold.
    """

    def __init__(
        self,
        store: Store,
        unit: Unit,
        fields: Iterable[str] | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.base, self.layers = base_of(unit), layers_of(unit)
        schema = store.snapshots[0].schema
        self.fields = resolve(schema, fields)
        if self.layers and schema.fields:  # else there is no schema yet, nor a row
            for layer in self.layers:
                self.fields = layer.outputs(schema, self.fields)
            self.gather = Gather(readable(schema), num_threads)
        else:
            self.gather = Gather(self.fields, num_threads)

    def read(self, store: Store, draw: Draw) -> Batch:
        """The batch of a draw's anchors, which are positions in `store`."""
        spans, anchors = store.spans, draw.anchors
        plan = plan_in(self.base, store, anchors)
        shape = (len(anchors), self.base.window)
        info: dict[str, Entry] = {
            "index": plan.steps,
            "anchor_index": lambda: spread(spans.steps_at(anchors)[:, None], shape),
            "validity_mask": plan.valid,
            "learning_mask": lambda: spread(self.base.learning, shape),
            "sequence_id": lambda: spread(np.arange(shape[0])[:, None], shape),
            "step_in_sequence": lambda: spread(np.arange(shape[1]), shape),
            "weight": lambda: spread(draw.weight[:, None], shape),
        }
        steps, valid = plan.steps, plan.valid
        if isinstance(self.base, Step):
            steps, valid = steps[:, 0], valid[:, 0]
            info = {name: partial(first_records, entry) for name, entry in info.items()}
        if not self.layers:
            return Batch(self.gather.read(store, steps), Info(info))
        records = Records(StoreRows(self.gather, store, draw), steps, valid, {})
        for layer in self.layers:
            records = layer.apply(records)
        return Batch(
            self._read(records), Info({**info, "validity_mask": records.valid, **records.info})
        )

    def _read(self, records: Records) -> dict[str, torch.Tensor]:
        """The fields of the batch in their order."""
        tensors = records.rows.read(dict.fromkeys(self.fields, records.steps))
        parts = (name + part for name in self.fields for part in ("", *RAGGED_PARTS))
        return {name: tensors[name] for name in parts if name in tensors}


def plan_in(unit: Unit, store: Store, anchors: NDArray[np.int64]) -> WindowPlan:
    """The windows of anchors (B,), positions in the store, whatever bounds them there."""
    if isinstance(unit, Sequence):
        return unit.plan(store.spans, anchors, unit.boundaries_in(store))
    return unit.plan(store.spans, anchors)


def first_records(entry: Any) -> NDArray[Any]:
    """(B,) of an entry (B, 1), which may have to be made first."""
    return np.ascontiguousarray((entry() if callable(entry) else entry)[:, 0])


def spread(values: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """A new array of the shape with `values` broadcast into it."""
    out = np.empty(shape, values.dtype)
    out[:] = values
    return out
