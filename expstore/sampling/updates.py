"""Priorities of steps as a caller may give them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError


def check_update(
    steps: NDArray[Any], priority: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps (n,) and priorities (n,) as arrays; see ``Prioritized.update`` for the errors."""
    from expstore.sampling.kernels import check_priorities

    steps, priority = as_update(steps, priority)
    check_good(steps, priority, check_priorities(priority, np.empty(len(steps), np.float32)))
    return steps, priority


def as_update(
    steps: NDArray[Any], priority: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Both as arrays of the right types, whatever their values."""
    steps, priority = as_steps(steps), np.asarray(priority)
    if steps.ndim != 1 or priority.shape != steps.shape:
        raise SchemaError(
            "steps and priority must have the same shape (n,), got "
            f"{steps.shape} and {priority.shape}; give one priority per step"
        )
    if priority.dtype.kind not in "fiu" and len(priority):
        raise SchemaError(f"priority must be numbers, got {priority.dtype}")
    return steps, np.ascontiguousarray(priority, np.float64)


def check_good(steps: NDArray[np.int64], priority: NDArray[np.float64], num_good: int) -> None:
    """Raise ``SchemaError`` unless all priorities are good, and not only the first ones."""
    if num_good < len(priority):
        raise SchemaError(
            f"priority[{num_good}] must be from 0 to 3.4e38, got {priority[num_good]} for step "
            f"{int(steps[num_good])}; take the absolute value of an error, and look for NaN in it"
        )


def as_steps(steps: Any) -> NDArray[np.int64]:
    """Step numbers of any shape."""
    steps = np.asarray(steps)
    if steps.dtype.kind not in "iu" and steps.size:
        raise SchemaError(f"steps must be integers, got {steps.dtype}")
    return np.ascontiguousarray(steps, np.int64)
