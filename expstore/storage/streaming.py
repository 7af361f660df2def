"""EpisodeStream: one episode appended step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import Columns, Episode, end_of, flatten
from expstore.errors import SchemaError, WriterStateError
from expstore.schema import FLAGS, Schema, is_observation
from expstore.storage.open_episode import OpenEpisode

BLOCK_BYTES = 1 << 20  # of rows collected before they are handed on
BLOCK_STEPS = 256


class EpisodeStream:
    """What `Writer.episode()` gives: `add` a step at a time, end with the block.

    Attributes:
        num_steps: steps added so far.
    """

    def __init__(
        self,
        begin: Callable[[Schema | None], OpenEpisode],
        end: Callable[[OpenEpisode, Mapping[str, NDArray[Any]], str], None],
        drop: Callable[[], None],
        end_reason: str | None,
        where: str,
    ) -> None:
        self.num_steps = 0
        self._begin, self._end, self._drop = begin, end, drop
        self._end_reason, self._where = end_reason, where
        self._episode: OpenEpisode | None = None
        self._block: dict[str, NDArray[Any]] = {}  # one row of room per step
        self._filled = self._room = 0
        self._next_names: tuple[str, ...] = ()
        self._final: dict[str, NDArray[Any]] = {}
        self._ended: list[str] = []  # flags of the newest step that are true
        self._closed = False

    def __enter__(self) -> EpisodeStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.end()
        else:
            self.discard()

    def add(self, step: Mapping[str, Any]) -> None:
        """Add the next step, or the final observation.

        Args:
            step: fields, nested as in `append`, with one value each and no step axis; also
                `next_<field>`, in every step or in none. A step that has nothing but
                observations is the final observation: none can follow it.

        Raises:
            SchemaError: the step does not fit; it was not added.
            StorageError: the system refused to write; the whole episode is dropped.
        """
        self._check_open()
        where = f"{self._where}, step {self.num_steps}"
        flat = flatten(step)
        if self.num_steps and all(map(is_observation, flat)):
            self._add_final(flat, where)
            return
        if self._ended or self._final:
            what = f"{self._ended[0]!r} was true" if self._ended else "the final observation came"
            raise SchemaError(f"{what} in the step before {where}; the episode ends there")
        rows = self._one_row(flat, where)
        ended = [flag for flag in FLAGS if flag in rows and rows[flag].any()]
        if self._filled == self._room:
            try:
                self._flush()
            except BaseException:
                self.discard()
                raise
        for name, row in rows.items():
            self._block[name][self._filled] = row[0]
        self._filled += 1
        self.num_steps += 1
        self._ended = ended

    def end(self) -> None:
        """End the episode, which now counts; the end of the block calls it."""
        if self._closed:
            return
        if not self.num_steps:
            self.discard()
            raise SchemaError(f"the episode {self._where} is empty; discard() it instead")
        try:
            reason = end_of(self._newest_flags(), self._where, self._end_reason)
            self._flush()
        except BaseException:
            self.discard()
            raise
        self._closed = True
        assert self._episode is not None
        self._end(self._episode, self._final, reason)

    def discard(self) -> None:
        """Drop the episode; what it wrote is written over by the next one."""
        if not self._closed:
            self._closed = True
            self._drop()

    def _newest_flags(self) -> dict[str, NDArray[Any]]:
        newest = slice(self._filled - 1, self._filled)
        return {flag: self._block[flag][newest] for flag in FLAGS if flag in self._block}

    def _one_row(self, flat: dict[str, Any], where: str) -> dict[str, NDArray[Any]]:
        columns = Columns.of({name: _with_axis(value) for name, value in flat.items()}, where)
        if self._episode is None:
            self._start(columns)
        assert self._episode is not None
        if tuple(columns.following) != self._next_names:
            raise SchemaError(
                f"next values must come in every step of an episode or in none, got "
                f"{list(columns.following)} after {list(self._next_names)} {where}"
            )
        episode = Episode.fit(columns, self._episode.schema, where)
        return {**episode.columns, **{f"next_{n}": v for n, v in episode.following.items()}}

    def _start(self, columns: Columns) -> None:
        episode = self._begin(columns.schema())
        schema = episode.schema
        Episode.fit(columns, schema, self._where)
        self._episode, self._next_names = episode, tuple(columns.following)
        step_bytes = sum(f.step_bytes for f in schema.fields.values())
        self._room = max(1, min(BLOCK_STEPS, BLOCK_BYTES // step_bytes))
        for name, f in schema.fields.items():
            self._block[name] = np.empty((self._room, *f.shape), f.stored_dtype)
            if name in self._next_names:
                self._block[f"next_{name}"] = np.empty_like(self._block[name])

    def _add_final(self, flat: dict[str, Any], where: str) -> None:
        if self._final:
            raise SchemaError(f"the final observation was given twice {self._where}")
        assert self._episode is not None
        schema = self._episode.schema
        columns = Columns.of({name: _with_axis(value) for name, value in flat.items()}, where)
        observed = Schema({n: f for n, f in schema.fields.items() if is_observation(n)})
        self._final = {n: r[0] for n, r in Episode.fit(columns, observed, where).columns.items()}

    def _flush(self) -> None:
        if not self._filled:
            return
        assert self._episode is not None
        rows = {name: block[: self._filled] for name, block in self._block.items()}
        following = {name: rows.pop(f"next_{name}") for name in self._next_names}
        self._episode.extend(rows, following)
        self._filled = 0

    def _check_open(self) -> None:
        if self._closed:
            raise WriterStateError(f"the episode {self._where} is over; open a new one")


def _with_axis(value: Any) -> Any:
    """One value as a column of one row."""
    if hasattr(value, "detach"):
        return value.detach()[None]
    return np.asarray(value)[None]
