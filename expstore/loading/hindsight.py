"""Hindsight: goals replaced by what the same episode went on to achieve."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.errors import SchemaError
from expstore.loading.rows import (
    Records,
    Rows,
    RowsAbove,
    Steps,
    bits_of,
    bounds_of,
    column,
    has_next,
    in_dtype_of,
    needed,
    numbers_of,
)
from expstore.loading.units import Layer, Step, Unit, as_share, check_once
from expstore.sampling.draw import Draw, fold, random_bits
from expstore.schema import Field, Schema
from expstore.storage.store import Store

STRATEGIES = ("future", "final", "episode")
_WHETHER, _WHICH = 0x48455231, 0x48455232  # apart from all that samplers draw


@dataclass(frozen=True, repr=False)
class Hindsight(Layer):
    """The unit that gives some records goals which their episode did achieve.

    A share `ratio` of the anchors get another goal: the achieved goal after a step of the
    anchor's episode, which is drawn uniformly from the anchor's step to the last one ("future"),
    or from all of them ("episode"), or is the last one ("final"). All records of a window that
    lie in the anchor's episode get that same goal, as `<goal>` and `next_<goal>`, and the reward
    that `reward_fn` gives them for it. `info.relabeled` says which records these are. Flags stay
    as they were recorded. (Andrychowicz et al.: Hindsight Experience Replay, 2017,
    arXiv:1707.01495.)

    Which anchors and goals is a function of seed and number of the draw, as the anchors are.
    Where an episode's last step has no next value, nothing is known to be achieved after it: it
    gives no goal. As a record of another goal it keeps its reward, which says nothing about that,
    and its `validity_mask` is False, as is that of a return of `NStep` which ends with it.

    Args:
        strategy: "future", "final" or "episode".
        ratio: share of the anchors, 0 to 1.
        reward_fn: `reward_fn(achieved, goal, info)`, the form of `compute_reward` in
            gymnasium-robotics. It gets arrays (n, *shape) of what was achieved after n steps and
            of their new goals, and returns n rewards. `info["<field>"]` reads any other field at
            the same steps, as an array. A unit with a lambda or a function that was defined
            within another one does not travel to spawned workers.
        goal: field of goals.
        achieved: field of what is achieved, which like observations has next values.
        reward: field of rewards.
        unit: what the records are: `Step()`, `Sequence(...)`, or these within `NStep` or `Stack`.

    Raises:
        SchemaError: an argument of no use.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> def compute_reward(achieved, goal, info):
        ...     return np.where(np.linalg.norm(achieved - goal, axis=-1) < 0.5, 0.0, -1.0)
        >>> path, place = tempfile.mkdtemp() + "/demo.exp", np.arange(5.0)[:, None]
        >>> with expstore.Writer(path) as writer:
        ...     observation = {"achieved_goal": place, "desired_goal": np.full((5, 1), 9.0)}
        ...     number = writer.append({"observation": observation, "reward": -np.ones(4)})
        >>> unit = expstore.Hindsight("final", ratio=1.0, reward_fn=compute_reward)
        >>> batch = expstore.SequenceDataset(expstore.open(path), unit).batch(range(4))
        >>> batch["observation"]["desired_goal"].flatten().tolist(), batch["reward"].tolist()
        ([4.0, 4.0, 4.0, 4.0], [-1.0, -1.0, -1.0, 0.0])
    """

    order: ClassVar[int] = 0  # below all others: returns are sums of the new rewards

    strategy: Literal["future", "final", "episode"] = "future"
    ratio: float = 0.8
    reward_fn: Callable[[Any, Any, Any], Any] | None = None
    goal: str = "observation/desired_goal"
    achieved: str = "observation/achieved_goal"
    reward: str = "reward"
    unit: Unit = Step()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise SchemaError(f"strategy must be one of {STRATEGIES}, got {self.strategy!r}")
        object.__setattr__(self, "ratio", as_share("ratio", self.ratio))
        if not callable(self.reward_fn):
            raise SchemaError(
                "reward_fn must be a function of (achieved, goal, info) that returns rewards, got "
                f"{self.reward_fn!r}; give compute_reward of the environment, say"
            )
        check_once(self)

    def __repr__(self) -> str:
        """The same in every process: a state is refused where it differs."""
        names = ("goal", "achieved", "reward", "unit")
        rest = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        head = f"strategy={self.strategy!r}, ratio={self.ratio}"
        return f"Hindsight({head}, reward_fn={name_of(self.reward_fn)}, {rest})"

    def outputs(self, schema: Schema, wanted: dict[str, Field]) -> dict[str, Field]:
        """What was asked for."""
        needed(schema, self.reward, "reward")
        goal = needed(schema, self.goal, "goal")
        achieved = needed(schema, self.achieved, "achieved")
        if goal.ragged or achieved.ragged or goal.shape != achieved.shape:
            raise SchemaError(
                f"goal {self.goal!r} and achieved {self.achieved!r} must have one shape, got "
                f"{shape_of(goal)} and {shape_of(achieved)}; name fields that can be compared"
            )
        if not achieved.has_next:
            raise SchemaError(
                f"achieved {self.achieved!r} must have next values, as fields under observation/ "
                f"do; record it there, or give next_{self.achieved} with each episode"
            )
        return wanted

    def apply(self, records: Records) -> Records:
        """The records with other goals and rewards."""
        goals = Goals.drawn(self, records.rows)
        return Records(
            RelabeledRows(records.rows, self, goals),
            records.steps,
            records.valid & goals.are_judged(records.steps),
            {**records.info, "relabeled": goals.cover(records.steps)},
            goals.are_judged,
        )


@dataclass(frozen=True)
class Goals:
    """The goal that was chosen for each anchor, if one was."""

    chosen: NDArray[np.bool_]  # (B,)
    start: Steps  # (B,) first step of the anchor's episode
    stop: Steps  # (B,) one past its last one
    known: Steps  # (B,) one past the last one after which something was achieved, for all we know
    values: torch.Tensor  # (B, *shape)

    @staticmethod
    def drawn(unit: Hindsight, rows: Rows) -> Goals:
        """By the random words of the rows' draw."""
        draw, spans = rows.draw, rows.store.spans
        steps = spans.steps_at(draw.anchors)
        start, stop = bounds_of(spans, steps)
        known = stop - ~has_next(rows.store, stop - 1)
        low = {"future": steps, "final": np.maximum(known - 1, start), "episode": start}
        first = low[unit.strategy]
        chosen = (uniform(draw, _WHETHER) < unit.ratio) & (first < known)
        later = (uniform(draw, _WHICH) * (known - first)).astype(np.int64)
        source = np.where(chosen, first + later, steps)
        following = f"next_{unit.achieved}"
        return Goals(chosen, start, stop, known, rows.read({following: source})[following])

    def cover(self, steps: Steps) -> NDArray[np.bool_]:
        """Which of the steps (B, ...) have another goal now."""
        chosen, start, stop = (self._beside(v, steps) for v in (self.chosen, self.start, self.stop))
        covered: NDArray[np.bool_] = chosen & (start <= steps) & (steps < stop)
        return covered

    def are_judged(self, steps: Steps) -> NDArray[np.bool_]:
        """Whether the rewards of the steps (B, ...) are known for the goals they have now."""
        judged: NDArray[np.bool_] = steps < self._beside(self.known, steps)
        return judged | ~self.cover(steps)

    @staticmethod
    def _beside(values: NDArray[Any], steps: Steps) -> NDArray[Any]:
        return values.reshape(-1, *[1] * (steps.ndim - 1))


@dataclass(frozen=True)
class RelabeledRows(RowsAbove):
    """Rows in which some records have another goal, and rewards for that."""

    unit: Hindsight
    goals: Goals

    def read(self, wanted: Mapping[str, Steps]) -> dict[str, torch.Tensor]:
        """See `Rows.read`."""
        out = self.below.read(wanted)
        for name in (self.unit.goal, f"next_{self.unit.goal}"):
            if name in wanted:
                covered = self.goals.cover(wanted[name])
                goals = in_dtype_of(numbers_of(self.goals.values), out[name])
                bits_of(out[name])[covered] = bits_of(goals)[np.nonzero(covered)[0]]
        if self.unit.reward in wanted:
            self._judge(wanted[self.unit.reward], out[self.unit.reward])
        return out

    def _judge(self, steps: Steps, rewards: torch.Tensor) -> None:
        """Put the new rewards in their places."""
        covered = self.goals.cover(steps) & self.goals.are_judged(steps)
        if not covered.any():
            return
        following = f"next_{self.unit.achieved}"
        achieved = numbers_of(self.below.read({following: steps})[following])[covered]
        goals = numbers_of(self.goals.values)[np.nonzero(covered)[0]]
        assert self.unit.reward_fn is not None
        given = self.unit.reward_fn(achieved, goals, Columns(self.store, steps[covered]))
        places = bits_of(rewards)
        shape = (len(goals), *places.shape[covered.ndim :])
        places[covered] = bits_of(fitted(given, shape, rewards, self.unit.reward_fn))


class Columns(Mapping[str, NDArray[Any]]):
    """Every field of a store at some steps (n,), read when it is asked for."""

    def __init__(self, store: Store, steps: Steps) -> None:
        self._store, self._steps = store, steps

    def __getitem__(self, name: str) -> NDArray[Any]:
        return numbers_of(column(self._store, name, self._steps))

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.fields)

    def __len__(self) -> int:
        return len(self._store.fields)


def uniform(draw: Draw, which: int) -> NDArray[np.float64]:
    """(B,) fractions in [0, 1), a function of the draw's seed and number; `which` of several."""
    words = random_bits(fold(draw.seed, which), draw.number, len(draw.anchors))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def fitted(
    given: Any, shape: tuple[int, ...], recorded: torch.Tensor, function: Any
) -> torch.Tensor:
    """What a function returned as rewards of a shape (n, *shape), like those that were recorded.

    Raises:
        SchemaError: another shape, no numbers, or fractions where integers were recorded.
    """
    values = np.asarray(given)
    is_scalar = values.shape == shape[:1] and math.prod(shape[1:]) == 1
    fits = values.dtype.kind in ("biuf" if recorded.is_floating_point() else "biu")
    if not fits or not (is_scalar or values.shape == shape):
        raise SchemaError(
            f"reward_fn {name_of(function)} must return rewards of shape {shape} for a field of "
            f"{recorded.dtype}, got shape {values.shape} of {values.dtype}"
        )
    # A copy: what was returned may be read-only, or of a byte order that torch does not know.
    native = values.astype(values.dtype.newbyteorder("="))
    return in_dtype_of(native.reshape(shape), recorded)


def shape_of(field: Field) -> str:
    """How a field's shape is called in a message."""
    return "any number of values" if field.ragged else str(field.shape)


def name_of(function: Any) -> str:
    """A function's qualified name, which does not depend on the process.

    >>> name_of(functools.partial(as_share, "ratio"))
    "partial(expstore.loading.units.as_share, 'ratio')"
    """
    if isinstance(function, functools.partial):
        given = [repr(value) for value in function.args]
        given += [f"{name}={value!r}" for name, value in sorted(function.keywords.items())]
        return f"partial({', '.join([name_of(function.func), *given])})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
