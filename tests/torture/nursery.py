"""The parent's side of `child`: start a writer, kill it, and read what it said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.torture.child import Task, spelled

ROOT = Path(__file__).parents[2]


class Nursery:
    """One process that forks writers; a context manager."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.child"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def run(self, task: Task) -> int:
        """Run one writer to its end.

        Returns:
            0 if it ended by itself, -9 if it was killed.

        Raises:
            AssertionError: it failed; the text has its traceback.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(spelled(task))
        self._process.stdin.flush()
        status = os.waitstatus_to_exitcode(int(self._process.stdout.readline()))
        if status not in (0, -signal.SIGKILL):
            error = "".join(said for what, said in journal_of(task)[-1:] if what == "error")
            raise AssertionError(f"{task}\n{error}")
        return status


def journal_of(task: Task) -> list[list[Any]]:
    """What the writer said; a killed one may not have come to say anything."""
    path = Path(task.journal)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
