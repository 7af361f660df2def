"""RecordedRows: what environments give, row by row, until their episodes end."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError

LEAST_ROOM = 64  # rows


class RecordedRows:
    """Rows of E environments side by side, one array (room, E, *shape) for each field.

    Rows are numbered from the beginning of the recording on. Room is made for as many as the
    longest open episode has; what lies before is written over.

    Attributes:
        casts: values by field that were of another dtype than the first ones.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.casts: dict[str, int] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._first = 0  # row that is at the beginning of the arrays
        self._room = LEAST_ROOM

    def make_room(self, row: int, earliest: int) -> None:
        """So that `row` can be put; nothing before `earliest` is needed any more."""
        if row - self._first < self._room:
            return
        count = row - earliest
        while 2 * count > self._room:
            self._room *= 2
        for name, old in self._arrays.items():
            new = old
            if len(old) != self._room:
                new = np.empty((self._room, *old.shape[1:]), old.dtype)
            new[:count] = old[earliest - self._first : row - self._first].copy()
            self._arrays[name] = new
        self._first = earliest

    def put(
        self, row: int, name: str, values: NDArray[Any], only: NDArray[np.bool_] | None = None
    ) -> None:
        """Copy values (E, *shape) of a field into a row, or those of some environments only.

        Raises:
            SchemaError: they are of another shape than those before.
        """
        array = self._arrays.get(name)
        if array is None:
            shape = (self._room, *values.shape)
            array = self._arrays[name] = np.zeros(shape, values.dtype)
        if values.shape != array.shape[1:]:
            raise SchemaError(
                f"field {name!r} has shape {values.shape[1:]}, and had {array.shape[2:]} in the "
                "step before; wrap the environment so that it stays the same"
            )
        if values.dtype != array.dtype:
            self.casts[name] = self.casts.get(name, 0) + len(values)
        if only is None:
            array[row - self._first] = values
        else:
            array[row - self._first, only] = values[only]

    def column(self, name: str, env: int, start: int, stop: int) -> NDArray[Any]:
        """Rows (n, *shape) of one environment, without a copy."""
        return self._arrays[name][start - self._first : stop - self._first, env]

    @property
    def names(self) -> list[str]:
        """The fields that were put so far."""
        return list(self._arrays)
