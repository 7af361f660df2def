"""BatchReader: from anchors to a Batch, for `Replay` and `SequenceDataset` alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.loading.batch import Batch, Info
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
        spans = store.spans
        plan = self.unit.plan(spans, draw.anchors)
        shape = (len(draw.anchors), self.unit.window)
        constant = self._constants(len(draw.anchors))
        info = {
            "index": plan.steps,
            "anchor_index": spread(spans.steps_at(draw.anchors)[:, None], shape),
            "validity_mask": plan.valid,
            **{name: array.copy() for name, array in constant.items()},
            "weight": spread(draw.weight[:, None], shape),
        }
        steps = plan.steps
        if isinstance(self.unit, Step):
            steps = steps[:, 0]
            info = {name: np.ascontiguousarray(array[:, 0]) for name, array in info.items()}
        return Batch(
            self.gather.read(store, steps),
            Info({name: torch.from_numpy(array) for name, array in info.items()}),
        )

    @lru_cache(maxsize=4)  # noqa: B019  (a reader lives as long as its loader)
    def _constants(self, batch_size: int) -> dict[str, NDArray[Any]]:
        """What is the same in every batch of this size, (B, W)."""
        shape = (batch_size, self.unit.window)
        return {
            "learning_mask": spread(self.unit.learning, shape),
            "sequence_id": spread(np.arange(shape[0])[:, None], shape),
            "step_in_sequence": spread(np.arange(shape[1]), shape),
        }


def spread(values: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """A new array of the shape with `values` broadcast into it."""
    out = np.empty(shape, values.dtype)
    out[:] = values
    return out
