"""Replay: batches drawn from a store, one `sample()` after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from expstore.errors import SchemaError, StateError
from expstore.loading.batch import Batch
from expstore.loading.reader import BatchReader
from expstore.loading.units import Step, Unit
from expstore.sampling.draw import Draw, Sampler
from expstore.sampling.uniform import Uniform
from expstore.storage.store import Store

STATE_VERSION = 1


class Replay:
    """Draws batches of steps or windows from a store, a view or a union.

    The same seed gives the same batches from the same commit. A run that loads the
    `state_dict` of another one continues with exactly the batch that was next.

    Args:
        store: what `expstore.open` gave, or a view of it.
        batch_size: anchors per batch, B.
        unit: what an anchor stands for: `Step()` or `Sequence(...)`.
        sampler: what chooses the anchors, `Uniform()` by default. One sampler serves one Replay.
        fields: names as in `Store.read`, also `next_<field>`; None for all fields.
        device: where the tensors go.
        prefetch: batches read ahead by a thread.
        seed: any integer.
        follow: pick up new commits between draws, at the price of one `stat` each.
        num_threads: that copy rows; by default the number of cores, at most 4.

    Raises:
        FieldNotFoundError: an unknown field.
        SchemaError: an argument out of range.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     number = writer.append({"observation": np.zeros((6, 2)), "reward": np.ones(5)})
        >>> unit = expstore.Sequence(length=3)
        >>> replay = expstore.Replay(expstore.open(path), batch_size=4, unit=unit)
        >>> replay.sample()["observation"].shape
        torch.Size([4, 3, 2])
    """

    def __init__(
        self,
        store: Store,
        batch_size: int,
        *,
        unit: Unit | None = None,
        sampler: Sampler | None = None,
        fields: Iterable[str] | None = None,
        device: str | torch.device = "cpu",
        prefetch: int = 0,
        seed: int = 0,
        follow: bool = False,
        num_threads: int | None = None,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("prefetch", prefetch, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SchemaError(f"{name} must be an integer of at least {least}, got {value!r}")
        self.store = store
        self.batch_size = batch_size
        self.unit = unit if unit is not None else Step()
        self.sampler = sampler if sampler is not None else Uniform()
        self.seed = seed
        self.follow = follow
        self.device = torch.device(device)
        self._reader = BatchReader(store, self.unit, fields, num_threads)
        self._prefetch = prefetch
        self._ahead: deque[tuple[dict[str, Any], Future[Batch]]] = deque()
        self._thread = ThreadPoolExecutor(1, "expstore-replay") if prefetch else None

    def sample(self) -> Batch:
        """The next batch.

        Raises:
            StepRangeError: the store holds no steps.
        """
        if self._thread is None:
            return self._read(*self._draw())
        while len(self._ahead) <= self._prefetch:
            before = self.sampler.state_dict()
            self._ahead.append((before, self._thread.submit(self._read, *self._draw())))
        return self._ahead.popleft()[1].result()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.sample()

    def state_dict(self) -> dict[str, Any]:
        """Plain integers and strings: where this Replay stands, for `load_state_dict`."""
        undelivered = self._ahead[0][0] if self._ahead else None
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "unit": repr(self.unit),
            "sampler": self.sampler.state_dict() if undelivered is None else undelivered,
            "stores": identities(self.store),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            StateError: it belongs to another store, unit, batch size or kind of sampler.
        """
        check_state(state, self.state_dict(), ("version", "batch_size", "unit"))
        self.sampler.load_state_dict(state["sampler"])
        self.seed = state["seed"]
        self._drop_ahead()

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._drop_ahead()
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _draw(self) -> tuple[Store, Draw]:
        if self.follow:
            self.store = self.store.latest()
        return self.store, self.sampler.draw(self.store.spans, self.batch_size, self.seed)

    def _read(self, store: Store, draw: Draw) -> Batch:
        batch = self._reader.read(store, draw)
        return batch if self.device.type == "cpu" else batch.to(self.device)

    def _drop_ahead(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()


def identities(store: Store) -> list[dict[str, Any]]:
    """Which stores, at which commits."""
    return [{"store_id": s.root.store_id, "commit": s.root.commit.number} for s in store.snapshots]


def check_state(state: Any, own: dict[str, Any], same: tuple[str, ...]) -> None:
    """Refuse a state that was not taken from the same kind of loader on the same store."""
    if not isinstance(state, dict) or not own.keys() <= state.keys():
        raise StateError(f"a state must have {', '.join(own)}; give what state_dict() returned")
    for name in same:
        if state[name] != own[name]:
            raise StateError(
                f"{name} was {state[name]} when the state was saved and is {own[name]} now; "
                "build the loader as it was"
            )
    saved, ours = ([s["store_id"] for s in x["stores"]] for x in (state, own))
    if saved != ours:
        raise StateError(f"the state belongs to store {saved}, this is {ours}; open that store")
