"""Anchors as a caller may give them, and the entries that describe their windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import AnchorShapeError
from expstore.sampling.arrays import is_number_array, repeat_rows, to_kind_of, to_numpy
from expstore.sampling.window import WindowPlan


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
        shapes = {column.shape for column in columns}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
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

    def index_of(self, steps: NDArray[np.int64]) -> Any:
        """The expanded index: (B * W,) of (B, W) steps, with the lanes beside it if any."""
        times = steps.shape[1]
        index = [steps.reshape(-1)] + [np.repeat(lane, times) for lane in self.coordinates[1:]]
        out = tuple(to_kind_of(self.example, axis) for axis in index)
        return out if self.is_tuple else out[0]


def describe_windows(
    anchors: Anchors, plan: WindowPlan, learning: NDArray[np.bool_], info: dict[str, Any]
) -> dict[str, Any]:
    """A copy of ``info`` with one row per record, and what each record is.

    Args:
        anchors: The B anchors.
        plan: Their windows of W records.
        learning: (W,) which records of a window belong to the learning region.
        info: What the sampler says about its anchors; entries with a first dimension have
            their rows repeated, numbers are passed through.

    Returns:
        ``info`` and ``index`` int64, ``anchor_index`` (dtype of the anchors), ``validity_mask``
        and ``learning_mask`` bool, ``sequence_id`` and ``step_in_sequence`` int64, all (B * W,).

    Raises:
        TypeError: An entry is neither a number nor an array of numbers.
    """
    num_windows, num_records = plan.steps.shape
    described = {
        key: _repeated(key, value, num_records, anchors.example)
        for key, value in info.items()
        if key != "index"  # replaced, and of another form than the other entries for lanes
    }
    entries = {
        "anchor_index": np.repeat(anchors.reported, num_records, axis=0),
        "validity_mask": plan.valid.reshape(-1),
        "learning_mask": _spread(learning, plan.steps.shape),
        "sequence_id": _spread(np.arange(num_windows, dtype=np.int64)[:, None], plan.steps.shape),
        "step_in_sequence": _spread(np.arange(num_records, dtype=np.int64), plan.steps.shape),
    }
    described.update({key: to_kind_of(anchors.example, entries[key]) for key in entries})
    described["index"] = anchors.index_of(plan.steps)
    return described


def _spread(values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """values broadcast to shape and made flat; several times faster than tile or repeat."""
    spread = np.empty(shape, values.dtype)
    spread[:] = values
    return spread.reshape(-1)


def _repeated(key: str, value: Any, times: int, example: Any) -> Any:
    if not is_number_array(value):
        raise TypeError(
            f"info entry {key!r} must be a number or an array of numbers, got "
            f"{type(value).__name__}; keep other things out of the sampler's info"
        )
    return repeat_rows(value, times, example) if np.ndim(value) else value
