"""Goals: states of the same episode, or of any other, that a record is asked to reach."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.errors import SchemaError
from expstore.loading.hindsight import uniform
from expstore.loading.rows import (
    Records,
    Rows,
    RowsAbove,
    Steps,
    bits_of,
    bounds_of,
    has_next,
    like,
    needed,
)
from expstore.loading.units import Layer, Step, Unit, as_share, check_unit, layers_of
from expstore.schema import Field, Schema

_KIND, _WHERE = 0x474F414C31, 0x474F414C32  # apart from all that samplers draw


@dataclass(frozen=True)
class Goals(Layer):
    """The unit that gives each anchor a goal: a state, as one more field of the batch.

    With probability `current` the goal is the anchor's own state, with `future` one that its
    episode came to later, with `random` the state of any step. These are the goals of OGBench
    (Park et al., 2024, arXiv:2410.20092); for both sets that it uses, nest two:
    `Goals("value_goal", unit=Goals("actor_goal", current=0, future=1, random=0, gamma=None))`.

    All records of a window get their anchor's goal. `info.<name>_reached` says for which records
    the goal is their own state, `info.<name>_distance` how many steps after the record it came,
    -1 for a goal out of the blue. Rewards stay as they were recorded. Which goals is a function
    of seed and number of the draw, as the anchors are.

    Args:
        name: of the new field.
        current: share of the anchors.
        future: share; the three sum to 1.
        random: share.
        gamma: a future goal is k steps away with probability (1 - gamma) * gamma**(k - 1), or the
            last state of the episode if that is nearer; None for all later states alike.
        state: field that goals are values of.
        unit: what the records are.

    Raises:
        SchemaError: an argument of no use.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     number = writer.append({"observation": np.arange(6), "reward": np.ones(5)})
        >>> unit = expstore.Goals(current=0, future=1, random=0, gamma=0.0)
        >>> batch = expstore.SequenceDataset(expstore.open(path), unit).batch([0, 4])
        >>> batch["goal"].tolist()
        [1, 5]
    """

    order: ClassVar[int] = 3

    name: str = "goal"
    current: float = 0.2
    future: float = 0.5
    random: float = 0.3
    gamma: float | None = 0.99
    state: str = "observation"
    unit: Unit = Step()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        shares = [as_share(n, getattr(self, n)) for n in ("current", "future", "random")]
        if abs(sum(shares) - 1) > 1e-9:
            raise SchemaError(f"current, future and random must sum to 1, got {sum(shares)}")
        if self.gamma is not None and not 0 <= self.gamma < 1:
            raise SchemaError(f"gamma must be from 0 to below 1, or None, got {self.gamma!r}")
        check_unit(self.unit)
        names = [unit.name for unit in layers_of(self) if isinstance(unit, Goals)]
        if len(set(names)) < len(names):
            raise SchemaError(f"two goals have the name {self.name!r}; give each its own")

    def outputs(self, schema: Schema, wanted: dict[str, Field]) -> dict[str, Field]:
        """What was asked for, and the goal."""
        state = needed(schema, self.state, "state")
        if state.ragged:
            raise SchemaError(f"state {self.state!r} must have one shape; goals are compared")
        if self.name in schema.fields:
            raise SchemaError(f"the store has a field {self.name!r}; give the goal another name")
        return {**wanted, self.name: replace(state, has_next=False)}

    def apply(self, records: Records) -> Records:
        """The records with a goal."""
        chosen = ChosenGoals.drawn(self, records.rows)
        distance = chosen.distance(records.steps)
        return replace(
            records,
            rows=GoalRows(records.rows, self.name, chosen.values),
            info={
                **records.info,
                f"{self.name}_reached": distance == 0,
                f"{self.name}_distance": distance,
            },
        )


@dataclass(frozen=True)
class ChosenGoals:
    """The goal of each anchor."""

    start: Steps  # (B,) first step of the episode that the goal is of, or -1 for out of the blue
    stop: Steps  # (B,) one past its last one
    moment: Steps  # (B,) step whose state the goal is; `stop` for the one after the last step
    values: torch.Tensor  # (B, *shape)

    @staticmethod
    def drawn(unit: Goals, rows: Rows) -> ChosenGoals:
        draw, spans, store = rows.draw, rows.store.spans, rows.store
        salt = zlib.crc32(unit.name.encode())
        kind, where = (uniform(draw, which ^ salt << 8) for which in (_KIND, _WHERE))
        steps = spans.steps_at(draw.anchors)
        start, stop = bounds_of(spans, steps)
        has_final = np.zeros(len(steps), bool)
        if store.fields[unit.state].has_next:
            has_final = has_next(store, stop - 1)
        last = stop - ~has_final  # the last moment whose state is known
        moment = np.minimum(steps + offsets(unit.gamma, where, last - steps), last)
        is_current, is_random = kind < unit.current, kind >= unit.current + unit.future
        moment[is_current] = steps[is_current]
        anywhere = (where * spans.num_steps).astype(np.int64)
        moment[is_random] = spans.steps_at(np.minimum(anywhere, spans.num_steps - 1))[is_random]
        start = np.where(is_random, -1, start)
        # The state after the last step is the next value of that one.
        after = moment == np.where(is_random, -1, stop)
        values = rows.read({unit.state: moment - after})[unit.state]
        if after.any():
            following = f"next_{unit.state}"
            final = rows.read({following: np.minimum(moment, stop - 1)})[following]
            bits_of(values)[after] = bits_of(final)[after]
        return ChosenGoals(start, stop, moment, values)

    def distance(self, steps: Steps) -> NDArray[np.int64]:
        """(B, ...) steps from each record to its goal; -1 where it is out of reach or passed."""
        start, stop, moment = (
            v.reshape(-1, *[1] * (steps.ndim - 1)) for v in (self.start, self.stop, self.moment)
        )
        same = (steps == moment) | ((start >= 0) & (start <= steps) & (steps < stop))
        apart: NDArray[np.int64] = np.where(same & (steps <= moment), moment - steps, -1)
        return apart


@dataclass(frozen=True)
class GoalRows(RowsAbove):
    """Rows that have a goal, too."""

    name: str
    values: torch.Tensor  # (B, *shape)

    def read(self, wanted: Mapping[str, Steps]) -> dict[str, torch.Tensor]:
        """See `Rows.read`."""
        out = self.below.read({n: steps for n, steps in wanted.items() if n != self.name})
        if self.name in wanted:
            steps, bits = wanted[self.name], bits_of(self.values)
            between = [1] * (steps.ndim - 1)
            spread = np.broadcast_to(
                bits.reshape(len(bits), *between, *bits.shape[1:]), steps.shape + bits.shape[1:]
            )
            out[self.name] = like(spread.copy(), self.values)
        return out


def offsets(
    gamma: float | None, where: NDArray[np.float64], most: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(B,) how far away a future goal is, at least 1, by fractions `where` in [0, 1).

    >>> offsets(None, np.array([0.0, 0.5, 0.9]), np.array([4, 4, 4])).tolist()
    [1, 3, 4]
    """
    if gamma is None:
        far = where * np.maximum(most, 1)
    elif gamma:
        far = np.minimum(np.log1p(-where) / np.log(gamma), 2.0**40)
    else:
        far = np.zeros(len(where))
    return np.asarray(1 + far.astype(np.int64), np.int64)
