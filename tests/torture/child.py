"""A nursery of writers that get killed: `python -m tests.torture.child`.

Starting Python and importing takes longer than a round, so one process does it once and forks
a writer for each line that it reads. Protocol: a `Task` as JSON in, the writer's status as of
`os.waitpid` out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pytest import MonkeyPatch

import expstore
from expstore.errors import SchemaError
from expstore.storage import writer
from tests.torture.episodes import Known, Plan, known_episode
from tests.torture.faults import interposed, killed, small_chunks
from tests.torture.saved import save

NEVER_S = 1e9


@dataclass(frozen=True)
class Task:
    """What one writer does, and when it ends."""

    path: str  # of the store
    journal: str  # file to which the writer says what it did
    seed: int  # of the store's episodes
    moves: list[tuple[str, int]]  # (what, how often), such as ("append", 3)
    durable: bool = True
    commit_interval_s: float = NEVER_S
    documents_interval_s: float = 0.0  # how long single arrays may lag
    with_schema: bool = False
    leave: str = "close"  # or "exit": without closing
    kill_after_s: float = 0  # from its start; 0 is never
    kill_at: int = 0  # at which operation; 0 is never
    when: str = "before"  # or "half", "after"
    capacity_steps: int | None = None
    capacity_bytes: int | None = None


class Journal:
    """Says what happened, one line at a time, each with a single write."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def say(self, *entry: Any) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")


class Program:
    """Writes known episodes; the episode's number decides its content."""

    def __init__(self, task: Task, journal: Journal) -> None:
        self.task, self.journal = task, journal
        self._rng = np.random.default_rng(list(task.journal.encode()[-9:]))
        self._open()

    def _open(self) -> None:
        task, plan = self.task, Plan.of(self.task.seed)
        self.writer = expstore.Writer(
            task.path,
            schema=schema_of(plan) if task.with_schema else None,
            layout=plan.layouts,
            chunk_steps=plan.chunk_steps,
            commit_interval_s=task.commit_interval_s,
            durable=task.durable,
            capacity_steps=task.capacity_steps,
            capacity_bytes=task.capacity_bytes,
        )
        found = self.writer.recovery
        self.journal.say("opened", self.writer.num_episodes, found.lost_episodes, found.lost_steps)

    def run(self) -> None:
        moves: dict[str, Callable[[], None]] = {
            "append": self.append,
            "stream": self.stream,
            "drop": self.drop,
            "fail": self.fail,
            "refuse": self.refuse,
            "commit": self.commit,
            "discard": self.discard,
            "delete": self.delete,
            "save": self.save,
            "repair": self.repair,
        }
        for move, times in self.task.moves:
            for _ in range(times):
                moves[move]()
        if self.task.leave == "close":
            self._close()

    @property
    def next_episode(self) -> Known:
        return known_episode(self.task.seed, self.writer.num_episodes)

    def append(self) -> None:
        episode = self.next_episode
        self._appending(episode)
        number = self.writer.append(
            episode.data, end_reason=episode.asked_reason, **episode.metadata
        )
        assert number == episode.number
        self._appended(episode)

    def stream(self) -> None:
        episode = self.next_episode
        if not episode.can_be_streamed:
            self.append()
            return
        with self.writer.episode(end_reason=episode.asked_reason, **episode.metadata) as stream:
            for step in episode.steps():
                stream.add(step)
            self._appending(episode)
        self._appended(episode)

    def drop(self) -> None:
        """Stream half an episode that is then thrown away, with a commit in the middle of it."""
        steps = list(known_episode(self.task.seed, self.writer.num_episodes + 1).steps())
        with self.writer.episode() as stream:
            for step in steps[: len(steps) // 2]:
                stream.add(step)
            if self.writer.num_episodes:
                self.commit()
            stream.discard()

    def fail(self) -> None:
        """Stream an episode that an exception ends."""
        known = known_episode(self.task.seed, self.writer.num_episodes + 1)
        try:
            with self.writer.episode() as stream:
                for step in list(known.steps())[: len(known)]:
                    stream.add(step)
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass

    def refuse(self) -> None:
        """Append an episode that does not fit."""
        data = self.next_episode.data
        data["reward"] = np.append(data["reward"], data["reward"][-1:], axis=0)
        try:
            self.writer.append(data)
        except SchemaError:
            return
        raise AssertionError("an episode with columns of different lengths was taken")

    def commit(self) -> None:
        self.journal.say("committing", self.writer.num_episodes)
        self.writer.commit()
        self.journal.say("committed", self.writer.num_episodes)

    def discard(self) -> None:
        self.writer.discard()
        self.journal.say("discarded", self.writer.num_episodes)

    def delete(self) -> None:
        """Delete an episode, which nobody may do while a writer is open."""
        self._close()
        live = expstore.open(self.task.path).episode_numbers
        if len(live) > 1:
            number = int(self._rng.choice(live))
            self.journal.say("deleting", number)
            expstore.delete(self.task.path, [number], durable=self.task.durable)
            self.journal.say("deleted", number)
        self._open()

    def repair(self) -> None:
        """There is nothing to repair after a writer was closed."""
        self._close()
        found = expstore.repair(self.task.path)
        assert found.was_sound, found.problems
        self._open()

    def save(self) -> None:
        """Save priorities, which needs no writer."""
        number = int(self._rng.integers(1 << 30))
        self.journal.say("saving", number)
        save(Path(self.task.path), number)
        self.journal.say("saved", number)

    def _close(self) -> None:
        self.journal.say("committing", self.writer.num_episodes)
        self.writer.close()
        self.journal.say("committed", self.writer.num_episodes)

    def _appending(self, episode: Known) -> None:
        self.journal.say("appending", episode.number, len(episode))

    def _appended(self, episode: Known) -> None:
        self.journal.say("appended", episode.number)
        if self.task.commit_interval_s == 0:
            self.journal.say("committed", self.writer.num_episodes)


def schema_of(plan: Plan) -> expstore.Schema:
    """What the first episode would define, said beforehand."""
    return expstore.Schema(
        {
            name: expstore.Field(shape, dtype, has_next=name in plan.next_fields)
            for name, (shape, dtype) in plan.fields.items()
        }
    )


def work(task: Task) -> None:
    """Be one writer."""
    plan = Plan.of(task.seed)
    journal = Journal(task.journal)
    try:
        with ExitStack() as stack:
            patch = stack.enter_context(MonkeyPatch.context())
            patch.setattr(writer, "DOCUMENTS_INTERVAL_S", task.documents_interval_s)
            stack.enter_context(small_chunks(plan.chunks))
            if task.kill_at:
                stack.enter_context(interposed(killed(task.kill_at, task.when)))
            Program(task, journal).run()
    except BaseException:
        journal.say("error", traceback.format_exc())
        os._exit(1)
    os._exit(0)


def main() -> None:
    for line in sys.stdin:
        document = json.loads(line)
        task = Task(**{**document, "moves": [tuple(move) for move in document["moves"]]})
        pid = os.fork()
        if not pid:
            work(task)
        if task.kill_after_s:
            time.sleep(task.kill_after_s)
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
        _, status = os.waitpid(pid, 0)
        print(status, flush=True)


def spelled(task: Task) -> str:
    return json.dumps(asdict(task)) + "\n"


if __name__ == "__main__":
    main()
