"""Gather: rows of a store copied into tensors, in reused memory and in threads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.schema import Field
from expstore.storage.parallel import Threads
from expstore.storage.reading import resolve
from expstore.storage.store import Store

ALIGNED_BYTES = 64  # a cache line
KEPT_BUFFERS = 4  # free ones of each size


class Gather:
    """Reads the same fields of a store again and again.

    The fields of a batch lie side by side in one buffer, which is used again when the last
    tensor on it is garbage.
    """

    def __init__(self, fields: dict[str, Field], num_threads: int | None = None) -> None:
        self.fields = fields
        self.threads = Threads(num_threads or min(4, os.cpu_count() or 1))
        self._ragged = [name for name, field in fields.items() if field.ragged]
        self._field_of = {**fields, **{f"{name}/values": fields[name] for name in self._ragged}}
        self._buffers = Buffers()
        self._layouts: dict[tuple[int, tuple[str, ...] | None], Packed] = {}

    @staticmethod
    def of(store: Store, names: Iterable[str] | None, num_threads: int | None = None) -> Gather:
        """Of the named fields, as in `Store.read`; None for all."""
        return Gather(resolve(store.snapshots[0].schema, names), num_threads)

    def read(
        self,
        store: Store,
        steps: NDArray[np.int64],
        names: tuple[str, ...] | None = None,
        memory: Memory | None = None,
    ) -> dict[str, torch.Tensor]:
        """Tensors (*S, *shape) of the given steps S, which the store is known to hold.

        All fields, or those named; into `memory` if that is given. A ragged field comes as
        `<name>/values` (*S, longest, *shape), filled up with zeros, and `<name>/length` (*S).
        """
        flat = steps.reshape(-1)
        packed = self._layouts.get((len(flat), names))
        if packed is None:
            fields = {name: self.fields[name] for name in names or self.fields}
            fixed = {name: f for name, f in fields.items() if not f.ragged}
            packed = self._layouts[len(flat), names] = Packed.of(fixed, len(flat))
        out = packed.views((memory or self._buffers).empty(packed.num_bytes))
        store.read_into(flat, out, self.threads)
        for name in self._ragged if names is None else set(self._ragged).intersection(names):
            rows = store.read_ragged(name, flat)
            out[f"{name}/values"], out[f"{name}/length"] = rows.padded(), rows.lengths
        shape = steps.shape
        return {
            name: as_tensor(array.reshape(shape + array.shape[1:]), self._field_of.get(name))
            for name, array in out.items()
        }

    def __reduce__(self) -> Any:
        return Gather, (self.fields, self.threads.num_threads)


class Memory(Protocol):
    """Where batches are read into."""

    def empty(self, num_bytes: int) -> NDArray[np.uint8]:
        """An array to fill."""
        ...


@dataclass(frozen=True)
class Packed:
    """Where each field's rows lie in a buffer."""

    num_bytes: int
    places: tuple[
        tuple[str, tuple[int, ...], np.dtype[Any], int], ...
    ]  # name, shape, dtype, offset

    @staticmethod
    def of(fields: dict[str, Field], num_rows: int) -> Packed:
        places, offset = [], 0
        for name, field in fields.items():
            places.append((name, (num_rows, *field.shape), field.stored_dtype, offset))
            offset += -(-num_rows * field.step_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return Packed(offset, tuple(places))

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Each field's part of `memory`, (n, *shape)."""
        return {
            name: np.ndarray(shape, dtype, memory, offset)
            for name, shape, dtype, offset in self.places
        }


class Buffers:
    """Memory that is used again once nothing refers to it.

    A fresh array of 39 MB costs more to fault in than to fill; one that comes back here
    when the last tensor on it is garbage costs nothing.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def empty(self, num_bytes: int) -> NDArray[np.uint8]:
        """A new array, for all that the caller can tell."""
        free = self._free.setdefault(num_bytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(num_bytes, np.uint8)
        return np.asarray(_Loan(memory, free))


class _Loan:
    """Owner of an array's memory as numpy sees it; gives the memory back when it dies."""

    _most = KEPT_BUFFERS  # at the end of the interpreter, the module's own names are gone

    def __init__(self, memory: NDArray[np.uint8], free: list[NDArray[np.uint8]]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        if len(self._free) < self._most:
            self._free.append(self._memory)


def as_tensor(array: NDArray[Any], field: Field | None) -> torch.Tensor:
    """The array as a tensor of the field's own dtype, without a copy."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if field and field.dtype == "bfloat16" else tensor
