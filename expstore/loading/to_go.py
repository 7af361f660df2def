"""ReturnToGo: what an episode still brings, as a field of its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.errors import SchemaError
from expstore.loading.rows import (
    Records,
    RowsAbove,
    Steps,
    bounds_of,
    column,
    needed,
    numbers_of,
)
from expstore.loading.units import Layer, Step, Unit, as_share, check_once
from expstore.schema import Field, Schema
from expstore.storage.store import Store

NAME = "return_to_go"


@dataclass(frozen=True)
class ReturnToGo(Layer):
    """The unit that adds `return_to_go`, the sum of rewards from each record to its episode's end.

    The sum goes to the end of the episode, not of the window, as it was recorded: an episode that
    was cut says nothing of what would have come. `info.timestep` is the place of each record in
    its episode, from 0.

    Args:
        gamma: discount, 0 to 1.
        reward: field of single numbers.
        unit: what the records are: `Step()` or `Sequence(...)`.

    Raises:
        SchemaError: an argument out of range.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     number = writer.append({"reward": [1.0, 2.0, 4.0, 8.0]})
        >>> unit = expstore.ReturnToGo(unit=expstore.Sequence(length=2))
        >>> batch = expstore.SequenceDataset(expstore.open(path), unit).batch([1])
        >>> batch["return_to_go"].tolist(), batch.info.timestep.tolist()
        ([[14.0, 12.0]], [[1, 2]])
    """

    order: ClassVar[int] = 4

    gamma: float = 1.0
    reward: str = "reward"
    unit: Unit = Step()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", as_share("gamma", self.gamma))
        check_once(self)

    def outputs(self, schema: Schema, wanted: dict[str, Field]) -> dict[str, Field]:
        """What was asked for, and the returns."""
        reward = needed(schema, self.reward, "reward")
        if reward.ragged or reward.shape:
            raise SchemaError(
                f"reward {self.reward!r} must be one number per step, got shape {reward.shape}"
            )
        if NAME in schema.fields:
            raise SchemaError(f"the store has a field {NAME!r} already; ask for that one")
        return {**wanted, NAME: Field((), "float32")}

    def apply(self, records: Records) -> Records:
        """The records with returns."""
        store, steps = records.rows.store, records.steps
        start, _ = bounds_of(store.spans, steps)
        rows = ReturnToGoRows(records.rows, self)
        return replace(records, rows=rows, info={**records.info, "timestep": steps - start})


@dataclass(frozen=True)
class ReturnToGoRows(RowsAbove):
    """Rows that have returns, too."""

    unit: ReturnToGo

    def read(self, wanted: Mapping[str, Steps]) -> dict[str, torch.Tensor]:
        """See `Rows.read`."""
        out = self.below.read({n: steps for n, steps in wanted.items() if n != NAME})
        if NAME in wanted:
            returns = returns_at(self.store, wanted[NAME], self.unit.gamma, self.unit.reward)
            out[NAME] = torch.from_numpy(returns.astype(np.float32))
        return out


def returns_at(store: Store, steps: Steps, gamma: float, reward: str) -> NDArray[np.float64]:
    """(*S) sum of the rewards from each step to the end of its episode.

    Rewards are read once for each episode that the steps lie in, from the first of them on.
    """
    flat = steps.reshape(-1)
    _, stop = bounds_of(store.spans, flat)
    ends, which = np.unique(stop, return_inverse=True)
    first = ends.copy()
    np.minimum.at(first, which, flat)
    longest = int((ends - first).max(initial=1))
    held = np.arange(longest) < (ends - first)[:, None]  # (E, L)
    rewards = np.zeros(held.shape)
    rewards[held] = numbers_of(column(store, reward, (first[:, None] + np.arange(longest))[held]))
    sums: NDArray[np.float64] = discounted(rewards, gamma)[which, flat - first[which]]
    return sums.reshape(steps.shape)


def discounted(rewards: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """(E, L) discounted sums from each place to the end of its row.

    >>> discounted(np.array([[1.0, 2.0, 4.0]]), 0.5).tolist()
    [[3.0, 4.0, 4.0]]
    """
    sums = rewards.copy()
    for at in range(rewards.shape[1] - 2, -1, -1):
        sums[:, at] += gamma * sums[:, at + 1]
    return sums
