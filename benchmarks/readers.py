"""Contestants that give batches of windows, and the proof that they give the same ones."""

from __future__ import annotations

import itertools
import logging
import warnings
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import expstore
from benchmarks.experience import Columns, Experience
from benchmarks.results import Mismatch

LARGE_ROW_BYTES = 1024  # rows from this size on are copied window by window
PLANS = 64  # batches that the plain contestants take in turns


class WindowReader(Protocol):
    """One contestant."""

    def sample(self) -> Any:
        """A batch of windows at random anchors: what is timed."""
        ...

    def read(self, anchors: NDArray[np.int64]) -> Any:
        """A batch of the windows at the given anchors."""
        ...

    def anchors(self, batch: Any) -> NDArray[np.int64]:
        """(B,) where the windows of a batch begin."""
        ...

    def columns(self, batch: Any) -> Columns:
        """What a batch holds, each field with B * W rows in whatever shape."""
        ...


class Expstore:
    """`Replay.sample`."""

    def __init__(self, store: expstore.Store, batch_size: int, length: int, num_threads: int):
        unit = expstore.Sequence(length=length)
        self.replay = expstore.Replay(store, batch_size, unit=unit, num_threads=num_threads)
        self.dataset = expstore.SequenceDataset(store, unit)
        self.sample = self.replay.sample

    def read(self, anchors: NDArray[np.int64]) -> Any:
        return self.dataset.batch(anchors.tolist())

    def anchors(self, batch: Any) -> NDArray[np.int64]:
        return np.asarray(batch.info.anchor_index[:, 0])

    def columns(self, batch: Any) -> Columns:
        return {name: tensor.numpy() for name, tensor in batch.fields.items()}


class TorchRL:
    """A `ReplayBuffer` on `LazyMemmapStorage` with TorchRL's own `Sequence`."""

    def __init__(self, experience: Experience, folder: Path, batch_size: int, length: int):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its compiled part and about torch
            from tensordict import TensorDict
            from torchrl.data import LazyMemmapStorage, ReplayBuffer, Sequence

            logging.getLogger("torchrl").setLevel(logging.WARNING)
            num_steps = experience.num_steps
            # Bounded by a flag that the batch holds anyway: no field more than the others read.
            self.unit = Sequence(length=length, done_key="truncated")
            self.storage = LazyMemmapStorage(num_steps, scratch_dir=folder)
            self.buffer = ReplayBuffer(
                storage=self.storage, batch_size=batch_size, sample_unit=self.unit
            )
            tensors = {name: torch.from_numpy(rows) for name, rows in experience.columns.items()}
            self.buffer.extend(TensorDict(tensors, [num_steps]))
        self.length = length

    def sample(self) -> Any:
        return self.buffer.sample(return_info=True)

    def read(self, anchors: NDArray[np.int64]) -> Any:
        index, info = self.unit.expand(torch.from_numpy(anchors), {}, self.storage)
        return self.storage.get(index), info

    def anchors(self, batch: Any) -> NDArray[np.int64]:
        return np.asarray(batch[1]["anchor_index"][:: self.length])

    def columns(self, batch: Any) -> Columns:
        return {str(name): tensor.numpy() for name, tensor in batch[0].items()}


class Plain:
    """Copies into arrays that are used again, with the windows known beforehand: the limit.

    Rows of a kilobyte and more are copied window by window, smaller ones by `numpy.take`,
    unless `by_take` says so for all.
    """

    def __init__(
        self,
        experience: Experience,
        arrays: Columns,
        batch_size: int,
        length: int,
        *,
        by_take: bool = False,
    ):
        self.arrays = arrays
        self.shape = batch_size, length
        self.sliced = [
            name
            for name, array in arrays.items()
            if array[0].nbytes >= LARGE_ROW_BYTES and not by_take
        ]
        self.experience = experience
        self.out = {
            name: np.empty((batch_size, length, *array.shape[1:]), array.dtype)
            for name, array in arrays.items()
        }
        rng = np.random.default_rng(1)
        drawn = rng.integers(0, experience.num_steps, (PLANS, batch_size))
        self._plans = itertools.cycle([self._plan(anchors) for anchors in drawn])

    def _plan(self, anchors: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        steps = self.experience.rows(anchors, self.shape[1])
        return anchors, steps.reshape(-1), steps[:, -1] - steps[:, 0] + 1

    def sample(self) -> Any:
        return self._copied(*next(self._plans))

    def read(self, anchors: NDArray[np.int64]) -> Any:
        return self._copied(*self._plan(anchors))

    def _copied(
        self, anchors: NDArray[np.int64], rows: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> Any:
        for name, array in self.arrays.items():
            out = self.out[name]
            if name not in self.sliced:
                array.take(rows, 0, out.reshape(-1, *array.shape[1:]), mode="clip")
                continue
            for window, start, count in zip(out, anchors.tolist(), counts.tolist(), strict=True):
                window[:count] = array[start : start + count]
                if count < len(window):
                    window[count:] = array[start + count - 1]
        return anchors, self.out

    def anchors(self, batch: Any) -> NDArray[np.int64]:
        anchors: NDArray[np.int64] = batch[0]
        return anchors

    def columns(self, batch: Any) -> Columns:
        columns: Columns = batch[1]
        return columns


def mapped_copies(experience: Experience, folder: Path) -> Columns:
    """The columns as plain files, one each, mapped."""
    folder.mkdir()
    arrays = {}
    for name, rows in experience.columns.items():
        rows.tofile(folder / name)
        mapped = np.memmap(folder / name, rows.dtype, "r", shape=rows.shape)
        arrays[name] = np.asarray(mapped)  # a memmap's own indexing costs microseconds
    return arrays


def check_same_bytes(
    contestants: dict[str, WindowReader], experience: Experience, batch_size: int, length: int
) -> None:
    """All contestants read the same windows, and sample what stands in the data.

    Raises:
        Mismatch: names the contestant and the field.
    """
    rng = np.random.default_rng(2)
    anchors = rng.integers(0, experience.num_steps, batch_size)
    # The last windows of an episode are those that repeat its last step.
    anchors[:2] = [experience.num_steps - 1, experience.episode_steps - 2]
    for name, contestant in contestants.items():
        batch = contestant.read(anchors)
        _check(name, contestant, batch, anchors, experience, length)
        batch = contestant.sample()
        _check(name, contestant, batch, contestant.anchors(batch), experience, length)


def _check(
    name: str,
    contestant: WindowReader,
    batch: Any,
    anchors: NDArray[np.int64],
    experience: Experience,
    length: int,
) -> None:
    rows = experience.rows(anchors, length).reshape(-1)
    found = contestant.columns(batch)
    for field, column in experience.columns.items():
        if field not in found or found[field].tobytes() != column[rows].tobytes():
            raise Mismatch(f"{name} does not return the bytes of field {field!r}")
