"""Prioritized: steps drawn in proportion to a power of their priority."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError, StateError
from expstore.sampling.draw import Draw, check_batch, check_state, fold
from expstore.sampling.forest import Forest
from expstore.spans import Spans

_SCHEDULE = "schedule"


class Prioritized:
    """Draws a step with probability ``leaf / sum of leaves``, ``leaf = (priority + eps) ** alpha``.

    The importance weight of a step is ``(leaf / smallest leaf) ** -beta``, the smallest one of
    all steps that can be drawn, so that the largest weight is 1. New steps enter at the largest
    priority that any step was ever given, 1 before the first `update`.
    (Schaul et al.: Prioritized Experience Replay, 2016, arXiv:1511.05952.)

    Args:
        alpha: How much priorities matter, from 0 (not at all) to 7.
        beta: How much of that the weights correct, at least 0, 1 for all. May be assigned at any
            time, or be a function of the number of the draw, counted from 0.
        eps: Added to every priority, so that steps of priority 0 are drawn, too.
        stratified: Draw one anchor from each of ``batch_size`` equal parts of the sum: less
            variance, and anchors that ascend within a batch.

    Raises:
        SchemaError: An argument out of range.

    >>> spans = Spans.laid_out(start=np.array([0]), length=np.array([4]))
    >>> sampler = Prioritized(alpha=1.0, beta=1.0)
    >>> sampler.update(spans, np.array([0, 1, 2, 3]), np.array([0, 1, 0, 4]))
    >>> draw = sampler.draw(spans, batch_size=5, seed=0)
    >>> sorted(set(draw.anchors.tolist())), sorted(set(draw.probability.round(3).tolist()))
    ([1, 3], [0.2, 0.8])
    """

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float | Callable[[int], float] = 0.4,
        eps: float = 1e-8,
        *,
        stratified: bool = False,
    ) -> None:
        self._forest = Forest(float(alpha), float(eps))
        self._stratified = bool(stratified)
        self.beta = beta
        self.next_draw = 0

    def __repr__(self) -> str:
        return (
            f"Prioritized(alpha={self.alpha:g}, beta={self.beta!r}, eps={self.eps:g}, "
            f"stratified={self.stratified})"
        )

    @property
    def alpha(self) -> float:
        """How much priorities matter."""
        return self._forest.alpha

    @property
    def eps(self) -> float:
        """What is added to every priority."""
        return self._forest.eps

    @property
    def stratified(self) -> bool:
        """Whether each anchor has a part of the sum to itself."""
        return self._stratified

    @property
    def beta(self) -> float | Callable[[int], float]:
        """How much the weights correct, or the function that says so."""
        return self._beta

    @beta.setter
    def beta(self, beta: float | Callable[[int], float]) -> None:
        self._beta = beta if callable(beta) else _checked_beta(beta)

    @property
    def num_ignored(self) -> int:
        """How many priorities were given for steps that had left before."""
        return self._forest.num_ignored

    def draw(self, spans: Spans, batch_size: int, seed: int) -> Draw:
        """See ``Sampler.draw``.

        Raises:
            SchemaError: Nothing can be drawn because all priorities are 0, as is ``eps``; or
                the schedule of ``beta`` gives no number of at least 0.
            StateError: A loaded state belongs to other steps.
        """
        check_batch(spans, batch_size)
        beta = _checked_beta(self._beta(self.next_draw)) if callable(self._beta) else self._beta
        self._forest.follow(spans)
        if not self._forest.total() > 0:
            raise SchemaError(
                f"every one of the {spans.num_steps} steps has priority 0 and eps is {self.eps}, "
                "so that none can be drawn; give eps a value above 0"
            )
        word = np.uint64(fold(seed))
        drawn = self._forest.draw(batch_size, word, self.next_draw, self._stratified, beta)
        self.next_draw += 1
        return Draw(*drawn)

    def update(self, spans: Spans, steps: NDArray[np.int64], priority: NDArray[Any]) -> None:
        """Give steps new priorities; of a step that comes twice, the last one counts.

        Priorities of steps that have left by now are ignored and counted by ``num_ignored``.

        Args:
            spans: What is drawn from.
            steps: (n,) step numbers, not positions.
            priority: (n,) numbers of at least 0, kept as float32.

        Raises:
            SchemaError: A priority is negative, NaN or beyond float32, or shapes do not fit.
            StepRangeError: A step was never among those drawn from.
            StateError: A loaded state belongs to other steps.
            In all cases, no priority has changed.
        """
        self.prepare(spans, steps, priority)()

    def prepare(
        self, spans: Spans, steps: NDArray[np.int64], priority: NDArray[Any]
    ) -> Callable[[], None]:
        """All checks of `update`; calling what is returned makes it, and cannot fail.

        So that the updates of several samplers can be made all or none.
        """
        self._forest.follow(spans)
        return self._forest.prepare(steps, priority)

    def priorities(self, spans: Spans, steps: NDArray[np.int64]) -> NDArray[np.float32]:
        """The priority of each step, of any shape, as it was given or entered with.

        Raises:
            StepRangeError: A step is not in ``spans``.
        """
        self._forest.follow(spans)
        return self._forest.priorities(steps)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and new arrays: everything the next draws depend on.

        Takes a copy of all priorities, 4 bytes per step: not for every batch. ``streams`` is a
        list of one dict per store of a union: ``raw`` (n,) float32, the priorities, ``runs``
        (R, 2) int64, which steps they belong to, and ``first_slot``, an int.
        """
        return {
            "kind": "prioritized",
            "next_draw": self.next_draw,
            **self._settings(),
            "beta": _SCHEDULE if callable(self._beta) else self._beta,
            **self._forest.to_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved sampler stood, with its ``beta`` unless that is a schedule.

        Steps that are new since then enter at the next draw or update, others have left.

        Raises:
            StateError: The state is of another kind of sampler, was saved with other settings,
                or is incomplete. If it belongs to other steps, the next draw or update says so.
        """
        check_state(state, "prioritized", ("next_draw",))
        for name, own in self._settings().items():
            if state.get(name) != own:
                raise StateError(
                    f"the state was saved with {name}={state.get(name)}, this sampler has "
                    f"{name}={own}; build it as it was"
                )
        beta = self._beta_from(state.get("beta"))
        self._forest = Forest.from_state(self.alpha, self.eps, state)
        self._beta, self.next_draw = beta, int(state["next_draw"])

    def _settings(self) -> dict[str, float]:
        return {"alpha": self.alpha, "eps": self.eps, "stratified": int(self._stratified)}

    def _beta_from(self, saved: Any) -> float | Callable[[int], float]:
        if (saved == _SCHEDULE) != callable(self._beta):
            raise StateError(
                f"the state was saved with beta={saved!r}, this sampler has beta={self._beta!r}; "
                "give both a number, or the same function to both"
            )
        if callable(self._beta):
            return self._beta
        try:
            return _checked_beta(saved)
        except SchemaError as error:
            raise StateError(f"the state does not fit: {error}") from error


def _checked_beta(beta: Any) -> float:
    try:
        number = float(beta)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise SchemaError(f"beta must be a number of at least 0, got {beta!r}")
    return number
