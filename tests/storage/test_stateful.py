"""The store against a plain list of episodes, whatever is done to both in whatever order."""

import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import expstore
from expstore.errors import SchemaError, StepRangeError, WriterStateError
from expstore.storage.verification import verify
from tests.torture.check import check_episode, check_steps, check_store
from tests.torture.child import NEVER_S
from tests.torture.episodes import Known, Plan, known_episode
from tests.torture.faults import small_chunks

STRIDE = 2**40
draws = st.integers(0, 2**32 - 1)


class StoreMachine(RuleBasedStateMachine):
    """`committed` and `pending` are the model; episode n has the content of n in both."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.path = self.home / "store.exp"
        self.committed = 0
        self.pending = 0
        self.lost = 0
        self.verified_ns = 0
        self.readers: list[tuple[expstore.Store, int]] = []  # with the episodes they must see

    @initialize(seed=st.integers(0, 50))
    def begin(self, seed: int) -> None:
        self.seed, self.plan = seed, Plan.of(seed)
        self.chunks = small_chunks(self.plan.chunks)
        self.chunks.__enter__()
        self.open_writer()
        other = self.home / "other.exp"
        with self.new_writer(other) as writer:
            for number in range(3):
                self.append_to(writer, number)
        self.other = expstore.open(other)

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
            check_store(self.path, self.seed, {self.committed + self.pending}, sample=5)
            self.chunks.__exit__(None, None, None)
        shutil.rmtree(self.home)

    def new_writer(self, path: Path) -> expstore.Writer:
        return expstore.Writer(
            path,
            layout=self.plan.layouts,
            chunk_steps=self.plan.chunk_steps,
            commit_interval_s=NEVER_S,
            durable=False,
        )

    def open_writer(self) -> None:
        self.writer = self.new_writer(self.path)
        assert self.writer.recovery.lost_episodes == self.lost
        assert self.writer.num_episodes == self.committed
        self.lost = 0

    @property
    def next_episode(self) -> Known:
        return known_episode(self.seed, self.committed + self.pending)

    def append_to(self, writer: expstore.Writer, number: int) -> None:
        known = known_episode(self.seed, number)
        added = writer.append(known.data, end_reason=known.asked_reason, **known.metadata)
        assert added == number

    # -- writing ---------------------------------------------------------------------------------

    @rule()
    def append(self) -> None:
        self.append_to(self.writer, self.committed + self.pending)
        self.pending += 1

    @rule()
    def append_with_next_values(self) -> None:
        """Several at once, so that most stores have every kind of episode."""
        for _ in range(4):
            self.append()

    @precondition(lambda self: self.next_episode.can_be_streamed)
    @rule()
    def stream(self) -> None:
        known = self.next_episode
        with self.writer.episode(end_reason=known.asked_reason, **known.metadata) as stream:
            for step in known.steps():
                stream.add(step)
        self.pending += 1

    @rule(number=st.integers(0, 20), how=st.sampled_from(["discard", "raise", "commit"]))
    def stream_in_vain(self, number: int, how: str) -> None:
        known = known_episode(self.seed, number)
        steps = list(known.steps())[: len(known)]
        try:
            with self.writer.episode() as stream:
                for step in steps:
                    stream.add(step)
                if how == "raise":
                    raise ZeroDivisionError
                if how == "commit":
                    self.commit()
                stream.discard()
        except ZeroDivisionError:
            pass

    @rule(what=st.sampled_from(["field", "shape", "length", "dtype", "flag", "empty"]))
    def append_what_does_not_fit(self, what: str) -> None:
        flat = dict(self.next_episode.columns)
        match what:
            case "field":
                flat["other"] = flat["reward"]
                if not self.committed + self.pending:
                    return  # the first episode may bring any field
            case "shape":
                if not self.committed + self.pending:
                    return
                flat["reward"] = np.stack([flat["reward"]] * 2, axis=1)
            case "length":
                flat["reward"] = np.concatenate([flat["reward"], flat["reward"]])
            case "dtype":
                if not self.committed + self.pending:
                    return
                flat["reward"] = np.zeros(flat["reward"].shape, np.int16)
            case "flag":
                if len(flat["reward"]) == 1:
                    return
                flat["terminated"] = np.ones(len(flat["reward"]), bool)
            case "empty":
                flat = {name: rows[:0] for name, rows in flat.items()}
        with pytest.raises(SchemaError):
            self.writer.append(flat)

    @rule()
    def commit(self) -> None:
        number = self.writer.commit()
        self.committed, self.pending = self.committed + self.pending, 0
        assert expstore.open(self.path).snapshots[0].root.commit.number == number

    @rule()
    def discard(self) -> None:
        self.writer.discard()
        self.pending = 0

    @rule()
    def crash(self) -> None:
        """What a kill leaves: nothing is flushed or committed, the lock is free."""
        self.writer._broken = "killed"
        self.writer.close()
        with pytest.raises(WriterStateError, match="closed"):
            self.writer.append(self.next_episode.data)
        self.lost, self.pending = self.pending, 0
        self.open_writer()

    @rule()
    def reopen(self) -> None:
        self.writer.close()
        self.committed, self.pending = self.committed + self.pending, 0
        self.open_writer()

    # -- reading ---------------------------------------------------------------------------------

    @rule()
    def open_reader(self) -> None:
        self.readers.append((expstore.open(self.path), self.committed))

    @precondition(lambda self: self.readers)
    @rule(draw=draws)
    def follow(self, draw: int) -> None:
        at = draw % len(self.readers)
        store, seen = self.readers[at]
        newer = store.latest()
        assert (newer is store) == (seen == self.committed and self.same_commit(store))
        self.readers[at] = newer, self.committed

    def same_commit(self, store: expstore.Store) -> bool:
        newest = expstore.open(self.path).snapshots[0].root.commit.number
        return store.snapshots[0].root.commit.number == newest

    @precondition(lambda self: self.readers)
    @rule(draw=draws)
    def pass_through_pickle(self, draw: int) -> None:
        store, seen = self.readers[draw % len(self.readers)]
        copy = pickle.loads(pickle.dumps(store))
        assert copy.num_episodes == seen
        self.readers[draw % len(self.readers)] = copy, seen

    @precondition(lambda self: any(seen for _, seen in self.readers))
    @rule(draw=draws)
    def read_steps(self, draw: int) -> None:
        store, seen = self.some_reader(draw)
        self.check_random_steps(store, list(range(seen)), draw)

    @precondition(lambda self: any(seen for _, seen in self.readers))
    @rule(draw=draws)
    def read_outside(self, draw: int) -> None:
        store, _ = self.some_reader(draw)
        for step in (-1, store.num_steps, STRIDE):
            with pytest.raises(StepRangeError):
                store.read([0, step], "reward")

    @precondition(lambda self: any(seen for _, seen in self.readers))
    @rule(draw=draws, kind=st.sampled_from(["function", "mask", "numbers", "split"]))
    def select(self, draw: int, kind: str) -> None:
        store, seen = self.some_reader(draw)
        kept = [n for n in range(seen) if len(known_episode(self.seed, n)) % 2 == 1]
        match kind:
            case "function":
                view = store.filter(lambda row: row["length"] % 2 == 1)
                followed = view.latest()
                wanted = [
                    n for n in range(self.committed) if len(known_episode(self.seed, n)) % 2 == 1
                ]
                self.check_view(followed, wanted, draw)
            case "mask":
                view = store.filter(np.isin(np.arange(seen), kept))
            case "numbers":
                view = store.filter(kept)
            case "split":
                view, others = store.split(0.5, seed=draw)
                kept = view.episode_numbers.tolist()
                assert sorted(kept + others.episode_numbers.tolist()) == list(range(seen))
                grown, _ = store.latest().split(0.5, seed=draw)
                assert [n for n in grown.episode_numbers.tolist() if n < seen] == kept
        self.check_view(view, kept, draw)
        self.check_view(
            pickle.loads(pickle.dumps(view)) if kind != "function" else view, kept, draw
        )

    @precondition(lambda self: any(seen for _, seen in self.readers))
    @rule(draw=draws)
    def unite(self, draw: int) -> None:
        """This store behind the other one."""
        if not self.committed:
            return
        union = expstore.open([self.other.paths[0], self.path])
        assert union.num_episodes == 3 + self.committed
        numbers = [*range(3), *(STRIDE + n for n in range(self.committed))]
        assert union.episode_numbers.tolist() == numbers
        self.check_random_steps(union, numbers, draw)
        for number in (0, numbers[-1]):
            known = known_episode(self.seed, number % STRIDE)
            check_episode(union, number, known, self.plan)

    def some_reader(self, draw: int) -> tuple[expstore.Store, int]:
        useful = [reader for reader in self.readers if reader[1]]
        return useful[draw % len(useful)]

    def check_view(self, view: expstore.Store, numbers: list[int], draw: int) -> None:
        assert view.episode_numbers.tolist() == numbers
        assert view.num_steps == sum(len(known_episode(self.seed, n)) for n in numbers)
        if numbers:
            check_episode(view, numbers[-1], known_episode(self.seed, numbers[-1]), self.plan)
            self.check_random_steps(view, numbers, draw)

    def check_random_steps(self, store: expstore.Store, numbers: list[int], draw: int) -> None:
        rng = np.random.default_rng(draw)
        firsts = np.cumsum(
            [
                0,
                *(
                    len(known_episode(self.seed, n))
                    for n in range(max(n % STRIDE for n in numbers) + 1)
                ),
            ]
        )
        located, steps = [], []
        for number in rng.choice(numbers, 8).tolist():
            known = known_episode(self.seed, number % STRIDE)
            offset = int(rng.integers(len(known)))
            located.append((known, offset))
            steps.append(number // STRIDE * STRIDE + int(firsts[number % STRIDE]) + offset)
        check_steps(store, np.array(steps), located, self.plan)

    # -- always ----------------------------------------------------------------------------------

    @invariant()
    def readers_see_what_was_committed_when_they_opened(self) -> None:
        for store, seen in self.readers:
            assert store.num_episodes == seen
            if seen:
                known = known_episode(self.seed, seen - 1)
                check_episode(store, seen - 1, known, self.plan)

    @invariant()
    def the_writer_counts_what_was_appended(self) -> None:
        if hasattr(self, "writer"):
            assert self.writer.num_episodes == self.committed + self.pending

    @invariant()
    def the_store_is_sound(self) -> None:
        newest = self.path / "zarr.json"
        if newest.exists() and newest.stat().st_mtime_ns != self.verified_ns:
            self.verified_ns = newest.stat().st_mtime_ns
            verified = verify(self.path)
            assert verified.is_sound, verified.problems
            assert verified.num_episodes == self.committed


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=200 if settings.get_current_profile_name() == "thorough" else 20,
    stateful_step_count=25,
    deadline=None,
)
