"""Anchors as a caller may give them, and the entries that describe their windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import AnchorShapeError
from expstore.sampling.arrays import is_number_array, repeat_rows, spread, to_kind_of, to_numpy

MOST_KEPT = 1 << 16  # records; what depends on nothing but a batch's shape is kept up to this size


@dataclass(frozen=True)
class Anchors:
    """The same anchors for arithmetic and for reporting."""

    coordinates: tuple[NDArray[np.int64], ...]  # D arrays (B,): time, then the lanes
    reported: NDArray[Any]  # (B,) or (B, D), in the dtype they came in
    is_tuple: bool  # the expanded index must be a tuple of coordinates
    example: Any  # an array or tensor of the kind, and on the device, of all outputs

    @staticmethod
    def read(index: Any) -> Anchors:
        """Understand (B,) anchors, a tuple of D arrays (B,), or (B, D) coordinates.

        Raises:
            AnchorShapeError: Another shape, or coordinates of different lengths.
            TypeError: Anchors that are not integers.
        """
        is_tuple = isinstance(index, tuple)
        columns = [to_numpy(column) for column in index] if is_tuple else [to_numpy(index)]
        if not is_tuple and columns[0].ndim == 2:
            is_tuple, columns = True, list(columns[0].T)
        if not columns or any(c.ndim != 1 or len(c) != len(columns[0]) for c in columns):
            raise AnchorShapeError(
                "Sequence expected multidimensional anchors with shape [batch, D]. "
                f"Got {[column.shape for column in columns]}; give (B,) anchors, a tuple of D "
                "arrays (B,), or (B, D) coordinates"
            )
        columns = [column if column.size else column.astype(np.int64) for column in columns]
        if wrong := [column.dtype for column in columns if column.dtype.kind not in "iu"]:
            raise TypeError(f"anchors must be integers, got {wrong[0]}")
        return Anchors(
            coordinates=tuple(np.array(column, np.int64) for column in columns),
            reported=np.stack(columns, axis=1) if len(columns) > 1 else columns[0],
            is_tuple=is_tuple,
            example=index[0] if isinstance(index, tuple) else index,
        )


def describe_windows(
    anchors: Anchors,
    steps: NDArray[np.int64],
    valid: NDArray[np.bool_],
    learning: NDArray[np.bool_],
    info: dict[str, Any],
) -> dict[str, Any]:
    """A copy of ``info`` with one row per record, and what each record is.

    Args:
        anchors: The B anchors.
        steps: (B, W) where the records of their windows are read.
        valid: (B, W) which records are steps of the window, not padding.
        learning: (W,) which records of a window belong to the learning region.
        info: What the sampler says about its anchors; entries with a first dimension have
            their rows repeated, numbers are passed through.

    Returns:
        ``info`` and ``index`` int64, ``anchor_index`` (dtype of the anchors), ``validity_mask``
        and ``learning_mask`` bool, ``sequence_id`` and ``step_in_sequence`` int64, all (B * W,).
        ``index`` is a tuple of coordinates if the anchors are.

    Raises:
        TypeError: An entry is neither a number nor an array of numbers.
    """
    num_windows, num_records = steps.shape
    described = {
        key: _repeated(key, value, num_records, anchors.example)
        for key, value in info.items()
        if key != "index"  # replaced, and of another form than the other entries for lanes
    }
    of_kind = to_kind_of(anchors.example)
    is_learning, sequence_id, step_in_sequence = _known(num_windows, learning.tobytes())
    described["anchor_index"] = of_kind(spread(anchors.reported, num_records))
    described["validity_mask"] = of_kind(valid.reshape(-1))
    described["learning_mask"] = of_kind(is_learning.copy())
    described["sequence_id"] = of_kind(sequence_id.copy())
    described["step_in_sequence"] = of_kind(step_in_sequence.copy())
    index = of_kind(steps.reshape(-1))
    if anchors.is_tuple:
        lanes = anchors.coordinates[1:]
        index = (index, *(of_kind(spread(lane, num_records)) for lane in lanes))
    described["index"] = index
    return described


Constants = tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]


def _known(num_windows: int, learning: bytes) -> Constants:
    """``learning_mask``, ``sequence_id`` and ``step_in_sequence``, not to be changed."""
    make = _kept if num_windows * len(learning) <= MOST_KEPT else _made
    return make(num_windows, learning)


def _made(num_windows: int, learning: bytes) -> Constants:
    num_records = len(learning)
    return (
        np.tile(np.frombuffer(learning, np.bool_), num_windows),
        spread(np.arange(num_windows, dtype=np.int64), num_records),
        np.tile(np.arange(num_records, dtype=np.int64), num_windows),
    )


_kept = lru_cache(maxsize=8)(_made)  # copying is several times faster than making


def _repeated(key: str, value: Any, times: int, example: Any) -> Any:
    if not is_number_array(value):
        raise TypeError(
            f"info entry {key!r} must be a number or an array of numbers, got "
            f"{type(value).__name__}; keep other things out of the sampler's info"
        )
    return repeat_rows(value, times, example) if np.ndim(value) else value
