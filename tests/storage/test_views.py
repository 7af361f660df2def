"""Views and unions are stores, too: selected, chained, followed, numbered and pickled."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore.errors import FieldNotFoundError, SchemaError, StateError, StepRangeError
from expstore.storage.reading import STRIDE
from tests.storage.made import assert_same, episode, store, writer


def counted(number: int, length: int) -> dict[str, object]:
    """An episode whose rows say which episode and step they are."""
    return {"observation": number * 100 + np.arange(length + 1), "reward": np.full(length, number)}


def write(path, numbers, **settings) -> None:
    """Episode n has 1 + n % 3 steps and the metadata `even`."""
    with writer(path, **settings) as out:
        for number in numbers:
            out.append(counted(number, 1 + number % 3), even=number % 2 == 0)


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "a.exp", range(8))
    return tmp_path / "a.exp"


def is_even(row) -> bool:
    return row["even"]


def steps(view: expstore.Store) -> np.ndarray:
    return view.spans.steps_at(np.arange(view.num_steps))


# -- selecting -----------------------------------------------------------------------------------


def test_a_function_selects_by_the_rows_of_the_table(path):
    view = expstore.open(path).filter(lambda row: row["length"] == 3 and row["return"] > 10)
    assert view.episode_numbers.tolist() == [5]
    assert (len(view), view.num_episodes) == (3, 1)


def test_a_function_may_ask_for_metadata(path):
    view = expstore.open(path).filter(is_even)
    assert view.episodes["number"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("kind", [list, np.array, tuple, iter])
def test_a_mask_selects_by_position(path, kind):
    view = expstore.open(path).filter(kind([True] + [False] * 6 + [True]))
    assert view.episode_numbers.tolist() == [0, 7]


@pytest.mark.parametrize("kind", [list, np.array, set, iter])
def test_a_list_selects_by_number_and_the_order_stays_that_of_the_store(path, kind):
    view = expstore.open(path).filter(kind([7, 2, 2, 3]))
    assert view.episode_numbers.tolist() == [2, 3, 7]


@pytest.mark.parametrize(
    "which", [[], np.zeros(8, bool), lambda row: False], ids=["numbers", "mask", "function"]
)
def test_a_view_may_be_empty(path, which):
    view = expstore.open(path).filter(which)
    assert (len(view), view.num_episodes, list(view.episodes)) == (0, 0, [])
    assert view.read([], ["reward"])["reward"].shape == (0,)
    with pytest.raises(StepRangeError, match="holds no steps; append an episode and commit"):
        view.read([0])


def test_steps_and_episodes_keep_their_numbers_in_a_view(path):
    whole = expstore.open(path)
    view = whole.filter([2, 5])
    assert steps(view).tolist() == [3, 4, 5, 9, 10, 11]
    assert_same(view.read(steps(view)), whole.read(steps(view)))
    assert_same(view.episode(5), whole.episode(5))
    assert view.episodes["start"].tolist() == [3, 9]


def test_a_step_or_episode_outside_of_the_view_is_refused(path):
    view = expstore.open(path).filter([2, 5])
    with pytest.raises(StepRangeError, match=r"step 6 is not among the 6 steps of this selection"):
        view.read([3, 6])
    with pytest.raises(
        StepRangeError, match=r"episode 3 is not among the 2 episodes here .2 to 5."
    ):
        view.episode(3)


def test_a_mask_of_another_length_is_refused(path):
    with pytest.raises(SchemaError, match="one entry for each of 8 episodes, got 3"):
        expstore.open(path).filter([True, False, True])


@pytest.mark.parametrize("numbers", [[8], [-1, 2], [10**30], np.array([2**64 - 1], np.uint64)])
def test_a_number_that_is_not_there_is_refused(path, numbers):
    with pytest.raises(StepRangeError, match=r"episode .* is not among the 8|below 2\*\*63"):
        expstore.open(path).filter(numbers)


def test_numbers_that_are_no_integers_are_refused(path):
    with pytest.raises(SchemaError, match="episode numbers must be integers, got dtype float64"):
        expstore.open(path).filter([1.0])


def test_a_function_that_asks_for_a_column_that_is_not_there_fails_as_written(path):
    with pytest.raises(KeyError, match="level"):
        expstore.open(path).filter(lambda row: row["level"])


def test_views_are_narrowed_step_by_step(path):
    whole = expstore.open(path)
    even = whole.filter(is_even)
    assert even.filter([True, False, False, True]).episode_numbers.tolist() == [0, 6]
    assert even.filter([2, 6]).filter(lambda row: row["number"] > 2).episode_numbers.tolist() == [6]
    with pytest.raises(StepRangeError, match="episode 3 is not among the 4 episodes here"):
        even.filter([3])
    assert whole.num_episodes == 8


# -- splitting -----------------------------------------------------------------------------------


def test_a_split_puts_every_episode_on_one_side(path):
    train, test = expstore.open(path).split(0.5, seed=3)
    assert sorted([*train.episode_numbers, *test.episode_numbers]) == list(range(8))


def test_the_shares_of_a_split_are_about_as_asked(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        for _ in range(2000):
            out.append({"x": [0]})
    opened = expstore.open(tmp_path / "a.exp")
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        sides = [side.num_episodes for side in opened.split(share, seed=1)]
        assert sum(sides) == 2000
        assert abs(sides[0] - 2000 * share) <= 4 * (2000 * share * (1 - share)) ** 0.5
    one, other = (set(opened.split(0.5, seed=s)[0].episode_numbers) for s in (1, 2))
    assert 300 < len(one & other) < 700


@given(share=st.floats(0, 1), seed=st.integers(0, 2**40), more=st.integers(1, 4))
def test_an_episode_never_changes_sides_while_the_store_grows(tmp_path_factory, share, seed, more):
    path = tmp_path_factory.mktemp("split") / "a.exp"
    write(path, range(6))
    before = expstore.open(path).split(share, seed)
    write(path, range(6, 6 + more))
    reopened = expstore.open(path).split(share, seed)
    for old, new in zip(before, reopened, strict=True):
        followed = old.latest()
        assert followed.episode_numbers.tolist() == new.episode_numbers.tolist()
        assert [n for n in new.episode_numbers if n < 6] == old.episode_numbers.tolist()
    assert sum(side.num_episodes for side in reopened) == 6 + more


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), [0.9, 0.1], "half"])
def test_a_share_beyond_the_whole_is_refused(path, share):
    with pytest.raises(SchemaError, match="share must be a number between 0 and 1, got"):
        expstore.open(path).split(share)


# -- following -----------------------------------------------------------------------------------


def test_a_store_never_changes_and_latest_gives_the_newer_one(path):
    old = expstore.open(path)
    assert old.latest() is old
    write(path, range(8, 10))
    assert old.num_episodes == 8
    with pytest.raises(StepRangeError, match="step 15 is not among the 15 steps"):
        old.read([15])
    new = old.latest()
    assert new.num_episodes == 10
    assert_same(new.episode(9), counted(9, 1))
    assert_same(old.episode(7), counted(7, 2))


def test_a_view_by_function_follows_and_asks_about_new_episodes_only(path):
    asked = []

    def odd_and_noted(row) -> bool:
        asked.append(row["number"])
        return row["number"] % 2 == 1

    view = expstore.open(path).filter(odd_and_noted).filter(lambda row: row["length"] > 1)
    assert view.episode_numbers.tolist() == [1, 5, 7]
    write(path, range(8, 12))
    asked.clear()
    assert view.latest().episode_numbers.tolist() == [1, 5, 7, 11]
    assert asked == [8, 9, 10, 11]


def test_a_split_of_a_filtered_view_follows(path):
    view = expstore.open(path).filter(is_even).split(0.5)[0]
    write(path, range(8, 20))
    expected = expstore.open(path).filter(is_even).split(0.5)[0]
    assert view.latest().episode_numbers.tolist() == expected.episode_numbers.tolist()


@pytest.mark.parametrize(
    "narrow",
    [
        lambda whole: whole.filter([2, 3]),
        lambda whole: whole.filter([True] * 8),
        lambda whole: whole.filter([2, 3]).filter(is_even),
        lambda whole: whole.filter(is_even).filter([2]),
        lambda whole: whole.filter([2, 3]).split(0.5)[0],
        lambda whole: pickle.loads(pickle.dumps(whole.filter(is_even))),
    ],
    ids=["numbers", "mask", "then a function", "after a function", "then a split", "pickled"],
)
def test_a_view_that_says_nothing_about_new_episodes_cannot_follow(path, narrow):
    view = narrow(expstore.open(path))
    assert view.latest() is view
    write(path, [8])
    with pytest.raises(SchemaError, match="cannot follow new commits; open the store and filter"):
        view.latest()


def test_a_view_that_was_empty_follows(tmp_path):
    writer(tmp_path / "a.exp").close()
    view = expstore.open(tmp_path / "a.exp").filter(is_even)
    write(tmp_path / "a.exp", range(3))
    assert view.latest().episode_numbers.tolist() == [0, 2]


def test_another_store_in_the_same_place_is_not_followed(path):
    old = expstore.open(path)
    shutil.rmtree(path)
    write(path, range(3))
    with pytest.raises(StateError, match=r"a\.exp is another store by now; open it anew"):
        old.latest()
    assert_same(expstore.open(path).episode(2), counted(2, 3))


# -- unions --------------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path):
    write(tmp_path / "a.exp", range(4))
    write(tmp_path / "b.exp", range(10, 13))
    return [tmp_path / "a.exp", tmp_path / "b.exp"]


def test_the_stores_of_a_union_are_numbered_by_their_position(paths):
    both = expstore.open(paths)
    assert both.paths == tuple(paths)
    assert (both.num_episodes, both.num_steps) == (7, 7 + 6)
    assert both.episode_numbers.tolist() == [0, 1, 2, 3, 2**40, 2**40 + 1, 2**40 + 2]
    assert both.episodes["start"].tolist() == [0, 1, 3, 6, 2**40, 2**40 + 2, 2**40 + 5]
    assert both.episodes[4]["number"] == both.episodes[4]["start"] == STRIDE
    assert both.spans.streams.tolist() == [0, 7, 13]
    assert_same(both.episode(2**40 + 1), counted(11, 3))


def test_a_union_reads_its_stores_in_any_order(paths):
    both = expstore.open(paths)
    one, other = (expstore.open(path) for path in paths)
    order = np.array([[STRIDE + 5, 0], [6, STRIDE], [0, STRIDE + 5]])
    got = both.read(order, ["observation", "next_observation", "done", "reward"])
    for name, values in got.items():
        expected = [
            other.read(step - STRIDE, [name])[name]
            if step >= STRIDE
            else one.read(step, [name])[name]
            for step in order.flat
        ]
        assert values.reshape(-1).tolist() == [value.item() for value in expected]


def test_the_episode_field_of_a_union_is_the_number_in_the_union(paths):
    both = expstore.open(paths)
    got = both.read([0, STRIDE, STRIDE + 5, 6], ["episode"])["episode"]
    assert got.tolist() == [0, STRIDE, STRIDE + 2, 3]


@pytest.mark.parametrize("step", [7, STRIDE - 1, STRIDE + 6, 2 * STRIDE, -1])
def test_steps_between_the_stores_of_a_union_are_not_there(paths, step):
    with pytest.raises(StepRangeError, match=f"step {step} is not among the 13 steps"):
        expstore.open(paths).read([0, step])


def test_a_union_is_filtered_and_split_like_a_store(paths):
    both = expstore.open(paths)
    odd = both.filter(lambda row: not row["even"])
    assert odd.episode_numbers.tolist() == [1, 3, STRIDE + 1]
    assert odd.filter([3, STRIDE + 1]).episode_numbers.tolist() == [3, STRIDE + 1]
    assert odd.filter([False, False, True]).episode_numbers.tolist() == [STRIDE + 1]
    assert odd.filter(lambda row: row["number"] >= STRIDE).episode_numbers.tolist() == [STRIDE + 1]
    sides = both.split(0.5, seed=1)
    for position, path in enumerate(paths):
        alone = [side.episode_numbers for side in expstore.open(path).split(0.5, seed=1)]
        for side, expected in zip(sides, alone, strict=True):
            numbers = side.episode_numbers
            here = numbers[numbers // STRIDE == position] - position * STRIDE
            assert here.tolist() == expected.tolist()


def test_numbers_do_not_shift_while_the_stores_of_a_union_grow(paths):
    both = expstore.open(paths)
    odd = both.filter(lambda row: not row["even"])
    before = both.read(steps(both))
    write(paths[0], range(4, 7))
    write(paths[1], [13])
    grown = both.latest()
    assert_same(grown.read(steps(both)), before)
    assert grown.num_episodes == 11
    assert odd.latest().episode_numbers.tolist() == [1, 3, 5, STRIDE + 1, STRIDE + 3]


def test_a_union_of_one_is_like_the_store(path):
    alone, union = expstore.open(path), expstore.open([path])
    assert_same(union.read(range(15)), alone.read(range(15)))


def test_one_store_may_stand_in_a_union_twice(path):
    twice = expstore.open([path, path])
    assert_same(twice.episode(STRIDE + 3), twice.episode(3))


def test_the_stores_of_a_union_must_have_the_same_fields(tmp_path):
    store(tmp_path / "a.exp", {"x": [1.0]})
    store(tmp_path / "b.exp", {"x": [1]})
    store(tmp_path / "c.exp", {"x": [1.0], "y": [1]})
    with pytest.raises(SchemaError, match=r"field 'x' is .*float64.* in .*a\.exp and .*int64.* in"):
        expstore.open([tmp_path / "a.exp", tmp_path / "b.exp"])
    with pytest.raises(SchemaError, match=r"field 'y' is None in .*a\.exp and .*int64"):
        expstore.open([tmp_path / "a.exp", tmp_path / "c.exp"])


def test_a_store_without_fields_cannot_stand_in_a_union_yet(tmp_path):
    store(tmp_path / "a.exp", {"x": [1.0]})
    writer(tmp_path / "b.exp").close()
    for order in (["a.exp", "b.exp"], ["b.exp", "a.exp"]):
        with pytest.raises(SchemaError, match=r"b\.exp has no fields yet.*; append to it first"):
            expstore.open([tmp_path / name for name in order])


def test_a_union_of_nothing_is_refused():
    with pytest.raises(SchemaError, match="a union needs at least one store, got an empty list"):
        expstore.open([])


def test_a_table_of_a_union_has_columns_of_both(paths):
    table = expstore.open(paths).episodes
    assert table["return"].tolist() == [0.0, 2.0, 6.0, 3.0, 20.0, 33.0, 12.0]
    assert table["even"] == [True, False, True, False, True, False, True]
    with pytest.raises(FieldNotFoundError, match="not every episode has 'odd'"):
        table["odd"]


# -- pickling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda paths: expstore.open(paths[0]),
        lambda paths: expstore.open(paths),
        lambda paths: expstore.open(paths).filter(is_even),
        lambda paths: expstore.open(paths).filter([1, STRIDE]),
        lambda paths: expstore.open(paths[0]).split(0.5, seed=4)[1],
    ],
    ids=["store", "union", "view by function", "view by numbers", "side of a split"],
)
def test_a_pickled_store_reads_its_commit_while_the_writer_moves_on(paths, make):
    original = make(paths)
    data = pickle.dumps(original)
    expected = original.read(steps(original), None)
    write(paths[0], range(20, 25))
    write(paths[1], range(20, 25))
    copy = pickle.loads(data)
    assert copy.episode_numbers.tolist() == original.episode_numbers.tolist()
    assert_same(copy.read(steps(copy)), expected)
    assert [dict(row) for row in copy.episodes] == [dict(row) for row in original.episodes]


def test_a_pickled_side_of_a_split_follows(path):
    side = expstore.open(path).split(0.5, seed=4)[0]
    copy = pickle.loads(pickle.dumps(side))
    write(path, range(8, 20))
    assert copy.latest().episode_numbers.tolist() == side.latest().episode_numbers.tolist()


def test_a_pickled_store_knows_whether_it_is_the_newest(path):
    copy = pickle.loads(pickle.dumps(expstore.open(path)))
    assert copy.latest() is copy
    write(path, [8])
    assert copy.latest().num_episodes == 9


def test_another_process_elsewhere_reads_what_its_parent_read(path, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    opened = expstore.open("a.exp")
    (tmp_path / "pickled").write_bytes(pickle.dumps(opened.filter([1, 7])))
    write(path, [8])
    code = (
        "import pickle, sys; view = pickle.load(open(sys.argv[1], 'rb'));"
        "print(view.num_episodes, view.episode(7)['observation'].tolist())"
    )
    search = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "pickled"],
        **{"capture_output": True, "text": True, "cwd": "/", "env": search, "check": True},
    )
    assert result.stdout == "2 [700, 701, 702]\n"


def test_a_union_of_views_keeps_what_each_selects(tmp_path: Path) -> None:
    one = store(tmp_path / "a.exp", episode(3), episode(5), episode(2))
    other = store(tmp_path / "b.exp", episode(4, seed=1))
    both = expstore.union([one.filter([0, 2]), expstore.union([other, one])])
    assert both.episode_numbers.tolist() == [
        0,
        2,
        STRIDE,
        2 * STRIDE,
        2 * STRIDE + 1,
        2 * STRIDE + 2,
    ]
    assert both.spans.start.tolist() == [0, 8, STRIDE, 2 * STRIDE, 2 * STRIDE + 3, 2 * STRIDE + 8]
    assert_same(both.episode(STRIDE), other.episode(0))
    assert_same(both.episode(2), one.episode(2))
    assert both.latest() is both
    assert_same(pickle.loads(pickle.dumps(both)).episode(2 * STRIDE + 1), one.episode(1))


def test_what_makes_no_union_is_refused(tmp_path: Path) -> None:
    one = store(tmp_path / "a.exp", episode(3))
    other = store(tmp_path / "b.exp", {"reward": np.zeros(2)})
    with pytest.raises(SchemaError, match="a union needs at least one store"):
        expstore.union([])
    with pytest.raises(SchemaError, match=r"a union is of stores, got str 'b\.exp'"):
        expstore.union([one, "b.exp"])
    with pytest.raises(SchemaError, match="the stores of a union have the same fields"):
        expstore.union([one, other])


def test_a_fixed_view_may_be_part_of_a_union_until_something_new_comes(tmp_path: Path) -> None:
    kept = store(tmp_path / "a.exp", episode(3)).filter([0])
    growing = store(tmp_path / "b.exp", episode(4))
    both = expstore.union([kept, growing])
    store(tmp_path / "b.exp", episode(2))
    assert both.latest().spans.length.tolist() == [3, 4, 2]
    store(tmp_path / "a.exp", episode(2))
    with pytest.raises(SchemaError, match="a view by mask or by numbers"):
        both.latest()


def test_a_column_that_no_episode_has_is_named(tmp_path):
    with writer(tmp_path / "a.exp") as out:
        out.append({"x": [1]}, policy="sac")
    opened = expstore.open(tmp_path / "a.exp")
    with pytest.raises(FieldNotFoundError, match=r"episode 0 has no 'retrun'; it has .*policy"):
        opened.filter(lambda episode: episode["retrun"] > 0).num_steps  # noqa: B018


def test_a_store_says_which_commit_it_is_as_of(paths):
    store = expstore.open(paths[0])
    assert expstore.open(paths[0], at=store.commit).commit == store.commit
    assert store.filter([]).commit == store.commit
    with expstore.Writer(paths[0]) as writer:
        writer.append(store.episode(int(store.episode_numbers[0])))
    assert store.latest().commit == store.commit + 1
    with pytest.raises(SchemaError, match="a union of 2 stores has a commit of each"):
        _ = expstore.open(paths[:2]).commit
