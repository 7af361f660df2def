"""Sets of steps as runs equal sets of steps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expstore.sampling import kernels, runs
from expstore.spans import Spans
from expstore.storage.reading import STRIDE

step_sets = st.sets(st.integers(0, 40))


def runs_of(steps: set[int]) -> np.ndarray:
    found: list[list[int]] = []
    for step in sorted(steps):
        if found and found[-1][1] == step:
            found[-1][1] += 1
        else:
            found.append([step, step + 1])
    return np.array(found, np.int64).reshape(-1, 2)


@given(step_sets, step_sets)
def test_a_union_of_runs_is_the_union_of_their_steps(one, other):
    assert runs.union(runs_of(one), runs_of(other)).tolist() == runs_of(one | other).tolist()


@given(step_sets, st.integers(0, 41), st.integers(0, 41))
def test_clipped_runs_hold_the_steps_in_between(steps, start, stop):
    inside = {step for step in steps if start <= step < stop}
    assert (
        runs.clipped(runs_of(steps), start, max(start, stop)).tolist() == runs_of(inside).tolist()
    )
    assert runs.num_steps(runs_of(steps)) == len(steps)


@given(step_sets)
def test_runs_know_their_steps(steps):
    asked = np.arange(-2, 44)
    assert runs.holds(runs_of(steps), asked).tolist() == [step in steps for step in asked.tolist()]


@given(step_sets, step_sets)
def test_what_is_known_of_steps_is_carried_to_other_runs(was, now):
    raw = np.array(sorted(was), np.float32)
    out = np.full(len(now), -1, np.float32)
    kernels.carry(runs_of(was), raw, runs_of(now), out)
    assert out.tolist() == [step if step in was else -1 for step in sorted(now)]


def test_episodes_that_touch_are_merged_within_a_stream_only():
    parts = [
        Spans.laid_out(np.array([0, 4, 9]), np.array([4, 2, 1])),
        Spans.laid_out(np.empty(0, np.int64), np.empty(0, np.int64)),
        Spans.laid_out(np.array([10, 12]), np.array([2, 1])),
    ]
    held = runs.merged(Spans.concatenate(parts))
    assert (held.start.tolist(), held.length.tolist()) == ([0, 9, 10], [6, 1, 3])
    assert held.first.tolist() == [0, 6, 7]
    assert [part.tolist() for part in runs.runs_of_streams(held)] == [
        [[0, 6], [9, 10]], [], [[10, 13]],
    ]  # fmt: skip


def test_the_stores_of_a_union_are_as_far_apart_as_storage_says():
    assert 1 << runs.STREAM_BITS == STRIDE
