"""Statistics of a field: one pass over a store in blocks, whatever its size."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import FieldNotFoundError, SchemaError, StepRangeError
from expstore.loading.rows import column, numbers_of
from expstore.schema import unknown_field
from expstore.storage.store import Store

BLOCK_BYTES = 8 << 20  # of rows in memory at a time, as float64
MAX_KEPT = 256  # results of fields, commits and views that are remembered


@dataclass(frozen=True)
class Statistics:
    """Of one field over all steps of a store or view; NaN where a value is NaN."""

    mean: NDArray[np.float64]  # (*shape)
    std: NDArray[np.float64]  # (*shape) of the population, not of a sample
    min: NDArray[Any]  # (*shape) of the field's dtype
    max: NDArray[Any]  # (*shape)
    count: int  # steps

    @staticmethod
    def of(store: Store, name: str) -> Statistics:
        """Read a field once; the result is remembered for this commit and selection.

        Raises:
            FieldNotFoundError: there is no such field.
            SchemaError: it is ragged.
            StepRangeError: there are no steps.
        """
        if name not in store.fields:
            raise FieldNotFoundError(unknown_field(name, store.fields))
        if store.fields[name].ragged:
            raise SchemaError(f"field {name!r} has values of any number per step: no statistics")
        if not store.num_steps:
            raise StepRangeError("there are no steps to take statistics of; widen the filter")
        parts = [
            (i["store_id"], i["commit"], i["selection"], i["path"]) for i in store.identities()
        ]
        key = (name, *parts)
        if key not in _kept:
            _kept[key] = _taken(store, name)
            if len(_kept) > MAX_KEPT:
                _kept.popitem(last=False)
        return _kept[key]


_kept: OrderedDict[Any, Statistics] = OrderedDict()


def _taken(store: Store, name: str) -> Statistics:
    field = store.fields[name]
    num_steps = store.num_steps
    size = max(1, BLOCK_BYTES // (8 * field.step_bytes // field.stored_dtype.itemsize))
    moments, low, high = Moments(np.zeros(field.shape), np.zeros(field.shape), 0), None, None
    with np.errstate(all="ignore"):  # infinite values are the recorder's to have
        for first in range(0, num_steps, size):
            positions = np.arange(first, min(first + size, num_steps))
            rows = numbers_of(column(store, name, store.spans.steps_at(positions)))
            moments = moments.joined(Moments.of(rows))
            smallest, largest = rows.min(axis=0), rows.max(axis=0)
            low = smallest if low is None else np.minimum(low, smallest)
            high = largest if high is None else np.maximum(high, largest)
    std = np.sqrt(moments.squares / moments.count)
    return Statistics(moments.mean, std, np.asarray(low), np.asarray(high), moments.count)


@dataclass(frozen=True)
class Moments:
    """Mean and sum of squared differences from it, which can be joined (Chan et al., 1979)."""

    mean: NDArray[np.float64]
    squares: NDArray[np.float64]
    count: int

    @staticmethod
    def of(rows: NDArray[Any]) -> Moments:
        values = rows.astype(np.float64)
        mean = values.mean(axis=0)
        return Moments(mean, np.square(values - mean).sum(axis=0), len(values))

    def joined(self, other: Moments) -> Moments:
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        between = np.square(apart) * (self.count * other.count / count)
        return Moments(mean, self.squares + other.squares + between, count)
