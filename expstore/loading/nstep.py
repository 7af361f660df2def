"""NStep: each record becomes a transition over several steps, with its discounted return."""

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
    has_next,
    in_dtype_of,
    is_terminated,
    needed,
    numbers_of,
)
from expstore.loading.units import Layer, Step, Unit, as_count, as_share, check_once
from expstore.schema import FLAGS, Field, Schema
from expstore.storage.reading import resolve
from expstore.storage.store import Store

AFTER = (*FLAGS, "done", "has_next")  # say what is after a step, as `next_<field>` does


@dataclass(frozen=True)
class NStep(Layer):
    """The unit that makes an n-step transition of each record of another unit.

    Of a record at step t, which uses m steps:

    - the reward is `sum(gamma ** i * reward[t + i] for i in range(m))`,
    - `next_<field>`, `terminated`, `truncated`, `done` and `has_next` are those of the last step
      used, t + m - 1,
    - `info.discount` (float32) is `gamma ** m`, or 0 if that step terminated its episode,
    - `info.num_steps` (int64) is m,
    - every other field is that of step t,

    so that `reward + discount * value(next_observation)` is the target (Sutton and Barto:
    Reinforcement Learning, 2018, section 7.1). m is n, or what is left of the record's episode:
    returns never run over a terminated step, and at a truncated one, or where an episode was cut,
    they bootstrap from its final observation. Where that was not recorded, the last observation
    there is takes its place: the return stops one step earlier. The last step of such an episode
    has nothing to bootstrap from; there m is 1, the discount 0 and the `validity_mask` False.

    The reward and the next value of every field that has such (all observations) come along,
    whatever `fields` of the batch names. Nothing of n or gamma is stored: change them at will.

    Args:
        n: steps of a transition at most.
        gamma: discount per step, 0 to 1.
        reward: field of numbers of any shape. Floats stay what they are, summed in float64;
            integers become float32.
        unit: what the records are: `Step()`, `Sequence(...)`, or these within `Stack` and
            `Hindsight`.

    Raises:
        SchemaError: an argument out of range.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     number = writer.append({"observation": np.arange(5), "reward": np.ones(4)})
        >>> dataset = expstore.SequenceDataset(expstore.open(path), expstore.NStep(3, gamma=0.5))
        >>> batch = dataset.batch([0, 1, 2])
        >>> batch["reward"].tolist(), batch["next_observation"].tolist()
        ([1.75, 1.75, 1.5], [3, 4, 4])
        >>> batch.info.discount.tolist()
        [0.125, 0.125, 0.25]
    """

    order: ClassVar[int] = 2  # its steps may be stacked, and its rewards those of other goals

    n: int
    gamma: float
    reward: str = "reward"
    unit: Unit = Step()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", as_count("n", self.n))
        object.__setattr__(self, "gamma", as_share("gamma", self.gamma))
        check_once(self)

    def outputs(self, schema: Schema, wanted: dict[str, Field]) -> dict[str, Field]:
        """What was asked for, the reward, and the next value of what has one."""
        reward = needed(schema, self.reward, "reward")
        if reward.ragged:
            raise SchemaError(f"field {self.reward!r} must be numbers to sum, got {reward.dtype}")
        following = [f"next_{n}" for n in wanted if n in schema.fields and schema[n].has_next]
        return {**wanted, self.reward: reward, **resolve(schema, following)}

    def apply(self, records: Records) -> Records:
        """Transitions of the records."""
        plan = ReturnPlan.of(records.rows.store, records.steps, self.n)
        valid = records.valid & plan.known
        if records.is_judged is not None:  # of an episode, only the last reward may not be so
            valid &= records.is_judged(plan.last)
        discount = np.where(plan.bootstraps, self.gamma**plan.num_steps, 0).astype(np.float32)
        return replace(
            records,
            rows=ReturnRows(records.rows, self, plan),
            valid=valid,
            info={**records.info, "discount": discount, "num_steps": plan.num_steps},
        )


@dataclass(frozen=True)
class ReturnPlan:
    """Over which steps the return of each record runs."""

    steps: Steps  # (*S) of the records
    num_steps: NDArray[np.int64]  # (*S) m
    last: Steps  # (*S) the last step used
    bootstraps: NDArray[np.bool_]  # (*S) the value after it counts
    known: NDArray[np.bool_]  # (*S) so does what the return is worth: it bootstraps or terminated

    @staticmethod
    def of(store: Store, steps: Steps, n: int) -> ReturnPlan:
        """Of records at steps (*S), n at most."""
        _, stop = bounds_of(store.spans, steps)
        left = stop - steps
        ends = left <= n  # with its episode, if at all
        final = stop[ends] - 1
        terminated = is_terminated(store, final)
        known = terminated | has_next(store, final)
        num_steps = np.minimum(left, n)
        num_steps[ends] = np.maximum(num_steps[ends] - ~known, 1)
        last = steps + num_steps - 1
        is_final = last[ends] == final
        bootstraps, is_known = np.ones((2, *steps.shape), bool)
        bootstraps[ends] = ~is_final | (known & ~terminated)
        is_known[ends] = ~is_final | known
        return ReturnPlan(steps, num_steps, last, bootstraps, is_known)


@dataclass(frozen=True)
class ReturnRows(RowsAbove):
    """Rows in which a record's reward is a return, and what comes next is what follows that."""

    unit: NStep
    plan: ReturnPlan

    def read(self, wanted: Mapping[str, Steps]) -> dict[str, torch.Tensor]:
        """See `Rows.read`; the steps are those of the records."""
        plan, at = self.plan, dict(wanted)
        for name in wanted:
            if name in AFTER or name.startswith("next_"):
                at[name] = plan.last
        offsets = np.arange(self.unit.n)
        at[self.unit.reward] = plan.steps[..., None] + np.minimum(
            offsets, plan.num_steps[..., None] - 1
        )
        out = self.below.read(at)
        used = offsets < plan.num_steps[..., None]
        out[self.unit.reward] = summed(out[self.unit.reward], used, self.unit.gamma)
        return out


def summed(rewards: torch.Tensor, used: NDArray[np.bool_], gamma: float) -> torch.Tensor:
    """The discounted sums (*S, *shape) of rewards (*S, n, *shape), where they are used (*S, n).

    >>> summed(torch.tensor([[1.0, 2.0, 4.0]]), np.array([[True, True, False]]), 0.5)
    tensor([2.])
    """
    example = rewards if rewards.is_floating_point() else torch.empty(0, dtype=torch.float32)
    numbers = numbers_of(rewards)
    shape = (*used.shape, *[1] * (numbers.ndim - used.ndim))
    discounts = np.broadcast_to(gamma ** np.arange(used.shape[-1], dtype=np.float64), used.shape)
    counts = (used & (discounts > 0)).reshape(shape)  # not times 0: a reward may be infinite
    weighted = np.zeros(numbers.shape)
    with np.errstate(all="ignore"):  # infinite rewards may cancel out, or be too large a sum
        np.multiply(numbers, discounts.reshape(shape), out=weighted, where=counts)
        return in_dtype_of(weighted.sum(used.ndim - 1), example)
