"""Rows: where the fields of a batch are read, from a store or through what a unit makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.episode import END_REASONS
from expstore.errors import FieldNotFoundError
from expstore.loading.batch import Entry
from expstore.loading.gather import Gather, Memory, as_tensor
from expstore.sampling.draw import Draw
from expstore.schema import Field, Schema, unknown_field
from expstore.spans import Spans
from expstore.storage.reading import DERIVED, STRIDE, resolve
from expstore.storage.store import Store

RAGGED_PARTS = ("/values", "/length")  # in which a ragged field is read
Steps = NDArray[np.int64]  # of any shape S; the first axis is that of the anchors


class Rows(Protocol):
    """Reads the fields of one batch."""

    @property
    def store(self) -> Store: ...

    @property
    def draw(self) -> Draw: ...

    def read(self, wanted: Mapping[str, Steps]) -> dict[str, torch.Tensor]:
        """Tensors (*S, *shape) of each field at its steps S; the caller may change them.

        A ragged field comes in two, as in `Gather.read`.
        """
        ...


@dataclass(frozen=True)
class RowsAbove:
    """What the rows of every layer have: others below them, of the same store and draw."""

    below: Rows

    @property
    def store(self) -> Store:
        return self.below.store

    @property
    def draw(self) -> Draw:
        return self.below.draw


@dataclass(frozen=True)
class Records:
    """The records of a batch, before they are read: what one layer hands to the next."""

    rows: Rows
    steps: Steps  # (B,) or (B, W)
    valid: NDArray[np.bool_]  # the same shape
    info: Mapping[str, Entry]  # what the layers say about them; the same shape, too
    # Whether the rewards of steps (B, ...) are known for the goals that their records have.
    is_judged: Callable[[Steps], NDArray[np.bool_]] | None = None


@dataclass(frozen=True)
class StoreRows:
    """The rows of a store as they were recorded."""

    gather: Gather
    store: Store
    draw: Draw
    memory: Memory | None = None

    def read(self, wanted: Mapping[str, Steps]) -> dict[str, torch.Tensor]:
        """See `Rows.read`; fields at the same steps are read together."""
        together: dict[int, list[str]] = {}
        for name, steps in wanted.items():
            together.setdefault(id(steps), []).append(name)
        out: dict[str, torch.Tensor] = {}
        for names in together.values():
            out.update(self.gather.read(self.store, wanted[names[0]], tuple(names), self.memory))
        return out


def readable(schema: Schema) -> dict[str, Field]:
    """Every name that has rows."""
    names = list(schema.fields)
    return resolve(schema, [*names, *(f"next_{name}" for name in names), *DERIVED])


def needed(schema: Schema, name: str, argument: str) -> Field:
    """A field that a unit cannot do without.

    Raises:
        FieldNotFoundError: there is none of that name; the text says which argument it was.
    """
    if name not in schema.fields:
        raise FieldNotFoundError(f"{argument} {name!r}: {unknown_field(name, schema.fields)}")
    return schema.fields[name]


def column(store: Store, name: str, steps: Steps) -> torch.Tensor:
    """(n, *shape) of a field at steps (n,), for numbers of steps that differ every time."""
    field = resolve(store.snapshots[0].schema, [name])[name]
    out = np.empty((len(steps), *field.shape), field.stored_dtype)
    store.read_into(steps, {name: out})
    return as_tensor(out, field)


def episodes_of(spans: Spans, steps: Steps) -> NDArray[np.int64]:
    """Which selected episode (0 to E - 1) holds each step; all must be held."""
    return np.searchsorted(spans.start, steps, side="right") - 1


def bounds_of(spans: Spans, steps: Steps) -> tuple[Steps, Steps]:
    """First step, and one past the last step, of the episode of each step."""
    episode = episodes_of(spans, steps)
    start = spans.start[episode]
    return start, start + spans.length[episode]


def has_next(store: Store, steps: Steps) -> NDArray[np.bool_]:
    """(n,) whether there is an observation after each of the steps (n,)."""
    out = np.empty(len(steps), bool)
    store.read_into(steps, {"has_next": out})
    return out


def is_terminated(store: Store, last: Steps) -> NDArray[np.bool_]:
    """(n,) whether the task ended with each of the steps (n,), which are last ones of episodes.

    A store without a field `terminated` says so by the episodes' end reasons.
    """
    if "terminated" in store.fields:
        flags: NDArray[Any] = column(store, "terminated", last).bool().numpy()
        return np.asarray(flags.any(axis=tuple(range(1, flags.ndim))))
    numbers = store.episode_numbers[episodes_of(store.spans, last)]
    out, by_task = np.empty(len(last), bool), END_REASONS.index("terminated")
    for k, snapshot in enumerate(store.snapshots):
        here = numbers // STRIDE == k
        at = numbers[here] - k * STRIDE - snapshot.first_episode
        out[here] = snapshot.index.column("end_reason")[at] == by_task
    return out


def bits_of(values: torch.Tensor) -> NDArray[Any]:
    """A tensor's memory as an array, bfloat16 as uint16: to move values, not to compute.

    Units work on arrays: torch's own threads wait for each other, and for those of training.
    """
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


def like(bits: NDArray[Any], example: torch.Tensor) -> torch.Tensor:
    """The inverse of `bits_of`, for values of the dtype of another tensor."""
    tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if example.dtype == torch.bfloat16 else tensor


def numbers_of(values: torch.Tensor) -> NDArray[Any]:
    """A tensor as an array to compute with, bfloat16 as float32."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def in_dtype_of(numbers: NDArray[Any], example: torch.Tensor) -> torch.Tensor:
    """Numbers as a tensor of the dtype of another one, on the CPU."""
    if example.dtype == torch.bfloat16:
        return torch.from_numpy(numbers).to(torch.bfloat16)
    return torch.from_numpy(numbers.astype(bits_of(example).dtype, copy=False))
