"""Store: what one or several directories held at their commits, whole or a selection of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from expstore.episode import nest
from expstore.errors import SchemaError, StateError, StepRangeError
from expstore.ragged import Ragged, Rows, text_of
from expstore.schema import Field, is_observation
from expstore.spans import Spans
from expstore.storage import files
from expstore.storage.commits import Root, root_at
from expstore.storage.episodes import EpisodeRow
from expstore.storage.parallel import ONE, Threads
from expstore.storage.reading import STRIDE, Snapshot, resolve
from expstore.storage.table import Episodes, row_of

Rule = Callable[["Snapshot", NDArray[np.int64], int], NDArray[np.bool_]]


@dataclass(frozen=True)
class _Predicate:
    """Keeps the episodes for which a function of their row in the table is true."""

    function: Callable[[EpisodeRow], Any]

    def __call__(
        self, snapshot: Snapshot, episodes: NDArray[np.int64], base: int
    ) -> NDArray[np.bool_]:
        kept = (bool(self.function(row_of(snapshot, int(e), base))) for e in episodes)
        return np.fromiter(kept, bool, len(episodes))


@dataclass(frozen=True)
class _Side:
    """Keeps the episodes whose hash falls on one side of a share; growth never moves one."""

    share: float
    seed: int
    left: bool

    def __call__(
        self, snapshot: Snapshot, episodes: NDArray[np.int64], base: int
    ) -> NDArray[np.bool_]:
        key = hashlib.blake2b(f"{self.seed}:{snapshot.root.store_id}".encode(), digest_size=8)
        fraction = _hashed(episodes, int.from_bytes(key.digest(), "little"))
        kept: NDArray[np.bool_] = (fraction < self.share) == self.left
        return kept


class Store:
    """A store as of one commit; it never changes. `latest()` gives the newer one.

    Opened by `expstore.open`. Views (`filter`, `split`) and unions are Stores, too: every
    method and every sampler treats them alike. Steps and episodes keep their numbers in a view;
    in a union, those of the k-th store begin at `k * 2**40`.
    """

    def __init__(
        self,
        snapshots: Sequence[Snapshot],
        rules: tuple[Rule, ...] = (),
        selected: Sequence[NDArray[np.int64] | None] | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        self._snapshots = tuple(snapshots)
        self._rules = rules
        self._selected = tuple(selected or [None] * len(self._snapshots))
        self._fixed = fixed  # selected by mask or list, so that a new commit says nothing

    # -- what is there ---------------------------------------------------------------------------

    @property
    def paths(self) -> tuple[Path, ...]:
        """The directories, one unless this is a union."""
        return tuple(snapshot.path for snapshot in self._snapshots)

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The directories as of their commits, for those who read columns themselves."""
        return self._snapshots

    @property
    def fields(self) -> dict[str, Field]:
        """Every field by name, nested names written with `/`."""
        return dict(self._snapshots[0].schema.fields)

    @property
    def num_steps(self) -> int:
        return self.spans.num_steps

    @property
    def num_episodes(self) -> int:
        return self.spans.num_episodes

    def __len__(self) -> int:
        return self.num_steps

    @cached_property
    def spans(self) -> Spans:
        """Where each selected episode lies; what samplers and windows compute with."""
        parts = []
        for position, (snapshot, selected) in enumerate(
            zip(self._snapshots, self._selected, strict=True)
        ):
            part = snapshot.spans(selected)
            if position:
                part = Spans(part.start + position * STRIDE, part.first, part.length, part.streams)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Spans.concatenate(parts)

    def identities(self) -> list[dict[str, Any]]:
        """Which store each part is, at which commit, and what of it is selected."""
        return [
            {
                "path": str(snapshot.path),
                "store_id": snapshot.root.store_id,
                "commit": snapshot.root.commit.number,
                "selection": None if chosen is None else files.crc32c(chosen.astype("<i8")),
            }
            for snapshot, chosen in zip(self._snapshots, self._selected, strict=True)
        ]

    @property
    def episodes(self) -> Episodes:
        """The table of the selected episodes."""
        return Episodes(self._snapshots, self._selected, self.episode_numbers, self.spans.start)

    @cached_property
    def episode_numbers(self) -> NDArray[np.int64]:
        """(E,) numbers of the selected episodes, ascending."""
        return np.concatenate(
            [
                position * STRIDE
                + (np.arange(s.first_episode, s.stop_episode) if chosen is None else chosen)
                for position, (s, chosen) in enumerate(
                    zip(self._snapshots, self._selected, strict=True)
                )
            ]
        )

    def __repr__(self) -> str:
        where = ", ".join(map(str, self.paths))
        return f"Store({where}: {self.num_episodes} episodes, {self.num_steps} steps)"

    # -- reading ---------------------------------------------------------------------------------

    def read(self, steps: ArrayLike, fields: Iterable[str] | None = None) -> dict[str, Any]:
        """Any steps, in any order, repeated or not.

        Args:
            steps: step numbers of any shape S.
            fields: names of fields or of groups of them, also `next_<field>`, `has_next`
                (whether there is a next value), `done` and `episode`; None for all fields.

        Returns:
            A nested dict of new arrays (*S, *shape). bfloat16 comes as its bits, uint16.
            Where there is no next value, `next_<field>` is 0. A ragged field is an object
            array S of arrays (n, *shape), or of strings.

        Raises:
            StepRangeError: a step that this store or view does not hold.
            FieldNotFoundError: an unknown name.
        """
        steps = _integers(steps, "steps")
        wanted = resolve(self._snapshots[0].schema, fields)
        self.spans.positions_of(steps)
        out = {
            name: np.empty((steps.size, *f.shape), f.stored_dtype)
            for name, f in wanted.items()
            if not f.ragged
        }
        self.read_into(steps.reshape(-1), out)
        for name, f in wanted.items():
            if f.ragged:
                out[name] = np.empty(steps.size, object)
                for i, row in enumerate(_listed(self.read_ragged(name, steps.reshape(-1)), f)):
                    out[name][i] = row
        return nest({n: out[n].reshape(steps.shape + out[n].shape[1:]) for n in wanted})

    def read_into(
        self, steps: NDArray[np.int64], out: dict[str, NDArray[Any]], threads: Threads = ONE
    ) -> None:
        """Read flat steps (n,), known to be held, into given arrays (n, *shape)."""
        if len(self._snapshots) == 1:
            for name, array in out.items():
                self._snapshots[0].take(name, steps, array, threads)
            return
        owner = steps // STRIDE
        for position in np.unique(owner).tolist():
            here = np.flatnonzero(owner == position)
            local = steps[here] - position * STRIDE
            for name, array in out.items():
                part = np.empty((len(here), *array.shape[1:]), array.dtype)
                self._snapshots[position].take(name, local, part, threads)
                array[here] = part + position * STRIDE if name == "episode" else part

    def read_ragged(self, name: str, steps: NDArray[np.int64]) -> Ragged:
        """Flat steps (n,), known to be held, of one ragged field or of `next_` of it."""
        owner = steps // STRIDE
        parts, places = [], []
        for position in np.unique(owner).tolist():
            places.append(np.flatnonzero(owner == position))
            local = steps[places[-1]] - position * STRIDE
            parts.append(self._snapshots[position].take_ragged(name, local))
        if not parts:
            return self._snapshots[0].take_ragged(name, steps)
        order = np.argsort(np.concatenate(places), kind="stable")
        whole: Ragged = Ragged.concatenate(parts)[order] if len(parts) > 1 else parts[0]
        return whole

    def episode(self, number: int) -> dict[str, Any]:
        """One episode as it was appended, as a nested dict of new arrays.

        Observations have T + 1 rows where the final one is known. `next_<field>` is there
        where it says more than that: for other fields, and where a source has gaps.

        Raises:
            StepRangeError: no such episode in this store or view.
        """
        snapshot, start, length = self._locate(number)
        steps = np.arange(start, start + length)
        flat: dict[str, Any] = {}
        for name, f in snapshot.schema.fields.items():
            flat[name] = _as_given(snapshot.rows(name, start, start + length), f)
        for name, reader in snapshot.following.items():
            f = snapshot.schema[name]
            offsets, present, values = reader.between(start, start + length)
            if present[-1] and (len(offsets) > 1 or not is_observation(name)):
                if f.ragged:
                    flat[f"next_{name}"] = _listed(snapshot.take_ragged(f"next_{name}", steps), f)
                else:
                    flat[f"next_{name}"] = out = np.empty_like(flat[name])
                    snapshot.take(f"next_{name}", steps, out)
            if is_observation(name) and present[-1]:
                final = _as_given(values[-1:], f)
                flat[name] = flat[name] + final if f.ragged else np.concatenate([flat[name], final])
        return nest(flat)

    def _locate(self, number: int) -> tuple[Snapshot, int, int]:
        number = int(_integers(number, "the episode number"))
        at = int(np.searchsorted(self.episode_numbers, number))
        if at == self.num_episodes or self.episode_numbers[at] != number:
            numbers = self.episode_numbers
            raise StepRangeError(
                f"episode {number} is not among the {self.num_episodes} episodes here"
                + (f" ({numbers[0]} to {numbers[-1]})" if len(numbers) else "")
                + "; `episodes` lists them"
            )
        position = number // STRIDE
        start = int(self.spans.start[at]) - position * STRIDE
        return self._snapshots[position], start, int(self.spans.length[at])

    # -- selecting -------------------------------------------------------------------------------

    def filter(self, which: Callable[[EpisodeRow], Any] | Iterable[bool] | Iterable[int]) -> Store:
        """A view of some episodes; nothing is copied.

        Args:
            which: a function of an episode's row in the table (`row["return"] > 3000`),
                a boolean mask over `episodes`, or a list of episode numbers.

        Raises:
            SchemaError: a mask of another length.
            StepRangeError: a number that is not here.
        """
        if callable(which):
            return self._narrowed(_Predicate(which))
        chosen = np.asarray(list(which))
        if chosen.dtype == bool:
            if len(chosen) != self.num_episodes:
                raise SchemaError(
                    f"the mask must have one entry for each of {self.num_episodes} episodes, "
                    f"got {len(chosen)}"
                )
            numbers = self.episode_numbers[chosen]
        else:
            numbers = np.unique(_integers(chosen, "episode numbers"))
            unknown = np.setdiff1d(numbers, self.episode_numbers)
            if len(unknown):
                self._locate(int(unknown[0]))
        selected = [
            numbers[numbers // STRIDE == position] - position * STRIDE
            for position in range(len(self._snapshots))
        ]
        return Store(self._snapshots, self._rules, selected, fixed=True)

    def split(self, share: float, seed: int = 0) -> tuple[Store, Store]:
        """Two views by whole episodes: about `share` of them, and the others.

        An episode's side depends on (seed, store, number) only: it never changes sides while
        the store grows.
        """
        if not 0 <= share <= 1:
            raise SchemaError(f"share must be between 0 and 1, got {share}")
        return (
            self._narrowed(_Side(share, seed, left=True)),
            self._narrowed(_Side(share, seed, left=False)),
        )

    def latest(self) -> Store:
        """The same store or view as of the newest commit; itself if there is none newer.

        Raises:
            SchemaError: a view by mask or list, which says nothing about new episodes.
            StateError: the directory holds another store by now.
        """
        if all(snapshot.is_newest() for snapshot in self._snapshots):
            return self
        if self._fixed:
            raise SchemaError(
                "a view by mask or by numbers, and a pickled one by a function, cannot follow new "
                "commits; open the store and filter with a function"
            )
        return self._at([Snapshot.of(snapshot.path) for snapshot in self._snapshots])

    def _at(self, snapshots: list[Snapshot]) -> Store:
        """This selection on newer snapshots; only episodes that are new are asked about."""
        for old, new in zip(self._snapshots, snapshots, strict=True):
            if old.root.store_id != new.root.store_id:
                raise StateError(f"{new.path} is another store by now; open it anew")
        for new in snapshots[1:]:
            _check_same_fields(snapshots[0], new)
        if not self._rules:
            return Store(snapshots)
        selected = []
        for position, (old, new) in enumerate(zip(self._snapshots, snapshots, strict=True)):
            kept = self._selected[position]
            assert kept is not None, position
            fresh = np.arange(max(old.stop_episode, new.first_episode), new.stop_episode)
            for rule in self._rules:
                fresh = fresh[rule(new, fresh, position * STRIDE)]
            selected.append(np.concatenate([kept[kept >= new.first_episode], fresh]))
        return Store(snapshots, self._rules, selected)

    def _narrowed(self, rule: Rule) -> Store:
        selected = []
        for position, (snapshot, chosen) in enumerate(
            zip(self._snapshots, self._selected, strict=True)
        ):
            if chosen is None:
                chosen = np.arange(snapshot.first_episode, snapshot.stop_episode)
            selected.append(chosen[rule(snapshot, chosen, position * STRIDE)])
        return Store(self._snapshots, (*self._rules, rule), selected, fixed=self._fixed)

    # -- pickling --------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        """With its commit, so that a spawned worker reads what its parent reads.

        A function given to `filter` stays behind: the copy has the same episodes, but
        cannot follow new commits.
        """
        rules = tuple(rule for rule in self._rules if isinstance(rule, _Side))
        fixed = self._fixed or len(rules) < len(self._rules)
        parts = [(str(s.path), s.root, s.version) for s in self._snapshots]
        return partial(_restored, fixed=fixed), (parts, rules, self._selected)


def open_store(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    at: int | Sequence[int] | None = None,
) -> Store:
    """Open a store, or several as one, as of the newest commit or of an older one.

    Args:
        path: a directory, or a list of them: a union, in which the steps and episodes of the
            k-th store are numbered from `k * 2**40` on. Readers take no lock; the store may be
            written at the same time.
        at: number of the commit, one for each store; None for the newest. What was evicted
            since cannot be read.

    Raises:
        StepRangeError: there is no commit `at`.
        NotAStoreError: there is no store at `path`.
        FormatError: the store was made by a newer version, or its root is damaged.
        SchemaError: the stores of a union have different fields.
    """
    given = [path] if isinstance(path, (str, os.PathLike)) else path
    paths = [absolute(p) for p in given]
    if not paths:
        raise SchemaError("a union needs at least one store, got an empty list")
    numbers = [at] * len(paths) if at is None or isinstance(at, int) else list(at)
    if len(numbers) != len(paths):
        raise SchemaError(f"at= must have one commit for each of {len(paths)} stores")
    snapshots = [
        Snapshot.of(p) if n is None else Snapshot(p, root_at(p, n))
        for p, n in zip(paths, numbers, strict=True)
    ]
    for snapshot in snapshots[1:]:
        _check_same_fields(snapshots[0], snapshot)
    return Store(snapshots)


def absolute(path: str | os.PathLike[str]) -> Path:
    """The same path wherever the process goes later."""
    return Path(os.path.abspath(path))


def _check_same_fields(one: Snapshot, other: Snapshot) -> None:
    for snapshot in (one, other):
        if not snapshot.schema.fields and one.schema != other.schema:
            raise SchemaError(
                f"{snapshot.path} has no fields yet, so it cannot be read together with others; "
                "append to it first, or give its Writer a schema="
            )
    ours, theirs = (
        {n: (f.shape, f.dtype) for n, f in s.schema.fields.items()} for s in (one, other)
    )
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            raise SchemaError(
                f"field {name!r} is {ours.get(name)} in {one.path} and {theirs.get(name)} in "
                f"{other.path}; the stores of a union have the same fields"
            )


def _restored(
    parts: list[tuple[str, Root, tuple[int, int, int] | None]],
    rules: tuple[Rule, ...],
    selected: tuple[NDArray[np.int64] | None, ...],
    *,
    fixed: bool,
) -> Store:
    snapshots = [Snapshot(Path(path), root, version) for path, root, version in parts]
    return Store(snapshots, rules, selected, fixed=fixed)


def _listed(rows: Ragged, field: Field) -> list[Any]:
    """A ragged column as a list with one array, or string, per step."""
    return [text_of(row) if field.dtype == "text" else row for row in rows]


def _as_given(rows: Rows, field: Field) -> Any:
    """A column in the form that `append` takes."""
    return _listed(rows, field) if isinstance(rows, Ragged) else np.array(rows)


def _integers(values: ArrayLike, what: str) -> NDArray[np.int64]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise SchemaError(f"{what} must be integers, got rows that differ in length") from error
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind == "O" and all(isinstance(value, int) for value in array.flat):
        raise StepRangeError(f"{what} must be below 2**63, got {max(array.flat, key=abs)}")
    if array.dtype.kind not in "iu":
        raise SchemaError(f"{what} must be integers, got dtype {array.dtype}")
    if array.dtype.kind == "u" and int(array.max()) >= 1 << 63:  # would become negative
        raise StepRangeError(f"{what} must be below 2**63, got {int(array.max())}")
    return array.astype(np.int64)


def _hashed(numbers: NDArray[np.int64], key: int) -> NDArray[np.float64]:
    """A fraction in [0, 1) for each number: the finalizer of SplitMix64 (Steele et al., 2014)."""
    z = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
