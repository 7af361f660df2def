"""Contestants timed in turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

TURN_S = 0.1  # a slow contestant makes fewer calls, at least one


def timed_in_turns(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    calls: int = 1,
    before: Callable[[], Any] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each contestant in each round, after a round that does not count.

    What a call returned lives until the next one of the same contestant has returned, as in
    a training loop; giving it back counts.

    Args:
        contestants: what to call, by name.
        rounds: how often each contestant has its turn.
        calls: calls of a turn, made one after the other; fewer when they have taken `TURN_S`.
        before: called before every turn, untimed.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    held: dict[str, Any] = {}
    for number in range(-1, rounds):
        gc.collect()
        first = number % len(names)
        for name in names[first:] + names[:first]:
            call = contestants[name]
            if before is not None:
                before()
            start, made = time.perf_counter(), 0
            while True:
                held[name] = call()
                made += 1
                elapsed = time.perf_counter() - start
                if made == calls or elapsed > TURN_S:
                    break
            if number >= 0:
                seconds[name].append(elapsed / made)
    return seconds
