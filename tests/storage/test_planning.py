"""A batch read by one plan is what its columns give one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore.errors import DamagedError
from expstore.storage.advice import ReadAhead
from expstore.storage.parallel import ONE, Threads
from expstore.storage.planning import BatchPlan
from tests.storage.made import assert_same, needs_map_fixed

NUM_STEPS = 300
FIELDS = ("wide", "action", "flag", "next_action", "next_wide", "done", "episode", "has_next")
rows = st.lists(st.integers(0, NUM_STEPS - 1), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> expstore.Store:
    path = tmp_path_factory.mktemp("plan") / "a.exp"
    rng = np.random.default_rng(0)
    with expstore.Writer(path, layout={"wide": "coded"}, durable=False) as writer:
        for _ in range(6):
            writer.append(
                {
                    "wide": rng.integers(0, 9, (50, 40, 31), np.uint8),
                    "action": rng.normal(size=(50, 3)),
                    "flag": rng.random(50) < 0.5,
                }
            )
    return expstore.open(path)


@given(rows, st.booleans())
def test_the_compiled_loop_gives_what_numpy_gives(opened, rows, are_windows):
    steps = np.array(rows, np.int64)
    if are_windows:
        steps = np.minimum(steps[:, None] + np.arange(5), NUM_STEPS - 1).reshape(-1)
    column = opened.snapshots[0].columns["steps/action"]
    by_plan = np.empty((len(steps), 3))
    plan = BatchPlan(ONE, ReadAhead())
    plan._is_compiled = True
    plan.add(column, steps, by_plan, 0, NUM_STEPS)
    plan.run()
    by_numpy = column.take(steps, np.empty_like(by_plan), 0, NUM_STEPS)
    assert_same(by_plan, by_numpy)


@given(rows, st.integers(1, 3))
def test_fields_of_all_kinds_are_read_together_as_one_by_one(opened, rows, num_threads):
    steps = np.array(rows, np.int64)
    out = opened.read(steps, FIELDS)
    together = {name: np.empty_like(array) for name, array in out.items()}
    opened.read_into(steps, together, Threads(num_threads))
    for name in FIELDS:
        assert_same(together[name], opened.read(steps, [name])[name])


@needs_map_fixed
@pytest.mark.parametrize("row", [-1, NUM_STEPS, 2**40])
def test_a_row_that_no_commit_has_is_never_touched(opened, row):
    out = np.zeros((2, 3))
    plan = BatchPlan(ONE, ReadAhead())
    plan._is_compiled = True
    plan._read_ahead.is_on = False
    plan.add(opened.snapshots[0].columns["steps/action"], np.array([0, row]), out, 0, NUM_STEPS)
    with pytest.raises(DamagedError, match=rf"row {row} is not one of those from 0 to 299"):
        plan.run()
    assert not out.any()
