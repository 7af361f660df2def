"""Store: what one or several directories held at their commits, whole or a selection of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from expstore.episode import nest
from expstore.errors import DamagedError, SchemaError, StepRangeError
from expstore.ragged import Ragged, Rows, text_of
from expstore.schema import Field, is_observation
from expstore.spans import Spans
from expstore.storage import files
from expstore.storage.boundaries import field_that_ends
from expstore.storage.commits import root_at
from expstore.storage.conditions import Condition
from expstore.storage.episodes import EpisodeRow
from expstore.storage.parallel import ONE, Threads
from expstore.storage.reading import STRIDE, Snapshot, resolve
from expstore.storage.selection import Part, Predicate, Rule, Side, Where, restored
from expstore.storage.table import Episodes

EPISODE_ENDS = ("done", ("done",), ("next", "done"))


class Store:
    """A store as of one commit; it never changes. `latest()` gives the newer one.

    Opened by `expstore.open`. Views (`filter`, `split`) and unions are Stores, too: every
    method and every sampler treats them alike. Steps and episodes keep their numbers in a view;
    in a union, those of the k-th store begin at `k * 2**40`.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = tuple(parts)
        self._snapshots = tuple(part.snapshot for part in self._parts)
        self._selected = tuple(part.chosen for part in self._parts)
        self._boundaries: dict[Any, NDArray[np.int64]] = {}  # by done_key

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
    def commit(self) -> int:
        """The number of the commit that this is as of: what ``open(path, at=)`` takes.

        Raises:
            SchemaError: a union has a commit of each of its stores; `identities` has them.
        """
        if len(self._snapshots) > 1:
            numbers = [snapshot.root.commit.number for snapshot in self._snapshots]
            raise SchemaError(
                f"a union of {len(numbers)} stores has a commit of each, {numbers}; give open a "
                "list of them"
            )
        return self._snapshots[0].root.commit.number

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
        parts = [part.spans() for part in self._parts]
        moved = [
            replace(part, start=part.start + position * STRIDE) if position else part
            for position, part in enumerate(parts)
        ]
        return moved[0] if len(moved) == 1 else Spans.concatenate(moved)

    def boundaries(self, done_key: str | Sequence[str] | None) -> NDArray[np.int64]:
        """Where a `done_key` of `expstore.Sequence` ends windows.

        The first use reads that column once, in blocks; the next commit of the same store then
        costs its new rows. The end of each store of a union bounds in any case.

        Args:
            done_key: `"done"` or `("next", "done")` for the last step of each episode; any
                other key for the steps at which the field of that name, without a leading
                `"next"`, is not zero (`("info", "life_lost")` is `info/life_lost`); None for
                no step at all.

        Returns:
            (K,) ascending positions in the selection: not step numbers, see `spans`.

        Raises:
            FieldNotFoundError: there is no such field.
            SchemaError: the field has more than one number per step.
        """
        key = done_key if done_key is None or isinstance(done_key, str) else tuple(done_key)
        if key not in self._boundaries:
            self._boundaries[key] = self._boundaries_of(key)
        return self._boundaries[key]

    def _boundaries_of(self, key: str | tuple[str, ...] | None) -> NDArray[np.int64]:
        if key is None:
            return np.empty(0, np.int64)
        if key in EPISODE_ENDS:
            return self.spans.first + self.spans.length - 1
        name = field_that_ends(self._snapshots[0].schema, key)
        ends = [s.ends(name) + position * STRIDE for position, s in enumerate(self._snapshots)]
        return self.spans.positions_held(np.concatenate(ends))

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
        selected = tuple(part.selected for part in self._parts)
        return Episodes(self._snapshots, selected, self.episode_numbers, self.spans.start)

    @cached_property
    def episode_numbers(self) -> NDArray[np.int64]:
        """(E,) numbers of the selected episodes, ascending."""
        numbers = [part.numbers + k * STRIDE for k, part in enumerate(self._parts)]
        return np.concatenate(numbers)

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
            self._snapshots[0].read_into(steps, out, threads)
            return
        owner = steps // STRIDE
        for position in np.unique(owner).tolist():
            here = np.flatnonzero(owner == position)
            local = steps[here] - position * STRIDE
            parts = {n: np.empty((len(here), *a.shape[1:]), a.dtype) for n, a in out.items()}
            self._snapshots[position].read_into(local, parts, threads)
            for name, part in parts.items():
                out[name][here] = part + position * STRIDE if name == "episode" else part

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
            if not len(present):
                raise DamagedError(
                    f"episode {number} of {snapshot.path} lacks the next value of {name!r} at its "
                    "last step; run expstore verify"
                )
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

    def filter(
        self, which: str | Callable[[EpisodeRow], Any] | Iterable[bool] | Iterable[int]
    ) -> Store:
        """A view of some episodes; nothing is copied.

        Args:
            which: a condition (`'return > 3000 and policy == "sac"'`: see `expstore.delete`), a
                function of an episode's row in the table (`row["return"] > 3000`),
                a boolean mask over `episodes`, or a list of episode numbers.

        Raises:
            SchemaError: a mask of another length, or no condition.
            FieldNotFoundError: a name in the condition that no episode has.
            StepRangeError: a number that is not here.
        """
        if isinstance(which, str):
            condition = Condition.parse(which)
            condition.mask(self.episodes)  # raises for names that nobody has, and for other kinds
            return self._narrowed(lambda base: Where(condition, base))
        if callable(which):
            return self._narrowed(lambda base: Predicate(which, base))
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
        return Store(
            replace(part, chosen=numbers[numbers // STRIDE == k] - k * STRIDE, is_fixed=True)
            for k, part in enumerate(self._parts)
        )

    def split(self, share: float, seed: int = 0) -> tuple[Store, Store]:
        """Two views by whole episodes: about `share` of them, and the others.

        An episode's side depends on (seed, store, number) only: it never changes sides while
        the store grows.
        """
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise SchemaError(
                f"share must be a number between 0 and 1, got {share!r}; for more than two views "
                "split one of the two again"
            )
        return (
            self._narrowed(lambda _: Side(share, seed, left=True)),
            self._narrowed(lambda _: Side(share, seed, left=False)),
        )

    def latest(self) -> Store:
        """The same store or view as of the newest commit; itself if there is none newer.

        Raises:
            SchemaError: a view by mask or list, which says nothing about new episodes.
            StateError: the directory holds another store by now.
        """
        parts = [part.latest() for part in self._parts]
        if all(new is old for new, old in zip(parts, self._parts, strict=True)):
            return self
        _check_same_fields(parts)
        return Store(parts)

    def _narrowed(self, rule_at: Callable[[int], Rule]) -> Store:
        """By a rule, given where the numbers of each part begin."""
        return Store(part.narrowed(rule_at(k * STRIDE)) for k, part in enumerate(self._parts))

    # -- pickling --------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        """With its commit, so that a spawned worker reads what its parent reads.

        A function given to `filter` stays behind: the copy has the same episodes, but
        cannot follow new commits.
        """
        return _restored, ([part.pickled() for part in self._parts],)


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
    if not isinstance(path, (str, os.PathLike, Iterable)):
        raise SchemaError(f"open takes a directory, or a list of them, got {path!r}")
    given = [path] if isinstance(path, (str, os.PathLike)) else path
    paths = [absolute(p) for p in given]
    if not paths:
        raise SchemaError("a union needs at least one store, got an empty list")
    numbers = [at] * len(paths) if at is None or isinstance(at, int) else list(at)
    if len(numbers) != len(paths):
        raise SchemaError(f"at= must have one commit for each of {len(paths)} stores")
    parts = [
        Part(Snapshot.of(p) if n is None else Snapshot(p, root_at(p, n)))
        for p, n in zip(paths, numbers, strict=True)
    ]
    _check_same_fields(parts)
    return Store(parts)


def union(stores: Iterable[Store]) -> Store:
    """Several stores, views of them or unions as one.

    What `open` of several paths gives, for stores that are open already, so that each may be a
    view of its own. `latest` follows each as it would by itself.

    Args:
        stores: at least one; the steps and episodes of the k-th directory among them are
            numbered from `k * 2**40` on.

    Raises:
        SchemaError: the stores have different fields, or there is none.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     numbers = [writer.append({"reward": np.ones(n)}) for n in (3, 5, 1)]
        >>> store = expstore.open(path)
        >>> both = expstore.union([store.filter(lambda row: row["length"] > 3), store])
        >>> [number % 2**40 for number in both.episode_numbers.tolist()]
        [1, 0, 1, 2]
    """
    given = [stores] if isinstance(stores, Store) else list(stores)
    for store in given:
        if not isinstance(store, Store):
            raise SchemaError(
                f"a union is of stores, got {type(store).__name__} {store!r}; expstore.open first"
            )
    parts = [part for store in given for part in store._parts]
    if not parts:
        raise SchemaError("a union needs at least one store, got an empty list")
    _check_same_fields(parts)
    return Store(parts)


def absolute(path: str | os.PathLike[str]) -> Path:
    """The same path wherever the process goes later."""
    return Path(os.path.abspath(path))


def _check_same_fields(parts: Sequence[Part]) -> None:
    for part in parts[1:]:
        _check_same_fields_of(parts[0].snapshot, part.snapshot)


def _check_same_fields_of(one: Snapshot, other: Snapshot) -> None:
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


def _restored(parts: list[tuple[Any, ...]]) -> Store:
    return Store(restored(*part) for part in parts)


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
