"""SequenceDataset and its DataLoader: windows for training loops built on torch's own."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from expstore.errors import SchemaError, StepRangeError
from expstore.loading.batch import Batch
from expstore.loading.reader import BatchReader, warm_up
from expstore.loading.replay import (
    STATE_VERSION,
    check_loader,
    check_same_steps,
    check_state,
)
from expstore.loading.units import Step, Unit
from expstore.sampling.draw import Draw, as_seed, fold
from expstore.sampling.permutation import permute
from expstore.storage.store import Store

SHARED_MEMORY = Path("/dev/shm")
SAME_ORDER = ("batch_size", "shuffle", "drop_last", "num_steps", "rank", "world_size")


class SequenceDataset(Dataset[Any]):
    """Every step of a store as the anchor of a window; item i is the window of position i.

    Whole batches are read at once (`__getitems__`), so that a DataLoader costs one read per
    batch and not one per item. It pickles as a path and a commit: workers open it anew.

    Args:
        store: what `expstore.open` gave, or a view of it.
        unit: `Step()` or `Sequence(...)`, also within `NStep`, `Stack` or `Hindsight`. What a
            unit leaves to chance depends on the positions that are asked for together, in a
            `sequence_loader` on its seed, epoch and batch.
        fields: names as in `Store.read`; None for all fields.
    """

    def __init__(
        self, store: Store, unit: Unit | None = None, *, fields: Iterable[str] | None = None
    ) -> None:
        check_loader(store, unit)
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
        draw = Draw.evenly(anchors, max(1, len(self)))
        if isinstance(positions, Picked):
            draw = replace(draw, seed=positions.seed, number=positions.number)
        else:
            draw = replace(draw, number=zlib.crc32(anchors.tobytes()))
        return self._reader.read(self.store, draw)


class Picked(list[int]):
    """The positions of a batch, with what all that is left to chance in it depends on."""

    seed: int
    number: int


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


@dataclass(frozen=True)
class Collate:
    """What `sequence_loader` does with a batch, which is there already, in the worker."""

    transform: Callable[[Batch], Any] | None = None

    def __call__(self, windows: Any) -> Any:
        batch: Batch = windows.batch
        return batch if self.transform is None else self.transform(batch)


class Positions(Sampler[list[int]]):
    """The positions of each batch of an epoch, a pure function of (seed, epoch, batch, rank).

    With several ranks, `num_steps mod world_size` positions are left out of an epoch: the last
    ones of its order, so with `shuffle` others each time.
    """

    def __init__(
        self,
        num_steps: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        rank: int,
        world_size: int,
    ) -> None:
        self.num_steps, self.batch_size = num_steps, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, as_seed(seed), drop_last
        self.rank, self.world_size = rank, world_size
        self.epoch = 0  # that `iter` walks
        self.first_batch = 0  # of it

    def __len__(self) -> int:
        own = self.num_steps // self.world_size
        return own // self.batch_size if self.drop_last else -(-own // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # The arguments are taken now: the generator runs when a loader reads ahead.
        return self._walk(self.epoch, self.first_batch)

    def _walk(self, epoch: int, first_batch: int) -> Iterator[list[int]]:
        own = self.num_steps // self.world_size
        for batch in range(first_batch, len(self)):
            start = batch * self.batch_size
            at = np.arange(start, min(start + self.batch_size, own)) * self.world_size + self.rank
            order = permute(self.seed, epoch, at, self.num_steps) if self.shuffle else at
            picked = Picked(order.tolist())
            picked.seed, picked.number = self.seed, fold(epoch, batch, self.rank)
            yield picked


class SequenceLoader(DataLoader[Any]):
    """A DataLoader that yields `Batch`es and can say, and be told, where it stands.

    Each `iter` walks another epoch, also when the one before was left early.
    """

    def __init__(self, dataset: SequenceDataset, positions: Positions, device: Any, **kwargs: Any):
        super().__init__(dataset, batch_sampler=positions, **kwargs)
        self._windows = dataset
        self._positions = positions
        self._device = torch.device(device)
        self._next = (0, 0)  # epoch and first batch of the next `iter`
        self._stands = (0, 0)  # epoch, and batches of it that were delivered

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, delivered = self._next
        self._positions.epoch, self._positions.first_batch = epoch, delivered
        self._next = (epoch + 1, 0)
        return self._walk(super().__iter__(), epoch, delivered)

    def _walk(self, batches: Iterator[Any], epoch: int, delivered: int) -> Iterator[Any]:
        try:
            for batch in batches:
                delivered += 1
                self._stands = (epoch, delivered)
                yield batch if self._device.type == "cpu" else batch.to(self._device)
        except (OSError, EOFError, RuntimeError):
            # Perhaps a worker was killed while it gave memory a name, which it takes away at once.
            remove_leftovers(getattr(batches, "_workers", ()))
            raise
        self._stands = (epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: epoch and batches delivered, not those read ahead."""
        positions = self._positions
        return {
            "version": STATE_VERSION,
            "seed": positions.seed,
            "epoch": self._stands[0],
            "batch": self._stands[1],
            **{name: getattr(positions, name) for name in SAME_ORDER},
            "unit": repr(self._windows.unit),
            "stores": self._windows.store.identities(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with the next `iter`.

        Raises:
            StateError: it belongs to another store, unit or order, or the store has grown
                since, so that the order of its steps is another one.
        """
        check_state(state, own := self.state_dict(), ("version", *SAME_ORDER, "unit"))
        check_same_steps(state, own)
        self._positions.seed = state["seed"]
        self._next = self._stands = (state["epoch"], state["batch"])


def remove_leftovers(workers: Iterable[BaseProcess]) -> None:
    """Remove the shared memory of workers that are dead, which torch names `torch_<pid>_...`."""
    workers = list(workers)
    for worker in workers:
        worker.join(0.1)  # one that was killed just now
    gone = {str(worker.pid) for worker in workers if not worker.is_alive()}
    with contextlib.suppress(OSError):  # where it is not listed, nobody can say what is left
        for entry in SHARED_MEMORY.iterdir():
            if entry.name.startswith("torch_") and entry.name.split("_")[1] in gone:
                entry.unlink(missing_ok=True)


def sequence_loader(
    dataset: SequenceDataset,
    batch_size: int,
    *,
    shuffle: bool = False,
    num_workers: int = 0,
    seed: int = 0,
    device: str | torch.device = "cpu",
    drop_last: bool = False,
    transform: Callable[[Batch], Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
    **kwargs: Any,
) -> SequenceLoader:
    """A torch DataLoader over the windows of a dataset.

    Every step is an anchor once per epoch. With `shuffle` their order is a function of
    (seed, epoch), computed and not stored; the batches are the same for any `num_workers`.

    Args:
        dataset: what to read.
        batch_size: windows per batch, B.
        shuffle: in random order.
        num_workers: processes that read; 0 reads in this one. They hold maps only.
        seed: any integer.
        device: where the batches go.
        drop_last: leave the last, shorter batch of an epoch out.
        transform: applied to each batch, in the worker; what it returns is what comes.
        rank: of this process in distributed training, 0 to `world_size - 1`.
        world_size: processes that share each epoch without overlap.
        **kwargs: further arguments of torch's DataLoader, such as `multiprocessing_context`.

    Raises:
        SchemaError: an argument out of range.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     number = writer.append({"observation": np.zeros((6, 2)), "reward": np.ones(5)})
        >>> dataset = expstore.SequenceDataset(expstore.open(path), expstore.Sequence(length=3))
        >>> loader = expstore.sequence_loader(dataset, batch_size=2, shuffle=True)
        >>> [batch["observation"].shape[0] for batch in loader]
        [2, 2, 1]
    """
    if not isinstance(dataset, SequenceDataset):
        raise SchemaError(
            f"dataset must be a SequenceDataset, got {type(dataset).__name__}; wrap the store: "
            "SequenceDataset(store, Sequence(length=...))"
        )
    for name, value, least in (("batch_size", batch_size, 1), ("world_size", world_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SchemaError(f"{name} must be an integer of at least {least}, got {value!r}")
    if not 0 <= rank < world_size:
        raise SchemaError(f"rank must be from 0 to {world_size - 1}, got {rank}")
    positions = Positions(
        len(dataset),
        batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        rank=rank,
        world_size=world_size,
    )
    kwargs = {"collate_fn": Collate(transform), "num_workers": num_workers, **kwargs}
    if num_workers:
        warm_up()  # what is compiled here, forked workers need not compile
    return SequenceLoader(dataset, positions, device, **kwargs)
