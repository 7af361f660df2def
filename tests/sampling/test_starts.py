"""What to draw from: anchors with whole windows, or an episode first."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from expstore.errors import SchemaError, StateError, StepRangeError
from expstore.sampling.draw import random_bits, scale_words
from expstore.sampling.prioritized import Prioritized
from expstore.sampling.sequence import Sequence
from expstore.sampling.starts import full_starts
from expstore.sampling.uniform import Uniform, WithoutReplacement
from expstore.spans import Spans
from tests.sampling.test_draw import is_plausible
from tests.sampling.test_prioritized import is_plausible as is_plausible_for
from tests.sampling.test_prioritized import steps, union

FAR = 2**40

gaps_and_lengths = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=5)


def selection(stores: list[list[tuple[int, int]]]) -> Spans:
    """A union of stores whose episodes are given as (gap before it, length)."""
    episodes = []
    for store in stores:
        ends = np.cumsum([gap + length for gap, length in store]).tolist()
        pairs = zip(ends, store, strict=True)
        episodes.append([(end - length, end) for end, (_, length) in pairs])
    return union(*episodes)


def all_steps(spans: Spans) -> list[int]:
    return spans.steps_at(np.arange(spans.num_steps)).tolist()


windows = st.builds(
    Sequence,
    length=st.integers(1, 4),
    burn_in=st.integers(0, 3),
    bootstrap=st.integers(0, 2),
    dilation=st.integers(1, 3),
    episode_boundary=st.sampled_from(["pad", "stop", "include_reset"]),
)


@given(st.lists(gaps_and_lengths, min_size=1, max_size=3), windows)
def test_full_starts_are_the_steps_whose_windows_are_whole_and_not_slid(stores, window):
    spans = selection(stores)
    assume(spans.num_steps)
    unslid = Sequence(
        window.length, "include_reset" if window.episode_boundary == "include_reset" else "pad",
        burn_in=window.burn_in, bootstrap=window.bootstrap, dilation=window.dilation,
    )  # fmt: skip
    plan = unslid.plan(spans, np.arange(spans.num_steps))
    whole = np.flatnonzero(plan.valid.all(axis=1))
    edges = spans.streams if window.episode_boundary == "include_reset" else None
    if not len(whole):
        with pytest.raises(StepRangeError, match="no window can be whole"):
            full_starts(spans, window.shape, edges)
        return
    starts = full_starts(spans, window.shape, edges)
    assert all_steps(starts) == spans.steps_at(whole).tolist()
    assert starts.num_episodes == len(starts.first) and (starts.length > 0).all()
    owners = np.searchsorted(starts.streams, np.arange(starts.num_steps), side="right") - 1
    assert (spans.steps_at(whole) // FAR).tolist() == owners.tolist()
    assert len(starts.streams) == len(spans.streams)
    again = starts.positions_of(starts.steps_at(np.arange(starts.num_steps)))
    assert again.tolist() == list(range(starts.num_steps))


@given(st.lists(gaps_and_lengths, min_size=1, max_size=2), st.sets(st.integers(0, 90)), windows)
def test_full_starts_may_be_bounded_by_any_edges(stores, edges, window):
    spans = selection(stores)
    assume(spans.num_steps)
    ascending = np.array(sorted(edges), np.int64)
    plan = Sequence(
        window.length, done_key="life_lost", burn_in=window.burn_in,
        bootstrap=window.bootstrap, dilation=window.dilation,
    ).plan(spans, np.arange(spans.num_steps), boundaries=ascending - 1)  # fmt: skip
    whole = np.flatnonzero(plan.valid.all(axis=1))
    assume(len(whole))
    starts = full_starts(spans, window.shape, ascending)
    assert all_steps(starts) == spans.steps_at(whole).tolist()


def test_a_window_longer_than_every_episode_says_how_long_they_are():
    window = Sequence(length=3, burn_in=2, bootstrap=1, dilation=2)
    with pytest.raises(
        StepRangeError, match="it spans 11 steps, the longest stretch has 10; short"
    ):
        full_starts(steps((0, 10), (10, 14)), window.shape)
    assert all_steps(full_starts(steps((0, 10), (10, 21)), window.shape)) == [14]


def test_full_starts_of_no_steps_are_none():
    empty = Spans.laid_out(np.empty(0, np.int64), np.empty(0, np.int64))
    assert full_starts(empty, Sequence(length=3).shape).num_steps == 0


EPISODES = [(0, 2), (2, 9), (12, 30)]
WINDOW = Sequence(length=4, burn_in=1)
FULL = [*range(3, 6), *range(13, 27)]  # by hand: one step before, three after


@pytest.mark.parametrize("sampler", [Uniform(), WithoutReplacement()])
def test_full_starts_are_drawn_equally_often(sampler):
    starts = full_starts(steps(*EPISODES), WINDOW.shape)
    anchors = np.concatenate([sampler.draw(starts, 51, seed=2).anchors for _ in range(200)])
    counts = np.bincount(anchors)
    assert starts.steps_at(np.arange(len(counts))).tolist() == FULL
    assert is_plausible(counts) or set(counts.tolist()) == {600}


def test_full_starts_are_drawn_by_priority_and_keep_it():
    sampler, raw = Prioritized(alpha=1.0, eps=0.0), np.arange(1.0, 18.0)
    starts = full_starts(steps(*EPISODES), WINDOW.shape)
    sampler.update(starts, np.array(FULL), raw)
    anchors = np.concatenate([sampler.draw(starts, 64, seed=0).anchors for _ in range(300)])
    assert is_plausible_for(np.bincount(anchors, minlength=17), raw / raw.sum())
    grown = full_starts(steps(*EPISODES[1:], (30, 35)), WINDOW.shape)
    assert sampler.priorities(grown, np.array([*FULL, 31])).tolist() == [*raw.tolist(), 17.0]


def test_by_episode_every_episode_and_then_every_step_of_it_is_as_likely():
    spans, sampler = union([(0, 1), (1, 41)], [(5, 10)]), Uniform(by="episode")
    draws = [sampler.draw(spans, 64, seed=0) for _ in range(400)]
    anchors = np.concatenate([draw.anchors for draw in draws])
    share = np.repeat([1 / 3, 1 / 120, 1 / 15], [1, 40, 5])
    counts = np.bincount(anchors, minlength=46)
    assert (counts > 0).all()
    assert is_plausible_for(counts, share)
    probability = np.concatenate([draw.probability for draw in draws])
    assert probability == pytest.approx(share[anchors])
    assert (draws[0].weight.dtype, set(draws[0].weight.tolist())) == (np.float32, {1.0})


def test_by_episode_and_full_starts_together():
    starts = full_starts(steps(*EPISODES), WINDOW.shape)
    anchors = Uniform(by="episode").draw(starts, 20_000, seed=0).anchors
    share = np.repeat([1 / 6, 1 / 28], [3, 14])
    assert is_plausible_for(np.bincount(anchors, minlength=17), share)


@given(st.integers(), st.integers(0, 5), st.integers(1, 30))
def test_the_compiled_draw_by_episode_equals_the_numpy_draw(seed, number, count):
    spans, sampler = steps(*EPISODES), Uniform(by="episode")
    sampler.next_draw = number
    words = random_bits(seed, number, 2 * count)
    episode = scale_words(words[::2], spans.num_episodes).astype(np.int64)
    expected = [
        int(spans.first[e]) + (int(word) * int(spans.length[e]) >> 64)
        for e, word in zip(episode.tolist(), words[1::2].tolist(), strict=True)
    ]
    assert sampler.draw(spans, count, seed).anchors.tolist() == expected


def test_a_sampler_by_episode_resumes_with_the_batch_that_was_next():
    spans, sampler, resumed = steps(*EPISODES), Uniform(by="episode"), Uniform(by="episode")
    sampler.draw(spans, 5, seed=0)
    resumed.load_state_dict(sampler.state_dict())
    expected = sampler.draw(spans, 5, seed=0).anchors.tolist()
    assert resumed.draw(spans, 5, seed=0).anchors.tolist() == expected
    with pytest.raises(StateError, match="kind 'uniform_by_episode', this one is 'uniform'"):
        Uniform().load_state_dict(sampler.state_dict())


def test_by_is_step_or_episode():
    with pytest.raises(SchemaError, match="by must be 'step' or 'episode', got 'lane'"):
        Uniform(by="lane")
