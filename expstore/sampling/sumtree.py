"""SumTree: draw from millions of leaves in proportion to them, while they change, come and go.

Sixteen children to a node: they fill two cache lines, and a tree of 10,000,000 leaves has six
levels; a binary tree is two to three times slower. A node is always recomputed from its
children, so that no error adds up, and which leaves it spans follows from their slot numbers
alone: the sums, and with them every draw, do not depend on how the tree came about.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError

LARGEST_ALPHA = 7.0  # so that no sum of 2**40 leaves overflows
LARGEST_EPS = float(np.finfo(np.float32).max)
_ABOVE_LEAVES = 1

Floats = NDArray[np.float64]


class SumTree:
    """One leaf ``(priority + eps) ** alpha`` for each slot from ``first`` to ``stop - 1``.

    Slots are added at the end and leave at the start; their numbers never change. Takes 13 to
    15 bytes per slot: the priority as float32, the leaf as float64, a 15th of two float64 each
    for the inner nodes, and room to grow.

    Args:
        alpha: Exponent, from 0 to 7.
        eps: Added to every priority, from 0 to 3.4e38.
        first: The number of the first slot that will be added.

    Raises:
        SchemaError: An argument out of range.

    >>> tree = SumTree(alpha=1.0, eps=0.0)
    >>> tree.extend(np.array([1, 0, 3], np.float32))
    >>> tree.draw(np.array([0.5, 1.0, 3.5]))[0].tolist(), tree.total, tree.least
    ([0, 2, 2], 4.0, 1.0)
    """

    def __init__(self, alpha: float, eps: float, first: int = 0) -> None:
        check_power(alpha, eps)
        assert first >= 0, first  # below 0, no node spans all slots
        self.alpha, self.eps = float(alpha), float(eps)
        self.first = self.stop = first
        self._raw = np.empty(0, np.float32)  # (C,) of the slots from _origin on
        self._leaf = np.empty(0, np.float64)  # (C,) 0 for slots that are not there
        self._origin = first & ~15
        self._move(0)

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return self.stop - self.first

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._totals[self._at[-1] + self._root])

    @property
    def least(self) -> float:
        """The smallest leaf above 0, infinite where there is none."""
        return float(self._leasts[self._at[-1] + self._root])

    @property
    def raw(self) -> NDArray[np.float32]:
        """(num_slots,) the priorities themselves, not to be written to."""
        return self._raw[self.first - self._origin : self.stop - self._origin]

    @property
    def num_bytes(self) -> int:
        """Memory reserved by the arrays; what is reserved for growth is not touched yet."""
        return sum(a.nbytes for a in (self._raw, self._leaf, self._totals, self._leasts))

    def extend(self, raw: NDArray[np.float32]) -> None:
        """Add slots at the end, in time proportional to their number.

        Args:
            raw: (n,) priorities, finite and at least 0.
        """
        from expstore.sampling.tree_kernels import fill_leaves

        if not len(raw):
            return
        if self.stop + len(raw) > self._origin + len(self._leaf):
            self._move(self.num_slots + len(raw))
        new = slice(self.stop - self._origin, self.stop - self._origin + len(raw))
        self._raw[new] = raw
        fill_leaves(raw, self.eps, self.alpha, self._leaf[new])
        self._refresh(self.stop, self.stop + len(raw))
        self.stop += len(raw)

    def evict(self, count: int) -> None:
        """Remove slots at the start, in time proportional to their number."""
        assert 0 <= count <= self.num_slots, (count, self.num_slots)
        if not count:
            return
        at = self.first - self._origin
        self._leaf[at : at + count] = 0.0
        self._refresh(self.first, self.first + count)
        self.first += count
        if 2 * ((self.first & ~15) - self._origin) > len(self._leaf):
            self._move(self.num_slots)

    def update(self, slots: NDArray[np.int64], raw: NDArray[np.float32]) -> float:
        """Give slots (n,) that are there new priorities (n,); of a repeated slot the last wins.

        Returns:
            The largest of the priorities, 0 of none.
        """
        from expstore.sampling.tree_kernels import write_leaves

        return float(write_leaves(slots, raw, self.eps, self.alpha, self._raw, *self._nodes))

    def draw(self, masses: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The slot at which the running sum of the leaves exceeds each mass, and its leaf.

        Args:
            masses: (B,) from 0 to ``total``, which must be above 0; used up. Where rounding
                leads past the end, the last leaf above 0 is drawn, and never one that is 0.
        """
        from expstore.sampling.tree_kernels import descend

        slots, leaves = np.empty(len(masses), np.int64), np.empty(len(masses))
        descend(masses, self._root, self._leaf, self._totals, self._at, slots, leaves)
        return slots, leaves

    def draw_all(
        self,
        word: np.uint64,
        number: int,
        stratified: bool,
        beta: float,
        out: tuple[NDArray[np.int64], Floats, NDArray[np.float32]],
    ) -> None:
        """A whole draw: ``out`` becomes offsets from ``first``, probabilities and weights (B,)."""
        from expstore.sampling.tree_kernels import draw_all

        draw_all(word, number, stratified, beta, self.first, self._root, *self._nodes, *out)

    @property
    def _nodes(self) -> tuple[Floats, Floats, Floats, NDArray[np.int64]]:
        return self._leaf, self._totals, self._leasts, self._at

    def _refresh(self, first: int, stop: int) -> None:
        from expstore.sampling.tree_kernels import refresh_range

        low, high = first >> 4, ((stop - 1) >> 4) + 1
        refresh_range(_ABOVE_LEAVES, low, high, *self._nodes)

    def _move(self, num_slots: int) -> None:
        """Make room for ``num_slots`` and an eighth more, and leave behind what is evicted."""
        old_raw, old = self.raw, self._leaf[self.first - self._origin : self.stop - self._origin]
        origin = self.first & ~15  # nodes span the same slots as before
        capacity = -(-(self.first - origin + num_slots + (num_slots >> 3)) // 16) * 16 or 16
        self._raw, self._leaf = np.zeros(capacity, np.float32), _aligned_zeros(capacity)
        kept = slice(self.first - origin, self.stop - origin)
        self._raw[kept], self._leaf[kept] = old_raw, old
        self._origin = origin
        self._at, num_nodes, self._root = _levels(origin, capacity)
        self._totals, self._leasts = _aligned_zeros(num_nodes), _aligned_zeros(num_nodes)
        self._leasts[:] = np.inf
        if self.num_slots:
            self._refresh(self.first, self.stop)


def check_power(alpha: float, eps: float) -> None:
    """Raise ``SchemaError`` unless ``(priority + eps) ** alpha`` can always be summed up."""
    for name, value, largest in (("alpha", alpha, LARGEST_ALPHA), ("eps", eps, LARGEST_EPS)):
        if not 0 <= value <= largest:
            raise SchemaError(f"{name} must be from 0 to {largest:g}, got {value}")


def _aligned_zeros(size: int) -> Floats:
    """Zeros of which each sixteen begin with a cache line and end with the next.

    The operating system's: they take memory only when they are first written.
    """
    zeros = np.zeros(size + 16)
    skip = -(zeros.ctypes.data // 8) % 16
    return zeros[skip : skip + size]


def _levels(origin: int, capacity: int) -> tuple[NDArray[np.int64], int, int]:
    """Where each level of nodes begins, how many nodes there are, and the last level's only one.

    Every level is stored from a multiple of 16 to a multiple of 16, so that the children of a
    node are always there.
    """
    at, num_nodes = [-origin], 0
    low, high = origin, origin + capacity
    while len(at) == 1 or high - low > 1:
        low, high = low >> 4, ((high - 1) >> 4) + 1
        begin, end = low & ~15, (high + 15) & ~15
        at.append(num_nodes - begin)
        num_nodes += end - begin
    return np.array(at, np.int64), num_nodes, low
