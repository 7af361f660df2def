"""Tensors of TensorDict as it maps them: files of nothing but their values, row after row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError

BFLOAT16 = "torch.bfloat16"
NUMBERS = "bool float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
DTYPES = {BFLOAT16: "uint16"} | {f"torch.{name}": name for name in NUMBERS.split()}


@dataclass(frozen=True)
class Column:
    """A tensor of rows, each lane of which may be read for itself."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of a row, without the lanes
    lanes: int
    is_bfloat16: bool

    @property
    def num_rows(self) -> int:
        """Whole rows that the file has."""
        row_bytes = self.dtype.itemsize * math.prod(self.shape) * self.lanes
        return self.path.stat().st_size // row_bytes if self.path.is_file() else 0

    def of(self, lane: int) -> _LaneRows:
        return _LaneRows(self, lane)


@dataclass(frozen=True)
class _LaneRows:
    """The rows of one lane, read from the file as they are asked for."""

    column: Column
    lane: int

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        column, wanted = self.column, rows.stop - rows.start
        if rows.stop > column.num_rows:
            raise SourceError(
                f"{column.path.name} has {column.num_rows:,} rows, but the episode has row "
                f"{rows.stop - 1:,}: the file is cut off"
            )
        elements = math.prod(column.shape) * column.lanes
        values = np.fromfile(
            column.path,
            column.dtype,
            count=wanted * elements,
            offset=rows.start * elements * column.dtype.itemsize,
        )
        values = values.reshape(wanted, column.lanes, *column.shape)[:, self.lane]
        if column.is_bfloat16:  # the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(values)
