"""Tensors and arrays treated alike, without importing torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_tensor(value: Any) -> bool:
    """Whether value is a torch tensor; it cannot be one before torch was imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(value: Any) -> NDArray[Any]:
    """value as an array; a tensor shares its memory where it lies on the CPU."""
    return np.asarray(value.detach().cpu().numpy() if is_tensor(value) else value)


def to_kind_of(example: Any, array: NDArray[Any]) -> Any:
    """array as a tensor on the device of ``example``, or as it is if that is no tensor."""
    if not is_tensor(example):
        return array
    return sys.modules["torch"].from_numpy(array).to(example.device)


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
    return to_kind_of(example, np.repeat(np.asarray(value), times, axis=0))


def take(values: Any, index: tuple[NDArray[np.int64], ...]) -> NDArray[np.bool_]:
    """Which of the indexed values are not zero; a tensor is indexed where it lies."""
    if is_tensor(values):
        torch = sys.modules["torch"]
        where = tuple(torch.from_numpy(axis).to(values.device) for axis in index)
        return np.asarray((values[where] != 0).cpu().numpy())
    return np.asarray(values[index] != 0)
