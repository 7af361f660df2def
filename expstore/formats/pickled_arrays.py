"""Arrays in a pickle, whose numbers stay in its file until rows of them are asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError

KINDS = "?biufSU"  # of dtypes, by their codes; objects are no numbers


class InFile:
    """Bytes that were left in the file."""

    def __init__(self, path: Path, offset: int, num_bytes: int) -> None:
        self.path, self.offset, self.num_bytes = path, offset, num_bytes


class StoredDtype:
    """A dtype as it is pickled: a code, then the order of its bytes."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self._code, self._order = str(code), "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = str(state[1])

    @property
    def is_objects(self) -> bool:
        return self._code.startswith("O")

    @property
    def dtype(self) -> np.dtype[Any]:
        if not self._code or self._code[0] not in KINDS:
            raise SourceError(f"dtype {self._code!r} is not read")
        return np.dtype(self._code).newbyteorder(">" if self._order == ">" else "<")


class StoredArray:
    """An array of numbers, whose rows are read as they are asked for; or of objects.

    Attributes:
        shape: of all of it.
        objects: the elements, where they are no numbers.
    """

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.objects: list[Any] | None = None
        self._dtype = np.dtype(np.uint8)
        self._content: bytes | InFile = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_columns, content = state
        self.fill(content, dtype, shape, "F" if is_columns else "C")

    def fill(self, content: Any, dtype: Any, shape: Any, order: Any) -> StoredArray:
        self.shape = tuple(int(n) for n in (shape if isinstance(shape, tuple) else (shape,)))
        if not isinstance(dtype, StoredDtype):
            raise SourceError("an array has no dtype")
        if dtype.is_objects:
            self.objects = content if isinstance(content, list) else []
            return self
        self._dtype = dtype.dtype
        num_bytes = content.num_bytes if isinstance(content, InFile) else len(content)
        if order == "F" and sum(n > 1 for n in self.shape) > 1:
            raise SourceError("an array lies column by column, so its rows cannot be read in turn")
        if num_bytes != self._dtype.itemsize * math.prod(self.shape):
            raise SourceError(f"an array of shape {self.shape} has {num_bytes:,} bytes")
        self._content = content
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        size = math.prod(self.shape[1:])
        count, skipped = (stop - start) * size, start * size * self._dtype.itemsize
        if isinstance(self._content, InFile):
            offset = self._content.offset + skipped
            flat = np.fromfile(self._content.path, self._dtype, count=count, offset=offset)
        else:
            flat = np.frombuffer(self._content, self._dtype, count=count, offset=skipped).copy()
        return flat.reshape(stop - start, *self.shape[1:])
