"""Priorities of records reduced to priorities of the anchors they were drawn by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError

Reduction = Literal["max", "min", "mean", "median"]


def reduce_priorities(
    anchor_index: NDArray[Any],
    priority: NDArray[Any],
    valid: NDArray[np.bool_],
    reduction: Reduction = "max",
) -> tuple[NDArray[Any], NDArray[Any]]:
    """One priority per distinct anchor: the largest over its valid records of all windows.

    Records of burn-in and bootstrap count as well as those of the learning region; only
    padding does not. NaN wins over any number, so that it is found and refused later.

    Args:
        anchor_index: (*records,) anchors, or (*records, D) coordinates. The records may be
            flat or (B, W).
        priority: (*records, ...) numbers; further dimensions are reduced per record first.
        valid: (*records,) which records are no padding.
        reduction: How those further dimensions are reduced; of an even number of values the
            median is the lower of the middle two.

    Returns:
        (U,) or (U, D) distinct anchors, ascending, and their (U,) priorities. Anchors without
        a valid record are left out.

    Raises:
        SchemaError: Shapes do not fit, or ``reduction`` is unknown.

    >>> anchors, largest = reduce_priorities(
    ...     np.array([7, 7, 3]), np.array([1.0, 5.0, 2.0]), np.array([True, False, True]))
    >>> anchors.tolist(), largest.tolist()
    ([3, 7], [2.0, 1.0])
    """
    _check_shapes(anchor_index, priority, valid)
    keep = np.asarray(valid, np.bool_)
    has_coordinates = anchor_index.ndim > keep.ndim
    anchors = anchor_index[keep] if has_coordinates else anchor_index[keep][:, None]
    values = _per_record(priority[keep], reduction)
    order = np.lexsort(anchors.T[::-1])
    anchors, values = anchors[order], values[order]
    is_first = np.ones(len(anchors), np.bool_)
    is_first[1:] = (anchors[1:] != anchors[:-1]).any(axis=1)
    first = np.flatnonzero(is_first)
    largest = np.maximum.reduceat(values, first) if len(first) else values
    return anchors[first] if has_coordinates else anchors[first, 0], largest


def _check_shapes(
    anchor_index: NDArray[Any], priority: NDArray[Any], valid: NDArray[np.bool_]
) -> None:
    records = valid.shape
    if anchor_index.shape[: valid.ndim] != records or anchor_index.ndim > valid.ndim + 1:
        raise SchemaError(
            f"anchor_index must have shape {records} or {(*records, 'D')}, got {anchor_index.shape}"
        )
    if priority.shape[: valid.ndim] != records:
        raise SchemaError(
            f"the priority must begin with the records' shape {records}, got {priority.shape}; "
            "give one priority per record of the batch"
        )
    if 0 in priority.shape[valid.ndim :]:
        raise SchemaError(f"a record must have at least one priority, got {priority.shape}")


def _per_record(priority: NDArray[Any], reduction: str) -> NDArray[Any]:
    reductions: dict[str, Callable[..., Any]] = {
        "max": np.max, "min": np.min, "mean": np.mean, "median": _lower_median,
    }  # fmt: skip
    if reduction not in reductions:
        raise SchemaError(f"reduction must be one of {sorted(reductions)}, got {reduction!r}")
    num_values = int(np.prod(priority.shape[1:]))
    return np.asarray(reductions[reduction](priority.reshape(len(priority), num_values), axis=1))


def _lower_median(values: NDArray[Any], axis: int) -> NDArray[Any]:
    middle = (values.shape[axis] - 1) // 2
    ranked = np.sort(values, axis=axis)
    median = np.take(ranked, middle, axis=axis)
    # A sort puts NaN last, where it would go unnoticed.
    return np.where(np.isnan(values).any(axis=axis), np.nan, median).astype(median.dtype)
