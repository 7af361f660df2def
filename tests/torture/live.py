"""A writer that runs for a while beside its readers.

`python -m tests.torture.live PATH SEED SECONDS [CAPACITY_STEPS]`
"""

from __future__ import annotations

import sys
import time

import numpy as np

import expstore
from tests.torture.episodes import Plan, known_episode
from tests.torture.faults import small_chunks


def write(path: str, seed: int, seconds: float, capacity_steps: int | None = None) -> None:
    """Append, stream, discard and commit at irregular moments; every episode is known."""
    plan, rng = Plan.of(seed), np.random.default_rng(seed)
    end = time.monotonic() + seconds
    with small_chunks(plan.chunks):
        writer = expstore.Writer(
            path,
            layout=plan.layouts,
            chunk_steps=plan.chunk_steps,
            commit_interval_s=0.03,
            durable=False,
            capacity_steps=capacity_steps,
        )
        while time.monotonic() < end:
            known = known_episode(seed, writer.num_episodes)
            if known.can_be_streamed and rng.random() < 0.3:
                with writer.episode(end_reason=known.asked_reason, **known.metadata) as stream:
                    for step in known.steps():
                        stream.add(step)
            else:
                writer.append(known.data, end_reason=known.asked_reason, **known.metadata)
            if rng.random() < 0.1:
                writer.discard()
            if rng.random() < 0.1:
                writer.commit()
            time.sleep(float(rng.choice([0, 0, 0.005])))
        writer.close()


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
