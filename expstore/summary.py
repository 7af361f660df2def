"""inspect: the numbers by which people judge a store, or one episode of it."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from expstore.errors import DamagedError, EvictedError, FormatError
from expstore.schema import Field
from expstore.storage import files
from expstore.storage.commits import read_root
from expstore.storage.layout import EPISODE, PRIORITIES
from expstore.storage.priorities import read_pointer, set_names
from expstore.storage.store import Store, open_store

NUM_BINS = 24
BLOCK_BYTES = 16 << 20  # of an episode's rows read at a time
BLOCK_STEPS = 256  # likewise of ragged fields, whose rows have no size of their own
LENGTH_BYTES = 8  # of each step of a ragged field, beside its elements


@dataclass(frozen=True)
class Distribution:
    """How a number is spread over the episodes; of the finite values only."""

    min: float
    median: float
    mean: float
    max: float
    counts: tuple[int, ...]  # episodes in bins of equal width from min to max
    num_not_finite: int = 0  # NaN or infinite, left out above


@dataclass(frozen=True)
class FieldSummary:
    """One field of a store."""

    name: str
    shape: tuple[int, ...]  # of one element, if it is ragged
    dtype: str
    ragged: bool
    layout: str
    num_bytes: int  # of its live rows as arrays
    allocated_bytes: int  # on disk, next values included


@dataclass(frozen=True)
class PrioritySummary:
    """Priorities saved by name beside the data."""

    name: str
    num_steps: int | None  # with a priority; None if the set is damaged, as is the time
    time: float | None  # seconds since 1970, UTC
    allocated_bytes: int


@dataclass(frozen=True)
class StoreSummary:
    """A store as of its newest commit.

    Attributes:
        allocated_bytes: the directory's, on disk; that of the fields, of saved priorities and of
            the index together.
        end_reasons: how many episodes ended so, most frequent first.
        length: of the episodes in steps; None where there are none.
        returns: "return" -> its distribution, "return[0]" and so on where rewards are vectors.
    """

    path: str
    store_id: str
    commit: int
    commit_time: float  # seconds since 1970, UTC
    num_episodes: int
    num_steps: int
    num_deleted: int  # episodes that were deleted, and whose rows are still there
    allocated_bytes: int
    fields: tuple[FieldSummary, ...]
    end_reasons: Mapping[str, int]
    length: Distribution | None
    returns: Mapping[str, Distribution]
    priorities: tuple[PrioritySummary, ...] = ()


@dataclass(frozen=True)
class FieldRange:
    """The values of one field in one episode; of the finite ones only, and of no text."""

    name: str
    shape: tuple[int, ...]  # of one element, if it is ragged
    dtype: str
    ragged: bool
    min: float | None  # None where no value is finite
    mean: float | None
    max: float | None
    num_not_finite: int


@dataclass(frozen=True)
class EpisodeSummary:
    """One episode of a store."""

    path: str
    number: int
    start: int  # its first step
    length: int
    end_reason: str
    has_final_observation: bool
    returned: Any  # a number, a list where rewards are vectors, None without rewards
    seed: int | None
    metadata: Mapping[str, Any]
    fields: tuple[FieldRange, ...]


@overload
def inspect(path: str | os.PathLike[str], *, at: int | None = None) -> StoreSummary: ...
@overload
def inspect(
    path: str | os.PathLike[str], episode: int, *, at: int | None = None
) -> EpisodeSummary: ...
def inspect(
    path: str | os.PathLike[str], episode: int | None = None, *, at: int | None = None
) -> StoreSummary | EpisodeSummary:
    """Sum up a store, or one episode of it; it may be written meanwhile.

    Args:
        path: the store's directory.
        episode: the number of an episode.
        at: number of an older commit, whose episodes must still be there; see `history`.

    Raises:
        NotAStoreError: there is no store at `path`.
        StepRangeError: there is no such episode, or no such commit.
        EvictedError: episodes of that commit were evicted.

    Example:
        >>> import numpy as np, expstore
        >>> with expstore.Writer("demo.exp") as writer:
        ...     writer.append({"observation": np.zeros((4, 2)), "reward": np.ones(3)})
        0
        >>> expstore.inspect("demo.exp").returns["return"].max
        3.0
        >>> expstore.inspect("demo.exp", episode=0).end_reason
        'cut'
    """
    store = open_store(path, at=at)
    if at is not None:
        _check_whole(store)
    return _of_store(store) if episode is None else _of_episode(store, episode)


def _check_whole(store: Store) -> None:
    """Refuse a commit that has lost episodes since: some of its files may be there all the same."""
    snapshot = store.snapshots[0]
    first = read_root(snapshot.path).commit.dims[EPISODE][0]
    gone = min(first, snapshot.stop_episode) - snapshot.first_episode
    if gone > 0:
        raise EvictedError(
            f"commit {store.commit} of {snapshot.path} is not there any more: {gone:,} of its "
            f"{len(snapshot.index):,} episodes were evicted since, as the store has a capacity; "
            "expstore history lists newer commits"
        )


def _of_store(store: Store) -> StoreSummary:
    snapshot, episodes = store.snapshots[0], store.episodes
    length = distribution(np.asarray(episodes["length"]))
    returns = {
        name: found
        for name, values in _return_columns(store)
        if (found := distribution(values)) is not None
    }
    return StoreSummary(
        path=str(snapshot.path),
        store_id=snapshot.root.store_id,
        commit=snapshot.root.commit.number,
        commit_time=snapshot.root.commit.time,
        num_episodes=store.num_episodes,
        num_steps=store.num_steps,
        num_deleted=len(snapshot.deleted),
        allocated_bytes=allocated_below(snapshot.path),
        fields=tuple(_field(store, name, f) for name, f in store.fields.items()),
        end_reasons=dict(Counter(episodes["end_reason"].tolist()).most_common()),
        length=length,
        returns=returns,
        priorities=tuple(
            _priorities(snapshot.path / PRIORITIES / name)
            for name in set_names(snapshot.path / PRIORITIES)
        ),
    )


def _priorities(path: Path) -> PrioritySummary:
    num_steps, time = None, None
    with contextlib.suppress(DamagedError, FormatError):  # verify says what is wrong
        if (pointer := read_pointer(path)) is not None:
            num_steps, time = pointer.num_steps, pointer.time
    return PrioritySummary(path.name, num_steps, time, allocated_below(path))


def _field(store: Store, name: str, field: Field) -> FieldSummary:
    path = store.paths[0]
    num_bytes = store.num_steps * field.step_bytes
    if field.ragged:
        start, stop = store.snapshots[0].root.commit.dims[f"{name}/values"]
        num_bytes = (stop - start) * field.step_bytes + store.num_steps * LENGTH_BYTES
    return FieldSummary(
        name=name,
        shape=field.shape,
        dtype=field.dtype,
        ragged=field.ragged,
        layout=field.layout,
        num_bytes=num_bytes,
        allocated_bytes=allocated_below(path / "steps" / name)
        + allocated_below(path / "next" / name),
    )


def _return_columns(store: Store) -> Iterator[tuple[str, NDArray[np.float64]]]:
    if "return" not in store.episodes.columns or not store.num_episodes:
        return
    returns = np.asarray(store.episodes["return"])
    for at in np.ndindex(returns.shape[1:]):
        suffix = f"[{','.join(map(str, at))}]" if returns[0].size > 1 else ""
        yield f"return{suffix}", returns[(slice(None), *at)]


def distribution(values: NDArray[Any]) -> Distribution | None:
    """The distribution of (E,) numbers; None where none is finite.

    >>> distribution(np.array([1, 1, 2, 4])).counts
    (2, 1, 0, 1)
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = finite.min(), finite.max()
    whole = values.dtype.kind in "iu" and high - low < NUM_BINS
    num_bins = int(high - low) + 1 if whole else NUM_BINS
    # Halved, since the distance between two floats can be too large for a float.
    width = high / 2 - low / 2
    if not width:
        counts = np.array([len(finite)])
    else:
        share = (finite / 2 - low / 2) / width
        counts = np.bincount(np.minimum((share * num_bins).astype(int), num_bins - 1))
    return Distribution(
        min=float(low),
        median=float(np.median(finite)),
        mean=float(finite.mean()),
        max=float(high),
        counts=tuple(counts.tolist()),
        num_not_finite=len(values) - len(finite),
    )


def _of_episode(store: Store, number: int) -> EpisodeSummary:
    store.filter([number])  # raises where there is none
    row = store.episodes[int(np.searchsorted(store.episode_numbers, number))]
    start, length = row["start"], row["length"]
    returned = row.get("return")
    return EpisodeSummary(
        path=str(store.paths[0]),
        number=number,
        start=start,
        length=length,
        end_reason=row["end_reason"],
        has_final_observation=bool(store.read([start + length - 1], ["has_next"])["has_next"][0]),
        returned=returned.tolist() if isinstance(returned, np.ndarray) else returned,
        seed=row["seed"],
        metadata=row["metadata"],
        fields=tuple(
            _range(store, name, f, start, start + length) for name, f in store.fields.items()
        ),
    )


def _range(store: Store, name: str, field: Field, start: int, stop: int) -> FieldRange:
    low, high, total, count, num_values = math.inf, -math.inf, 0.0, 0, 0
    for values in _blocks(store, name, field, start, stop):
        finite = values[np.isfinite(values)]
        num_values += values.size
        count += finite.size
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            total += float(finite.mean(dtype=np.float64)) * finite.size
    return FieldRange(
        name,
        field.shape,
        field.dtype,
        field.ragged,
        min=low if count else None,
        mean=total / count if count else None,
        max=high if count else None,
        num_not_finite=num_values - count,
    )


def _blocks(store: Store, name: str, field: Field, start: int, stop: int) -> Iterator[NDArray[Any]]:
    """The numbers of a field, some steps at a time."""
    if field.dtype == "text":
        return
    block = BLOCK_STEPS if field.ragged else max(1, BLOCK_BYTES // field.step_bytes)
    for first in range(start, stop, block):
        steps = np.arange(first, min(first + block, stop))
        if field.ragged:
            rows = store.read_ragged(name, steps).values
        else:
            rows = np.empty((len(steps), *field.shape), field.stored_dtype)
            store.read_into(steps, {name: rows})
        if field.dtype == "bfloat16":
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        yield rows


def allocated_below(path: Path) -> int:
    """Bytes that the files of a directory take on disk, those of directories in it included."""
    return sum(
        allocated_below(Path(entry.path))
        if entry.is_dir(follow_symlinks=False)
        else files.allocated_bytes(Path(entry.path))
        for entry in files.list_directory(path)
    )
