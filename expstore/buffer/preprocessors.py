"""Preprocessors: what becomes of an observation, or of a reward, given its space."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.buffer.preprocess import default_obs_preprocessor, default_reward_preprocessor
from expstore.errors import ArgumentTypeError, SchemaError, StateError

__all__ = [
    "BoxFlattenPreprocessor",
    "DiscretePreprocessor",
    "NonPreprocessor",
    "NormalizePreprocessor",
    "Preprocessor",
    "default_obs_preprocessor",
    "default_reward_preprocessor",
    "get_preprocessor_cls",
]


class Preprocessor(ABC):
    """Transforms values of a space; a buffer calls it on each one."""

    def __init__(self, space: Any) -> None:
        self.original_space = space

    @abstractmethod
    def transform(self, data: Any) -> Any:
        """One value."""

    @abstractmethod
    def batch_transform(self, batched_data: Any) -> Any:
        """Values along a first dimension."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of a transformed value."""

    def __call__(self, data: Any) -> Any:
        return self.transform(data)


class NonPreprocessor(Preprocessor):
    """Leaves everything as it is."""

    def transform(self, data: Any) -> Any:
        return data

    def batch_transform(self, batched_data: Any) -> Any:
        return batched_data

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.original_space.shape)


class BoxFlattenPreprocessor(Preprocessor):
    """Flattens values of a Box to one dimension; those of vector environments row by row.

    >>> from gymnasium.spaces import Box
    >>> flatten = BoxFlattenPreprocessor(Box(0, 1, (2, 3)))
    >>> flatten(np.zeros((2, 3))).shape, flatten(np.zeros((4, 2, 3))).shape
    ((6,), (4, 6))
    """

    def __init__(self, space: Any) -> None:
        if type(space).__name__ != "Box":
            raise SchemaError(f"BoxFlattenPreprocessor needs a Box space, got {space!r}")
        super().__init__(space)

    def transform(self, data: Any) -> Any:
        data = _numeric(data)
        if data.ndim == len(self.original_space.shape) + 1:
            return self.batch_transform(data)
        return data.reshape(-1)

    def batch_transform(self, batched_data: Any) -> Any:
        if isinstance(batched_data, tuple):
            return tuple(self.transform(item) for item in batched_data)
        data = _numeric(batched_data)
        return data.reshape(len(data), -1)

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(np.prod(self.original_space.shape)),)


class DiscretePreprocessor(Preprocessor):
    """One-hot float32 vectors of values of a Discrete space, `start` respected.

    >>> from gymnasium.spaces import Discrete
    >>> DiscretePreprocessor(Discrete(3, start=5))(6).tolist()
    [0.0, 1.0, 0.0]
    """

    def __init__(self, space: Any) -> None:
        if type(space).__name__ != "Discrete":
            raise SchemaError(f"DiscretePreprocessor needs a Discrete space, got {space!r}")
        super().__init__(space)
        self._count, self._start = int(space.n), int(getattr(space, "start", 0))

    def transform(self, data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return torch.from_numpy(self._one_hot(data.detach().cpu().numpy())).to(data.device)
        return self._one_hot(np.asarray(data))

    def batch_transform(self, batched_data: Any) -> Any:
        if isinstance(batched_data, tuple):
            return tuple(self.transform(item) for item in batched_data)
        return self.transform(batched_data)

    def _one_hot(self, values: NDArray[Any]) -> NDArray[np.float32]:
        if values.dtype.kind not in "iu":
            raise ArgumentTypeError(
                f"values of a Discrete space must be integers, got {values.dtype}"
            )
        at = values.astype(np.int64) - self._start
        if ((at < 0) | (at >= self._count)).any():
            raise SchemaError(
                f"values must be from {self._start} to {self._start + self._count - 1}, got "
                f"{values.tolist()}"
            )
        return np.eye(self._count, dtype=np.float32)[at]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._count,)


class NormalizePreprocessor(Preprocessor):
    """Subtracts the running mean and divides by the running standard deviation.

    Every value counts except the dummy reward of a reset, for which a buffer calls `frozen`.
    (Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
    variances, 1979.)

    Args:
        space: of the values; None for plain numbers, such as rewards.
        eps: added to the variance.
        clip: the largest absolute result; None for no limit.

    >>> normalize = NormalizePreprocessor(None)
    >>> [round(float(normalize(x)), 3) for x in (2.0, 4.0)]
    [0.0, 1.0]
    """

    def __init__(self, space: Any = None, *, eps: float = 1e-8, clip: float | None = None) -> None:
        super().__init__(space)
        self.eps, self.clip = eps, clip
        shape = () if space is None else tuple(space.shape)
        self.count = 0
        self.mean = np.zeros(shape)
        self._squares = np.zeros(shape)  # sum of squared distances from the mean

    @property
    def variance(self) -> NDArray[np.float64]:
        """Of the values so far."""
        return np.asarray(self._squares / max(1, self.count))

    def transform(self, data: Any) -> Any:
        values = _array(data)
        if values.ndim == self.mean.ndim + 1:  # of a vector environment
            return self.batch_transform(data)
        self._update(values[None])
        return self.frozen(data)

    def batch_transform(self, batched_data: Any) -> Any:
        self._update(_array(batched_data))
        return self.frozen(batched_data)

    def frozen(self, data: Any) -> Any:
        """The same without counting the value."""
        values = (_array(data) - self.mean) / np.sqrt(self.variance + self.eps)
        if self.count == 0:
            values = np.zeros_like(values)
        if self.clip is not None:
            values = np.clip(values, -self.clip, self.clip)
        if isinstance(data, torch.Tensor):
            return torch.from_numpy(values).to(data.device, torch.float32)
        return values.astype(np.float32)

    def masked(self, data: Any, counted: Sequence[bool]) -> Any:
        """A batch of which only some values count."""
        values = _array(data)
        if values.ndim > self.mean.ndim:  # a reset's plain 0.0 counts for nobody
            self._update(values[np.asarray(counted)])
        return self.frozen(data)

    def _update(self, values: NDArray[np.float64]) -> None:
        if values.shape[1:] != self.mean.shape:
            raise SchemaError(f"values must have shape {self.mean.shape}, got {values.shape[1:]}")
        if not len(values):
            return
        count, mean = len(values), values.mean(axis=0)
        total, distance = self.count + count, mean - self.mean
        self._squares = self._squares + ((values - mean) ** 2).sum(axis=0)
        self._squares = self._squares + distance**2 * self.count * count / total
        self.mean = self.mean + distance * count / total
        self.count = total

    def state_dict(self) -> dict[str, Any]:
        """The running statistics."""
        return {
            "count": self.count,
            "mean": np.atleast_1d(self.mean),
            "squares": np.atleast_1d(self._squares),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with saved statistics.

        Raises:
            StateError: they are of another shape.
        """
        for name in ("mean", "squares"):
            if state[name].shape != np.atleast_1d(self.mean).shape:
                raise StateError(
                    f"the saved {name} has shape {state[name].shape}, this space {self.mean.shape}"
                )
        self.count = int(state["count"])
        self.mean = np.array(state["mean"]).reshape(self.mean.shape)
        self._squares = np.array(state["squares"]).reshape(self.mean.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mean.shape)


def get_preprocessor_cls(space: Any) -> type[Preprocessor]:
    """The usual preprocessor of a gymnasium space."""
    usual: dict[str, type[Preprocessor]] = {
        "Box": BoxFlattenPreprocessor,
        "Discrete": DiscretePreprocessor,
    }
    return usual.get(type(space).__name__, NonPreprocessor)


def _numeric(data: Any) -> Any:
    """An array or a tensor."""
    return data if isinstance(data, torch.Tensor) else np.asarray(data)


def _array(data: Any) -> NDArray[np.float64]:
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu().numpy()
    return np.asarray(data, np.float64)
