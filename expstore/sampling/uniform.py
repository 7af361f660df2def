"""Samplers that ask for no priorities, with and without replacement."""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError, StateError
from expstore.sampling.draw import Draw, check_batch, check_state, keys_of
from expstore.sampling.permutation import permute_compiled
from expstore.sampling.runs import merged
from expstore.spans import Spans


class Uniform:
    """Draws every step with the same probability, independently of all others.

    Args:
        by: ``"step"``, or ``"episode"``: an episode first, each as likely as any other, then a
            step of it, so that a step of a short episode is drawn more often.

    Raises:
        SchemaError: ``by`` is something else.

    >>> spans = Spans.laid_out(start=np.array([0]), length=np.array([100]))
    >>> sampler = Uniform()
    >>> len(sampler.draw(spans, batch_size=8, seed=0).anchors), sampler.state_dict()
    (8, {'kind': 'uniform', 'next_draw': 1})
    """

    def __init__(self, by: Literal["step", "episode"] = "step") -> None:
        if by not in ("step", "episode"):
            raise SchemaError(f"by must be 'step' or 'episode', got {by!r}")
        self.by = by
        self.next_draw = 0

    def __repr__(self) -> str:
        return f"Uniform(by={self.by!r})"

    def draw(self, spans: Spans, batch_size: int, seed: int) -> Draw:
        """See ``Sampler.draw``."""
        check_batch(spans, batch_size)
        draw = self._by_step if self.by == "step" else self._by_episode
        drawn = draw(spans, np.empty(batch_size, np.int64), seed)
        self.next_draw += 1
        return drawn

    def _by_step(self, spans: Spans, anchors: NDArray[np.int64], seed: int) -> Draw:
        from expstore.sampling import kernels

        kernels.fill_integers(*keys_of(seed, self.next_draw), np.uint64(spans.num_steps), anchors)
        return Draw.evenly(anchors, spans.num_steps)

    def _by_episode(self, spans: Spans, anchors: NDArray[np.int64], seed: int) -> Draw:
        from expstore.sampling import kernels

        keys = keys_of(seed, self.next_draw)
        kernels.fill_by_episode(*keys, spans.first, spans.length, anchors)
        length = spans.length[spans.episodes_at(anchors)]
        weight = np.ones(len(anchors), np.float32)  # the distribution is wanted as it is
        return Draw(anchors, 1.0 / (length * spans.num_episodes), weight)

    @property
    def _kind(self) -> str:
        return "uniform" if self.by == "step" else "uniform_by_episode"

    def state_dict(self) -> dict[str, int | str]:
        """The number of the next draw."""
        return {"kind": self._kind, "next_draw": self.next_draw}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """See ``Sampler.load_state_dict``."""
        check_state(state, self._kind, ("next_draw",))
        self.next_draw = int(state["next_draw"])


class WithoutReplacement:
    """Draws every step exactly once per epoch, in an order of the epoch's own.

    The population is fixed when an epoch starts: steps appended later wait for the next one,
    steps evicted meanwhile are left out. The last batch of an epoch holds what is left.

    Args:
        drop_last: Leave out a last batch that would be shorter than the others.

    >>> spans = Spans.laid_out(start=np.array([0]), length=np.array([7]))
    >>> sampler = WithoutReplacement()
    >>> batches = [sampler.draw(spans, batch_size=3, seed=0).anchors for _ in range(3)]
    >>> [len(batch) for batch in batches], sorted(np.concatenate(batches).tolist())
    ([3, 3, 1], [0, 1, 2, 3, 4, 5, 6])
    """

    def __init__(self, drop_last: bool = False) -> None:
        self.drop_last = drop_last
        self.epoch = 0
        self._offset = 0
        self._population: _Population | None = None  # None between two epochs

    def __repr__(self) -> str:
        return f"WithoutReplacement(drop_last={self.drop_last})"

    def draw(self, spans: Spans, batch_size: int, seed: int) -> Draw:
        """See ``Sampler.draw``.

        Raises:
            SchemaError: ``drop_last`` and not one whole batch in an epoch.
            StateError: A state saved within an epoch meets other steps than it was saved with.
        """
        check_batch(spans, batch_size)
        if self.drop_last and spans.num_steps < batch_size:
            raise SchemaError(
                f"batch_size {batch_size} is above the {spans.num_steps} steps of an epoch, and "
                "drop_last leaves none of them"
            )
        anchors = self._next_anchors(spans, batch_size, seed)
        while not len(anchors) or (self.drop_last and len(anchors) < batch_size):
            anchors = self._next_anchors(spans, batch_size, seed)
        return Draw.evenly(anchors, spans.num_steps)

    def _next_anchors(self, spans: Spans, batch_size: int, seed: int) -> NDArray[np.int64]:
        """The next anchors of this epoch, fewer than asked where it ends."""
        if self._population is None:
            self._population = _Population.of(spans)
        num_steps = self._population.num_steps
        found = np.empty(0, np.int64)
        while len(found) < batch_size and self._offset < num_steps:
            stop = min(self._offset + batch_size - len(found), num_steps)
            order = np.arange(self._offset, stop, dtype=np.int64)
            drawn = permute_compiled(seed, self.epoch, order, num_steps)
            staying = self._population.positions_in(spans, drawn)
            found = np.concatenate([found, staying]) if len(found) else staying
            self._offset = stop
        if self._offset == num_steps:
            self.epoch, self._offset, self._population = self.epoch + 1, 0, None
        return found

    def state_dict(self) -> dict[str, int | str]:
        """Epoch, place in it, and which steps it is made of."""
        state: dict[str, int | str] = {
            "kind": "without_replacement",
            "drop_last": int(self.drop_last),
            "epoch": self.epoch,
            "offset": self._offset,
        }
        return state if self._population is None else {**state, **self._population.to_state()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """See ``Sampler.load_state_dict``."""
        check_state(state, "without_replacement", ("drop_last", "epoch", "offset"))
        if bool(state["drop_last"]) != self.drop_last:
            raise StateError(
                f"the state was saved with drop_last={bool(state['drop_last'])}, this sampler has "
                f"drop_last={self.drop_last}"
            )
        population = _Population.from_state(state) if "num_steps" in state else None
        if int(state["offset"]) and population is None:
            raise StateError("the state stands within an epoch but does not say of which steps")
        self.epoch, self._offset = int(state["epoch"]), int(state["offset"])
        self._population = population


class _Population:
    """The steps of an epoch, and where those that are still there stand in a selection.

    While they begin the selection, a checksum of their runs says so; that and their number is
    all a state holds then. Once eviction has moved them it holds the runs.
    """

    def __init__(self, num_steps: int, first_step: int, last_step: int, checksum: int) -> None:
        self.num_steps, self.first_step, self.last_step = num_steps, first_step, last_step
        self.checksum = checksum
        self.runs: Spans | None = None  # None until a loaded state meets its selection
        self.has_moved = False
        self._met: tuple[Spans, bool] | None = None  # the newest selection: do they begin it?

    @staticmethod
    def of(spans: Spans) -> _Population:
        return _Population._made_of(_first_runs(spans, spans.num_steps))

    @staticmethod
    def _made_of(runs: Spans) -> _Population:
        first, last = int(runs.start[0]), int(runs.start[-1] + runs.length[-1] - 1)
        population = _Population(runs.num_steps, first, last, _checksum(runs))
        population.runs = runs
        return population

    def positions_in(self, spans: Spans, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the drawn members are in ``spans`` now; those that have left are left out."""
        if self._begins(spans):
            return drawn
        assert self.runs is not None
        return spans.positions_held(self.runs.steps_at(drawn))

    def _begins(self, spans: Spans) -> bool:
        """Whether the first positions are exactly these steps, not only as many."""
        if self._met is None or self._met[0] is not spans:
            head = _first_runs(spans, self.num_steps)
            begins = head.num_steps == self.num_steps and _checksum(head) == self.checksum
            if begins:
                self.runs = self.runs or head
            elif self.runs is None:
                raise StateError(
                    f"the state was saved in an epoch over {self.num_steps} steps, "
                    f"{self.first_step} to {self.last_step}, which are not the first of this "
                    "selection; load it on the store, view and commit it was saved with, or start "
                    "a new sampler"
                )
            self._met = spans, begins
            self.has_moved |= not begins
        return self._met[1]

    def to_state(self) -> dict[str, int | str]:
        state: dict[str, int | str] = {
            "num_steps": self.num_steps,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "checksum": self.checksum,
        }
        if self.has_moved and self.runs is not None:
            runs = zip(self.runs.start, self.runs.length, strict=True)
            state["runs"] = " ".join(f"{first}+{length}" for first, length in runs)
        return state

    @staticmethod
    def from_state(state: dict[str, int | str]) -> _Population:
        names = ("num_steps", "first_step", "last_step", "checksum")
        check_state(state, str(state["kind"]), names)
        if "runs" not in state:
            return _Population(*(int(state[name]) for name in names))
        runs = np.array([run.split("+") for run in str(state["runs"]).split()], np.int64)
        population = _Population._made_of(Spans.laid_out(runs[:, 0], runs[:, 1]))
        population.has_moved = True
        return population


def _first_runs(spans: Spans, num_steps: int) -> Spans:
    """The steps at the first positions in as few stretches without a gap as can be."""
    held = merged(spans)
    here = held.first < num_steps
    first, length = held.first[here], held.length[here]
    return Spans.laid_out(held.start[here], np.minimum(length, num_steps - first))


def _checksum(runs: Spans) -> int:
    return zlib.crc32(np.concatenate([runs.start, runs.length]).astype("<i8").tobytes())
