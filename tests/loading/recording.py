"""A recorder that runs beside a training run: `python -m tests.loading.recording SECONDS PATH...`.

Several stores take turns. Every value says which step it belongs to; see `making.episode`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import expstore
from expstore.errors import NotAStoreError
from tests.loading.making import episode

CAPACITY_STEPS = 2000  # at about 2000 steps a second for each store
COMMIT_INTERVAL_S = 0.1


def record(seconds: float, paths: list[str]) -> None:
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                expstore.Writer(
                    path,
                    capacity_steps=CAPACITY_STEPS,
                    commit_interval_s=COMMIT_INTERVAL_S,
                    durable=False,
                )
            )
            for path in paths
        ]
        while time.monotonic() < end:
            for writer in writers:
                length = 1 + writer.num_episodes * 7 % 40
                writer.append(episode(writer.num_steps, length), tag=length)
            time.sleep(0.01)


@contextmanager
def recorder(*paths: Path, seconds: float = 120) -> Iterator[subprocess.Popen[bytes]]:
    """Run it for the time of a block that ends sooner, once every store has episodes."""
    command = [sys.executable, "-m", "tests.loading.recording", str(seconds), *map(str, paths)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as process:
        try:
            while not all(map(has_episodes, paths)):
                assert process.poll() is None, "the recorder ended"
                time.sleep(0.01)
            yield process
        finally:
            process.kill()
            process.wait()


def has_episodes(path: Path) -> bool:
    try:
        return expstore.open(path).num_episodes > 0
    except NotAStoreError:
        return False


if __name__ == "__main__":
    record(float(sys.argv[1]), sys.argv[2:])
