"""Whether the episodes of the index lie one after the other, within the steps of the commit.

Steps are read through maps by where the index says that they are: a damaged entry would have
memory read that is nobody's, which ends the process. So nothing is read before this holds.
"""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

from expstore.storage.protocols import Column

# Episodes that were found to be so, by the column of lengths, which the snapshots of a store share.
_known: weakref.WeakKeyDictionary[Column, tuple[int, int]] = weakref.WeakKeyDictionary()


def first_gap(
    column: Column,
    episodes: tuple[int, int],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    steps: tuple[int, int],
) -> int | None:
    """The first episode that does not begin where the one before ends, None if there is none.

    A commit that follows one which was looked at costs its new episodes only.

    Args:
        column: of the lengths.
        episodes: the live range of episodes.
        start: (E,) first step of each of them.
        length: (E,) likewise, steps.
        steps: the live range of steps.
    """
    first, stop = episodes
    if first == stop:
        return None if steps[0] == steps[1] else first
    low, high = _known.get(column, (first, first))
    # The last one is looked at again: of an older commit it may end where that says, or not.
    since = min(max(0, high - 1 - first), stop - 1 - first) if low <= first else 0
    ends = start[since:] + length[since:]
    wrong = np.flatnonzero((length[since:] < 1) | (ends != np.append(start[since + 1 :], steps[1])))
    if start[0] != steps[0]:
        return first
    if len(wrong):
        return first + since + int(wrong[0])
    _known[column] = (first, max(stop, high))
    return None
