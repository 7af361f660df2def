"""Random words are a pure function of seed, draw number and lane, and look random."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import SchemaError
from expstore.sampling import draw, kernels

seeds = st.integers() | st.integers(-(2**200), 2**200)
highs = st.integers(1, 2**63 - 1) | st.sampled_from([1, 2, 2**32 - 1, 2**32, 2**63 - 1])


def is_plausible(counts: np.ndarray) -> bool:
    """Whether equally likely cells could have these counts: chi square within five sigma."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    chi_square = ((counts - expected) ** 2).sum() / expected
    return bool(abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom))


@given(seeds, st.integers(0, 2**70), st.integers(0, 40))
def test_the_compiled_words_equal_the_numpy_words(seed, number, count):
    out = np.empty(count, np.uint64)
    kernels.fill_bits(*draw.keys_of(seed, number), out)
    words = draw.random_bits(seed, number, count)
    assert words.dtype == np.uint64
    assert out.tolist() == words.tolist()


@given(seeds, st.integers(0, 2**40), highs)
def test_integers_are_the_exact_scaled_words_in_both_forms(seed, number, high):
    out = np.empty(9, np.int64)
    kernels.fill_integers(*draw.keys_of(seed, number), np.uint64(high), out)
    plain = draw.integers(seed, number, 9, high)
    words = draw.random_bits(seed, number, 9)
    assert plain.dtype == np.int64
    assert out.tolist() == plain.tolist() == [int(word) * high >> 64 for word in words]
    assert (plain >= 0).all()
    assert (plain < high).all()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_mixing_words_is_mixing_each(words):
    mixed = draw.mix_words(np.array(words, np.uint64))
    assert mixed.tolist() == [draw.mix(word) for word in words]


def test_a_lane_does_not_depend_on_how_many_there_are():
    assert draw.random_bits(3, 5, 100)[:7].tolist() == draw.random_bits(3, 5, 7).tolist()


def test_the_words_of_a_seed_never_change():
    assert draw.random_bits(0, 0, 3).tolist() == [
        16091783165417238040,
        1041880409365463244,
        18155741930147677879,
    ]
    assert draw.integers(-1, 2, 4, 1000).tolist() == [228, 674, 596, 201]


def test_seeds_of_any_size_and_sign_differ():
    values = [0, 1, -1, 2, -2, 2**63, 2**64, -(2**64), 2**64 + 1, 2**128, -(2**128), 10**40]
    assert len({draw.fold(value) for value in values}) == len(values)
    assert draw.fold(1, 2) != draw.fold(2, 1)
    assert draw.fold(1, 2) != draw.fold(1 + (2 << 64))
    assert draw.fold(np.int32(-7)) == draw.fold(-7)


def test_a_seed_that_is_no_integer_is_refused():
    with pytest.raises(TypeError):
        draw.random_bits(1.5, 0, 1)


@pytest.mark.parametrize("high", [0, -1, 2**63])
def test_a_bound_without_integers_is_refused(high):
    with pytest.raises(SchemaError, match="high must be from 1"):
        draw.integers(0, 0, 1, high)


@pytest.mark.parametrize("high", [2, 7, 100, 1000])
def test_integers_are_uniform_over_the_lanes_of_a_draw(high):
    assert is_plausible(np.bincount(draw.integers(1, 0, 200_000, high), minlength=high))


def test_integers_are_uniform_over_draws_and_over_seeds():
    over_draws = [draw.integers(1, number, 2, 10) for number in range(5000)]
    over_seeds = [draw.integers(seed, 0, 2, 10) for seed in range(5000)]
    for drawn in (over_draws, over_seeds):
        first, second = np.array(drawn).T
        assert is_plausible(np.bincount(first, minlength=10))
        assert is_plausible(np.bincount(first * 10 + second, minlength=100))


def test_every_bit_of_a_word_is_set_half_of_the_time():
    words = draw.random_bits(7, 3, 100_000)
    share = [((words >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(64)]
    assert np.abs(np.array(share) - 0.5).max() < 0.01


def test_successive_lanes_draws_and_seeds_share_no_bits():
    words = draw.random_bits(7, 3, 20_000)
    others = [words[1:], draw.random_bits(7, 4, 20_000), draw.random_bits(8, 3, 20_000)]
    for other in others:
        flipped = np.unpackbits((words[: len(other)] ^ other).view(np.uint8))
        assert abs(flipped.mean() - 0.5) < 0.003
