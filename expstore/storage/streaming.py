"""EpisodeStream: one episode appended step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.episode import Columns, Episode, end_of, flatten, next_name
from expstore.errors import SchemaError, WriterStateError
from expstore.ragged import Ragged, Rows
from expstore.schema import FLAGS, Schema, is_observation
from expstore.storage.open_episode import OpenEpisode

BLOCK_BYTES = 1 << 20  # of rows collected before they are handed on
BLOCK_STEPS = 256


@dataclass(frozen=True)
class StreamCalls:
    """What a stream needs of its writer."""

    check: Callable[[], None]  # raises if the writer cannot write any more
    begin: Callable[[Schema], OpenEpisode]  # given the schema that the first step would define
    end: Callable[[OpenEpisode, Mapping[str, NDArray[Any]], str], None]
    drop: Callable[[], None]


class EpisodeStream:
    """What `Writer.episode()` gives: `add` a step at a time, end with the block.

    Attributes:
        num_steps: steps added so far.
    """

    def __init__(
        self,
        calls: StreamCalls,
        schema: Schema,
        end_reason: str | None,
        casts: dict[str, int] | None,
        where: str,
    ) -> None:
        self.num_steps = 0
        self._calls, self._schema = calls, schema
        self._end_reason, self._casts, self._where = end_reason, casts, where
        self._episode: OpenEpisode | None = None
        self._block: dict[str, Any] = {}  # one row of room per step; a list if ragged
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
                observations, in a store that has other fields, is the final observation: none
                can follow it.

        Raises:
            SchemaError: the step does not fit; it was not added.
            StorageError: the system refused to write; the whole episode is dropped.
        """
        self._check_open()
        where = f"{self._where}, step {self.num_steps}"
        flat = flatten(step, where, self._schema.fields)
        if self.num_steps and flat and self._is_final(flat):
            self._add_final(flat, where)
            return
        self._check_goes_on(where)
        rows = self._fitted(Columns.of_step(flat, where, self._schema.fields), where)
        ended = [flag for flag in FLAGS if flag in rows and np.any(rows[flag][0])]
        if self._filled == self._room:
            try:
                self._flush()
            except BaseException:
                self.discard()
                raise
        for name, row in rows.items():
            self._block[name][self._filled] = row[0].copy() if isinstance(row, Ragged) else row[0]
        self._filled += 1
        self.num_steps += 1
        self._ended = ended

    def extend(self, steps: Mapping[str, Any]) -> None:
        """Add the next steps at once.

        Args:
            steps: columns of equally many rows, as `append` takes them, without a final
                observation: that comes last, by `add`.

        Raises:
            SchemaError: the steps do not fit; none of them was added.
            StorageError: the system refused to write; the whole episode is dropped.
        """
        self._check_open()
        where = f"{self._where}, from step {self.num_steps} on"
        columns = Columns.of(steps, where, self._schema.fields)
        if columns.final:
            raise SchemaError(f"the final observation comes with other steps {where}; add it last")
        self._check_goes_on(where)
        rows = self._fitted(columns, where)
        count = columns.num_steps
        ended = [flag for flag in FLAGS if flag in rows and np.any(rows[flag][-1])]
        try:
            self._flush()
            self._write({name: column[: count - 1] for name, column in rows.items()}, count - 1)
        except BaseException:
            self.discard()
            raise
        # The newest step stays here, where the end and the final observation look at it.
        for name, column in rows.items():
            last = column[count - 1]
            self._block[name][0] = last.copy() if isinstance(column, Ragged) else last
        self._filled, self._ended = 1, ended
        self.num_steps += count

    def end(self) -> None:
        """End the episode, which now counts; the end of the block calls it."""
        if self._closed:
            return
        if not self.num_steps:
            self.discard()
            raise SchemaError(f"there are no steps {self._where}; discard() it instead")
        try:
            reason = end_of(self._newest_flags(), self._where, self._end_reason)
            self._flush()
        except BaseException:
            self.discard()
            raise
        self._closed = True
        assert self._episode is not None
        self._calls.end(self._episode, self._final, reason)

    def discard(self) -> None:
        """Drop the episode; what it wrote is written over by the next one."""
        if not self._closed:
            self._closed = True
            self._calls.drop()

    def _newest_flags(self) -> dict[str, NDArray[Any]]:
        newest = slice(self._filled - 1, self._filled)
        return {flag: self._block[flag][newest] for flag in FLAGS if flag in self._block}

    def _check_goes_on(self, where: str) -> None:
        if self._ended or self._final:
            what = f"field {self._ended[0]!r} was true" if self._ended else "the final one came"
            raise SchemaError(
                f"no step can be added {where}: {what} in the step before; end the episode there"
            )

    def _fitted(self, columns: Columns, where: str) -> dict[str, Rows]:
        """The rows as they are stored, next values under their names."""
        if self.num_steps and set(columns.following) != set(self._next_names):
            raise SchemaError(
                f"next values must come in every step of an episode or in none, got "
                f"{sorted(columns.following)} after {sorted(self._next_names)} {where}; "
                "give the same ones"
            )
        schema = self._schema if self._schema.fields else columns.schema(where)
        casts: dict[str, int] | None = None if self._casts is None else {}
        episode = Episode.fit(columns, schema, where, casts=casts)
        if not self.num_steps:
            self._start(schema, tuple(columns.following))
        for name, count in (casts or {}).items():
            assert self._casts is not None
            self._casts[name] = self._casts.get(name, 0) + count
        return {**episode.columns, **{f"next_{n}": v for n, v in episode.following.items()}}

    def _start(self, schema: Schema, next_names: tuple[str, ...]) -> None:
        self._episode = self._calls.begin(schema)
        self._schema = schema = self._episode.schema
        self._next_names = next_names
        step_bytes = sum(f.step_bytes for f in schema.fields.values())
        self._room = max(1, min(BLOCK_STEPS, BLOCK_BYTES // step_bytes))
        for name, f in schema.fields.items():
            for row in (name, next_name(name))[: 2 if name in self._next_names else 1]:
                self._block[row] = (
                    [None] * self._room
                    if f.ragged
                    else np.empty((self._room, *f.shape), f.stored_dtype)
                )

    def _is_final(self, flat: Mapping[str, Any]) -> bool:
        """Whether a step has only observations where there are other fields, too."""
        return all(map(is_observation, flat)) and not all(map(is_observation, self._schema.fields))

    def _add_final(self, flat: dict[str, Any], where: str) -> None:
        if self._final:
            raise SchemaError(f"the final observation comes twice {where}; give one of them")
        columns = Columns.of_step(flat, where, self._schema.fields)
        observed = Schema({n: f for n, f in self._schema.fields.items() if is_observation(n)})
        final = Episode.fit(columns, observed, where, casts=self._casts).columns
        for name in final:
            if name in self._next_names:
                given = self._block[next_name(name)][self._filled - 1]
                if given.tobytes() != final[name][0].tobytes():
                    raise SchemaError(
                        f"the final {name!r} {where} differs from {next_name(name)!r} of the step "
                        "before; give one of them"
                    )
        self._final = {name: rows[0].copy() for name, rows in final.items()}

    def _flush(self) -> None:
        if not self._filled:
            return
        rows: dict[str, Rows] = {
            name: Ragged.of(block[: self._filled])
            if isinstance(block, list)
            else block[: self._filled]
            for name, block in self._block.items()
        }
        self._write(rows, self._filled)
        self._filled = 0

    def _write(self, rows: dict[str, Rows], num_rows: int) -> None:
        if not num_rows:
            return
        assert self._episode is not None
        following = {name: rows.pop(f"next_{name}") for name in self._next_names}
        self._episode.extend(rows, following)

    def _check_open(self) -> None:
        if self._closed:
            raise WriterStateError(f"what was open {self._where} is over; open a new episode")
        self._calls.check()
