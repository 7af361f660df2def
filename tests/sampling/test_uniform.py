"""Uniform and WithoutReplacement: fair, reproducible, resumable, and exact per epoch."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import SchemaError, StateError, StepRangeError
from expstore.sampling.draw import integers
from expstore.sampling.uniform import Uniform, WithoutReplacement
from expstore.spans import Spans
from tests.sampling.test_draw import is_plausible

EMPTY = Spans.laid_out(np.empty(0, np.int64), np.empty(0, np.int64))


def steps(*ranges: tuple[int, int]) -> Spans:
    """A selection of the given (start, stop) episodes."""
    start, stop = np.array(ranges, np.int64).T
    return Spans.laid_out(start, stop - start)


def drawn(sampler, spans, sizes, seed=0):
    """The step numbers of one batch after the other."""
    batches = [sampler.draw(spans, size, seed).anchors for size in sizes]
    return [spans.steps_at(batch).tolist() for batch in batches]


@pytest.mark.parametrize("sampler", [Uniform, WithoutReplacement])
def test_a_draw_says_how_likely_its_anchors_were(sampler):
    draw = sampler().draw(steps((0, 20)), 4, seed=0)
    assert draw.anchors.dtype == np.int64
    assert draw.probability.tolist() == [0.05] * 4
    assert (draw.probability.dtype, draw.weight.dtype) == (np.float64, np.float32)
    assert draw.weight.tolist() == [1.0] * 4


@pytest.mark.parametrize("sampler", [Uniform(), WithoutReplacement()])
def test_nothing_can_be_drawn_from_nothing(sampler):
    with pytest.raises(StepRangeError, match="there is no step to draw from; append an episode"):
        sampler.draw(EMPTY, 4, seed=0)
    with pytest.raises(SchemaError, match="batch_size must be at least 1, got 0"):
        sampler.draw(steps((0, 20)), 0, seed=0)


def test_uniform_draws_are_the_integers_of_their_number():
    sampler = Uniform()
    for number in range(3):
        anchors = sampler.draw(steps((0, 20)), 8, seed=4).anchors
        assert anchors.tolist() == integers(4, number, 8, 20).tolist()


def test_uniform_draws_reach_every_step_equally_often():
    sampler, spans = Uniform(), steps((0, 1), (1, 40), (45, 50))
    anchors = np.concatenate([sampler.draw(spans, 256, seed=1).anchors for _ in range(200)])
    counts = np.bincount(anchors, minlength=spans.num_steps)
    assert len(counts) == 45
    assert is_plausible(counts)


def test_uniform_resumes_with_the_batch_that_was_next():
    spans, sampler, resumed = steps((0, 1000)), Uniform(), Uniform()
    drawn(sampler, spans, [7, 7])
    resumed.load_state_dict(sampler.state_dict())
    assert drawn(resumed, spans, [7, 5]) == drawn(sampler, spans, [7, 5])


@given(st.integers(1, 60), st.lists(st.integers(1, 25), min_size=1, max_size=30), st.integers())
def test_an_epoch_holds_every_step_exactly_once(num_steps, sizes, seed):
    sampler, seen = WithoutReplacement(), []
    for size in sizes:
        epoch = sampler.epoch
        batch = sampler.draw(steps((3, 3 + num_steps)), size, seed).anchors.tolist()
        assert 1 <= len(batch) <= size
        seen += batch
        if sampler.epoch > epoch:
            assert sorted(seen) == list(range(num_steps))
            seen = []
        else:
            assert len(batch) == size
            assert len(set(seen)) == len(seen)


def test_the_last_batch_of_an_epoch_is_short():
    batches = drawn(WithoutReplacement(), steps((0, 7)), [3] * 6)
    assert [len(batch) for batch in batches] == [3, 3, 1, 3, 3, 1]


def test_the_last_batch_is_left_out_if_asked():
    sampler = WithoutReplacement(drop_last=True)
    batches = drawn(sampler, steps((0, 7)), [3] * 40)
    assert {len(batch) for batch in batches} == {3}
    assert all(
        len({*one, *other}) == 6 for one, other in zip(batches[::2], batches[1::2], strict=True)
    )
    assert {step for batch in batches for step in batch} == set(range(7))


def test_a_batch_larger_than_an_epoch_is_refused_if_short_ones_are_left_out():
    with pytest.raises(SchemaError, match="batch_size 8 is above the 7 steps of an epoch"):
        WithoutReplacement(drop_last=True).draw(steps((0, 7)), 8, seed=0)
    assert len(WithoutReplacement().draw(steps((0, 7)), 8, seed=0).anchors) == 7


def test_steps_appended_during_an_epoch_wait_for_the_next():
    sampler = WithoutReplacement()
    first = drawn(sampler, steps((0, 6)), [4]) + drawn(sampler, steps((0, 6), (6, 9)), [4])
    assert [len(batch) for batch in first] == [4, 2]
    assert sorted(chain(*first)) == list(range(6))
    assert sorted(chain(*drawn(sampler, steps((0, 6), (6, 9)), [4] * 3))) == list(range(9))


def test_steps_evicted_during_an_epoch_are_left_out_and_the_others_come_once():
    sampler = WithoutReplacement()
    before = drawn(sampler, steps((0, 4), (4, 12)), [3])[0]
    after = drawn(sampler, steps((4, 12), (12, 20)), [3] * 3)
    still_there = [step for step in before if step >= 4]
    until_end = list(chain(*after))[: 8 - len(still_there)]
    assert sorted(still_there + until_end) == list(range(4, 12))


def test_an_epoch_whose_steps_have_all_left_gives_way_to_the_next():
    sampler = WithoutReplacement()
    drawn(sampler, steps((0, 6)), [4])
    assert sorted(chain(*drawn(sampler, steps((6, 9)), [2, 2]))) == [6, 7, 8]


def test_a_union_whose_first_store_grows_keeps_its_epoch():
    def union(num_first):
        return Spans.concatenate([steps((0, num_first)), steps((2**40, 2**40 + 4))])

    sampler = WithoutReplacement()
    seen = drawn(sampler, union(5), [4]) + drawn(sampler, union(8), [5])
    assert sorted(chain(*seen)) == [0, 1, 2, 3, 4, *(2**40 + k for k in range(4))]


def test_a_union_that_grows_by_as_much_as_it_loses_keeps_its_epoch():
    """Number, first and last step stayed the same, and so new steps were drawn in the epoch."""

    def union(first_stop, second_start):
        members = steps((0, first_stop)), steps((2**40 + second_start, 2**40 + 8))
        return Spans.concatenate(list(members))

    sampler = WithoutReplacement()
    seen = drawn(sampler, union(5, 0), [4]) + drawn(sampler, union(8, 3), [9])
    left = {2**40 + k for k in range(3)}
    assert set(chain(*seen)) - left == {*range(5), *(2**40 + k for k in range(3, 8))}
    assert len(list(chain(*seen))) == len(set(chain(*seen)))


def test_a_state_meets_other_steps_of_the_same_number_and_ends():
    sampler, other = WithoutReplacement(), WithoutReplacement()
    drawn(sampler, steps((0, 4), (6, 12)), [3])
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(StateError, match="which are not the first of this selection"):
        other.draw(steps((0, 6), (8, 12)), 3, seed=0)


@pytest.mark.parametrize("num_drawn", range(8))
def test_an_epoch_resumes_with_the_batch_that_was_next(num_drawn):
    spans, sampler, resumed = steps((2, 9), (12, 20)), WithoutReplacement(), WithoutReplacement()
    drawn(sampler, spans, [4] * num_drawn)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.state_dict() == sampler.state_dict()
    assert drawn(resumed, spans, [4] * 6) == drawn(sampler, spans, [4] * 6)


def test_an_epoch_resumes_exactly_after_growth_and_eviction():
    sampler = WithoutReplacement()
    drawn(sampler, steps((0, 4), (4, 12), (15, 20)), [3])
    for now in (steps((0, 4), (4, 12), (15, 20), (20, 30)), steps((4, 12), (15, 20), (20, 30))):
        drawn(sampler, now, [2])
        resumed = WithoutReplacement()
        resumed.load_state_dict(sampler.state_dict())
        probe = WithoutReplacement()
        probe.load_state_dict(sampler.state_dict())
        expected = drawn(sampler, now, [2])
        assert drawn(resumed, now, [2]) == expected
        assert drawn(probe, now, [2, 3, 9])[0] == expected[0]


def test_a_state_is_small_and_plain():
    sampler = WithoutReplacement()
    drawn(sampler, steps((0, 500), (500, 1000)), [3])
    assert sampler.state_dict() == {
        "kind": "without_replacement",
        "drop_last": 0,
        "epoch": 0,
        "offset": 3,
        "num_steps": 1000,
        "first_step": 0,
        "last_step": 999,
        "checksum": 2372300572,
    }


def test_a_state_within_an_epoch_is_refused_on_other_steps():
    sampler, other = WithoutReplacement(), WithoutReplacement()
    drawn(sampler, steps((0, 9)), [3])
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(StateError, match="saved in an epoch over 9 steps, 0 to 8, which are not"):
        other.draw(steps((1, 10)), 3, seed=0)


@pytest.mark.parametrize(
    ("sampler", "state", "text"),
    [
        (Uniform(), {}, "kind None, this one is 'uniform'"),
        (Uniform(), {"kind": "without_replacement"}, "kind 'without_replacement'"),
        (Uniform(), {"kind": "uniform"}, "'next_draw' must be an int of at least 0, got None"),
        (Uniform(), {"kind": "uniform", "next_draw": -1}, "at least 0, got -1"),
        (WithoutReplacement(), Uniform().state_dict(), "kind 'uniform'"),
        (WithoutReplacement(), WithoutReplacement(True).state_dict(), "drop_last=True, this"),
        (
            WithoutReplacement(),
            {**WithoutReplacement().state_dict(), "offset": 3},
            "does not say of which steps",
        ),
    ],
)
def test_a_state_of_something_else_is_refused(sampler, state, text):
    with pytest.raises(StateError, match=text):
        sampler.load_state_dict(state)
