"""Forest: the priorities of a selection of steps, one tree per stream, kept while it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import StateError, StepRangeError
from expstore.sampling import runs
from expstore.sampling.runs import Runs
from expstore.sampling.sumtree import SumTree, check_power
from expstore.sampling.updates import as_steps, as_update, check_good
from expstore.spans import Spans

_NONE = np.empty((0, 2), np.int64)
_LAST = np.iinfo(np.int64).max


class Forest:
    """Raw priorities of steps, and the trees to draw from them.

    A step enters at the largest priority that any step was ever given, 1 before that.

    Args:
        alpha: See ``SumTree``, as is ``eps``.
        eps: Added to every priority.
    """

    def __init__(self, alpha: float, eps: float) -> None:
        check_power(alpha, eps)
        self.alpha, self.eps = alpha, eps
        self.largest: float | None = None  # of all priorities given so far
        self.num_ignored = 0  # priorities given to steps that had left
        self.trees: list[SumTree] = []
        self.streams = np.zeros(1, np.int64)  # (S + 1,) see Spans
        self._runs: list[Runs] = []  # the steps of each tree's slots
        self._seen = _NONE  # all steps that were ever held, except below a stream's first one
        self._spans: Spans | None = None  # as of which all this is
        self._held = Spans.laid_out(np.empty(0, np.int64), np.empty(0, np.int64))
        self._is_loaded = False  # and so must fit the next spans

    # -- following the steps ---------------------------------------------------------------------

    def follow(self, spans: Spans) -> None:
        """Take up new steps and drop those that have left; every other keeps its priority.

        Growth at the end of a stream and eviction at its start cost what is new or gone (and
        one look at the episodes); any other change rebuilds the tree of its stream.

        Raises:
            StateError: A loaded state lacks steps older than the newest it knows.
        """
        if spans is self._spans:
            return
        held = runs.merged(spans)
        now = runs.runs_of_streams(held)
        if self._is_loaded:
            self._check_fit(now)
        were = self._runs + [_NONE] * (len(now) - len(self._runs))
        trees = self.trees + [SumTree(self.alpha, self.eps) for _ in now[len(self.trees) :]]
        self.trees = [
            self._moved(*moved) for moved in zip(trees, were, now, strict=False)
        ]  # fewer streams than before: those at the end are gone
        self._seen = self._without_evicted(runs.union(self._seen, np.concatenate(now)), now)
        self._spans, self._held, self._runs = spans, held, now
        self.streams, self._is_loaded = spans.streams, False

    def _moved(self, tree: SumTree, was: Runs, now: Runs) -> SumTree:
        if np.array_equal(was, now):
            return tree
        if not len(was) or not len(now):
            tree = SumTree(self.alpha, self.eps, first=int(now[0, 0]) if len(now) else 0)
            tree.extend(self._entering(runs.num_steps(now)))
            return tree
        kept = runs.clipped(was, int(now[0, 0]), _LAST)
        if np.array_equal(kept, runs.clipped(now, 0, int(was[-1, 1]))):
            stay = runs.num_steps(kept)
            tree.evict(tree.num_slots - stay)
            tree.extend(self._entering(runs.num_steps(now) - stay))
            return tree
        return self._carried(tree, was, now)

    def _carried(self, tree: SumTree, was: Runs, now: Runs) -> SumTree:
        from expstore.sampling.kernels import carry

        raw = self._entering(runs.num_steps(now))
        carry(was, tree.raw, now, raw)
        carried = SumTree(self.alpha, self.eps, first=int(now[0, 0]))
        carried.extend(raw)
        return carried

    def _entering(self, count: int) -> NDArray[np.float32]:
        return np.full(count, 1.0 if self.largest is None else self.largest, np.float32)

    def _without_evicted(self, seen: Runs, now: list[Runs]) -> Runs:
        """Without the runs that ``kernels.locate`` knows have left, lest they add up."""
        for held in now:
            if len(held):
                first = held[0, 0]
                stream = seen[:, 0] >> runs.STREAM_BITS == first >> runs.STREAM_BITS
                seen = seen[~(stream & (seen[:, 1] <= first))]
        return seen

    # -- priorities ------------------------------------------------------------------------------

    def prepare(self, steps: NDArray[Any], priority: NDArray[Any]) -> Callable[[], None]:
        """Check everything about an update; what is returned then makes it, and cannot fail."""
        from expstore.sampling.kernels import check_update

        steps, priority = as_update(steps, priority)
        raw, positions = np.empty(len(steps), np.float32), np.empty(len(steps), np.int64)
        held = self._held
        num_good, num_missing = check_update(
            priority, steps, held.start, held.first, held.length, raw, positions
        )
        check_good(steps, priority, num_good)
        if num_missing:
            self._check_left(steps, positions)
        return lambda: self._write(positions, raw, num_missing)

    def _write(
        self, positions: NDArray[np.int64], raw: NDArray[np.float32], num_missing: int
    ) -> None:
        if num_missing:
            self.num_ignored += num_missing
            stay = positions >= 0
            positions, raw = positions[stay], raw[stay]
        if len(self.trees) == 1:
            largest = self.trees[0].update(positions + self.trees[0].first, raw)
        else:
            parts = self._in_trees(positions)
            largest = max((tree.update(slots, raw[at]) for tree, at, slots in parts), default=0.0)
        if len(raw):
            self.largest = max(largest, self.largest or 0.0)

    def priorities(self, steps: NDArray[Any]) -> NDArray[np.float32]:
        """See ``Prioritized.priorities``."""
        flat = as_steps(steps).reshape(-1)
        out = np.empty(len(flat), np.float32)
        for tree, here, slots in self._in_trees(self._held.positions_of(flat)):
            out[here] = tree.raw[slots - tree.first]
        return out.reshape(np.shape(steps))

    def _check_left(self, steps: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        unknown = (positions == -2) & ~runs.holds(self._seen, steps)
        if unknown.any():
            at = int(np.flatnonzero(unknown)[0])
            raise StepRangeError(
                f"steps[{at}] is {int(steps[at])}, which is not and never was among the "
                f"{self._held.num_steps} steps drawn from; give step numbers as in a batch's "
                "anchor_index"
            )

    def _in_trees(
        self, positions: NDArray[np.int64]
    ) -> Iterator[tuple[SumTree, Any, NDArray[np.int64]]]:
        """Each tree that positions (n,) are in, with where in the n, and their slots."""
        for k, here in _parted(self.streams[:-1], positions):
            tree = self.trees[k]
            yield tree, here, positions[here] + (tree.first - int(self.streams[k]))

    # -- drawing ---------------------------------------------------------------------------------

    def total(self) -> float:
        """Sum of all leaves."""
        return self.trees[0].total if len(self.trees) == 1 else float(self._ends()[-1])

    def draw(
        self, count: int, word: np.uint64, number: int, stratified: bool, beta: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float32]]:
        """Positions (B,), their probabilities and importance weights; ``total`` is above 0.

        Args:
            count: How many, B.
            word: ``fold(seed)``.
            number: Of the draw.
            stratified: See ``Prioritized``, as is ``beta``.
            beta: A number.
        """
        out = np.empty(count, np.int64), np.empty(count), np.empty(count, np.float32)
        if len(self.trees) == 1:
            self.trees[0].draw_all(word, number, stratified, beta, out)
        else:
            self._draw_from_several(word, number, stratified, beta, *out)
        return out

    def _draw_from_several(
        self,
        word: np.uint64,
        number: int,
        stratified: bool,
        beta: float,
        positions: NDArray[np.int64],
        leaves: NDArray[np.float64],
        weight: NDArray[np.float32],
    ) -> None:
        from expstore.sampling.tree_kernels import fill_masses, weigh

        masses, total = np.empty(len(leaves)), self.total()
        fill_masses(word, number, total, stratified, masses)
        positions[:], leaves[:] = self.at_masses(masses)
        weigh(total, min(tree.least for tree in self.trees), beta, leaves, weight)

    def at_masses(
        self, masses: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Positions (B,) and leaves (B,) at masses (B,) from 0 to ``total``, which is above 0."""
        ends = self._ends()
        last = int(np.searchsorted(ends, ends[-1]))  # tree above 0, where rounding may lead past
        begins = np.append(0.0, ends[:last])
        positions, leaves = np.empty(len(masses), np.int64), np.empty(len(masses))
        for k, here in _parted(begins, masses):
            tree = self.trees[k]
            slots, leaves[here] = tree.draw(masses[here] - begins[k])
            positions[here] = slots + (int(self.streams[k]) - tree.first)
        return positions, leaves

    def _ends(self) -> NDArray[np.float64]:
        """(S,) running sum of the trees' totals."""
        return np.cumsum([tree.total for tree in self.trees])

    # -- state -----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """New arrays of everything that was learned of the steps."""
        state: dict[str, Any] = {
            "num_ignored": self.num_ignored,
            "seen": self._seen.copy(),
            "streams": [
                {"first_slot": tree.first, "runs": held.copy(), "raw": tree.raw.copy()}
                for tree, held in zip(self.trees, self._runs, strict=True)
            ],
        }
        return state if self.largest is None else {**state, "largest": self.largest}

    @staticmethod
    def from_state(alpha: float, eps: float, state: dict[str, Any]) -> Forest:
        """The forest as it was saved; it shares no memory with ``state``.

        Raises:
            StateError: An entry is missing, or cannot be what ``to_state`` gave.
        """
        forest = Forest(alpha, eps)
        try:
            forest.num_ignored = int(state["num_ignored"])
            forest.largest = float(state["largest"]) if "largest" in state else None
            forest._seen = _as_runs(state["seen"])
            for stream in state["streams"]:
                raw, held = np.asarray(stream["raw"]), _as_runs(stream["runs"])
                if raw.dtype != np.float32 or raw.shape != (runs.num_steps(held),):
                    raise ValueError(f"{raw.dtype} priorities {raw.shape} for these runs of steps")
                if not (np.isfinite(raw) & (raw >= 0)).all():
                    raise ValueError("a priority that is not a number of at least 0")
                first = int(stream["first_slot"])
                if not 0 <= first < 2**61:
                    raise ValueError(f"first_slot {first}")
                tree = SumTree(alpha, eps, first)
                tree.extend(raw)
                forest.trees.append(tree)
                forest._runs.append(held)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the state's priorities cannot be used: {error!r}; give what state_dict() returned"
            ) from error
        forest._is_loaded = True
        return forest

    def _check_fit(self, now: list[Runs]) -> None:
        for k, was in enumerate(self._runs):
            if not len(was):
                continue
            older = runs.clipped(now[k], 0, int(was[-1, 1])) if k < len(now) else None
            if older is None or not np.array_equal(runs.union(was, older), was):
                raise StateError(
                    f"the state holds priorities of {runs.num_steps(was)} steps, "
                    f"{int(was[0, 0])} to {int(was[-1, 1]) - 1}, which are others than those of "
                    "this selection; load it on the store and view it was saved with"
                )


def _parted(begins: NDArray[Any], values: NDArray[Any]) -> list[tuple[int, Any]]:
    """The parts, the k-th from ``begins[k]`` on, that hold any of ``values``, and which they hold.

    In each part, values are in the order in which they come.
    """
    if len(begins) == 1:
        return [(0, slice(None))] if len(values) else []
    part = np.searchsorted(begins, values, side="right") - 1
    order = np.argsort(part, kind="stable")
    bounds = np.searchsorted(part[order], np.arange(len(begins) + 1)).tolist()
    return [(k, order[low:high]) for k, (low, high) in enumerate(pairwise(bounds)) if low < high]


def _as_runs(saved: Any) -> Runs:
    bounds = np.array(saved)
    if not bounds.size:
        return _NONE
    rises = np.diff(bounds.reshape(-1), prepend=-1) > 0
    if bounds.dtype != np.int64 or bounds.shape[1:] != (2,) or not rises.all():
        raise ValueError("runs of steps that do not ascend")
    return bounds
