"""The compiled loops of ``SumTree``; numba is imported with this module, so import it late.

The nodes are numbered level by level: node i of level k spans the slots from i * 16**k on. Slot
i is ``leaf[at[0] + i]``; node i of level k has the sum of its leaves in ``totals[at[k] + i]``, and
the smallest one above 0 in ``leasts[at[k] + i]``.

Of the functions that are called here only `mixed` lives elsewhere, and it will not change: see
``kernels`` for why that matters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expstore.sampling.kernels import (
    FIRST,
    GOLDEN,
    SECOND,
    Floats,
    Integers,
    Priorities,
    compiled,
    mixed,
)  # fmt: skip

ONE, TWO, EIGHT, SIXTEEN = np.uint64(1), np.uint64(2), np.uint64(8), np.uint64(16)
NEGATIVE = np.uint64(0xD1B54A32D192ED03)
S11, UNIT = np.uint64(11), 2.0**-53


@compiled
def fill_leaves(raw: Priorities, eps: float, alpha: float, out: Floats) -> None:
    """out (n,) becomes ``(raw + eps) ** alpha``."""
    last, leaf = np.float32(-1.0), 0.0
    for i in range(len(raw)):
        if raw[i] != last:  # new steps all have the same
            last = raw[i]
            leaf = (np.float64(last) + eps) ** alpha
        out[i] = leaf


@compiled
def _refresh(
    level: int, node: int, leaf: Floats, totals: Floats, leasts: Floats, at: Integers
) -> None:
    child = np.uint64(at[level - 1] + node * 16)
    # Two at a time and without branches: three times faster than the plain loop.
    total, even, odd = 0.0, np.inf, np.inf
    if level == 1:
        for c in range(child, child + SIXTEEN, TWO):
            one, other = leaf[c], leaf[c + ONE]
            total = total + one + other
            one = one if one > 0.0 else np.inf
            other = other if other > 0.0 else np.inf
            even = one if one < even else even
            odd = other if other < odd else odd
    else:
        for c in range(child, child + SIXTEEN, TWO):
            total = total + totals[c] + totals[c + ONE]
            even = leasts[c] if leasts[c] < even else even
            odd = leasts[c + ONE] if leasts[c + ONE] < odd else odd
    totals[at[level] + node] = total
    leasts[at[level] + node] = even if even < odd else odd


@compiled
def refresh_range(
    level: int, low: int, high: int, leaf: Floats, totals: Floats, leasts: Floats, at: Integers
) -> None:
    """Recompute the nodes from low to high - 1 of a level, and all above them."""
    for above in range(level, len(at)):
        for node in range(low, high):
            _refresh(above, node, leaf, totals, leasts, at)
        low, high = low >> 4, ((high - 1) >> 4) + 1


@compiled
def _touched(nodes: Integers, begin: int, values: Floats) -> float:
    """Read from both cache lines of the children of each node, so that all misses overlap.

    The loops that follow have too much to do for each node to ask for the next ones in time:
    they take half as long again without this, from a million slots on.
    """
    some = 0.0
    for i in range(len(nodes)):
        child = np.uint64(begin + nodes[i] * 16)
        some += values[child] + values[child + EIGHT]
    return some


@compiled
def write_leaves(
    slots: Integers,
    values: Priorities,
    eps: float,
    alpha: float,
    raw: Priorities,
    leaf: Floats,
    totals: Floats,
    leasts: Floats,
    at: Integers,
) -> float:
    """Write the priorities of slots (n,) one after the other, then recompute what is above.

    A level with fewer nodes than there are slots is recomputed from end to end.

    Returns:
        The largest of the priorities, 0 of none.
    """
    if len(slots) == 0:
        return 0.0
    nodes, largest = slots >> 4, 0.0
    sink = np.empty(1)  # so that what is only touched is read at all
    sink[0] = _touched(nodes, at[0], leaf) + raw[at[0] + slots].sum()
    for i in range(len(slots)):
        raw[at[0] + slots[i]] = values[i]
        largest = max(largest, np.float64(values[i]))
        leaf[at[0] + slots[i]] = (np.float64(values[i]) + eps) ** alpha
    for level in range(1, len(at)):
        low, high = nodes.min(), nodes.max()
        if high - low < len(nodes):
            refresh_range(level, low, high + 1, leaf, totals, leasts, at)
            break
        above = nodes >> 4
        sink[0] = _touched(above, at[level], totals) + _touched(above, at[level], leasts)
        for i in range(len(nodes)):
            _refresh(level, nodes[i], leaf, totals, leasts, at)
        nodes = above
    return largest


@compiled
def fill_masses(word: np.uint64, number: int, total: float, stratified: bool, out: Floats) -> None:
    """out (B,) becomes uniform numbers from 0 to total, one in each B-th of it if stratified.

    Args:
        word: ``draw.fold(seed)``.
        number: Of the draw; the lanes' words are those of ``draw.random_bits``.
        total: Above 0.
        stratified: See above.
        out: (B,) filled here.
    """
    word = mixed(mixed((word + GOLDEN) ^ np.uint64(number)) + NEGATIVE)
    key, second_key = mixed(word ^ FIRST), mixed(word ^ SECOND)
    for i in range(len(out)):
        lane = mixed(mixed(key + np.uint64(i) * GOLDEN) ^ second_key)
        part = np.float64(lane >> S11) * UNIT
        out[i] = (i + part) * (total / len(out)) if stratified else part * total


@compiled
def descend(
    masses: Floats,
    root: int,
    leaf: Floats,
    totals: Floats,
    at: Integers,
    slots: Integers,
    leaves: Floats,
) -> None:
    """Find the slot at which the leaves' running sum exceeds each mass, never an empty one.

    Args:
        masses: (B,) numbers of at least 0; used up. One at or above the sum of all leaves,
            be it by rounding, goes to the last leaf above 0.
        root: The only node of the last level; its sum is above 0.
        leaf: See above, as are ``totals`` and ``at``.
        totals: Sums of the inner nodes.
        at: Where each level begins.
        slots: (B,) filled here, as is ``leaves``.
        leaves: (B,) may be ``masses``.
    """
    slots[:] = root
    after = np.empty(17)  # what is left of a mass after so many children
    for level in range(len(at) - 2, -1, -1):
        values = totals if level > 0 else leaf
        after[0] = _touched(slots, at[level], values)
        for i in range(len(masses)):
            child = np.uint64(at[level] + slots[i] * 16)
            mass, num_before = masses[i], 0
            after[0] = mass
            for c in range(16):  # always all of them: guessing where to stop costs more
                mass -= values[child + np.uint64(c)]
                after[c + 1] = mass
                num_before += mass >= 0.0
            if num_before < 16:
                masses[i] = after[num_before]
            else:
                masses[i], num_before = np.inf, 15
                while values[child + np.uint64(num_before)] <= 0.0:
                    num_before -= 1
            slots[i] = slots[i] * 16 + num_before
    for i in range(len(slots)):
        leaves[i] = leaf[at[0] + slots[i]]


@compiled
def weigh(
    total: float, least: float, beta: float, leaves: Floats, weight: NDArray[np.float32]
) -> None:
    """Drawn leaves (B,) become their probabilities, weight (B,) their importance weights."""
    for i in range(len(leaves)):
        weight[i] = (leaves[i] / least) ** -beta
        leaves[i] /= total


@compiled
def draw_all(
    word: np.uint64,
    number: int,
    stratified: bool,
    beta: float,
    first: int,
    root: int,
    leaf: Floats,
    totals: Floats,
    leasts: Floats,
    at: Integers,
    anchors: Integers,
    probability: Floats,
    weight: NDArray[np.float32],
) -> None:
    """A whole draw from one tree whose slots begin at ``first``: all of the above at once."""
    top = at[len(at) - 1] + root
    fill_masses(word, number, totals[top], stratified, probability)
    descend(probability, root, leaf, totals, at, anchors, probability)
    anchors -= first
    weigh(totals[top], leasts[top], beta, probability, weight)
