"""Gather: rows of a store copied into tensors, in reused memory and in threads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.schema import Field
from expstore.storage.reading import resolve
from expstore.storage.store import Store

ALIGNED_BYTES = 64  # a cache line
KEPT_BUFFERS = 4  # free ones of each size
SPLIT_BYTES = 1 << 20  # a field of a batch is copied by several threads from this size on


class Gather:
    """Reads the same fields of a store again and again.

    The fields of a batch lie side by side in one buffer, which is used again when the last
    tensor on it is garbage.
    """

    def __init__(self, fields: dict[str, Field], num_threads: int | None = None) -> None:
        self.fields = fields
        self.num_threads = num_threads or min(4, os.cpu_count() or 1)
        self._buffers = Buffers()
        self._layouts: dict[int, Packed] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    @staticmethod
    def of(store: Store, names: Iterable[str] | None, num_threads: int | None = None) -> Gather:
        """Of the named fields, as in `Store.read`; None for all."""
        return Gather(resolve(store.snapshots[0].schema, names), num_threads)

    def read(self, store: Store, steps: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Tensors (*S, *shape) of the given steps S, which the store is known to hold."""
        flat = steps.reshape(-1)
        packed = self._layouts.get(len(flat))
        if packed is None:
            packed = self._layouts[len(flat)] = Packed.of(self.fields, len(flat))
        out = packed.views(self._buffers.empty(packed.num_bytes))
        if packed.large:
            self._read_split(store, flat, {name: out[name] for name in packed.large})
            store.read_into(flat, {n: a for n, a in out.items() if n not in packed.large})
        else:
            store.read_into(flat, out)
        return {
            name: as_tensor(array, self.fields[name]).view(*steps.shape, *array.shape[1:])
            for name, array in out.items()
        }

    def _read_split(
        self, store: Store, steps: NDArray[np.int64], out: dict[str, NDArray[Any]]
    ) -> None:
        edges = np.linspace(0, len(steps), self.num_threads + 1).astype(int).tolist()
        parts = [slice(*edge) for edge in pairwise(edges)]

        def read(part: slice) -> None:
            store.read_into(steps[part], {name: array[part] for name, array in out.items()})

        if self.num_threads == 1:
            read(parts[0])
            return
        others = [self._pool().submit(read, part) for part in parts[1:]]
        read(parts[0])
        for other in others:
            other.result()

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None or self._process != os.getpid():  # threads do not survive a fork
            self._threads = ThreadPoolExecutor(self.num_threads - 1, "expstore-gather")
            self._process = os.getpid()
        return self._threads

    def __getstate__(self) -> dict[str, Any]:
        return {"fields": self.fields, "num_threads": self.num_threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


@dataclass(frozen=True)
class Packed:
    """Where each field's rows lie in a buffer."""

    num_bytes: int
    places: tuple[
        tuple[str, tuple[int, ...], np.dtype[Any], int], ...
    ]  # name, shape, dtype, offset
    large: frozenset[str]  # fields that are worth several threads

    @staticmethod
    def of(fields: dict[str, Field], num_rows: int) -> Packed:
        places, large, offset = [], set(), 0
        for name, field in fields.items():
            places.append((name, (num_rows, *field.shape), field.stored_dtype, offset))
            num_bytes = num_rows * field.step_bytes
            offset += -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
            if num_bytes >= SPLIT_BYTES:
                large.add(name)
        return Packed(offset, tuple(places), frozenset(large))

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

    def __init__(self, memory: NDArray[np.uint8], free: list[NDArray[np.uint8]]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        if len(self._free) < KEPT_BUFFERS:
            self._free.append(self._memory)


def as_tensor(array: NDArray[Any], field: Field) -> torch.Tensor:
    """The array as a tensor of the field's own dtype, without a copy."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if field.dtype == "bfloat16" else tensor
