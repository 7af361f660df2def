"""Fixed shares of every batch, exact over time, each part by a sampler of its own."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import SchemaError, StateError, StepRangeError
from expstore.sampling.mixture import Mixture, Shares
from expstore.sampling.prioritized import Prioritized
from expstore.sampling.uniform import Uniform, WithoutReplacement
from tests.sampling.test_prioritized import steps, union

FAR = 2**40

relative_shares = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(relative_shares, st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_shares_are_exact_over_time(relative, batch_sizes):
    total = sum(relative)
    shares = Shares([part / total for part in relative])
    drawn, counts = 0, np.zeros(len(relative), np.int64)
    for batch_size in batch_sizes:
        batch = shares.counts(drawn, batch_size)
        assert sum(batch) == batch_size
        assert min(batch) >= 0
        drawn, counts = drawn + batch_size, counts + batch
        exact = [Fraction(part * drawn, total) for part in relative]
        off = [abs(c - e) for c, e in zip(counts.tolist(), exact, strict=True)]
        assert max(off) <= Fraction(len(relative), 2)
    full = shares.counts(0, 1000 * total)
    assert full == [1000 * part for part in relative]


def test_shares_that_divide_the_batch_are_the_same_in_every_batch():
    shares = Shares([0.5, 0.25, 0.25])
    assert [shares.counts(8 * k, 8) for k in range(5)] == [[4, 2, 2]] * 5


def test_what_a_batch_rounds_the_next_makes_up_for():
    shares = Shares([1 / 3, 2 / 3])
    assert [shares.counts(4 * k, 4)[0] for k in range(6)] == [1, 2, 1, 1, 2, 1]
    tenth = Shares([0.1, 0.9])
    assert [tenth.counts(k, 1)[0] for k in range(20)].count(1) == 2


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ([0.5, 0.4], "the shares must sum to 1, got 0.9 from"),
        ([0.5, 0.6], "the shares must sum to 1, got 1.1 from"),
        ([], "the shares must sum to 1, got 0 from"),
        ([1.0, 0.0], "a share must be above 0 and at most 1, got 0.0"),
        ([1.5, -0.5], "a share must be above 0 and at most 1, got 1.5"),
        ([float("nan"), 0.5], "a share must be above 0 and at most 1, got nan"),
    ],
)
def test_shares_that_are_none_are_refused(shares, text):
    with pytest.raises(SchemaError, match=text):
        Shares(shares)


SPANS = union([(0, 40)], [(0, 4), (6, 10)])


def drawn(mixture, spans, sizes, seed=0):
    return [spans.steps_at(mixture.draw(spans, size, seed).anchors).tolist() for size in sizes]


def test_every_batch_has_its_share_of_each_part_in_order():
    mixture = Mixture({"offline": 0.25, "online": 0.75})
    for batch in drawn(mixture, SPANS, [8] * 20):
        assert [step >= FAR for step in batch] == [False] * 2 + [True] * 6


def test_a_mixture_counts_what_was_drawn_and_makes_up_for_rounding():
    mixture = Mixture({"offline": 1 / 3, "online": 2 / 3})
    batches = drawn(mixture, SPANS, [4] * 6)
    assert [sum(step < FAR for step in batch) for batch in batches] == [1, 2, 1, 1, 2, 1]


def test_every_step_of_each_part_is_drawn():
    mixture = Mixture({"offline": 0.25, "online": 0.75})
    assert {step for batch in drawn(mixture, SPANS, [64] * 20) for step in batch} == {
        *range(40), *(FAR + step for step in (0, 1, 2, 3, 6, 7, 8, 9)),
    }  # fmt: skip


def test_a_part_may_be_several_stores():
    spans = union([(0, 3)], [(0, 5)], [], [(0, 2)])
    mixture = Mixture({"a": 0.5, "b": 0.5}, num_streams={"b": 3})
    draw = mixture.draw(spans, 1000, seed=0)
    owners = spans.steps_at(draw.anchors) // FAR
    assert np.bincount(owners)[0] == 500
    assert set(owners.tolist()) == {0, 1, 3}
    assert sorted(set(draw.probability.round(6).tolist())) == [0.071429, 0.166667]


def test_two_parts_alike_do_not_draw_alike():
    spans = union([(0, 1000)], [(0, 1000)])
    batch = np.array(drawn(Mixture({"a": 0.5, "b": 0.5}), spans, [200])[0])
    assert (batch[:100] != batch[100:] - FAR).sum() > 90


def test_an_epoch_that_ends_in_a_part_goes_on_with_the_next():
    mixture = Mixture({"a": 0.5, "b": 0.5}, {"b": WithoutReplacement()})
    online = [step for batch in drawn(mixture, SPANS, [10] * 8) for step in batch if step >= FAR]
    assert len(online) == 40
    epochs = [sorted(online[at : at + 8]) for at in range(0, 40, 8)]
    assert epochs == [[FAR + step for step in (0, 1, 2, 3, 6, 7, 8, 9)]] * 5


def test_priorities_go_to_the_parts_that_have_them():
    mixture = Mixture({"a": 0.5, "b": 0.5}, {"b": Prioritized(alpha=1.0, eps=0.0)})
    update = np.array([3, FAR + 7, FAR]), np.array([9.0, 2.0, 0.0])
    mixture.update(SPANS, *update)
    part = steps((FAR, FAR + 4), (FAR + 6, FAR + 10))
    read = mixture.samplers["b"].priorities(part, np.array([FAR, FAR + 1, FAR + 7]))
    assert read.tolist() == [0, 1, 2]
    draw = mixture.draw(SPANS, 16, seed=0)
    assert set(draw.probability[:8].tolist()) == {0.5 / 40}
    assert set(draw.probability[8:].tolist()) <= {0.5 / 8, 0.5 * 2 / 8}


def test_priorities_keep_their_steps_when_the_part_before_grows():
    mixture = Mixture({"a": 0.5, "b": 0.5}, {"b": Prioritized(alpha=1.0, eps=0.0)})
    mixture.update(SPANS, np.array([FAR, FAR + 9]), np.array([0.0, 1e9]))
    grown = union([(0, 40), (40, 60)], [(0, 4), (6, 10)])
    assert drawn(mixture, grown, [8])[0][4:] == [FAR + 9] * 4


@pytest.mark.parametrize(
    ("step", "priority", "error", "text"),
    [
        (FAR + 50, 1.0, StepRangeError, r"steps\[0\] is \d+, which is not and never was"),
        (2 * FAR, 1.0, StepRangeError, r"steps\[1\] is \d+, a step of no part"),
        (-1, 1.0, StepRangeError, r"steps\[1\] is -1, a step of no part"),
        (FAR, -1.0, SchemaError, r"priority\[1\] must be from 0 to 3.4e38, got -1.0"),
    ],
)
def test_an_update_that_is_refused_changes_no_part(step, priority, error, text):
    samplers = {"a": Prioritized(), "b": Prioritized()}
    mixture = Mixture({"a": 0.5, "b": 0.5}, samplers)
    with pytest.raises(error, match=text):
        mixture.update(SPANS, np.array([3, step]), np.array([5.0, priority]))
    assert samplers["a"].priorities(union([(0, 40)]), np.array([3])).tolist() == [1.0]


def test_a_part_without_steps_is_named_and_nothing_advances():
    mixture = Mixture({"offline": 0.5, "online": 0.5})
    with pytest.raises(StepRangeError, match="part online of the mixture holds no step to draw"):
        mixture.draw(union([(0, 4)], []), 4, seed=0)
    assert mixture.state_dict() == Mixture({"offline": 0.5, "online": 0.5}).state_dict()


def test_other_stores_than_parts_are_refused():
    with pytest.raises(SchemaError, match="the mixture is of 2 stores, the selection of 1; give"):
        Mixture({"a": 0.5, "b": 0.5}).draw(union([(0, 4)]), 4, seed=0)
    with pytest.raises(SchemaError, match="'c' is not among the parts of the mixture: a, b"):
        Mixture({"a": 0.5, "b": 0.5}, {"c": Uniform()})
    with pytest.raises(SchemaError, match="'c' is not among the parts of the mixture: a, b"):
        Mixture({"a": 0.5, "b": 0.5}, num_streams={"c": 2})


def mixture_of_all():
    samplers = {"a": WithoutReplacement(), "b": Prioritized()}
    return Mixture({"a": 0.3, "b": 0.7}, samplers)


def test_a_mixture_resumes_with_the_batch_that_was_next():
    mixture, resumed = mixture_of_all(), mixture_of_all()
    drawn(mixture, SPANS, [7, 7])
    mixture.update(SPANS, np.array([FAR + 1, FAR + 2]), np.array([5.0, 0.1]))
    resumed.load_state_dict(mixture.state_dict())
    grown = union([(0, 40)], [(0, 4), (6, 10), (10, 12)])
    assert drawn(resumed, SPANS, [7, 5]) == drawn(mixture, SPANS, [7, 5])
    assert drawn(resumed, grown, [7, 5]) == drawn(mixture, grown, [7, 5])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "uniform"}, "kind 'uniform', this one is 'mixture'"),
        ({"num_drawn": -1}, "'num_drawn' must be an int of at least 0, got -1"),
        ({"shares": "1/2 1/2"}, "saved with shares 1/2 1/2, this mixture has 3/10 7/10"),
        ({"parts": None}, "saved with shares"),
        ({"parts": []}, "the state has 0 parts, not 2"),
    ],
)
def test_a_state_of_something_else_is_refused(changes, text):
    with pytest.raises(StateError, match=text):
        mixture_of_all().load_state_dict({**mixture_of_all().state_dict(), **changes})
