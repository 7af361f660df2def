"""States as checkpoints take them: with tensors, where samplers have arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def with_tensors(state: Any) -> Any:
    """The state with a new tensor for each array: ``torch.load(weights_only=True)`` reads it.

    >>> with_tensors({"seed": 7, "parts": [{"raw": np.zeros(2, np.float32)}]})
    {'seed': 7, 'parts': [{'raw': tensor([0., 0.])}]}
    """
    if isinstance(state, Mapping):
        return {key: with_tensors(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [with_tensors(value) for value in state]
    if isinstance(state, np.generic):
        return state.item()
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def with_arrays(state: Any) -> Any:
    """The inverse: arrays for tensors, which may be on any device.

    >>> with_arrays({"parts": [{"raw": torch.zeros(2)}]})
    {'parts': [{'raw': array([0., 0.], dtype=float32)}]}
    """
    if isinstance(state, Mapping):
        return {key: with_arrays(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [with_arrays(value) for value in state]
    return state.detach().cpu().numpy() if isinstance(state, torch.Tensor) else state
