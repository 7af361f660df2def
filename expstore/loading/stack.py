"""Stack: the last k values of a field in place of the newest one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.errors import SchemaError
from expstore.loading.rows import (
    RAGGED_PARTS,
    Records,
    RowsAbove,
    Steps,
    bits_of,
    bounds_of,
    like,
)
from expstore.loading.units import Layer, Step, Unit, as_count, check_unit, layers_of
from expstore.schema import Field, Schema
from expstore.storage.reading import DERIVED, resolve


@dataclass(frozen=True)
class Stack(Layer):
    """The unit that stacks the last k values of some fields, as frame stacking does.

    A field of the record at step t comes as (B, k, *shape), or (B, W, k, *shape) for windows:
    the values of steps t - k + 1 to t, the newest one last. Before the start of the record's
    episode, its first value is repeated. `next_<field>` is the stack one step later: it ends in
    the value after t. Neither `burn_in` nor `dilation` of a `Sequence` bear on it.

    Args:
        k: values in a stack.
        fields: names of fields or of groups of them, as in `Store.read`.
        unit: what the records are: `Step()`, `Sequence(...)`, or these within `NStep`,
            `Hindsight` and a `Stack` of other fields.

    Raises:
        SchemaError: an argument out of range.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     number = writer.append({"observation": np.arange(5), "reward": np.ones(4)})
        >>> dataset = expstore.SequenceDataset(expstore.open(path), expstore.Stack(3))
        >>> dataset.batch([0, 1, 3])["observation"].tolist()
        [[0, 0, 0], [0, 0, 1], [1, 2, 3]]
    """

    order: ClassVar[int] = 1  # below `NStep`, which says after which step comes the next value

    k: int
    fields: tuple[str, ...] = ("observation",)
    unit: Unit = Step()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", as_count("k", self.k))
        object.__setattr__(self, "fields", as_names(self.fields))
        check_unit(self.unit)

    def outputs(self, schema: Schema, wanted: dict[str, Field]) -> dict[str, Field]:
        """What was asked for; each field has one stack at most."""
        own = self.stacked(schema)
        for other in layers_of(self.unit):
            if isinstance(other, Stack) and (twice := own & other.stacked(schema)):
                raise SchemaError(
                    f"field {min(twice)!r} is stacked twice; leave it out of fields= of one Stack"
                )
        return wanted

    def stacked(self, schema: Schema) -> set[str]:
        """The names of the fields themselves."""
        return set(resolve(schema, self.fields))

    def apply(self, records: Records) -> Records:
        """The records with stacks in place of values."""
        names = self.stacked(records.rows.store.snapshots[0].schema)
        return replace(records, rows=StackRows(records.rows, self.k, names))


@dataclass(frozen=True)
class StackRows(RowsAbove):
    """Rows in which some fields, and what comes next of them, are stacks."""

    k: int
    names: set[str]

    def read(self, wanted: Mapping[str, Steps]) -> dict[str, torch.Tensor]:
        """See `Rows.read`."""
        own = {n: s for n, s in wanted.items() if n.removeprefix("next_") in self.names}
        distinct = {id(steps): steps for steps in own.values()}
        # One array for all fields at the same steps: those are read together.
        stacks = {key: self._stack(steps) for key, steps in distinct.items()}
        at = {n: stacks[id(s)] if n in self.names else s for n, s in wanted.items()}
        out = self.below.read(at)
        following = {n: n.removeprefix("next_") for n in own if n not in self.names}
        newer = {key: stack[..., 1:] for key, stack in stacks.items()}
        missing = {
            base: newer[id(own[name])]
            for name, base in following.items()
            if self.k > 1 and at.get(base) is not stacks[id(own[name])]
        }
        past = self.below.read(missing)
        for name, base in following.items():
            for part in ("", *RAGGED_PARTS):
                if name + part in out:
                    before = past.get(base + part, out.get(base + part))
                    out[name + part] = self._shifted(before, out[name + part], own[name].ndim)
        return out

    def _stack(self, steps: Steps) -> Steps:
        """(*S, k) steps of the stacks of steps (*S)."""
        start, _ = bounds_of(self.store.spans, steps)
        wanted = steps[..., None] + np.arange(1 - self.k, 1)
        return np.asarray(np.maximum(wanted, start[..., None]))

    def _shifted(
        self, before: torch.Tensor | None, newest: torch.Tensor, axis: int
    ) -> torch.Tensor:
        """The stack that follows `before`, of which the last k - 1 values along `axis` stay."""
        if before is None or self.k == 1:
            return newest.unsqueeze(axis)
        behind, last = bits_of(before), np.expand_dims(bits_of(newest), axis)
        behind = behind[(*[slice(None)] * axis, slice(behind.shape[axis] - self.k + 1, None))]
        if behind.ndim > axis + 1 and behind.shape[axis + 1] != last.shape[axis + 1]:
            longest = max(behind.shape[axis + 1], last.shape[axis + 1])  # both are ragged
            behind, last = (lengthened(rows, axis + 1, longest) for rows in (behind, last))
        return like(np.concatenate([behind, last], axis), newest)


def lengthened(rows: NDArray[Any], axis: int, length: int) -> NDArray[Any]:
    """The rows filled up with zeros along an axis.

    >>> lengthened(np.ones((1, 2)), 1, 3).tolist()
    [[1.0, 1.0, 0.0]]
    """
    widths = [(0, 0)] * rows.ndim
    widths[axis] = (0, length - rows.shape[axis])
    return np.pad(rows, widths)


def as_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of fields that can be stacked; one name stands for itself."""
    given = (names,) if isinstance(names, str) else names
    found = tuple(given) if isinstance(given, Iterable) else ()
    if not found or not all(isinstance(name, str) for name in found):
        raise SchemaError(f"fields must be names of fields, got {names!r}")
    for name in found:
        if name in DERIVED or name.startswith("next_"):
            raise SchemaError(
                f"fields must be recorded ones, got {name!r}; the next values of a stacked field "
                "are stacked with it"
            )
    return found
