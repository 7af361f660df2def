"""BatchReader: from anchors to a Batch, for `Replay` and `SequenceDataset` alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.loading.batch import Batch, Entry, Info
from expstore.loading.gather import Gather, Memory
from expstore.loading.rows import RAGGED_PARTS, Records, StoreRows, readable
from expstore.loading.units import Step, Unit, base_of, layers_of
from expstore.sampling.draw import Draw
from expstore.sampling.sequence import Sequence
from expstore.sampling.uniform import Uniform
from expstore.sampling.window import WindowPlan
from expstore.spans import Spans
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
        self._made: dict[tuple[int, int], dict[str, Entry]] = {}
        schema = store.snapshots[0].schema
        self.fields = resolve(schema, fields)
        if self.layers and schema.fields:  # else there is no schema yet, nor a row
            for layer in self.layers:
                self.fields = layer.outputs(schema, self.fields)
            self.gather = Gather(readable(schema), num_threads)
        else:
            self.gather = Gather(self.fields, num_threads)

    def read(self, store: Store, draw: Draw, memory: Memory | None = None) -> Batch:
        """The batch of a draw's anchors, which are positions in `store`.

        Its fields lie in `memory` if that is given, else in memory that is used again when the
        batch is garbage.
        """
        spans, anchors = store.spans, draw.anchors
        plan = plan_in(self.base, store, anchors)
        shape = (len(anchors), self.base.window)
        info: dict[str, Entry] = {
            "index": plan.steps,
            "anchor_index": lambda: spread(spans.steps_at(anchors)[:, None], shape),
            "validity_mask": plan.valid,
            **self._constants(shape),
            "weight": lambda: spread(draw.weight[:, None], shape),
        }
        steps, valid = plan.steps, plan.valid
        if isinstance(self.base, Step):
            steps, valid = steps[:, 0], valid[:, 0]
            info = {name: partial(first_records, entry) for name, entry in info.items()}
        if not self.layers:
            return Batch(self.gather.read(store, steps, memory=memory), Info(info))
        records = Records(StoreRows(self.gather, store, draw, memory), steps, valid, {})
        for layer in self.layers:
            records = layer.apply(records)
        return Batch(
            self._read(records), Info({**info, "validity_mask": records.valid, **records.info})
        )

    def _constants(self, shape: tuple[int, int]) -> dict[str, Entry]:
        """What is the same in every batch (B, W): made once, and copied for whoever asks."""
        made = self._made.get(shape)
        if made is None:
            arrays = {
                "learning_mask": spread(self.base.learning, shape),
                "sequence_id": spread(np.arange(shape[0])[:, None], shape),
                "step_in_sequence": spread(np.arange(shape[1]), shape),
            }
            made = {name: array.copy for name, array in arrays.items()}
            self._made = {shape: made}  # batches differ in size at the end of an epoch only
        return made

    def _read(self, records: Records) -> dict[str, torch.Tensor]:
        """The fields of the batch in their order."""
        tensors = records.rows.read(dict.fromkeys(self.fields, records.steps))
        parts = (name + part for name in self.fields for part in ("", *RAGGED_PARTS))
        return {name: tensors[name] for name in parts if name in tensors}


@cache
def warm_up() -> None:
    """Load the compiled loops, which takes a second, and longer once on a machine."""
    from expstore.storage.row_kernels import copy_block, copy_rows, gather_rows

    one = np.zeros(1, np.int64)
    spans = Spans.laid_out(one, one + 1)
    Uniform().draw(spans, 1, seed=0)
    Sequence(length=1).plan(spans, one)
    gather_rows(np.empty((0, 3), np.int64), one, 0, 1)
    words = np.zeros((1, 2), np.uint64)
    words.flags.writeable = False  # as what is mapped
    nothing = np.empty((0, 2), np.uint64)
    copy_rows(words, one[:0], nothing)
    copy_block(np.zeros((1, 2), np.uint64), 0, 0, nothing, 0)


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
