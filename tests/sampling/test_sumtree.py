"""The tree draws in proportion to its leaves, whatever happened to it before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import SchemaError
from expstore.sampling import tree_kernels
from expstore.sampling.draw import fold, random_bits
from expstore.sampling.sumtree import SumTree

PRIORITIES = st.floats(0, 1e6, width=32) | st.sampled_from([0.0, 1e-30, 3.4e38])


class Obvious:
    """The slow form of a tree: a list of priorities."""

    def __init__(self, alpha: float, eps: float, first: int) -> None:
        self.alpha, self.eps, self.first, self.raw = alpha, eps, first, []

    @property
    def leaves(self) -> np.ndarray:
        return (np.array(self.raw, np.float32).astype(np.float64) + self.eps) ** self.alpha


def tree_of(raw, alpha=1.0, eps=0.0, first=0):
    tree = SumTree(alpha, eps, first)
    tree.extend(np.array(raw, np.float32))
    return tree


def assert_same(tree: SumTree, slow: Obvious) -> None:
    leaves = slow.leaves
    above = np.flatnonzero(leaves > 0)
    assert (tree.first, tree.num_slots) == (slow.first, len(slow.raw))
    assert tree.raw.tolist() == np.array(slow.raw, np.float32).tolist()
    assert tree.total == pytest.approx(leaves.sum(), rel=1e-12)
    assert tree.least == pytest.approx(leaves[above].min(initial=np.inf), rel=1e-12)
    if not len(above):
        return
    middles = (np.cumsum(leaves) - leaves / 2)[above]
    clear = leaves[above] > 1e-9 * leaves.sum()  # of rounding in the slow form
    slots, drawn = tree.draw(middles[clear].copy())
    assert (slots - slow.first).tolist() == above[clear].tolist()
    assert drawn == pytest.approx(leaves[above][clear], rel=1e-12)


actions = st.lists(
    st.tuples(st.just("extend"), st.lists(PRIORITIES, max_size=40))
    | st.tuples(st.just("update"), st.lists(st.tuples(st.floats(0, 1), PRIORITIES), max_size=40))
    | st.tuples(st.just("evict"), st.floats(0, 1)),
    max_size=12,
)


@given(actions, st.sampled_from([0.0, 0.6, 1.0, 2.0]), st.sampled_from([0.0, 1e-8]),
       st.sampled_from([0, 7, 250, 2**40 + 4095]))  # fmt: skip
def test_the_tree_equals_its_slow_form_under_growth_eviction_and_updates(
    actions, alpha, eps, first
):
    tree, slow = SumTree(alpha, eps, first), Obvious(alpha, eps, first)
    for action, given_ in actions:
        if action == "extend":
            tree.extend(np.array(given_, np.float32))
            slow.raw += given_
        elif action == "evict":
            count = round(given_ * len(slow.raw))
            tree.evict(count)
            slow.first, slow.raw = slow.first + count, slow.raw[count:]
        elif slow.raw:
            places = [round(where * (len(slow.raw) - 1)) for where, _ in given_]
            raw = np.array([value for _, value in given_], np.float32)
            largest = tree.update(np.array(places, np.int64) + slow.first, raw)
            assert largest == max(raw.tolist(), default=0.0)
            for place, value in zip(places, raw.tolist(), strict=True):
                slow.raw[place] = value
        assert_same(tree, slow)


@given(st.integers(0, 10**6), st.integers(1, 3000), st.data())
def test_how_a_tree_came_about_does_not_change_a_bit_of_it(first, num_slots, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    raw = (rng.random(num_slots) ** 8).astype(np.float32)
    whole = tree_of(raw, alpha=0.6, first=first)
    before = data.draw(st.integers(0, min(first, 2000)))
    grown = tree_of(rng.random(before), alpha=0.6, first=first - before)
    for part in np.array_split(raw, data.draw(st.integers(1, 9))):
        grown.extend(part[::-1].copy())
    grown.evict(before)
    order = rng.permutation(num_slots)
    for places in np.array_split(order, data.draw(st.integers(1, 4))):
        grown.update(first + places, raw[places])
    masses = rng.random(500) * whole.total
    assert (grown.total, grown.least) == (whole.total, whole.least)
    assert grown.draw(masses.copy())[0].tolist() == whole.draw(masses.copy())[0].tolist()


def test_the_ends_of_each_leaf_belong_to_it():
    tree = tree_of([0, 2, 0, 0, 1, 0])
    slots, leaves = tree.draw(np.array([0.0, np.nextafter(2.0, 0), 2.0, np.nextafter(3.0, 0)]))
    assert slots.tolist() == [1, 1, 4, 4]
    assert leaves.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("num_slots", [1, 15, 16, 17, 255, 256, 257, 4097])
@pytest.mark.parametrize("num_empty", [0, 1, 20])
def test_a_mass_past_the_end_draws_the_last_leaf_above_zero(num_slots, num_empty):
    tree = tree_of([0.1] * num_slots + [0] * num_empty)
    masses = np.array([tree.total, np.nextafter(tree.total, np.inf), 2 * tree.total, np.inf])
    assert tree.draw(masses)[0].tolist() == [num_slots - 1] * 4


def test_a_leaf_of_zero_is_never_drawn():
    rng = np.random.default_rng(0)
    raw = np.where(rng.random(5000) < 0.3, rng.random(5000), 0)
    tree = tree_of(raw, alpha=0.6)
    slots, leaves = tree.draw(np.linspace(0, tree.total, 100_000))
    assert (leaves > 0).all()
    assert set(slots.tolist()) == set(np.flatnonzero(raw).tolist())


def test_sums_do_not_drift():
    tree = tree_of(np.ones(1000))
    rng = np.random.default_rng(1)
    for _ in range(300):
        tree.update(rng.integers(0, 1000, 50), (rng.random(50) * 1e30).astype(np.float32))
    tree.update(np.arange(1000), np.ones(1000, np.float32))
    assert tree.total == 1000.0


def test_evicted_slots_give_their_memory_back():
    tree = tree_of(np.ones(100_000))
    for _ in range(50):
        tree.extend(np.ones(10_000, np.float32))
        tree.evict(10_000)
        assert tree.num_bytes < 15 * 112_000
    tree.evict(99_000)
    assert tree.num_bytes < 15 * 2_000
    assert (tree.total, tree.num_slots) == (1000.0, 1000)


def test_a_slot_takes_less_than_fifteen_bytes():
    tree = tree_of(np.ones(1_000_000))
    assert 13 <= tree.num_bytes / 1_000_000 < 15


def test_an_empty_tree_has_no_total_and_no_least():
    tree = SumTree(0.6, 1e-8)
    assert (tree.total, tree.least, tree.num_slots) == (0.0, np.inf, 0)
    tree.extend(np.ones(3, np.float32))
    tree.evict(3)
    assert (tree.total, tree.least, tree.first) == (0.0, np.inf, 3)


def test_the_largest_priorities_and_exponent_do_not_overflow():
    tree = tree_of([3.4e38, 1e-45], alpha=7.0, eps=3e38)
    assert np.isfinite(tree.total) and tree.total * 2.0**40 < np.inf


@pytest.mark.parametrize(
    ("alpha", "eps", "text"),
    [
        (-0.1, 0.0, "alpha must be from 0 to 7, got -0.1"),
        (7.5, 0.0, "alpha must be from 0 to 7, got 7.5"),
        (np.nan, 0.0, "alpha must be from 0 to 7, got nan"),
        (0.6, -1e-9, "eps must be from 0 to 3.40282e.38, got -1e-09"),
    ],
)
def test_an_exponent_or_addend_out_of_range_is_refused(alpha, eps, text):
    with pytest.raises(SchemaError, match=text):
        SumTree(alpha, eps)


@given(st.integers(), st.integers(0, 9), st.integers(1, 40), st.floats(1e-3, 1e6), st.booleans())
def test_the_compiled_masses_equal_the_numpy_masses(seed, draw, count, total, stratified):
    out = np.empty(count)
    tree_kernels.fill_masses(np.uint64(fold(seed)), draw, total, stratified, out)
    part = (random_bits(seed, draw, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    expected = (np.arange(count) + part) * (total / count) if stratified else part * total
    assert out.tolist() == expected.tolist()
