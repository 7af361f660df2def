"""TorchRL: a `ReplayBuffer` on `LazyMemmapStorage`."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.experience import Columns, Experience


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without its remarks on torch and on its compiled part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrl.data  # noqa: F401  (it greets when it is imported)

        logging.getLogger("torchrl").setLevel(logging.ERROR)
        yield


def filled(
    columns: Columns,
    folder: Path,
    batch_size: int,
    *,
    storage: str = "LazyMemmapStorage",
    **kwargs: Any,
) -> Any:
    """A buffer with these rows; names with a / become nested keys."""
    with quiet():
        import torchrl.data
        from tensordict import TensorDict

        num_steps = len(next(iter(columns.values())))
        rows = getattr(torchrl.data, storage)(num_steps, scratch_dir=folder)
        buffer = torchrl.data.ReplayBuffer(storage=rows, batch_size=batch_size, **kwargs)
        tensors = {tuple(n.split("/")): torch.from_numpy(rows) for n, rows in columns.items()}
        buffer.extend(TensorDict(tensors, [num_steps]))
    return buffer


class Sequences:
    """TorchRL's own `Sequence`."""

    def __init__(self, experience: Experience, folder: Path, batch_size: int, length: int):
        with quiet():
            from torchrl.data import Sequence

            # Bounded by a flag that the batch holds anyway: no field more than the others read.
            self.unit = Sequence(length=length, done_key="truncated")
        self.buffer = filled(experience.columns, folder, batch_size, sample_unit=self.unit)
        self.length = length

    def sample(self) -> Any:
        return self.buffer.sample(return_info=True)

    def read(self, anchors: NDArray[np.int64]) -> Any:
        index, info = self.unit.expand(torch.from_numpy(anchors), {}, self.buffer.storage)
        return self.buffer.storage.get(index), info

    def anchors(self, batch: Any) -> NDArray[np.int64]:
        return np.asarray(batch[1]["anchor_index"][:: self.length])

    def columns(self, batch: Any) -> Columns:
        return {str(name): tensor.numpy() for name, tensor in batch[0].items()}


class Slices:
    """Its `SliceSampler`, told to keep where episodes end: whole slices only, never padded."""

    def __init__(self, sequences: Sequences, experience: Experience, batch_size: int, length: int):
        with quiet():
            from torchrl.data import ReplayBuffer, SliceSampler

            sampler = SliceSampler(slice_len=length, end_key="truncated", cache_values=True)
            self.buffer = ReplayBuffer(
                storage=sequences.buffer.storage, sampler=sampler, batch_size=batch_size * length
            )
        self.experience, self.length = experience, length

    def sample(self) -> Any:
        return self.buffer.sample(return_info=True)

    def read(self, anchors: NDArray[np.int64]) -> Any:
        rows = torch.from_numpy(self.experience.rows(anchors, self.length).reshape(-1))
        return self.buffer.storage.get(rows), {}

    def anchors(self, batch: Any) -> NDArray[np.int64]:
        index = batch[1]["index"]
        index = index[0] if isinstance(index, tuple) else index
        return np.asarray(index).reshape(-1)[:: self.length]

    def columns(self, batch: Any) -> Columns:
        # The sampler adds ("next", "truncated") and the like, which are not asked for.
        data = batch[0]
        return {str(n): t.numpy() for n, t in data.items() if isinstance(t, torch.Tensor)}
