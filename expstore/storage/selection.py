"""Part: one store directory at a commit, and which of its episodes are selected."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expstore.errors import FieldNotFoundError, SchemaError, StateError
from expstore.spans import Spans
from expstore.storage.conditions import Condition
from expstore.storage.episodes import EpisodeRow
from expstore.storage.reading import Snapshot
from expstore.storage.table import Episodes, row_of


class Rule(Protocol):
    """Decides which episodes a view keeps, also of those that come with later commits."""

    def __call__(self, snapshot: Snapshot, episodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(E,) whether each of the episodes (E,), numbers of the snapshot's own, is kept."""
        ...


@dataclass(frozen=True)
class Predicate:
    """Keeps the episodes for which a function of their row in the table is true."""

    function: Callable[[EpisodeRow], Any]
    base: int  # of the numbers that the function sees: those of the store it was given to

    def __call__(self, snapshot: Snapshot, episodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        kept = (bool(self.function(row_of(snapshot, int(e), self.base))) for e in episodes)
        return np.fromiter(kept, bool, len(episodes))


class _Moved(Episodes):
    """The table of one store of a union, with the numbers of the union."""

    base = 0

    def _column(self, name: str) -> Any:
        values = super()._column(name)
        return values + self.base if name in ("number", "start") else values


@dataclass(frozen=True)
class Where:
    """Keeps the episodes for which a condition holds."""

    condition: Condition
    base: int  # of the numbers that the condition sees

    def __call__(self, snapshot: Snapshot, episodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        start = snapshot.index.column("start")[episodes - snapshot.first_episode]
        table = _Moved((snapshot,), (episodes,), episodes, start)
        table.base = self.base
        try:
            return self.condition.mask(table)
        except FieldNotFoundError:  # a key that none of these episodes has, but others
            return np.zeros(len(episodes), bool)


@dataclass(frozen=True)
class Side:
    """Keeps the episodes whose hash falls on one side of a share; growth never moves one."""

    share: float
    seed: int
    left: bool

    def __call__(self, snapshot: Snapshot, episodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        key = hashlib.blake2b(f"{self.seed}:{snapshot.root.store_id}".encode(), digest_size=8)
        fraction = _hashed(episodes, int.from_bytes(key.digest(), "little"))
        kept: NDArray[np.bool_] = (fraction < self.share) == self.left
        return kept


@dataclass(frozen=True)
class Part:
    """A snapshot, whole or some episodes of it; a union has several parts."""

    snapshot: Snapshot
    chosen: NDArray[np.int64] | None = None  # (E,) numbers of the selected episodes, None for all
    rules: tuple[Rule, ...] = ()
    is_fixed: bool = False  # chosen by mask or list, so that a new commit says nothing

    @property
    def numbers(self) -> NDArray[np.int64]:
        """(E,) ascending numbers of the selected episodes."""
        if self.selected is None:
            self.snapshot.index.column("length")  # raises where files are missing
            return np.arange(self.snapshot.first_episode, self.snapshot.stop_episode)
        return self.selected

    @property
    def selected(self) -> NDArray[np.int64] | None:
        """(E,) the same, but None where these are all episodes of the live range."""
        return self.snapshot.present if self.chosen is None else self.chosen

    def spans(self) -> Spans:
        """Where the selected episodes lie."""
        return self.snapshot.spans(self.selected)

    def narrowed(self, rule: Rule) -> Part:
        """The episodes that a rule keeps, and later those that it will keep."""
        kept = self.numbers[rule(self.snapshot, self.numbers)]
        return replace(self, chosen=kept, rules=(*self.rules, rule))

    def latest(self) -> Part:
        """The same selection as of the newest commit; itself if there is none newer.

        Only episodes that are new are asked about.

        Raises:
            SchemaError: a selection by mask or list, which says nothing about new episodes.
            StateError: the directory holds another store by now.
        """
        if self.snapshot.is_newest():
            return self
        if self.is_fixed:
            raise SchemaError(
                "a view by mask or by numbers, and a pickled one by a function, cannot follow new "
                "commits; open the store and filter with a function"
            )
        old, new = self.snapshot, Snapshot.of(self.snapshot.path)
        if old.root.store_id != new.root.store_id:
            raise StateError(f"{new.path} is another store by now; open it anew")
        if self.chosen is None:
            return replace(self, snapshot=new)
        fresh = np.arange(max(old.stop_episode, new.first_episode), new.stop_episode)
        fresh = np.setdiff1d(fresh, new.deleted, assume_unique=True)
        for rule in self.rules:
            fresh = fresh[rule(new, fresh)]
        kept = self.chosen[self.chosen >= new.first_episode]
        kept = np.setdiff1d(kept, new.deleted, assume_unique=True)
        return replace(self, snapshot=new, chosen=np.concatenate([kept, fresh]))

    def pickled(self) -> tuple[Any, ...]:
        """What `restored` makes the part of again, in another process."""
        rules = tuple(rule for rule in self.rules if isinstance(rule, (Side, Where)))
        is_fixed = self.is_fixed or len(rules) < len(self.rules)
        snapshot = self.snapshot
        return snapshot.path, snapshot.root, snapshot.version, self.chosen, rules, is_fixed


def restored(path: Any, root: Any, version: Any, *selection: Any) -> Part:
    """The inverse of `Part.pickled`."""
    return Part(Snapshot(path, root, version), *selection)


def _hashed(numbers: NDArray[np.int64], key: int) -> NDArray[np.float64]:
    """A fraction in [0, 1) for each number: the finalizer of SplitMix64 (Steele et al., 2014)."""
    z = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
