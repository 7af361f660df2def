"""Samplers: which positions of a buffer make a batch."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.buffer.config import SamplerConfig
from expstore.errors import SchemaError, StateError
from expstore.sampling.draw import integers, random_bits
from expstore.sampling.prioritized import Prioritized

# A BaseSampler, or one of `expstore`, such as expstore.Prioritized().
AnySampler = Any


class BaseSampler(ABC):
    """Chooses positions by nothing but numbers; subclasses may override the hooks, too.

    Positions count from 0, the oldest entry, in the buffer's unit. The hooks speak of ids,
    which never shift and are never used again: step numbers, or episode numbers. They are called
    in the order of what happened, so that a sampler can keep a value for each entry: a push adds
    to the end, an eviction takes from the front.

    >>> class Newest(BaseSampler):
    ...     def sample(self, batch_size, data_size, shuffle=False):
    ...         return np.arange(data_size - batch_size, data_size)
    >>> Newest(replacement=False).sample(2, 10).tolist()
    [8, 9]
    """

    def __init__(self, replacement: bool = False) -> None:
        self.replacement = replacement

    @abstractmethod
    def sample(self, batch_size: Any, data_size: int, shuffle: bool = False) -> Any:
        """Positions (n,) from 0 to `data_size - 1`; or a pair of them and weights (n,)."""

    def bind(self, buffer: Any) -> None:
        """The sampler serves `buffer` from now on; `on_push` for what it holds follows."""
        return None

    def on_push(self, ids: NDArray[np.int64]) -> None:
        """Entries (n,) came, ids ascending."""
        return None

    def on_evict(self, ids: NDArray[np.int64]) -> None:
        """The oldest entries (n,) left, ids ascending."""
        return None

    def update_priorities(self, ids: NDArray[np.int64], priorities: NDArray[Any]) -> None:
        """New priorities (n,) of entries (n,), some of which may have left.

        Raises:
            StateError: the sampler has no priorities.
        """
        raise StateError(f"{type(self).__name__} has no priorities; use a sampler that has")


class _Seeded(BaseSampler):
    """A sampler whose draws are a function of its seed and the number of the draw."""

    def __init__(self, replacement: bool, seed: int) -> None:
        super().__init__(replacement)
        self.seed = seed
        self.next_draw = 0

    def state_dict(self) -> dict[str, Any]:
        """The number of the next draw."""
        return {"next_draw": self.next_draw}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with that draw."""
        self.next_draw = int(state["next_draw"])

    def _order(self, count: int) -> NDArray[np.int64]:
        """A permutation of `count` positions."""
        words = random_bits(self.seed, self._draw(), count)
        return np.argsort(words, kind="stable").astype(np.int64)

    def _draw(self) -> int:
        self.next_draw += 1
        return self.next_draw - 1


class UniformSampler(_Seeded):
    """Every position equally likely, with replacement.

    >>> UniformSampler(seed=1).sample(1000, 3).max()
    np.int64(2)
    """

    def __init__(self, replacement: bool = True, seed: int = 0) -> None:
        super().__init__(replacement, seed)

    def sample(self, batch_size: Any, data_size: int, shuffle: bool = False) -> NDArray[np.int64]:
        """(batch_size,) positions; `shuffle` makes no difference."""
        count = _checked(batch_size, data_size)
        return integers(self.seed, self._draw(), count, data_size)


class AllDataSampler(_Seeded):
    """Every position once, in order, or shuffled."""

    def __init__(self, replacement: bool = False, seed: int = 0) -> None:
        super().__init__(replacement, seed)

    def sample(self, batch_size: Any, data_size: int, shuffle: bool = False) -> NDArray[np.int64]:
        """(data_size,) positions; a `batch_size` that differs is warned of."""
        if batch_size is not None and batch_size != data_size:
            warnings.warn(
                f"AllDataSampler takes all {data_size} entries, not {batch_size}", stacklevel=2
            )
        return self._order(data_size) if shuffle else np.arange(data_size)


class BatchSampler(_Seeded):
    """Random positions, none twice in a batch."""

    def __init__(self, replacement: bool = False, seed: int = 0) -> None:
        super().__init__(replacement, seed)

    def sample(self, batch_size: Any, data_size: int, shuffle: bool = False) -> NDArray[np.int64]:
        """(batch_size,) positions; `shuffle` makes no difference.

        Raises:
            SchemaError: there are fewer entries than that.
        """
        count = _checked(batch_size, data_size)
        if count > data_size:
            raise SchemaError(
                f"batch_size must be at most {data_size}, the number of entries, got {count}"
            )
        return self._order(data_size)[:count]


def build_sampler(config: SamplerConfig) -> AnySampler:
    """The sampler that a configuration asks for."""
    if config.type == "prioritized":
        return Prioritized(config.alpha, config.beta, config.eps)
    kinds: dict[str, type[Any]] = {
        "uniform": UniformSampler,
        "all": AllDataSampler,
        "batch": BatchSampler,
    }
    return kinds[config.type](seed=config.seed)


def is_native(sampler: AnySampler) -> bool:
    """Whether it is one of `expstore`'s own, which draw from spans."""
    return hasattr(sampler, "draw")


def check_positions(positions: Any, data_size: int, sampler: AnySampler) -> NDArray[np.int64]:
    """Refuse what a sampler may not return."""
    found = np.asarray(positions)
    name = type(sampler).__name__
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        raise SchemaError(
            f"{name}.sample must return a one-dimensional array of integers, got shape "
            f"{found.shape} of {found.dtype}"
        )
    found = found.astype(np.int64)
    if len(found) and (found.min() < 0 or found.max() >= data_size):
        raise SchemaError(
            f"{name}.sample must return positions from 0 to {data_size - 1}, got {found.min()} to "
            f"{found.max()}"
        )
    return found


def _checked(batch_size: Any, data_size: int) -> int:
    is_integer = isinstance(batch_size, int | np.integer) and not isinstance(batch_size, bool)
    if not is_integer or batch_size < 1:
        raise SchemaError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    if data_size < 1:
        raise SchemaError("there is nothing to draw from")
    return int(batch_size)
