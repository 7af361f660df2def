"""Power cuts: a program runs on a simulated disk, which loses or keeps what was not synced."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pytest import MonkeyPatch

import expstore
from expstore.errors import NotAStoreError
from expstore.storage import files, writer
from expstore.storage.commits import read_history
from tests.torture.check import check_episode
from tests.torture.child import NEVER_S
from tests.torture.disk import Disk, Done, fates, watched
from tests.torture.episodes import LENGTHS, Plan, known_episode
from tests.torture.faults import interposed, small_chunks
from tests.torture.saved import save, saved_number

MOVES = ("append", "stream", "commit", "discard", "drop", "reopen", "delete", "save")
SHARES = (0.35, 0.15, 0.2, 0.05, 0.05, 0.08, 0.06, 0.06)
MOST_ROWS = 256  # of a chunk: larger files take long to write
NUM_MOVES = 12  # of a session
GO_ON_EVERY = 10  # cuts: then the next writer opens what is left, and appends


@dataclass(frozen=True)
class State:
    """What readers see of a store; None as the number where there is none yet."""

    commit: int
    first: int
    num_episodes: int
    deleted: tuple[int, ...]

    @staticmethod
    def of(path: Path) -> State | None:
        try:
            store = expstore.open(path)
        except NotAStoreError:
            return None
        commit = store.snapshots[0].root.commit
        first, stop = commit.dims["episode"]
        live = set(store.episode_numbers.tolist())
        gone = tuple(number for number in range(first, stop) if number not in live)
        return State(commit.number, first, stop, gone)


@dataclass
class Account:
    """Which value of something is durable after which operation."""

    first: Any
    changes: list[tuple[int, int, Any]] = field(default_factory=list)  # begun, certain, value

    def allowed(self, num_done: int) -> list[Any]:
        """What may be found when so many operations were done."""
        certain = [value for _, end, value in self.changes if end <= num_done]
        possible = [value for begun, end, value in self.changes if begun < num_done < end]
        return [certain[-1] if certain else self.first, *possible]


class Session:
    """A program with writers on a disk, from one power cut to the next."""

    def __init__(self, home: Path, seed: int, rng: np.random.Generator) -> None:
        self.path = home / "store.exp"
        self.seed, self.plan, self._rng = seed, Plan.of(seed), rng
        self.log: list[Done] = []
        self.states = Account(State.of(self.path))
        self.saved = Account(saved_number(self.path))
        self.counts: Counter[str] = Counter()
        self._writer: expstore.Writer | None = None

    def run(self, capacity_steps: int | None, num_moves: int = NUM_MOVES) -> None:
        """Open, which recovers, and do a few things; the disk is looked at meanwhile."""
        with interposed(watched(self.log)):
            self._changing(lambda: self._open(capacity_steps))
            for move in self._rng.choice(MOVES, num_moves, p=SHARES):
                self.counts[str(move)] += 1
                getattr(self, str(move))()
            self._changing(self._out.close)

    @property
    def _out(self) -> expstore.Writer:
        assert self._writer is not None
        return self._writer

    def _open(self, capacity_steps: int | None) -> None:
        self._capacity_steps = capacity_steps
        self._writer = expstore.Writer(
            self.path,
            layout=self.plan.layouts,
            chunk_steps=self.plan.chunk_steps,
            commit_interval_s=NEVER_S,
            capacity_steps=capacity_steps,
        )

    def _changing(self, action: Callable[[], Any]) -> None:
        """Do what publishes a commit, and note when that begins and when it is certain."""
        begun = len(self.log)
        action()
        state = State.of(self.path)
        if not self.states.changes or self.states.changes[-1][2] != state:
            self.states.changes.append((begun, len(self.log), state))

    def append(self) -> None:
        known = known_episode(self.seed, self._out.num_episodes)
        self._out.append(known.data, end_reason=known.asked_reason, **known.metadata)

    def stream(self) -> None:
        known = known_episode(self.seed, self._out.num_episodes)
        if not known.can_be_streamed:
            self.append()
            return
        with self._out.episode(end_reason=known.asked_reason, **known.metadata) as stream:
            for step in known.steps():
                stream.add(step)

    def drop(self) -> None:
        steps = list(known_episode(self.seed, self._out.num_episodes + 1).steps())
        with self._out.episode() as stream:
            for step in steps[: len(steps) // 2]:
                stream.add(step)
            stream.discard()

    def commit(self) -> None:
        self._changing(self._out.commit)

    def discard(self) -> None:
        self._out.discard()

    def reopen(self) -> None:
        self._changing(self._out.close)
        self._changing(lambda: self._open(self._capacity_steps))

    def delete(self) -> None:
        self._changing(self._out.close)
        live = expstore.open(self.path).episode_numbers
        if len(live) > 1:  # the newest one stays, and so some always do
            chosen = [int(self._rng.choice(live[:-1]))]
            self._changing(lambda: expstore.delete(self.path, chosen))
        self._changing(lambda: self._open(self._capacity_steps))

    def save(self) -> None:
        number = int(self._rng.integers(1 << 30))
        begun = len(self.log)
        save(self.path, number)
        self.saved.changes.append((begun, len(self.log), number))


def check_left(path: Path, session: Session, num_done: int, rng: np.random.Generator) -> State:
    """What a power cut has left must be what was durable, or what was about to be.

    Raises:
        AssertionError: something else is there, or something is torn.
    """
    state, allowed = State.of(path), session.states.allowed(num_done)
    assert state in allowed, f"{state}, allowed: {allowed}"
    if state is not None:
        known = {entry["number"] for entry in read_history(path)}
        assert known >= set(range(state.commit + 1)), f"a history of {known}"
    saved, allowed = saved_number(path), session.saved.allowed(num_done)
    assert saved in allowed, f"priorities {saved}, allowed: {allowed}"
    return check_whole(path, session, rng, {"metadata file"})


def check_whole(
    path: Path, session: Session, rng: np.random.Generator, mended: Collection[str] = ()
) -> State:
    """Every checksum holds, and some episodes are byte by byte those that were appended.

    Args:
        mended: what may be unsound. Metadata of single arrays may lag after a power cut, in any
            order, until the next writer brings them up.
    """
    state = State.of(path)
    if state is None:
        return State(-1, 0, 0, ())
    verified = expstore.verify(path)
    problems = [problem for problem in verified.problems if problem.what not in mended]
    assert not problems, problems[:3]
    store = expstore.open(path)
    live = store.episode_numbers.tolist()
    for number in sorted({*live[:1], *live[-2:], *(rng.choice(live, 2).tolist() if live else ())}):
        check_episode(store, number, known_episode(session.seed, number), session.plan)
    return state


@dataclass
class Tally:
    """What happened in some histories."""

    histories: int = 0
    power_cuts: int = 0
    operations: int = 0
    episodes_read: int = 0
    writers_that_went_on: int = 0
    moves: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@contextmanager
def _one_after_the_other(rng: np.random.Generator) -> Iterator[None]:
    """What is done side by side comes in an order that the seed decides."""

    def together(calls: Any) -> None:
        calls = list(calls)
        for at in rng.permutation(len(calls)):
            calls[at]()

    with MonkeyPatch.context() as patch:
        patch.setattr(files, "together", together)
        patch.setattr(writer, "DOCUMENTS_INTERVAL_S", float(rng.choice([0, NEVER_S])))
        yield


def play_power_cuts(
    home: Path, seed: int, *, num_sessions: int = 2, num_cuts: int = 20, num_moves: int = NUM_MOVES
) -> Tally:
    """One store through some power cuts; each session begins with what one of them has left.

    Args:
        num_cuts: of each session, each of a copy of the disk.

    Raises:
        AssertionError: names seed, session and operation.
    """
    rng = np.random.default_rng([seed, 4])
    fate, tally = fates(rng), Tally(histories=1)
    capacity_steps = int(rng.integers(max(LENGTHS), 250)) if rng.random() < 0.5 else None
    live, left, where = home / "disk", home / "left", "at the start"
    live.mkdir(parents=True)
    try:
        with _one_after_the_other(rng), small_chunks(Plan.of(seed).chunks):
            for number in range(num_sessions):
                disk, session = Disk(live), Session(live, seed, rng)
                session.run(capacity_steps, num_moves)
                tally.moves += session.counts
                tally.operations += len(session.log)
                cuts = np.sort(rng.integers(1, len(session.log) + 1, num_cuts))
                goes_on = int(rng.integers(num_cuts))
                done, next_live = 0, home / f"disk-{number}"
                for at, cut in enumerate(cuts.tolist()):
                    for operation in session.log[done:cut]:
                        disk.play(operation)
                    done = cut
                    where = f"session {number}, after operation {cut}, {session.log[cut - 1]}"
                    disk.cut(next(fate), left)
                    state = check_left(left / "store.exp", session, cut, rng)
                    tally.power_cuts += 1
                    tally.episodes_read += state.num_episodes - state.first
                    if at == goes_on:
                        shutil.copytree(left, next_live)
                    if at == goes_on or at % GO_ON_EVERY == 0:
                        _go_on(left / "store.exp", session, state, rng)
                        tally.writers_that_went_on += 1
                    shutil.rmtree(left)
                shutil.rmtree(live)
                live = next_live
    except Exception as error:
        raise AssertionError(f"seed {seed}, {where}: {type(error).__name__}: {error}") from error
    shutil.rmtree(home)
    return tally


def _go_on(path: Path, session: Session, state: State, rng: np.random.Generator) -> None:
    """The next writer opens what is left, and appends to it."""
    with expstore.Writer(
        path,
        layout=session.plan.layouts,
        chunk_steps=session.plan.chunk_steps,
        commit_interval_s=NEVER_S,
        durable=False,
    ) as out:
        assert out.num_episodes == state.num_episodes
        known = known_episode(session.seed, out.num_episodes)
        out.append(known.data, end_reason=known.asked_reason, **known.metadata)
    after = check_whole(path, session, rng)
    assert after.num_episodes == state.num_episodes + 1
    assert (after.first, after.deleted) == (state.first, state.deleted)


def power_seeds(seed: int, count: int) -> list[int]:
    """Seeds of stores with small files."""
    rng, found = np.random.default_rng([seed, 5]), []
    while len(found) < count:
        candidate = int(rng.integers(1 << 31))
        plan = Plan.of(candidate)
        if max(plan.chunks.rows, plan.chunk_steps) <= MOST_ROWS:
            found.append(candidate)
    return found
