"""SequenceDataset and its DataLoader: windows for training loops built on torch's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from expstore.errors import SchemaError, StepRangeError
from expstore.loading.batch import Batch
from expstore.loading.reader import BatchReader
from expstore.loading.replay import STATE_VERSION, check_state, identities
from expstore.loading.units import Step, Unit
from expstore.sampling.draw import Draw
from expstore.sampling.permutation import permute
from expstore.storage.store import Store


class SequenceDataset(Dataset[Any]):
    """Every step of a store as the anchor of a window; item i is the window of position i.

    Whole batches are read at once (`__getitems__`), so that a DataLoader costs one read per
    batch and not one per item. It pickles as a path and a commit: workers open it anew.

    Args:
        store: what `expstore.open` gave, or a view of it.
        unit: `Step()` or `Sequence(...)`.
        fields: names as in `Store.read`; None for all fields.
    """

    def __init__(
        self, store: Store, unit: Unit | None = None, *, fields: Iterable[str] | None = None
    ) -> None:
        self.store = store
        self.unit = unit if unit is not None else Step()
        # One thread: a DataLoader's processes are the parallelism here.
        self._reader = BatchReader(store, self.unit, fields, num_threads=1)

    def __len__(self) -> int:
        return self.store.num_steps

    def __getitem__(self, position: int) -> dict[str, Any]:
        """One window: fields and `info` as tensors (W, *shape), nested."""
        item: dict[str, Any] = Windows(self.batch([position]))[0]
        return item

    def __getitems__(self, positions: list[int]) -> Windows:
        return Windows(self.batch(positions))

    def batch(self, positions: Sequence[int]) -> Batch:
        """The windows of several positions as one Batch.

        Raises:
            StepRangeError: a position below 0 or not below `len(self)`.
        """
        anchors = np.asarray(positions, np.int64)
        outside = (anchors < 0) | (anchors >= len(self))
        if outside.any():
            raise StepRangeError(
                f"positions must be from 0 to {len(self) - 1}, got {int(anchors[outside][0])}"
            )
        return self._reader.read(self.store, Draw.evenly(anchors, max(1, len(self))))


class Windows(Sequence[dict[str, Any]]):
    """A batch as the list of items that torch's default collate function expects."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return self.batch.batch_size

    def __getitem__(self, i: Any) -> Any:
        if i >= len(self):
            raise IndexError(i)  # ends iteration
        item = self.batch.map(lambda tensor: tensor[i])
        return {**{name: plain(item[name]) for name in item}, "info": dict(item.info)}


def plain(value: Any) -> Any:
    """A nested dict in place of a nested Batch."""
    return {name: plain(value[name]) for name in value} if isinstance(value, Batch) else value


def whole_batch(windows: Any) -> Batch:
    """The collate function of `sequence_loader`: the batch is there already."""
    batch: Batch = windows.batch
    return batch


class Positions(Sampler[list[int]]):
    """The positions of each batch of an epoch, a pure function of (seed, epoch, batch)."""

    def __init__(
        self, num_steps: int, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.num_steps, self.batch_size = num_steps, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.first_batch = 0  # of the next epoch that is walked

    def __len__(self) -> int:
        if self.drop_last:
            return self.num_steps // self.batch_size
        return -(-self.num_steps // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.first_batch, len(self)):
            start = batch * self.batch_size
            at = np.arange(start, min(start + self.batch_size, self.num_steps))
            yield (
                permute(self.seed, self.epoch, at, self.num_steps) if self.shuffle else at
            ).tolist()


class SequenceLoader(DataLoader[Any]):
    """A DataLoader that yields `Batch`es and can say, and be told, where it stands."""

    def __init__(self, dataset: SequenceDataset, positions: Positions, device: Any, **kwargs: Any):
        super().__init__(dataset, batch_sampler=positions, collate_fn=whole_batch, **kwargs)
        self._windows = dataset
        self._positions = positions
        self._device = torch.device(device)
        self._delivered = 0  # batches of this epoch

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """The rest of this epoch; the next call walks the next one."""
        positions = self._positions
        self._delivered = positions.first_batch
        for batch in super().__iter__():
            self._delivered += 1
            yield batch if self._device.type == "cpu" else batch.to(self._device)
        positions.epoch, positions.first_batch, self._delivered = positions.epoch + 1, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: epoch and batches delivered, not those read ahead."""
        dataset, positions = self._windows, self._positions
        return {
            "version": STATE_VERSION,
            "seed": positions.seed,
            "epoch": positions.epoch,
            "batch": self._delivered,
            "batch_size": positions.batch_size,
            "shuffle": positions.shuffle,
            "drop_last": positions.drop_last,
            "num_steps": positions.num_steps,
            "unit": repr(dataset.unit),
            "stores": identities(dataset.store),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with the next call of `iter`.

        Raises:
            StateError: it belongs to another store, unit or order. The store may have grown
                since: open it as of the same commit.
        """
        same = ("version", "batch_size", "shuffle", "drop_last", "num_steps", "unit")
        check_state(state, self.state_dict(), same)
        positions = self._positions
        positions.seed, positions.epoch = state["seed"], state["epoch"]
        positions.first_batch = self._delivered = state["batch"]


def sequence_loader(
    dataset: SequenceDataset,
    batch_size: int,
    *,
    shuffle: bool = False,
    num_workers: int = 0,
    seed: int = 0,
    device: str | torch.device = "cpu",
    drop_last: bool = False,
    **kwargs: Any,
) -> SequenceLoader:
    """A torch DataLoader over the windows of a dataset.

    Every step is an anchor once per epoch. With `shuffle` their order is a function of
    (seed, epoch), computed and not stored.

    Args:
        dataset: what to read.
        batch_size: windows per batch.
        shuffle: in random order.
        num_workers: processes that read; 0 reads in this one.
        seed: any integer.
        device: where the batches go.
        drop_last: leave the last, shorter batch of an epoch out.
        **kwargs: further arguments of torch's DataLoader.

    Raises:
        SchemaError: a batch size below 1.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise SchemaError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    positions = Positions(len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    return SequenceLoader(dataset, positions, device, num_workers=num_workers, **kwargs)
