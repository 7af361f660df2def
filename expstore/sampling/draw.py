"""Counter-based random numbers, and what every sampler takes and gives.

A random word is a pure function of (seed, draw number, lane): two rounds of the SplitMix64
finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) over a
counter, so that nothing has to be remembered between two draws but the draw number.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError, StateError, StepRangeError
from expstore.spans import Spans

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_NEGATIVE = 0xD1B54A32D192ED03


def as_seed(seed: Any) -> int:
    """Any integer, also one of numpy's, as one of Python's own, which a state can hold.

    Raises:
        SchemaError: it is no integer.
    """
    try:
        return operator.index(seed)
    except TypeError:
        raise SchemaError(f"seed must be an integer, got {seed!r}") from None


@dataclass(frozen=True)
class Draw:
    """What a sampler returns."""

    anchors: NDArray[np.int64]  # (B,) position of each window's first learning step
    probability: NDArray[np.float64]  # (B,) with which the anchor was drawn
    weight: NDArray[np.float32]  # (B,) importance weight, largest 1
    seed: int = 0  # with the number, all that random choices made for these anchors depend on
    number: int = 0  # of the draw, counted by whoever reads it

    @staticmethod
    def evenly(anchors: NDArray[np.int64], num_steps: int) -> Draw:
        """A draw in which each of ``num_steps`` steps was equally likely."""
        probability = np.empty(len(anchors))
        probability.fill(1.0 / num_steps)
        weight = np.empty(len(anchors), np.float32)
        weight.fill(1.0)
        return Draw(anchors, probability, weight)


class Sampler(Protocol):
    """Chooses the anchors of a batch."""

    def draw(self, spans: Spans, batch_size: int, seed: int) -> Draw:
        """Draw the next batch of positions in ``spans`` and advance by one.

        Raises:
            StepRangeError: ``spans`` holds no step.
            SchemaError: ``batch_size`` is below 1.
        """
        ...

    def state_dict(self) -> dict[str, int | str]:
        """Everything the next draws depend on besides the seed and the steps."""
        ...

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue where the saved sampler stood.

        Raises:
            StateError: The state is of another kind of sampler, or incomplete.
        """
        ...


def fold(*integers: int) -> int:
    """Any integers, negative and huge ones too, as one well mixed word from 0 to 2**64 - 1."""
    word = 0
    for integer in integers:
        word = _absorbed(word, operator.index(integer))
    return word


@lru_cache(maxsize=64)  # the seed is the same in every draw
def _absorbed(word: int, integer: int) -> int:
    if integer < 0:
        integer, word = ~integer, mix(word ^ _NEGATIVE)
    word = mix(((word + _GOLDEN) ^ integer) & _MASK)
    while integer := integer >> 64:
        word = mix(((word + _GOLDEN) ^ integer) & _MASK)
    return mix((word + _NEGATIVE) & _MASK)  # so that (1, 2) differs from (1 + 2 * 2**64,)


def mix(word: int) -> int:
    """The SplitMix64 finalizer, a bijection of the integers from 0 to 2**64 - 1."""
    word = (word ^ word >> 30) * _FIRST & _MASK
    word = (word ^ word >> 27) * _SECOND & _MASK
    return word ^ word >> 31


def mix_words(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``mix`` of every element."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))


def keys_of(seed: int, draw: int) -> tuple[np.uint64, np.uint64]:
    """The two words that, with the lane, decide every random word of a draw."""
    word = fold(seed, draw)
    return np.uint64(mix(word ^ _FIRST)), np.uint64(mix(word ^ _SECOND))


def random_bits(seed: int, draw: int, count: int) -> NDArray[np.uint64]:
    """(count,) uniform words; lane i is the same whatever ``count`` is.

    >>> random_bits(seed=0, draw=0, count=3)[:2].tolist() == random_bits(0, 0, 2).tolist()
    True
    """
    key, second_key = keys_of(seed, draw)
    lanes = np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix_words(mix_words(lanes + key) ^ second_key)


def integers(seed: int, draw: int, count: int, high: int) -> NDArray[np.int64]:
    """(count,) integers uniform from 0 to ``high - 1``, with a bias of at most high / 2**64.

    Raises:
        SchemaError: ``high`` is not from 1 to 2**63 - 1.
    """
    if not 1 <= high < 2**63:
        raise SchemaError(f"high must be from 1 to 2**63 - 1, got {high}")
    return scale_words(random_bits(seed, draw, count), high).astype(np.int64)


def scale_words(words: NDArray[np.uint64], high: int) -> NDArray[np.uint64]:
    """``words * high // 2**64``, computed in halves because NumPy has no 128-bit product."""
    half = np.uint64(32)
    low_bits = np.uint64(0xFFFFFFFF)
    high_low, high_high = np.uint64(high & 0xFFFFFFFF), np.uint64(high >> 32)
    low = (words & low_bits) * high_low
    middle = (words >> half) * high_low
    other = (words & low_bits) * high_high
    carry = ((low >> half) + (middle & low_bits) + (other & low_bits)) >> half
    scaled = (words >> half) * high_high + (middle >> half) + (other >> half) + carry
    return np.asarray(scaled, np.uint64)


def check_batch(spans: Spans, batch_size: int) -> None:
    """What every sampler checks before it draws."""
    if batch_size < 1:
        raise SchemaError(f"batch_size must be at least 1, got {batch_size}")
    if not spans.num_steps:
        raise StepRangeError(
            "there is no step to draw from; append an episode and commit() it, or widen the "
            "filter first"
        )


def check_state(state: dict[str, int | str], kind: str, counters: tuple[str, ...]) -> None:
    """Raise ``StateError`` unless ``state`` is of ``kind`` and holds every counter."""
    if state.get("kind") != kind:
        raise StateError(
            f"the state belongs to a sampler of kind {state.get('kind')!r}, this one is {kind!r}"
        )
    for name in counters:
        value = state.get(name)
        if not isinstance(value, int) or value < 0:
            raise StateError(f"the state's {name!r} must be an int of at least 0, got {value!r}")
