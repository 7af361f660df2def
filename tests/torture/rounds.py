"""Round after round: a writer is killed, everything is checked, the next one goes on."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.torture.check import Found, check_store
from tests.torture.child import NEVER_S, Task
from tests.torture.episodes import Plan
from tests.torture.eviction import Limits, check_eviction
from tests.torture.loaders import Loaders
from tests.torture.nursery import Nursery, journal_of
from tests.torture.readers import Readers
from tests.torture.saved import saved_number

MOST_STEPS = 3000  # then a store has had its rounds: checking it takes too long
MOVES = ("append", "stream", "drop", "fail", "refuse", "commit", "discard")
SHARES = (0.5, 0.15, 0.05, 0.04, 0.04, 0.18, 0.04)
# Of stores without a capacity, whose oldest episode nobody but these moves takes away.
MORE_MOVES = (*MOVES, "delete", "save", "repair")
MORE_SHARES = (0.45, 0.13, 0.04, 0.03, 0.03, 0.14, 0.04, 0.06, 0.06, 0.02)


@dataclass
class Tally:
    """What happened in some rounds."""

    rounds: int = 0
    stores: int = 0
    killed: Counter[str] = field(default_factory=Counter)  # by how
    ended: int = 0  # writers that came to their end before the kill
    commits: int = 0  # checked: number of the newest commit, summed over stores
    steps_committed: int = 0
    episodes_committed: int = 0
    episodes_lost: int = 0  # appended but not committed, as `Recovery` said
    episodes_read: int = 0  # over all checks
    checks_that_found_lagging_arrays: int = 0
    stores_that_evicted: int = 0
    episodes_evicted: int = 0
    episodes_deleted: int = 0
    priorities_saved: int = 0
    reads_meanwhile: int = 0  # of whole episodes, by readers that were alive all the time
    steps_loaded_meanwhile: int = 0  # by workers of a DataLoader
    files_evicted: int = 0
    kills_before_the_store_existed: int = 0
    kills_before_the_schema_was_committed: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@dataclass
class State:
    """What the parent knows of a store from what its writers said."""

    committed: int = 0  # episodes, for sure
    perhaps: set[int] = field(default_factory=set)  # numbers of episodes that may be, besides
    deleted: set[int] = field(default_factory=set)  # episodes, for sure
    perhaps_deleted: set[int] = field(default_factory=set)
    saved: set[int | None] = field(default_factory=lambda: {None})  # numbers of saved priorities
    lost: tuple[int, int] | None = None  # fewest and most episodes that the next writer finds lost

    @property
    def allowed(self) -> set[int]:
        return {self.committed} | {count for count in self.perhaps if count > self.committed}

    def hear(self, journal: list[list[Any]], *, commits_in_append: bool) -> None:
        """Follow one writer's account."""
        appended, appending, opened = self.committed, self.committed, False
        for what, *said in journal:
            match what, said:
                case "opened", [episodes, lost_episodes, _]:
                    assert episodes == self.committed, (episodes, self)
                    self._check_lost(lost_episodes)
                    self.lost = None if not opened else (0, 0)
                    appended, appending, opened = episodes, episodes, True
                case "appending", [number, _]:
                    appending = number + 1
                    if commits_in_append:
                        self.perhaps.add(number + 1)
                case "appended", [number]:
                    appended = number + 1
                case "committing", [count]:
                    self.perhaps.add(count)
                case "committed", [count]:
                    self.committed, self.perhaps = count, set()
                case "discarded", [count]:
                    assert count in self.allowed, (count, self)
                    self.committed, self.perhaps = count, set()
                    appended = appending = count
                case "deleting", [number]:
                    self.perhaps_deleted.add(number)
                    self.lost = 0, 0  # before it, the writer was closed
                case "deleted", [number]:
                    self.deleted.add(number)
                case "saving", [number]:
                    self.saved.add(number)
                case "saved", [number]:
                    self.saved = {number}
                case _:
                    raise AssertionError((what, said))
        self._appended = (appended, appending) if opened else None

    def _check_lost(self, lost: int) -> None:
        if self.lost is not None:
            assert self.lost[0] <= lost <= self.lost[1], (lost, self)

    def found(self, num_episodes: int, deleted: Collection[int], saved: int | None) -> None:
        """After the check: what is there now is what is committed."""
        assert self.deleted <= set(deleted) <= self.deleted | self.perhaps_deleted, (deleted, self)
        assert saved in self.saved, (saved, self)
        self.deleted, self.perhaps_deleted, self.saved = set(deleted), set(), {saved}
        self.committed, self.perhaps = num_episodes, set()
        self.lost = None
        if self._appended is not None:
            least, most = (max(0, count - num_episodes) for count in self._appended)
            self.lost = (least, most)


class History:
    """One store and its rounds; everything in it follows from the seed."""

    def __init__(self, directory: Path, seed: int, *, sample: int = 0) -> None:
        self.seed = seed
        self.path = directory / "store.exp"
        self.state = State()
        self.tally = Tally(stores=1)
        self._journals = directory
        self._sample = sample
        self._found = Found(0, 0, 0, -1, 0)
        self._round = 0
        self._limits = random_limits(seed)
        self.num_files_evicted = 0

    def play(self, nursery: Nursery, readers: Readers | None = None) -> Found:
        """One round: a writer, its end, the check, during which the readers rest."""
        task = random_task(self.path, self._journals, self.seed, self._round, self._limits)
        self._round += 1
        status = nursery.run(task)
        journal = journal_of(task)
        self.tally.priorities_saved += sum(what == "saved" for what, *_ in journal)
        before, commits_in_append = self._found, task.commit_interval_s < NEVER_S
        self.state.hear(journal, commits_in_append=commits_in_append)
        with readers.resting() if readers else nullcontext():
            found = check_store(self.path, self.seed, self.state.allowed, sample=self._sample)
        assert found.commit >= before.commit, (found, before)
        self.state.found(found.num_episodes, found.deleted, saved_number(self.path))
        if found.commit >= 0:
            is_closed = not status and task.leave == "close"
            limits = Limits(task.capacity_steps, task.capacity_bytes)
            self.num_files_evicted = check_eviction(
                self.path, self.seed, limits, before, found, is_closed=is_closed
            )
        self._count(task, status, found)
        self._found = found
        return found

    def _count(self, task: Task, status: int, found: Found) -> None:
        tally, before = self.tally, self._found
        tally.rounds += 1
        if status:
            by_operation = f"at an operation, {task.when}"
            tally.killed["at a moment" if task.kill_after_s else by_operation] += 1
            tally.kills_before_the_store_existed += found.commit < 0
            tally.kills_before_the_schema_was_committed += found.commit == 0
        else:
            tally.ended += 1
        tally.commits += found.commit - before.commit
        tally.steps_committed += found.num_steps - before.num_steps
        tally.episodes_committed += found.num_episodes - before.num_episodes
        tally.episodes_read += found.num_episodes
        tally.episodes_lost += (self.state.lost or (0, 0))[0]
        tally.checks_that_found_lagging_arrays += found.num_lagging > 0
        tally.stores_that_evicted += found.first_episode > 0 == before.first_episode
        tally.episodes_deleted += len(found.deleted) - len(before.deleted)
        tally.episodes_evicted += found.first_episode - before.first_episode

    @property
    def is_long(self) -> bool:
        return self._found.num_steps > MOST_STEPS


def random_limits(seed: int) -> Limits:
    """Those that most writers of a store have."""
    return Limits.random(np.random.default_rng([seed, 3]), Plan.of(seed))


def random_task(path: Path, journals: Path, seed: int, number: int, usual: Limits) -> Task:
    """What the writer of a round does and when it dies.

    Args:
        usual: limits of the store's writers; one in ten has others.
    """
    rng = np.random.default_rng([seed, number, 1])
    has_more = usual == Limits()
    names, shares = (MORE_MOVES, MORE_SHARES) if has_more else (MOVES, SHARES)
    moves = [str(move) for move in rng.choice(names, int(rng.integers(1, 80)), p=shares)]
    interval_s = float(rng.choice([0.0, 0.002, 0.02, NEVER_S, NEVER_S]))
    kill_at, kill_after_s = 0, 0.0
    ends = ["operation", "early operation", "moment", "none"]
    match rng.choice(ends, p=[0.2, 0.6, 0.2, 0] if number < 2 else [0.4, 0.15, 0.4, 0.05]):
        case "operation":
            kill_at = int(np.exp(rng.uniform(np.log(30), np.log(8000))))
        case "early operation":
            kill_at = int(np.exp(rng.uniform(0, np.log(300))))
        case "moment":
            kill_after_s = float(rng.uniform(0.001, 0.5))
    limits = usual if has_more or rng.random() < 0.9 else Limits.random(rng, Plan.of(seed))
    return Task(
        path=str(path),
        journal=str(journals / f"journal-{number}"),
        seed=seed,
        moves=[(move, 1) for move in moves],
        durable=bool(rng.random() < 0.3),
        commit_interval_s=interval_s,
        documents_interval_s=float(rng.choice([0.0, 0.05, 1.0])),
        with_schema=bool(rng.random() < 0.3),
        leave=str(rng.choice(["close", "exit"])),
        kill_at=kill_at,
        when=str(rng.choice(["before", "half", "after"])),
        kill_after_s=kill_after_s,
        capacity_steps=limits.capacity_steps,
        capacity_bytes=limits.capacity_bytes,
    )


def split_rounds(num_rounds: int, seed: int) -> list[tuple[int, int]]:
    """(seed, rounds) of each store: many short lives, since creation is one of the risks."""
    rng = np.random.default_rng([seed, 2])
    histories: list[tuple[int, int]] = []
    while num_rounds > 0:
        rounds = min(num_rounds, int(rng.choice([1, 2, 4, 8, 16])))
        histories.append((int(rng.integers(1 << 31)), rounds))
        num_rounds -= rounds
    return histories


def play_history(
    nursery: Nursery,
    directory: Path,
    seed: int,
    num_rounds: int,
    *,
    keep: bool = False,
    sample: int = 0,
    loaders: Loaders | None = None,
) -> Tally:
    """Play the rounds of one store, and of a new one when it has become long.

    Args:
        loaders: also read meanwhile; None where there is no torch.

    Raises:
        AssertionError: names seed and round; the store is left as it was found.
    """
    home = directory / f"seed-{seed}"
    home.mkdir(parents=True)
    history = History(home, seed, sample=sample)
    try:
        if loaders:
            loaders.begin(history.path, seed)
        with Readers(history.path, seed) as readers:
            while history.tally.rounds < num_rounds and not history.is_long:
                history.play(nursery, readers)
        if loaders:
            history.tally.steps_loaded_meanwhile += loaders.end()
    except Exception as error:
        where = f"seed {seed}, round {history.tally.rounds}, in {history.path}"
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    history.tally.reads_meanwhile += readers.num_reads
    history.tally.files_evicted += history.num_files_evicted
    if not keep:
        shutil.rmtree(home)
    rest = num_rounds - history.tally.rounds
    if rest:
        more = play_history(
            nursery, directory, seed + 1, rest, keep=keep, sample=sample, loaders=loaders
        )
        history.tally += more
    return history.tally
