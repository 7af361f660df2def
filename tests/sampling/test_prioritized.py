"""Prioritized: proportions, weights, and priorities that stay with their steps."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import SchemaError, StateError, StepRangeError
from expstore.sampling.forest import Forest
from expstore.sampling.prioritized import Prioritized
from expstore.spans import Spans

FAR = 2**40
EMPTY = Spans.laid_out(np.empty(0, np.int64), np.empty(0, np.int64))


def steps(*ranges: tuple[int, int]) -> Spans:
    """A selection of the given (start, stop) episodes of one store."""
    bounds = np.array(ranges, np.int64).reshape(-1, 2)
    return Spans.laid_out(bounds[:, 0], bounds[:, 1] - bounds[:, 0])


def union(*stores: list[tuple[int, int]]) -> Spans:
    """A union of stores of the given episodes."""
    return Spans.concatenate(
        [steps(*((k * FAR + a, k * FAR + b) for a, b in store)) for k, store in enumerate(stores)]
    )


def given_priorities(spans, raw, **settings):
    sampler = Prioritized(**settings)
    sampler.update(spans, spans.steps_at(np.arange(spans.num_steps)), np.array(raw, np.float64))
    return sampler


def all_of(sampler, spans):
    """The priority of every step, in order."""
    return sampler.priorities(spans, spans.steps_at(np.arange(spans.num_steps))).tolist()


def drawn(sampler, spans, sizes=(8,), seed=0):
    """Step numbers, probabilities and weights of the next batches, to the last bit."""
    draws = [sampler.draw(spans, size, seed) for size in sizes]
    return [
        (spans.steps_at(d.anchors).tolist(), d.probability.tolist(), d.weight.tolist())
        for d in draws
    ]


def is_plausible(counts: np.ndarray, probability: np.ndarray) -> bool:
    """Whether cells of these probabilities could have these counts: within five sigma."""
    expected, freedom = counts.sum() * probability, counts.size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return bool(abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom))


# -- proportions and weights -----------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("stratified", [False, True])
def test_steps_are_drawn_in_proportion_to_their_leaves(alpha, stratified):
    spans = union([(0, 1), (1, 40), (45, 50)], [], [(3, 8)])
    raw = (np.random.default_rng(0).random(50) + 0.2).astype(np.float32)
    sampler = given_priorities(spans, raw, alpha=alpha, stratified=stratified)
    leaves = (raw.astype(np.float64) + 1e-8) ** alpha
    draws = [sampler.draw(spans, 64, seed=1) for _ in range(1000)]
    anchors = np.concatenate([draw.anchors for draw in draws])
    counts = np.bincount(anchors, minlength=50)
    assert (counts > 0).all()  # every step, the first and last of every episode included
    if stratified:  # less spread than independent draws have
        assert (np.abs(counts / counts.sum() - leaves / leaves.sum()) < 1 / 640).all()
    else:
        assert is_plausible(counts, leaves / leaves.sum())
    probability = np.concatenate([draw.probability for draw in draws])
    assert probability == pytest.approx((leaves / leaves.sum())[anchors], rel=1e-12)


def test_stratified_anchors_have_a_part_of_the_sum_each():
    spans = steps((0, 64))
    draw = Prioritized(stratified=True).draw(spans, 64, seed=0)
    assert draw.anchors.tolist() == list(range(64))
    ends = np.arange(1, 5)
    sampler = given_priorities(steps((0, 4)), [1, 2, 3, 4], alpha=1, eps=0, stratified=True)
    for _ in range(20):
        anchors = sampler.draw(steps((0, 4)), 10, seed=3).anchors
        assert np.bincount(anchors, minlength=4).tolist() == ends.tolist()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_a_weight_is_relative_to_the_smallest_leaf_of_all(beta):
    spans, raw = union([(0, 3)], [(0, 1)]), [4.0, 9.0, 16.0, 1.0]
    sampler = given_priorities(spans, raw, alpha=0.5, beta=beta, eps=0.0)
    for batch_size in [1] * 30 + [100]:  # also where the smallest is not in the batch
        draw = sampler.draw(spans, batch_size, seed=0)
        expected = np.array([2.0, 3.0, 4.0, 1.0])[draw.anchors] ** -beta
        assert draw.weight == pytest.approx(expected.astype(np.float32), rel=1e-6)
        assert (draw.weight.dtype, draw.anchors.dtype) == (np.float32, np.int64)
    assert draw.weight.max() == 1.0


def test_weights_times_frequencies_are_even_where_beta_is_one():
    spans = steps((0, 20))
    raw = np.random.default_rng(3).random(20) + 0.1
    draw = given_priorities(spans, raw, beta=1.0).draw(spans, 4000, seed=0)
    assert draw.weight * draw.probability == pytest.approx(draw.probability.min(), rel=1e-5)


def test_leaves_are_as_the_reference_has_them():
    spans = steps((0, 2))
    sampler = given_priorities(spans, [2.0, 4.0], alpha=0.6)
    grown = steps((0, 2), (2, 4))
    draw = sampler.draw(grown, 200, seed=0)
    leaves = np.array([1.5157166, 2.2973967, 2.2973967, 2.2973967])
    expected = dict(enumerate((leaves / leaves.sum()).round(6).tolist()))
    seen = dict(zip(draw.anchors.tolist(), draw.probability.round(6).tolist(), strict=True))
    assert seen == pytest.approx(expected, abs=2e-6)


def test_a_priority_of_zero_is_drawn_only_with_eps():
    spans, raw = steps((0, 3)), [0.0, 1.0, 0.0]
    assert set(given_priorities(spans, raw, eps=0.0).draw(spans, 500, 0).anchors.tolist()) == {1}
    with_eps = given_priorities(spans, raw, eps=0.5)
    assert set(with_eps.draw(spans, 500, 0).anchors.tolist()) == {0, 1, 2}


def test_nothing_can_be_drawn_where_every_leaf_is_zero():
    spans = steps((0, 3))
    sampler = given_priorities(spans, [0, 0, 0], eps=0.0)
    with pytest.raises(SchemaError, match="every one of the 3 steps has priority 0 and eps is 0"):
        sampler.draw(spans, 4, seed=0)


def test_nothing_can_be_drawn_from_nothing():
    with pytest.raises(StepRangeError, match="there is no step to draw from"):
        Prioritized().draw(EMPTY, 4, seed=0)
    with pytest.raises(SchemaError, match="batch_size must be at least 1, got 0"):
        Prioritized().draw(steps((0, 3)), 0, seed=0)


def test_rounding_never_leads_into_a_store_without_steps():
    spans, forest = union([], [(0, 3)], [], [(4, 6)], []), Forest(alpha=1.0, eps=0.0)
    forest.follow(spans)
    masses = np.array([0.0, 3.0, np.nextafter(3.0, 0), 5.0, np.nextafter(5.0, 9), 99.0])
    assert forest.at_masses(masses)[0].tolist() == [0, 3, 2, 4, 4, 4]


def test_draws_are_a_function_of_seed_number_steps_and_priorities():
    spans, raw = steps((0, 500)), np.random.default_rng(0).random(500)
    one, other = given_priorities(spans, raw), given_priorities(spans, raw)
    assert drawn(one, spans, [8, 8]) == drawn(other, spans, [8, 8])
    again = given_priorities(spans, raw)
    again.next_draw = 1
    assert (
        drawn(again, spans, [8], seed=0) == drawn(given_priorities(spans, raw), spans, [8, 8])[1:]
    )
    assert drawn(again, spans, [8], seed=1) != drawn(other, spans, [8], seed=0)


# -- beta ------------------------------------------------------------------------------------------


def test_beta_may_be_assigned_at_any_time():
    spans = steps((0, 2))
    sampler = given_priorities(spans, [1.0, 4.0], alpha=1.0, beta=0.0, eps=0.0)
    assert set(sampler.draw(spans, 50, 0).weight.tolist()) == {1.0}
    sampler.beta = 0.5
    assert set(sampler.draw(spans, 50, 0).weight.tolist()) == {1.0, 0.5}


def test_beta_may_be_a_function_of_the_draw_number():
    spans, asked = steps((0, 2)), []

    def schedule(number):
        asked.append(number)
        return number / 2

    sampler = given_priorities(spans, [1.0, 4.0], alpha=1.0, beta=schedule, eps=0.0)
    least = [sampler.draw(spans, 50, 0).weight.min() for _ in range(3)]
    assert (least, asked) == ([1.0, 0.5, 0.25], [0, 1, 2])


@pytest.mark.parametrize("beta", [-0.1, np.nan, np.inf, "high", None])
def test_a_beta_below_zero_is_refused(beta):
    with pytest.raises(SchemaError, match="beta must be a number of at least 0, got"):
        Prioritized(beta=beta)
    sampler = Prioritized()
    with pytest.raises(SchemaError, match="beta must be a number of at least 0, got"):
        sampler.beta = beta
    scheduled = Prioritized(beta=lambda number: beta)
    with pytest.raises(SchemaError, match="beta must be a number of at least 0, got"):
        scheduled.draw(steps((0, 3)), 4, seed=0)
    assert scheduled.next_draw == 0


def test_an_alpha_below_zero_is_refused():
    with pytest.raises(SchemaError, match="alpha must be from 0 to 7, got -1"):
        Prioritized(alpha=-1)
    with pytest.raises(AttributeError):
        Prioritized().alpha = 0.5


# -- updates ---------------------------------------------------------------------------------------


def test_of_a_step_that_comes_twice_the_last_priority_counts():
    spans, sampler = steps((0, 5)), Prioritized()
    sampler.update(spans, np.array([3, 1, 3, 3]), np.array([9.0, 5.0, 7.0, 2.0]))
    assert all_of(sampler, spans) == [1.0, 5.0, 1.0, 2.0, 1.0]


def test_new_steps_enter_at_the_largest_priority_ever_given():
    sampler = Prioritized()
    assert all_of(sampler, steps((0, 2))) == [1.0, 1.0]
    sampler.update(steps((0, 2)), np.array([0, 1]), np.array([0.25, 0.5]))
    assert all_of(sampler, steps((0, 2), (2, 3))) == [0.25, 0.5, 0.5]
    sampler.update(steps((0, 2), (2, 3)), np.array([0, 0]), np.array([8.0, 0.1]))
    assert all_of(sampler, steps((0, 2), (2, 4))) == [
        pytest.approx(0.1), 0.5, 0.5, 8.0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [-1.0, -1e-300, np.nan, np.inf, -np.inf, 3.5e38, np.float32(-1e-30), np.float32(np.nan), -3],
)
def test_a_priority_that_is_none_is_refused_and_nothing_changes(bad):
    spans = steps((10, 15))
    sampler = given_priorities(spans, [1, 2, 3, 4, 5])
    priority = np.array([7, bad, 8], np.asarray(bad).dtype)
    with pytest.raises(
        SchemaError, match=r"priority\[1\] must be from 0 to 3.4e38, got .* step 11"
    ):
        sampler.update(spans, np.array([10, 11, 12]), priority)
    assert all_of(sampler, spans) == [1, 2, 3, 4, 5]
    assert all_of(sampler, steps((10, 15), (15, 16)))[-1] == 5


@pytest.mark.parametrize("bad", [-1, 15, 2**40, 2**62, -(2**63)])
def test_a_step_that_was_never_written_is_refused_and_nothing_changes(bad):
    spans = steps((10, 15))
    sampler = given_priorities(spans, [1, 2, 3, 4, 5])
    with pytest.raises(StepRangeError, match=rf"steps\[2\] is {bad}, which is not and never was"):
        sampler.update(spans, np.array([10, 3, bad]), np.array([7.0, 7.0, 7.0]))
    assert all_of(sampler, spans) == [1, 2, 3, 4, 5]
    assert sampler.num_ignored == 0


def test_a_step_that_the_view_does_not_select_is_refused():
    spans = union([(0, 5), (9, 12)], [(3, 6)])
    for step in (5, 8, 12, FAR + 6):
        with pytest.raises(StepRangeError, match=rf"steps\[0\] is {step}"):
            Prioritized().update(spans, np.array([step]), np.array([1.0]))


def test_steps_that_have_left_are_ignored_and_counted():
    sampler = given_priorities(steps((0, 4), (4, 8)), range(8))
    now = steps((4, 8), (8, 10))
    sampler.update(now, np.array([3, 4, 0, 9]), np.array([50.0, 60.0, 50.0, 40.0]))
    assert all_of(sampler, now) == [60, 5, 6, 7, 7, 40]
    assert sampler.num_ignored == 2
    sampler.update(now, np.array([1]), np.array([1e6]))
    assert all_of(sampler, steps((4, 8), (8, 10), (10, 11)))[-1] == 60
    assert sampler.num_ignored == 3


def test_steps_that_left_before_the_sampler_came_are_ignored_too():
    sampler, spans = Prioritized(), union([(7, 9)], [(5, 6)])
    sampler.update(spans, np.array([6, 7, FAR, FAR + 5]), np.array([2.0, 3.0, 4.0, 5.0]))
    assert (all_of(sampler, spans), sampler.num_ignored) == ([3.0, 1.0, 5.0], 2)


def test_steps_of_a_deleted_episode_are_ignored_and_counted():
    sampler = given_priorities(steps((0, 4), (4, 8), (8, 12)), range(12))
    now = steps((0, 4), (8, 12))
    sampler.update(now, np.array([5, 8]), np.array([1.0, 2.0]))
    assert all_of(sampler, now) == [0, 1, 2, 3, 2, 9, 10, 11]
    assert sampler.num_ignored == 1


def test_steps_of_a_store_that_was_emptied_are_ignored_and_counted():
    sampler = given_priorities(union([(0, 4)], [(0, 2)]), range(6))
    now = union([], [(0, 2)])
    sampler.update(now, np.array([2, FAR]), np.array([1.0, 2.0]))
    assert (all_of(sampler, now), sampler.num_ignored) == ([2, 5], 1)
    refilled = union([(4, 6)], [(0, 2)])
    assert all_of(sampler, refilled) == [5, 5, 2, 5]


@pytest.mark.parametrize(
    ("steps_", "priority", "text"),
    [
        ([1, 2], [1.0], r"same shape \(n,\), got \(2,\) and \(1,\)"),
        ([1, 2], 1.0, r"same shape \(n,\), got \(2,\) and \(\)"),
        ([[1], [2]], [[1.0], [2.0]], r"got \(2, 1\) and \(2, 1\)"),
        ([1.0, 2.0], [1.0, 1.0], "steps must be integers, got float64"),
        ([1, 2], ["a", "b"], "priority must be numbers, got <U1"),
        ([1, 2], [1j, 2j], "priority must be numbers, got complex128"),
    ],
)
def test_what_is_no_priority_per_step_is_refused(steps_, priority, text):
    with pytest.raises(SchemaError, match=text):
        Prioritized().update(steps((0, 5)), np.array(steps_), np.array(priority))


def test_an_empty_update_changes_nothing():
    sampler = given_priorities(steps((0, 2)), [3, 4])
    sampler.update(steps((0, 2)), np.empty(0, np.int64), np.empty(0))
    assert all_of(sampler, steps((0, 2))) == [3, 4]


def test_priorities_are_read_by_step_in_any_shape():
    spans = union([(2, 4)], [(5, 7)])
    sampler = given_priorities(spans, [1, 2, 3, 4])
    read = sampler.priorities(spans, np.array([[FAR + 6, 2], [3, 3]]))
    assert (read.tolist(), read.dtype) == ([[4, 1], [2, 2]], np.float32)
    with pytest.raises(StepRangeError, match="step 4 is not among the 4 steps"):
        sampler.priorities(spans, np.array([4]))


# -- following -------------------------------------------------------------------------------------


def test_a_member_of_a_union_that_grows_leaves_the_others_their_priorities():
    sampler = given_priorities(union([(0, 3)], [(0, 2)]), [1, 2, 3, 4, 5])
    now = union([(0, 3), (3, 5)], [(0, 2)], [(0, 1)])
    assert all_of(sampler, now) == [1, 2, 3, 5, 5, 4, 5, 5]
    later = union([(3, 5)], [(0, 2), (2, 3)], [(0, 1)])
    assert all_of(sampler, later) == [5, 5, 4, 5, 5, 5]


def test_a_narrower_view_keeps_the_priorities_of_its_steps():
    sampler = given_priorities(steps((0, 4), (4, 8), (8, 12)), range(12))
    assert all_of(sampler, steps((1, 3), (5, 9))) == [1, 2, 5, 6, 7, 8]


def test_growth_does_not_touch_what_was_there_before(monkeypatch):
    sampler = given_priorities(steps((0, 100_000)), np.arange(100_000))
    carried = []
    monkeypatch.setattr(type(sampler._forest), "_carried", lambda *a: carried.append(a))
    tree = sampler._forest.trees[0]
    entered = []
    monkeypatch.setattr(tree, "extend", lambda raw: entered.append(len(raw)))
    sampler._forest.follow(steps((40, 100_000), (100_000, 100_007)))
    assert (carried, entered) == ([], [7])


def fates(num_stores: int) -> st.SearchStrategy:
    """What can happen to a union: (action, store, three numbers that say how)."""
    actions = st.sampled_from(["append", "append", "evict", "delete", "update", "save"])
    numbers = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 9))
    return st.lists(st.tuples(actions, st.integers(0, num_stores - 1), numbers), max_size=25)


@given(fates(3), st.booleans())
def test_priorities_stay_with_their_steps_whatever_happens(fates, stratified):
    stores: list[list[tuple[int, int]]] = [[(0, 3)], [], [(0, 20), (20, 24)]]
    stops = [3, 0, 24]
    sampler, expected, given = Prioritized(stratified=stratified), {}, []
    for action, k, (a, b, c) in fates:
        if action == "append":
            stores[k].append((stops[k] + (c == 9), stops[k] + a + 2))  # 9: the view leaves one out
            stops[k] += a + 2
        elif action == "evict":
            stores[k] = stores[k][c // 3 :]
        elif action == "delete" and len(stores[k]) > 1:
            del stores[k][a % len(stores[k])]
        spans = union(*stores)
        if action == "save":
            state, sampler = sampler.state_dict(), Prioritized(stratified=stratified)
            sampler.load_state_dict(state)
        if not spans.num_steps:
            continue
        now = spans.steps_at(np.arange(spans.num_steps)).tolist()
        expected = {step: expected.get(step, max(given, default=1.0)) for step in now}
        if action == "update":
            asked = [k * FAR + step for step in range(a, a + b) if k * FAR + step in expected]
            priority = [float(c + i % 3) for i in range(len(asked))]
            sampler.update(spans, np.array(asked, np.int64), np.array(priority))
            given += priority
            expected.update(zip(asked, priority, strict=True))
        assert all_of(sampler, spans) == [expected[step] for step in now]
        copy = Prioritized(stratified=stratified)
        copy.load_state_dict(sampler.state_dict())
        assert drawn(copy, spans) == drawn(sampler, spans)


# -- state -----------------------------------------------------------------------------------------


def test_a_state_is_plain():
    sampler = given_priorities(union([(0, 2), (2, 3)], [(5, 6)]), [1, 2, 3, 4], beta=0.5)
    state = sampler.state_dict()
    arrays = [state.pop("seen"), *(s.pop(n) for s in state["streams"] for n in ("runs", "raw"))]
    assert [array.tolist() for array in arrays] == [
        [[0, 3], [FAR + 5, FAR + 6]], [[0, 3]], [1, 2, 3], [[FAR + 5, FAR + 6]], [4],
    ]  # fmt: skip
    assert state == {
        "kind": "prioritized", "next_draw": 0, "alpha": 0.6, "eps": 1e-8, "stratified": 0,
        "beta": 0.5, "num_ignored": 0, "largest": 4.0,
        "streams": [{"first_slot": 0}, {"first_slot": FAR + 5}],
    }  # fmt: skip


@pytest.mark.parametrize("beta", [0.3, lambda number: 1 - 0.5**number])
def test_a_sampler_resumes_with_the_batch_that_was_next_also_after_growth(beta):
    raw = np.random.default_rng(0).random(300) ** 4
    sampler = given_priorities(steps((0, 300)), raw, beta=beta)
    drawn(sampler, steps((0, 300)), [7, 7])
    state = sampler.state_dict()
    grown = steps((0, 300), (300, 420))
    for now in (steps((0, 300)), grown, steps((300, 420), (420, 421))):
        resumed, probe = Prioritized(beta=beta), Prioritized(beta=beta)
        resumed.load_state_dict(state)
        probe.load_state_dict(state)
        assert drawn(resumed, now, [7, 5]) == drawn(probe, now, [7, 5])
        assert all_of(resumed, now) == all_of(probe, now)
    resumed = Prioritized(beta=beta)
    resumed.load_state_dict(state)
    assert drawn(resumed, steps((0, 300)), [7, 5]) == drawn(sampler, steps((0, 300)), [7, 5])
    assert drawn(resumed, grown, [7, 5]) == drawn(sampler, grown, [7, 5])


def test_a_view_that_was_evicted_and_grown_resumes_to_the_bit():
    rng = np.random.default_rng(5)
    sampler, stop = Prioritized(), 0
    episodes: list[tuple[int, int]] = []
    for _ in range(40):
        episodes.append((stop + 3, stop + 3 + int(rng.integers(1, 90))))
        stop = episodes[-1][1]
        episodes = episodes[-9:]
        spans = steps(*episodes)
        anchors = spans.steps_at(sampler.draw(spans, 64, seed=0).anchors)
        sampler.update(spans, anchors, rng.random(64) ** 9 * 1e3)
        resumed = Prioritized()
        resumed.load_state_dict(sampler.state_dict())
        mirror = deepcopy(sampler)
        assert drawn(resumed, spans, [500]) == drawn(mirror, spans, [500])


def test_a_saved_state_and_a_sampler_share_no_memory():
    spans = steps((0, 4))
    sampler = given_priorities(spans, [1, 2, 3, 4])
    state = sampler.state_dict()
    resumed = Prioritized()
    resumed.load_state_dict(state)
    resumed.update(spans, np.array([0]), np.array([9.0]))
    sampler.update(spans, np.array([1]), np.array([8.0]))
    assert state["streams"][0]["raw"].tolist() == [1, 2, 3, 4]
    state["streams"][0]["raw"][:] = 0
    assert all_of(resumed, spans) == [9, 2, 3, 4]


def test_a_sampler_that_never_drew_has_a_state_too():
    resumed = Prioritized()
    resumed.load_state_dict(Prioritized().state_dict())
    assert drawn(resumed, steps((0, 9))) == drawn(Prioritized(), steps((0, 9)))


def test_beta_is_part_of_the_state_unless_it_is_a_function():
    sampler, resumed = Prioritized(beta=0.4), Prioritized(beta=0.4)
    sampler.beta = 0.9
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.beta == 0.9
    for saved, loading in ((sampler, Prioritized(beta=abs)), (Prioritized(beta=abs), sampler)):
        with pytest.raises(StateError, match="the state was saved with beta="):
            loading.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("now", [[(0, 6)], [(0, 3), (4, 6)], [(2, 9)], [(0, 5)]])
def test_a_state_of_other_steps_is_refused(now):
    sampler, other = given_priorities(steps((0, 2), (5, 9)), range(6)), Prioritized()
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(StateError, match="holds priorities of 6 steps, 0 to 8, which are others"):
        other.draw(steps(*now), 3, seed=0)
    with pytest.raises(StateError, match="which are others"):
        other.update(steps(*now), np.array([0]), np.array([1.0]))
    assert all_of(other, steps((0, 2), (5, 9))) == list(range(6))


def test_a_state_of_more_stores_is_refused():
    sampler, other = given_priorities(union([(0, 2)], [(0, 1)]), [1, 2, 3]), Prioritized()
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(StateError, match="holds priorities of 1 steps"):
        other.draw(steps((0, 2)), 3, seed=0)


def spoiled(**changes):
    state = given_priorities(steps((0, 3)), [1, 2, 3]).state_dict()
    state["streams"][0].update(changes.pop("stream", {}))
    return {**state, **changes}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "kind None, this one is 'prioritized'"),
        ({"kind": "uniform"}, "kind 'uniform'"),
        (spoiled(next_draw=-1), "'next_draw' must be an int of at least 0, got -1"),
        (spoiled(alpha=0.7), "saved with alpha=0.7, this sampler has alpha=0.6"),
        (spoiled(eps=0.0), "saved with eps=0.0, this sampler has eps=1e-08"),
        (spoiled(stratified=1), "saved with stratified=1, this sampler has stratified=0"),
        (spoiled(beta=-1), "beta must be a number of at least 0, got -1"),
        (spoiled(beta=None), "beta must be a number of at least 0, got None"),
        (spoiled(streams=None), "priorities cannot be used"),
        (spoiled(stream={"raw": np.ones(2, np.float32)}), "float32 priorities .2,. for these runs"),
        (spoiled(stream={"raw": np.ones(3)}), "float64 priorities"),
        (spoiled(stream={"raw": np.full(3, np.nan, np.float32)}), "not a number of at least 0"),
        (spoiled(stream={"raw": -np.ones(3, np.float32)}), "not a number of at least 0"),
        (spoiled(stream={"runs": np.array([[3, 0]])}), "runs of steps that do not ascend"),
        (spoiled(stream={"runs": np.array([0, 3])}), "runs of steps that do not ascend"),
        (spoiled(stream={"runs": np.array([[-3, 0]])}), "runs of steps that do not ascend"),
        (spoiled(stream={"first_slot": -1}), "first_slot -1"),
    ],
)
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(state, text):
    sampler = given_priorities(steps((0, 3)), [7, 8, 9])
    with pytest.raises(StateError, match=text):
        sampler.load_state_dict(state)
    assert all_of(sampler, steps((0, 3))) == [7, 8, 9]
