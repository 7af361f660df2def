"""Open episodes: the rows of each environment since its last cut."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from expstore.buffer.postprocess import RawEpisode
from expstore.buffer.trees import IMMUTABLE, copied, filled_like, has_ended, rows_of
from expstore.errors import SchemaError

UID_BYTES = 8


class OpenEpisode:
    """The rows of one environment since its last cut, as a list for each key.

    Attributes:
        num_envs: 1, or how many sub-environments each row has values of.
        ends: (row, reason) of each row with a flag.
    """

    def __init__(self, env_id: str, num_envs: int = 1, uid: str | None = None) -> None:
        self.env_id, self.num_envs = env_id, num_envs
        self.uid = uid or secrets.token_hex(UID_BYTES)
        self.columns: dict[str, list[Any]] = {}
        self.num_rows = 0
        self.ends: list[tuple[int, str]] = []
        self.policy_valid = True

    def add(self, row: Mapping[str, Any]) -> str | None:
        """Copy a row; returns which end its flags tell, if any.

        Raises:
            SchemaError: its keys are not those of the first row; the row is not added.
        """
        reason = self.check(row)
        self.append(row, reason)
        return reason

    def check(self, row: Mapping[str, Any]) -> str | None:
        """Refuse a row that does not fit; returns which end its flags tell, if any."""
        if self.num_rows and row.keys() != self.columns.keys():
            self._refuse(row)
        return has_ended(row, self.env_id) if self.num_envs == 1 else None

    def append(self, row: Mapping[str, Any], reason: str | None) -> None:
        """Copy a row that was checked."""
        columns = self.columns
        if not self.num_rows:
            columns.update({key: [] for key in row})
        for key, value in row.items():
            if type(value) is np.ndarray and value.dtype.kind != "O":
                value = value.copy()
            elif type(value) not in IMMUTABLE:
                value = copied(value)
            columns[key].append(value)
        if reason:
            self.ends.append((self.num_rows, reason))
        self.num_rows += 1

    @property
    def at_start(self) -> bool:
        """Whether the next row is that of a reset."""
        return bool(self.ends) and self.ends[-1][0] == self.num_rows - 1

    def completed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A last row without an answer of the policy: its fields are NaN, 0 or false."""
        missing = self.columns.keys() - row.keys()
        return {**row, **{key: filled_like(self.columns[key][-1]) for key in missing}}

    def _refuse(self, row: Mapping[str, Any]) -> None:
        for key in (*row, *self.columns):
            if key not in self.columns or key not in row:
                what = "is missing" if key in self.columns else "is new"
                raise SchemaError(
                    f"field {key!r} {what} in row {self.num_rows} of the episode of env "
                    f"{self.env_id!r}; all rows of an episode have the same fields"
                )

    def pieces(self, end_reason: str) -> Iterator[tuple[int, RawEpisode]]:
        """The true episodes among the rows, each with the number of environments in its rows.

        One, unless the stream went on after a flag. `end_reason` is that of an episode whose
        last row has no flag.
        """
        if self.num_envs > 1 and self._flagged_inside():
            for part in self._by_environment():
                yield from part.pieces(end_reason)
            return
        start = 0
        ends = self.ends if self.at_start else [*self.ends, (self.num_rows - 1, end_reason)]
        for last, reason in ends:
            columns = self.columns
            if start or last != self.num_rows - 1:
                columns = {key: values[start : last + 1] for key, values in columns.items()}
            is_valid = self.policy_valid or last < self.num_rows - 1
            yield self.num_envs, RawEpisode(columns, self.env_id, self.uid, reason, is_valid)
            start = last + 1

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict for each row."""
        for at in range(self.num_rows):
            yield {key: values[at] for key, values in self.columns.items()}

    def _flagged_inside(self) -> bool:
        return any(
            np.any(np.asarray(flag))
            for key in ("last_terminated", "last_truncated")
            for flag in self.columns.get(key, [])[:-1]
            if not isinstance(flag, Mapping)
        )

    def _by_environment(self) -> list[OpenEpisode]:
        parts = [OpenEpisode(f"{self.env_id}/{at}", uid=self.uid) for at in range(self.num_envs)]
        for row in self.rows():
            for part, own in zip(parts, rows_of(row, self.num_envs, self.env_id), strict=True):
                part.add(own)
        for part in parts:
            part.policy_valid = self.policy_valid
        return parts
