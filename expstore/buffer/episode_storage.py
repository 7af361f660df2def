"""The store under a buffer: finished episodes appended, committed, counted and read."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.buffer.columns import given_key, stored_key, to_stored
from expstore.buffer.syncing import FilesToSync
from expstore.episode import Columns, nest
from expstore.errors import BufferFullError, CapacityError, FormatError, NotAStoreError, SchemaError
from expstore.loading.gather import Gather
from expstore.spans import Spans
from expstore.storage import files
from expstore.storage.layout import METADATA_FILE, PRIVATE
from expstore.storage.store import open_store
from expstore.storage.writer import Writer

VERSION = 1
DIRECTORY = "buffer"  # in the store's private directory
DOCUMENT = "buffer.json"


@dataclass
class Document:
    """What a buffer writes down beside its store, as JSON."""

    config: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)  # point -> fingerprint
    keys: list[str] = field(default_factory=list)  # of the stored columns, as given
    cleared_episode: int = 0  # the first that counts
    cleared_step: int = 0  # its first step
    version: int = VERSION


@dataclass(frozen=True)
class Finished:
    """One episode on its way into the store."""

    columns: Mapping[str, Any]
    end_reason: str | None
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Change:
    """What a commit brought, by ids."""

    pushed_steps: range
    evicted_steps: range
    pushed_episodes: range
    evicted_episodes: range


class EpisodeStorage:
    """A store with the memory of what was cleared, read by positions of what was not.

    Args:
        path: the store's directory.
        capacity: steps.
        is_fixed: refuse what does not fit, in place of evicting.
    """

    def __init__(self, path: Path, capacity: int, *, is_fixed: bool) -> None:
        self.path = path
        self.capacity, self.is_fixed = capacity, is_fixed
        self.directory = path / PRIVATE / DIRECTORY
        self._finish_recreation()
        self.writer = self._opened()
        files.make_directory(self.directory)
        self.document = read_document(self.directory / DOCUMENT)
        self._written: Document | None = None
        self.store = open_store(path)
        if not self.document.keys:  # of a store that was written otherwise
            self.document.keys = keys_of(self.store.fields)
        self._to_sync = FilesToSync(path)
        self._gather: Gather | None = None
        self._live: tuple[Spans, int, Spans] | None = None
        self._seen = self._bounds()
        self._committed = self.writer.num_episodes

    def _opened(self) -> Writer:
        return Writer(
            self.path,
            cast=True,
            capacity_steps=self.capacity,
            commit_interval_s=float("inf"),  # commits are made here, see `commit`
            durable=False,
        )

    # -- writing ---------------------------------------------------------------------------------

    def push(self, episodes: Sequence[Finished]) -> None:
        """Append all of the episodes, or none.

        Raises:
            CapacityError: one is longer than the capacity.
            BufferFullError: mode is fixed and there is no room.
            SchemaError: one does not fit the others.
        """
        parts = [to_stored(episode.columns) for episode in episodes]
        lengths = [Columns.of(part, "in the episode").num_steps for part in parts]
        self._check_room(lengths)
        keys = list(episodes[0].columns)
        if self.document.keys and set(keys) != set(self.document.keys):
            if self._is_empty:
                self._recreate()
            else:
                _refuse_keys(keys, self.document.keys)
        if len(parts) > 1:
            self.writer.commit()  # so that `discard` throws nothing else away
        try:
            self._append(parts, episodes)
        except SchemaError:
            if len(parts) > 1:
                self.writer.discard()
            if not self._is_empty or not self.writer.schema.fields:
                raise
            self._recreate()  # a buffer that was cleared takes episodes of any kind
            self._append(parts, episodes)
        if not self.document.keys:
            self.document.keys = keys

    def _append(self, parts: list[dict[str, Any]], episodes: Sequence[Finished]) -> None:
        for part, episode in zip(parts, episodes, strict=True):
            self.writer.append(part, end_reason=episode.end_reason, **episode.metadata)

    def _check_room(self, lengths: Sequence[int]) -> None:
        if max(lengths) > self.capacity:
            raise CapacityError(
                f"the episode has {max(lengths)} transitions, but the buffer may hold "
                f"{self.capacity} (capacity); cut episodes earlier, or raise the capacity"
            )
        free = self.capacity - (self.writer.num_steps - self._first_live_step)
        if self.is_fixed and sum(lengths) > free:
            raise BufferFullError(
                f"the buffer has room for {free} of its {self.capacity} transitions (mode fixed), "
                f"the episode has {sum(lengths)}; clear() it, or raise the capacity"
            )

    @property
    def _first_live_step(self) -> int:
        spans = self.store.spans
        first = int(spans.start[0]) if spans.num_episodes else 0
        return max(self.document.cleared_step, first)

    @property
    def _is_empty(self) -> bool:
        return self.writer.num_steps <= self.document.cleared_step

    def clear(self) -> None:
        """Nothing that was pushed and committed so far counts any more."""
        self.document.cleared_episode = self.writer.num_episodes
        self.document.cleared_step = self.writer.num_steps
        self._seen = self._bounds()

    @property
    def has_pending(self) -> bool:
        """Whether there is something that was pushed and is not readable yet."""
        return self.writer.num_episodes > self._committed

    def commit(self) -> Change:
        """Make what was pushed readable; a kill leaves it, a power cut may not."""
        self.write_document()
        self.writer.commit()
        self.store = self.store.latest()
        self._committed = self.writer.num_episodes
        before, after = self._seen, self._bounds()
        self._seen = after
        pushed, evicted = [], []
        for (start, stop), (new_start, new_stop) in zip(before, after, strict=True):
            pushed.append(range(max(stop, new_start), new_stop))
            evicted.append(range(start, max(start, min(new_start, stop))))
        return Change(pushed[0], evicted[0], pushed[1], evicted[1])

    def sync(self) -> None:
        """Make what was committed durable."""
        self._to_sync.sync()

    def write_document(self) -> None:
        """Write down what changed in `document`."""
        if self._written != self.document:
            data = json.dumps(asdict(self.document), indent=1).encode()
            files.write_whole(self.directory / DOCUMENT, data, durable=False)
            self._written = Document(**json.loads(data))

    def close(self) -> None:
        """Commit, make it durable, and let the store go."""
        try:
            self.write_document()
        finally:
            self.writer.close()
        self.sync()

    def _bounds(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last of what counts, of steps and episodes."""
        numbers, spans = self.store.episode_numbers, self.live
        if not spans.num_episodes:
            step, episode = self.document.cleared_step, self.document.cleared_episode
            return (step, step), (episode, episode)
        stop = int(spans.start[-1] + spans.length[-1])
        episodes = int(numbers[-spans.num_episodes]), int(numbers[-1]) + 1
        return (int(spans.start[0]), stop), episodes

    def _recreate(self) -> None:
        """A new store in the place of one in which nothing counts.

        Without its root it is none, so what a kill leaves is removed at the next opening.
        """
        self.writer.close()
        files.unlink(self.path / METADATA_FILE)
        self._remove_rest()
        self.document.keys, self.document.cleared_episode, self.document.cleared_step = [], 0, 0
        self.writer = self._opened()
        self.store = open_store(self.path)
        self._gather, self._live, self._committed = None, None, 0
        self._seen = self._bounds()

    def _finish_recreation(self) -> None:
        if not (self.path / METADATA_FILE).exists() and (self.directory / DOCUMENT).exists():
            self._remove_rest()
            files.unlink(self.directory / DOCUMENT)

    def _remove_rest(self) -> None:
        for name in ("steps", "next", "episodes", "priorities"):
            files.remove_directory(self.path / name)
        files.remove_directory(self.directory / "state")  # it speaks of steps that are gone

    # -- reading ---------------------------------------------------------------------------------

    @property
    def live(self) -> Spans:
        """The committed episodes that count."""
        spans, cleared = self.store.spans, self.document.cleared_episode
        if self._live is None or self._live[0] is not spans or self._live[1] != cleared:
            first = int(np.searchsorted(self.store.episode_numbers, cleared))
            counting = spans
            if first:
                counting = Spans.laid_out(spans.start[first:], spans.length[first:])
            self._live = spans, cleared, counting
        return self._live[2]

    @property
    def live_episodes(self) -> NDArray[np.int64]:
        """(E,) numbers of the committed episodes that count."""
        numbers = self.store.episode_numbers
        return numbers[len(numbers) - self.live.num_episodes :]

    def read(self, steps: NDArray[np.int64], device: torch.device) -> dict[str, Any]:
        """The columns of steps (n,) as tensors (n, *shape), nested as they were given.

        Strings, and arrays of varying length, come as lists.
        """
        if self._gather is None:
            names = [stored_key(key, self.document.keys) for key in self.document.keys]
            self._gather = Gather.of(self.store, names)
            self._ragged = [n for n, f in self._gather.fields.items() if f.ragged]
            self._fixed = Gather({n: f for n, f in self._gather.fields.items() if not f.ragged})
        flat: dict[str, Any] = {}
        for name, tensor in self._fixed.read(self.store, steps).items():
            flat[given_key(name)] = tensor if device.type == "cpu" else tensor.to(device)
        for name in self._ragged:
            rows = self.store.read(steps, [name])
            for part in name.split("/"):
                rows = rows[part]
            flat[given_key(name)] = [_row(row, device) for row in rows]
        return nest(flat)

    def read_episodes(self, positions: NDArray[np.int64], device: torch.device) -> Any:
        """Whole episodes: a dict (E, L, ...) if they are of one length, else a list of dicts."""
        bounds = [(int(self.live.start[p]), int(self.live.length[p])) for p in positions]
        steps = [np.arange(start, start + length) for start, length in bounds]
        whole = self.read(np.concatenate(steps) if steps else np.empty(0, np.int64), device)
        ends = np.cumsum([0, *(length for _, length in bounds)]).tolist()
        parts = [_sliced(whole, a, b) for a, b in itertools.pairwise(ends)]
        is_even = len({length for _, length in bounds}) == 1
        return _stacked(parts) if is_even else parts

    def has_uid(self, uid: str) -> bool:
        """Whether an episode that began under this uid is in the store; looks at all of them."""
        mark = json.dumps({"uid": uid}, separators=(",", ":"))[1:-1].encode()
        index = self.store.snapshots[0].index
        numbers = reversed(self.store.episode_numbers.tolist())
        return any(mark in index.metadata_bytes(number) for number in numbers)


def read_document(path: Path) -> Document:
    """The document at `path`, an empty one where there is none.

    Raises:
        FormatError: it was made by a newer version, or is damaged.
    """
    try:
        found = json.loads(files.read(path))
    except FileNotFoundError:
        return Document()
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {error}; restore it from a copy") from error
    if found.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {found.get('version')}, this expstore reads {VERSION}; install "
            "a newer one"
        )
    return Document(**found)


def keys_of(names: Iterable[str]) -> list[str]:
    """The keys of a store's fields, next observations included."""
    keys = list(dict.fromkeys(given_key(name).split("/")[0] for name in names))
    return [*keys, "next_observation"] if "observation" in keys else keys


def has_buffer(path: Path) -> bool:
    """Whether a buffer was kept at `path`."""
    with contextlib.suppress(NotAStoreError, OSError):
        return (path / PRIVATE / DIRECTORY / DOCUMENT).exists()
    return False


def _refuse_keys(keys: list[str], expected: list[str]) -> None:
    for key in (*keys, *expected):
        if key not in expected or key not in keys:
            what = "missing" if key in expected else "new"
            raise SchemaError(
                f"column {key!r} is {what}: a finished episode must have {', '.join(expected)}, "
                f"got {', '.join(keys)}; use a buffer with a path of its own for other columns"
            )


def _sliced(rows: Any, start: int, stop: int) -> Any:
    if isinstance(rows, dict):
        return {key: _sliced(member, start, stop) for key, member in rows.items()}
    return rows[start:stop]


def _stacked(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: _stacked([part[key] for part in parts]) for key in parts[0]}
    return torch.stack(parts) if isinstance(parts[0], torch.Tensor) else parts


def _row(row: Any, device: torch.device) -> Any:
    return row if isinstance(row, str) else torch.from_numpy(np.array(row)).to(device)
