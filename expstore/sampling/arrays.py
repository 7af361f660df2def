"""Tensors and arrays treated alike, without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_tensor(value: Any) -> bool:
    """Whether value is a torch tensor; it cannot be one before torch was imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(value: Any) -> NDArray[Any]:
    """value as an array; a tensor shares its memory where it lies on the CPU."""
    return np.asarray(value.numpy(force=True) if is_tensor(value) else value)


def to_kind_of(example: Any) -> Callable[[NDArray[Any]], Any]:
    """What makes an array a tensor on the device of ``example``, or leaves it if that is none."""
    if not is_tensor(example):
        return _unchanged
    from_numpy: Callable[[NDArray[Any]], Any] = sys.modules["torch"].from_numpy
    if example.device.type == "cpu":
        return from_numpy
    return lambda array: from_numpy(array).to(example.device)


def _unchanged(array: NDArray[Any]) -> NDArray[Any]:
    return array


def spread(values: NDArray[Any], times: int) -> NDArray[Any]:
    """Each row of values (n, ...) so many times in a row; several times faster than repeat."""
    out = np.empty((len(values), times, *values.shape[1:]), values.dtype)
    out[:] = values[:, None]
    return out.reshape(-1, *values.shape[1:])


def is_number_array(value: Any) -> bool:
    """Whether value is a number or an array, tensor or list of them."""
    return is_tensor(value) or np.asarray(value).dtype.kind in "biufc"


def repeat_rows(value: Any, times: int, example: Any) -> Any:
    """Each row of value ``times`` times, as a tensor where value or ``example`` is one."""
    if is_tensor(value):
        on = value.to(example.device) if is_tensor(example) else value
        return on.repeat_interleave(times, dim=0)
    if is_tensor(example) and not isinstance(value, np.ndarray):
        # By torch, so that a list of floats gets torch's default dtype.
        return repeat_rows(sys.modules["torch"].as_tensor(value), times, example)
    return to_kind_of(example)(spread(np.asarray(value), times))


def take(values: Any, index: tuple[NDArray[np.int64], ...]) -> NDArray[np.bool_]:
    """Which of the indexed values are not zero; a tensor is indexed where it lies."""
    if is_tensor(values):
        torch = sys.modules["torch"]
        where = tuple(torch.from_numpy(axis).to(values.device) for axis in index)
        return np.asarray((values[where] != 0).cpu().numpy())
    return np.asarray(values[index] != 0)
