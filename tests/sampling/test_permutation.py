"""The computed order of an epoch: a bijection, well mixed, of any size without memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import SchemaError, StepRangeError
from expstore.sampling.permutation import permute, permute_compiled
from tests.sampling.test_draw import is_plausible


@pytest.mark.parametrize("n", [*range(1, 130), 1000, 4095, 4096, 4097, 65_536, 1_000_003])
def test_every_position_goes_to_a_place_of_its_own(n):
    order = permute_compiled(seed=5, epoch=n, positions=np.arange(n), n=n)
    assert order.min() == 0
    assert np.bincount(order, minlength=n).tolist() == [1] * n


@given(
    st.integers(),
    st.integers(0, 2**40),
    st.integers(1, 5000) | st.integers(1, 2**62),
    st.lists(st.integers(0, 2**62), max_size=8),
)
def test_the_compiled_order_equals_the_numpy_order(seed, epoch, n, numbers):
    positions = np.array([number % n for number in numbers], np.int64)
    compiled = permute_compiled(seed, epoch, positions, n)
    plain = permute(seed, epoch, positions, n)
    assert compiled.dtype == plain.dtype == np.int64
    assert compiled.tolist() == plain.tolist()
    assert (plain >= 0).all()
    assert (plain < n).all()


def test_the_numpy_order_of_all_positions_equals_the_compiled_one():
    positions = np.arange(10_007)
    assert np.array_equal(
        permute(1, 2, positions, 10_007), permute_compiled(1, 2, positions, 10_007)
    )


def test_positions_keep_their_shape():
    order = permute(0, 0, np.arange(6).reshape(2, 3), 6)
    assert order.shape == (2, 3)
    assert sorted(order.ravel().tolist()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_few_steps_is_as_likely(n):
    weights = n ** np.arange(n)
    orders = [permute_compiled(0, epoch, np.arange(n), n) @ weights for epoch in range(4800)]
    seen, counts = np.unique(orders, return_counts=True)
    assert len(seen) == [2, 6, 24][n - 2]
    assert is_plausible(counts)


@pytest.mark.parametrize("n", [10, 100, 5000])
def test_the_first_and_the_next_place_of_an_epoch_are_uniform(n):
    cells = 10
    pairs = np.array([permute_compiled(3, epoch, np.arange(2), n) for epoch in range(6000)])
    first, second = (pairs * cells // n).T
    assert is_plausible(np.bincount(first, minlength=cells))
    assert is_plausible(np.bincount(second, minlength=cells))
    assert (pairs[:, 0] != pairs[:, 1]).all()


def test_neighbours_do_not_stay_neighbours():
    n = 100_000
    order = permute_compiled(11, 0, np.arange(n), n)
    distance = np.abs(np.diff(order))
    assert abs(distance.mean() / n - 1 / 3) < 0.01  # of two independent uniform places
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.02


def test_steps_next_to_each_other_in_an_epoch_are_uniform_pairs():
    n, cells = 200_000, 20
    order = permute_compiled(2, 9, np.arange(n), n) * cells // n
    assert is_plausible(np.bincount(order[:-1:2] * cells + order[1::2], minlength=cells**2))


def test_epochs_and_seeds_have_orders_of_their_own():
    positions = np.arange(50)
    orders = {
        tuple(permute_compiled(seed, epoch, positions, 50))
        for seed in (-1, 0, 1, 2**64)
        for epoch in range(10)
    }
    assert len(orders) == 40


def test_the_order_of_a_seed_never_changes():
    assert permute(0, 0, np.arange(10), 10).tolist() == [5, 0, 7, 6, 9, 2, 3, 4, 8, 1]


def test_a_population_larger_than_any_memory_is_no_trouble():
    positions = np.arange(1000) + 2**61
    assert len(set(permute_compiled(0, 0, positions, 2**62).tolist())) == 1000


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
@pytest.mark.parametrize("form", [permute, permute_compiled])
def test_a_population_without_order_is_refused(form, n):
    with pytest.raises(SchemaError, match="n must be from 1"):
        form(0, 0, np.arange(0), n)


@pytest.mark.parametrize("position", [-1, 5])
@pytest.mark.parametrize("form", [permute, permute_compiled])
def test_a_position_outside_of_the_population_is_refused(form, position):
    with pytest.raises(StepRangeError, match=f"positions must be from 0 to 4, got {position}"):
        form(0, 0, np.array([0, position]), 5)
