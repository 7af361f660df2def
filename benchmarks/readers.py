"""Contestants that give batches of windows, and the proof that they give the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import expstore
from benchmarks.experience import Columns, Experience
from benchmarks.results import Mismatch


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

    def __init__(
        self,
        store: expstore.Store,
        batch_size: int,
        length: int,
        num_threads: int,
        fields: Iterable[str] | None = None,
    ):
        unit = expstore.Sequence(length=length)
        self.replay = expstore.Replay(
            store, batch_size, unit=unit, num_threads=num_threads, fields=fields
        )
        self.dataset = expstore.SequenceDataset(store, unit, fields=fields)
        self.sample = self.replay.sample

    def read(self, anchors: NDArray[np.int64]) -> Any:
        return self.dataset.batch(anchors.tolist())

    def anchors(self, batch: Any) -> NDArray[np.int64]:
        return np.asarray(batch.info.anchor_index[:, 0])

    def columns(self, batch: Any) -> Columns:
        return {name: tensor.numpy() for name, tensor in batch.fields.items()}


def check_same_bytes(
    contestants: Mapping[str, WindowReader], experience: Experience, batch_size: int, length: int
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
