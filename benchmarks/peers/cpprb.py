"""cpprb: transitions in arrays in memory, sampled by compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experience import Columns


class Transitions:
    """A `ReplayBuffer`, or a `PrioritizedReplayBuffer` whose drawn rows get new priorities."""

    def __init__(
        self, columns: Columns, batch_size: int, priorities: NDArray[np.float32] | None = None
    ):
        import cpprb

        num_steps = len(columns["reward"])
        described = {n: {"shape": c.shape[1:] or 1, "dtype": c.dtype} for n, c in columns.items()}
        kind = cpprb.ReplayBuffer if priorities is None else cpprb.PrioritizedReplayBuffer
        self.buffer = kind(num_steps, described)
        self.buffer.add(**columns)
        self.batch_size, self.priorities = batch_size, priorities
        self._named = columns
        # It does not say which rows it drew, so they are found by what is in them.
        keys = _keys(columns["observation"])
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def sample(self) -> Any:
        batch = self.buffer.sample(self.batch_size)
        if self.priorities is not None:
            self.buffer.update_priorities(batch["indexes"], self.priorities)
        return batch

    def rows(self, batch: Any) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._order[
            np.searchsorted(self._keys, _keys(batch["observation"]))
        ]
        return found

    def columns(self, batch: Any) -> Columns:
        return {name: batch[name] for name in self._named}


def _keys(observation: NDArray[np.float32]) -> NDArray[np.int64]:
    """(N,) the first eight bytes of each row: random in random data."""
    keys: NDArray[np.int64] = np.ascontiguousarray(observation[:, :2]).view(np.int64).reshape(-1)
    return keys
