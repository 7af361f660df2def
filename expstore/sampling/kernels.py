"""The compiled loops of sampling; numba is imported with this module, so import it late.

Functions that call each other live in one file, because numba's disk cache does not notice when
a function that is called from another file changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from expstore.sampling.runs import STREAM_BITS

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
Priorities = NDArray[np.float32]
Function = TypeVar("Function", bound=Callable[..., Any])

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
LOW = np.uint64(0xFFFFFFFF)
FETCHED_EPISODES = 4096  # an index of fewer stays in the caches
S27, S30, S31, S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


def compiled(function: Function) -> Function:
    """Without the interpreter lock, and kept on disk."""
    return cast(Function, numba.njit(nogil=True, cache=True)(function))


@compiled
def mixed(word: np.uint64) -> np.uint64:
    """Equal to ``draw.mix``."""
    word = (word ^ (word >> S30)) * FIRST
    word = (word ^ (word >> S27)) * SECOND
    return word ^ (word >> S31)


@compiled
def _scaled(word: np.uint64, high: np.uint64) -> np.uint64:
    low = (word & LOW) * (high & LOW)
    middle = (word >> S32) * (high & LOW)
    other = (word & LOW) * (high >> S32)
    carry = ((low >> S32) + (middle & LOW) + (other & LOW)) >> S32
    return (word >> S32) * (high >> S32) + (middle >> S32) + (other >> S32) + carry


@compiled
def fill_bits(key: np.uint64, second_key: np.uint64, out: Words) -> None:
    """Equal to ``draw.random_bits``: out (B,) becomes one random word per lane."""
    for i in range(len(out)):
        out[i] = mixed(mixed(key + np.uint64(i) * GOLDEN) ^ second_key)


@compiled
def fill_integers(key: np.uint64, second_key: np.uint64, high: np.uint64, out: Integers) -> None:
    """Equal to ``draw.integers``: out (B,) becomes uniform integers from 0 to high - 1."""
    for i in range(len(out)):
        word = mixed(mixed(key + np.uint64(i) * GOLDEN) ^ second_key)
        out[i] = np.int64(_scaled(word, high))


@compiled
def fill_by_episode(
    key: np.uint64, second_key: np.uint64, first: Integers, length: Integers, out: Integers
) -> None:
    """out (B,) becomes a uniform position of a uniform episode, two random words for each.

    Args:
        key: See ``draw.keys_of``, as is ``second_key``.
        second_key: The other one.
        first: (E,) see ``Spans``, as is ``length``.
        length: (E,)
        out: (B,) filled here.
    """
    for i in range(len(out)):
        word = mixed(mixed(key + np.uint64(2 * i) * GOLDEN) ^ second_key)
        episode = np.int64(_scaled(word, np.uint64(len(first))))
        word = mixed(mixed(key + np.uint64(2 * i + 1) * GOLDEN) ^ second_key)
        out[i] = first[episode] + np.int64(_scaled(word, np.uint64(length[episode])))


@compiled
def _walked(at: np.uint64, rows: np.uint64, columns: np.uint64, keys: Words) -> np.uint64:
    row, column = at % rows, at // rows
    for i in range(0, len(keys), 2):
        row += ((mixed(keys[i] + column * GOLDEN) >> S32) * rows) >> S32
        if row >= rows:
            row -= rows
        column += ((mixed(keys[i + 1] + row * GOLDEN) >> S32) * columns) >> S32
        if column >= columns:
            column -= columns
    return column * rows + row


@compiled
def fill_permuted(
    positions: Integers,
    num: np.uint64,
    rows: np.uint64,
    columns: np.uint64,
    keys: Words,
    out: Integers,
) -> None:
    """Equal to ``permutation.permute``: out (B,) becomes where each position goes."""
    for i in range(len(positions)):
        at = _walked(np.uint64(positions[i]), rows, columns, keys)
        while at >= num:
            at = _walked(at, rows, columns, keys)
        out[i] = np.int64(at)


@compiled
def _num_at_most(ascending: Integers, value: int) -> int:
    # From where the value would be if all were evenly spread: a binary search misses the cache
    # at most of its steps in a store of 100,000 episodes.
    low: Any = 0
    reach: Any = 1
    high: Any = len(ascending) - 1
    if high < 0 or value < ascending[0]:
        return 0
    if value >= ascending[high]:
        return int(high + 1)
    share = np.float64(value - ascending[0]) / np.float64(ascending[high] - ascending[0])
    guess = np.int64(share * high)
    if ascending[guess] <= value:
        low = guess
        while low + reach < high and ascending[low + reach] <= value:
            low += reach
            reach *= 2
        high = min(high, low + reach)
    else:
        high = guess
        while high - reach > low and ascending[high - reach] > value:
            high -= reach
            reach *= 2
        low = max(low, high - reach)
    while high - low > 1:
        middle = (low + high) // 2
        if ascending[middle] <= value:
            low = middle
        else:
            high = middle
    return int(low + 1)


@compiled
def _bounds(streams: Integers, edges: Integers, shift: int, at: int) -> tuple[int, int]:
    stream = _num_at_most(streams, at)
    start, stop = streams[stream - 1], streams[stream]
    after = _num_at_most(edges, at - shift)
    if after > 0:
        start = max(start, edges[after - 1] + shift)
    if after < len(edges):
        stop = min(stop, edges[after] + shift)
    return start, stop


@compiled
def _fetch(
    anchors: Integers, by: Integers, start: Integers, first: Integers, length: Integers
) -> int:
    """Touch the index where each anchor's episode will be found, if episodes are about as long.

    The searches that follow depend on what they read, so each waits for memory in turn; these
    reads do not, and the processor makes them all at once. In an index that no cache holds
    (100,000 episodes) a plan takes half the time.

    Returns:
        All that was read, or-ed: never negative, but the compiler does not know that.
    """
    high = len(by) - 1
    share = high / np.float64(by[high] - by[0])
    total = 0
    guess: Any = 0
    for b in range(len(anchors)):
        guess = min(max(np.int64(np.float64(anchors[b] - by[0]) * share), 0), high)
        total |= start[guess] | first[guess] | length[guess]
    return total


@compiled
def plan_spans(
    anchors: Integers,
    are_steps: bool,
    start: Integers,
    first: Integers,
    length: Integers,
    streams: Integers,
    edges: Integers,
    shift: int,
    burn_in: int,
    dilation: int,
    need: int,
    steps: Integers,
    valid: NDArray[np.bool_],
    positions: Integers,
) -> int:
    """Equal to ``window.plan_numpy``: find the bounds, lay the window, translate to steps.

    Args:
        anchors: (B,) positions, or step numbers if ``are_steps``.
        are_steps: What the anchors count.
        start: (E,) see ``Spans``, as are ``first``, ``length`` and ``streams``.
        first: (E,)
        length: (E,)
        streams: (S + 1,)
        edges: Sorted; a new stretch begins at each ``edge + shift``.
        shift: 0 where edges are starts, 1 where they are last positions, -1 where the episodes
            are the stretches and edges are not read.
        burn_in: Records before the anchor.
        dilation: Steps between two records.
        need: Steps that must follow the anchor, 0 where windows never slide.
        steps: (B, W) filled here, as is ``valid``.
        valid: (B, W)
        positions: (B, W) filled here, too, unless it is empty.

    Returns:
        -1, or the index of the first anchor that is not among the selected steps; the
        outputs are then incomplete.
    """
    if len(start) >= FETCHED_EPISODES:
        by = start if are_steps else first
        if _fetch(anchors, by, start, first, length) < 0:  # never: else it would be left out
            return 0
    for b in range(len(anchors)):
        at = anchors[b]
        if are_steps:
            episode = _num_at_most(start, at) - 1
            if episode < 0 or at - start[episode] >= length[episode]:
                return b
            at += first[episode] - start[episode]
        elif at < 0 or at >= streams[-1]:
            return b
        else:
            episode = _num_at_most(first, at) - 1
        if shift < 0:
            low, high = first[episode], first[episode] + length[episode]
        else:
            low, high = _bounds(streams, edges, shift, at)
        last = high - 1
        at -= min(max(need - (last - at), 0), at - low)
        wanted = at - burn_in * dilation
        if max(wanted, low) < first[episode]:
            episode = _num_at_most(first, max(wanted, low)) - 1
        _fill_window(wanted, dilation, low, last, episode, start, first, length, steps[b], valid[b])
        if len(positions):
            for k in range(steps.shape[1]):
                positions[b, k] = min(max(wanted + k * dilation, low), last)
    return -1


@compiled
def _fill_window(
    wanted: int,
    dilation: int,
    low: int,
    last: int,
    episode: int,
    start: Integers,
    first: Integers,
    length: Integers,
    steps: Integers,
    valid: NDArray[np.bool_],
) -> None:
    """The steps (W,) of one window, of which the first record lies in the episode."""
    shift_to_step = start[episode] - first[episode]
    episode_stop = first[episode] + length[episode]
    if last < episode_stop:  # nothing to look up on the way: several times faster
        for k in range(len(steps)):
            clipped = min(max(wanted, low), last)
            steps[k] = clipped + shift_to_step
            valid[k] = clipped == wanted
            wanted += dilation
        return
    for k in range(len(steps)):
        clipped = min(max(wanted, low), last)
        while clipped >= episode_stop:
            episode += 1
            shift_to_step = start[episode] - first[episode]
            episode_stop += length[episode]
        steps[k] = clipped + shift_to_step
        valid[k] = clipped == wanted
        wanted += dilation


@compiled
def locate(
    steps: Integers, start: Integers, first: Integers, length: Integers, out: Integers
) -> int:
    """The position of each step, as ``Spans.positions_of`` but without an error.

    Args:
        steps: (n,) step numbers.
        start: (E,) see ``Spans``, as are ``first`` and ``length``.
        first: (E,)
        length: (E,)
        out: (n,) filled here: the position; -1 for a step below the first one of its stream,
            which must have left it; -2 for any other step that is not there.

    Returns:
        How many of ``out`` are negative.
    """
    num_missing = 0
    for i in range(len(steps)):
        after = _num_at_most(start, steps[i])
        if after > 0 and steps[i] - start[after - 1] < length[after - 1]:
            out[i] = first[after - 1] + steps[i] - start[after - 1]
            continue
        stream = steps[i] >> STREAM_BITS
        is_first = after == 0 or start[after - 1] >> STREAM_BITS != stream
        has_left = after < len(start) and start[after] >> STREAM_BITS == stream and is_first
        out[i] = -1 if has_left else -2
        num_missing += 1
    return num_missing


@compiled
def carry(was: Integers, raw: Priorities, now: Integers, out: Priorities) -> None:
    """Copy what is known of the steps of ``now`` from those of ``was``, in one pass over both.

    Args:
        was: (R, 2) ascending half-open runs of steps.
        raw: One value per step of ``was``.
        now: (Q, 2) runs, too.
        out: One value per step of ``now``; those that were not there are left as they are.
    """
    run, begin, place = 0, 0, 0
    for q in range(len(now)):
        start, stop = now[q, 0], now[q, 1]
        while run < len(was) and was[run, 1] <= start:
            begin += was[run, 1] - was[run, 0]
            run += 1
        while run < len(was) and was[run, 0] < stop:
            for step in range(max(start, was[run, 0]), min(stop, was[run, 1])):
                out[place + step - start] = raw[begin + step - was[run, 0]]
            if was[run, 1] > stop:
                break
            begin += was[run, 1] - was[run, 0]
            run += 1
        place += stop - start


@compiled
def check_priorities(priority: Floats, out: Priorities) -> int:
    """Round priorities (n,) to float32; the index of the first that is none, or n."""
    for i in range(len(priority)):
        out[i] = np.float32(priority[i])
        if not (priority[i] >= 0.0 and np.isfinite(out[i])):
            return i
    return len(priority)


@compiled
def check_update(
    priority: Floats,
    steps: Integers,
    start: Integers,
    first: Integers,
    length: Integers,
    raw: Priorities,
    positions: Integers,
) -> tuple[int, int]:
    """What ``check_priorities`` and ``locate`` return, into ``raw`` and ``positions``."""
    return check_priorities(priority, raw), locate(steps, start, first, length, positions)
