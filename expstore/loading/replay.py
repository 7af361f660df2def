"""Replay: batches drawn from a store, one `sample()` after the other."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.errors import EvictedError, SchemaError, StateError, StepRangeError
from expstore.loading.batch import Batch
from expstore.loading.reader import BatchReader, plan_in, warm_up
from expstore.loading.resident import Resident, places_of
from expstore.loading.rows import RAGGED_PARTS
from expstore.loading.saved import check_priorities, directory_of, has_grown
from expstore.loading.states import with_arrays, with_tensors
from expstore.loading.transfer import Lift, Lifted, Slot, device_of, streams_of
from expstore.loading.units import Layer, Step, Unit, as_count, base_of, check_unit
from expstore.sampling.draw import Draw, Sampler, as_seed
from expstore.sampling.mixture import Mixture
from expstore.sampling.priority import reduce_priorities
from expstore.sampling.sequence import Sequence
from expstore.sampling.starts import full_starts
from expstore.sampling.uniform import Uniform
from expstore.spans import Spans
from expstore.storage.priorities import check_set_name, load_state, save_state
from expstore.storage.reading import resolve
from expstore.storage.store import Store

Reading = Future[Batch | Lifted]

STATE_VERSION = 1
SAME = ("version", "batch_size", "unit", "starts")  # what a state and who loads it must agree on


class Replay:
    """Draws batches of steps or windows from a store, a view or a union.

    The same seed gives the same batches from the same commit. A run that loads the
    `state_dict` of another one continues with exactly the batch that was next.

    Args:
        store: what `expstore.open` gave, or a view of it.
        batch_size: anchors per batch, B.
        unit: what an anchor stands for: `Step()` or `Sequence(...)`, also within `NStep`, `Stack`
            or `Hindsight`.
        sampler: what chooses the anchors, `Uniform()` by default. One sampler serves one Replay.
        fields: names as in `Store.read`, also `next_<field>`; None for all fields.
        device: where the tensors go.
        prefetch: batches read ahead by a thread, and copied to the device ahead.
        seed: any integer.
        follow: pick up new commits between draws, at the price of one `stat` each.
        starts: "all" draws every step, "full" only those whose whole window lies within what
            bounds it: its episode, or what the unit names in its place.
        num_threads: that copy rows; by default the number of cores, at most 4.
        priorities: a name that `save_priorities` was or will be given. If there is a set of that
            name, this Replay continues with it, also with its seed: with exactly the batch that
            was next if the store is as it was; else new steps have the largest priority and
            evicted ones are gone.
        priorities_path: a directory for saved priorities, other than the store's own.
        reuse: a batch lives until the next `sample()`, which overwrites it: for loops that keep
            nothing of a batch, in one thread. By default a batch is the caller's to keep.
        resident: "device" or "pinned" (page-locked host memory), for all fields or as a dict for
            some: they are loaded whole, if they fit, and batches are looked up there. For `Step`
            and `Sequence`, without `follow`.

    Raises:
        FieldNotFoundError: an unknown field.
        SchemaError: an argument out of range, or a device that is not there.
        StateError: the saved priorities are of another store, view, unit, batch size or sampler,
            or the sampler has none.
        DamagedError: the saved priorities are damaged.

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
        fields: str | Iterable[str] | None = None,
        device: str | torch.device = "cpu",
        prefetch: int = 0,
        seed: int = 0,
        follow: bool = False,
        starts: str = "all",
        num_threads: int | None = None,
        priorities: str | None = None,
        priorities_path: str | os.PathLike[str] | None = None,
        reuse: bool = False,
        resident: str | Mapping[str, str] | None = None,
    ) -> None:
        check_loader(store, unit)
        check_sampler(sampler)
        self.store = store
        self.batch_size = as_count("batch_size", batch_size)
        self.unit = unit if unit is not None else Step()
        self.sampler = sampler if sampler is not None else Uniform()
        if isinstance(self.sampler, Mixture):
            self.sampler.check_union(store.identities())
        self.seed = as_seed(seed)
        self.follow = follow
        self.device = device_of(device)
        self._fields = [fields] if isinstance(fields, str) else fields and list(fields)
        self._num_threads = num_threads
        self._places = places_of(store, self._fields, resident)
        self._resident: Resident | None = None
        if self._places:
            self._move_in()
        else:
            self._reader = BatchReader(store, self.unit, self._fields, num_threads)
        warm_up()
        self._prefetch = as_count("prefetch", prefetch, least=0)
        self.reuse = reuse
        self._slots: list[Slot] = [Slot() for _ in range(self._prefetch + 1)] if reuse else []
        self._lift: Lift | None = None
        if (streams := streams_of(self.device)) is not None:
            # One more where batches are kept: its copies end while the next one is read.
            num_slots = self._prefetch + (1 if reuse else 2)
            self._lift = Lift(self.device, streams, num_slots, reuse=reuse)
        if starts not in ("all", "full"):
            raise SchemaError(f'starts must be "all" or "full", got {starts!r}')
        self._starts = starts
        self._population: tuple[Spans, Spans] | None = None  # of the store, and what is drawn from
        self._num_draws = 0
        self._ahead: deque[tuple[Drawn, Reading | None]] = deque()  # None: not begun
        self._thread = ThreadPoolExecutor(1, "expstore-replay") if prefetch else None
        self._is_closed = False
        self._lock = threading.Lock()
        self._priorities = priorities
        self._sets = directory_of(store, priorities_path)
        if priorities is not None:
            self._open_priorities(priorities)

    def sample(self) -> Batch:
        """The next batch.

        Raises:
            StepRangeError: the store holds no steps.
            StateError: the Replay was closed.
        """
        while True:
            try:
                return self._next_batch()
            except EvictedError:
                if not self.follow:
                    raise  # else it was evicted after it was drawn: the next draw knows

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.sample()

    def update_priority(
        self,
        batch: Batch | None = None,
        priority: Any = None,
        *,
        region: str = "window",
        steps: Any = None,
    ) -> None:
        """Give anchors new priorities, for a sampler that has some.

        An anchor that comes several times in a batch gets its largest value. Anchors that were
        evicted meanwhile are ignored.

        Args:
            batch: what `sample` gave.
            priority: numbers of at least 0, such as absolute temporal-difference errors, as a
                tensor or an array: (B,) for the anchors, or (B, W) for the records, of which
                the largest valid one counts. With `steps`, (n,).
            region: "window" for all valid records, "learning" for those of the learning region.
            steps: (n,) step numbers in place of a batch; the last one of a repeated step counts.

        Raises:
            SchemaError: another shape, or negative, NaN or infinite values; nothing has changed.
            StateError: the sampler has no priorities.
        """
        sampler: Any = self.sampler
        check_priorities(sampler)
        values = as_numbers(priority)
        if steps is not None:
            chosen = as_numbers(steps)
        elif batch is not None:
            chosen, values = reduced(batch, values, region)
        else:
            raise SchemaError("give a batch, or steps=, together with the priorities")
        with self._lock:
            sampler.update(self._drawn_from(self.store), chosen, values)

    def save_priorities(self, name: str | None = None) -> None:
        """Save where this Replay stands under a name, in place of what was saved under it before.

        Durable when it returns; a kill or an error before that leaves the former set. Takes 4
        bytes per step. `Replay(..., priorities=name)` continues from there.

        Args:
            name: of the set, the one given as `priorities=` by default.

        Raises:
            SchemaError: the name cannot be that of a directory, or there is none.
            StateError: the sampler has no priorities, or the name is that of another store's.
            StoreLockedError: another process is saving under this name.
            StorageError: the system refused to write.

        Example:
            >>> import numpy as np, expstore
            >>> with expstore.Writer("demo.exp") as writer:
            ...     number = writer.append({"action": np.arange(5)})
            >>> store, sampler = expstore.open("demo.exp"), expstore.Prioritized()
            >>> replay = expstore.Replay(store, batch_size=2, sampler=sampler)
            >>> replay.update_priority(steps=[3], priority=[7.0])
            >>> replay.save_priorities("run-3")
            >>> sampler = expstore.Prioritized()
            >>> again = expstore.Replay(store, batch_size=2, sampler=sampler, priorities="run-3")
            >>> sampler.priorities(store.spans, np.arange(5)).tolist()
            [1.0, 1.0, 1.0, 7.0, 1.0]
        """
        check_priorities(self.sampler)
        if name is None and self._priorities is None:
            raise SchemaError(
                'give a name, save_priorities("run-3"), or one to Replay, priorities='
            )
        path = self._sets / check_set_name(self._priorities if name is None else name)
        state = self._state()
        save_state(path, state, [store["store_id"] for store in state["stores"]])

    def _open_priorities(self, name: str) -> None:
        check_priorities(self.sampler)
        path = self._sets / check_set_name(name)
        state = load_state(path)
        if state is None:
            return
        try:
            check_state(state, own := self._state(), SAME)
            if not (grown := has_grown(state, own)):
                check_same_steps(state, own)
            self._continue(state, grown)
            self._check_fit()
        except StateError as error:
            raise StateError(f"priorities saved in {path}: {error}") from error

    def _check_fit(self) -> None:
        """Find out now, and not at the first draw, whether a loaded state has other steps."""
        if self.store.num_steps:
            sampler: Any = self.sampler
            none = np.empty(0, np.int64)
            sampler.update(self._drawn_from(self.store), none, none)

    def state_dict(self) -> dict[str, Any]:
        """Where this Replay stands, for `load_state_dict`.

        Plain numbers, strings, lists and dicts, and for prioritized samplers tensors, so that
        ``torch.load(weights_only=True)`` reads it. Batches that were read ahead are in it as
        what was drawn.
        """
        state: dict[str, Any] = with_tensors(self._state())
        return state

    def _state(self) -> dict[str, Any]:
        with self._lock:
            return {
                "version": STATE_VERSION,
                "seed": self.seed,
                "batch_size": self.batch_size,
                "unit": repr(self.unit),
                "starts": self._starts,
                "sampler": self.sampler.state_dict(),
                "num_draws": self._num_draws,
                "ahead": [drawn.to_state() for drawn, _ in self._ahead],
                "stores": self.store.identities(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; its tensors may be on any device.

        Raises:
            StateError: it belongs to another store, unit, batch size or kind of sampler, or,
                without `follow`, to another commit or view.
        """
        state = with_arrays(state)
        check_state(state, own := self._state(), SAME)
        if not self.follow:
            check_same_steps(state, own)
        self._continue(state, grown=self.follow)

    def _continue(self, state: dict[str, Any], grown: bool) -> None:
        ahead = []
        for entry in state["ahead"]:
            # Of a store that has grown, steps may have left: nobody could read that batch.
            with contextlib.suppress(StepRangeError) if grown else contextlib.nullcontext():
                ahead.append(Drawn.from_state(self.store, entry, state["seed"]))
        with self._lock:
            self.sampler.load_state_dict(state["sampler"])
            self.seed, self._num_draws = state["seed"], state["num_draws"]
            self._drop_ahead()
            self._ahead.extend((drawn, self._submitted(drawn)) for drawn in ahead)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """What it draws, from what, and how."""
        parts = [
            f"{self.store!r}, batch_size={self.batch_size}, unit={self.unit!r}",
            f"sampler={self.sampler!r}, fields={self._fields}, device={str(self.device)!r}",
            f"prefetch={self._prefetch}, seed={self.seed}",
        ]
        return f"Replay({', '.join(parts)})"

    def close(self) -> None:
        """End the threads that read ahead and copy rows; the end of a `with` block calls it.

        Nothing can be sampled afterwards; states and priorities can still be saved.
        """
        self._is_closed = True
        if self._prefetch:
            with self._lock:  # what was read ahead is still the next, for `state_dict`
                for _, reading in self._ahead:
                    if reading is not None:
                        reading.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._reader.gather.threads.close()

    def _next_batch(self) -> Batch:
        if self._is_closed:
            raise StateError("this Replay was closed; make another one to go on sampling")
        with self._lock:  # draws are made one after the other, whoever asks
            if self._lift is not None:
                self._lift.take_back()
            while len(self._ahead) <= self._prefetch:
                drawn = self._draw()
                self._ahead.append((drawn, self._submitted(drawn)))
            drawn, reading = self._ahead.popleft()
        try:
            read = self._read(drawn) if reading is None else reading.result()
            if isinstance(read, Lifted):
                assert self._lift is not None
                read = self._lift.hand_out(read)
            return self._completed(read, drawn)
        except EvictedError:
            raise
        except BaseException:
            with self._lock:  # it was not delivered, so it is still the next one
                self._ahead.appendleft((drawn, None))
            raise

    def _move_in(self) -> None:
        """Load the resident fields; the reader reads the others."""
        if self.follow or isinstance(self.unit, Layer):
            raise SchemaError(
                "resident= holds the rows of one commit as they were recorded: leave follow= and "
                f"it out, or take Step() or Sequence(...) as unit, got {self.unit!r}"
            )
        schema = self.store.snapshots[0].schema
        fields = self._all_fields = resolve(schema, self._fields)
        self._resident = Resident(self.store, fields, self._places, self.device)
        others = [name for name in fields if name not in self._places]
        self._reader = BatchReader(self.store, self.unit, others, self._num_threads)

    def _completed(self, batch: Batch, drawn: Drawn) -> Batch:
        """With the resident fields, in the order of all."""
        if self._resident is None:
            return batch
        positions = plan_in(self.unit, drawn.store, drawn.draw.anchors).positions
        if isinstance(self.unit, Step):
            positions = positions[:, 0]
        found = {**batch.fields, **self._resident.read(positions)}
        parts = (name + part for name in self._all_fields for part in ("", *RAGGED_PARTS))
        return Batch({name: found[name] for name in parts if name in found}, batch.info)

    def _draw(self) -> Drawn:
        if self.follow:
            self.store = self.store.latest()
            if not self._reader.fields:  # the store had no schema yet
                self._reader = BatchReader(self.store, self.unit, self._fields, self._num_threads)
        spans = self._drawn_from(self.store)
        draw = self.sampler.draw(spans, self.batch_size, self.seed)
        anchors = draw.anchors
        if spans is not self.store.spans:
            anchors = self.store.spans.positions_of(spans.steps_at(anchors))
        draw = Draw(anchors, draw.probability, draw.weight, self.seed, self._num_draws)
        self._num_draws += 1
        return Drawn(self.store, draw)

    def _drawn_from(self, store: Store) -> Spans:
        unit = base_of(self.unit)
        shape = getattr(unit, "shape", None)
        if self._starts == "all" or shape is None:
            return store.spans
        if self._population is None or self._population[0] is not store.spans:
            edges = unit.edges_in(store) if isinstance(unit, Sequence) else None
            self._population = store.spans, full_starts(store.spans, shape, edges)
        return self._population[1]

    def _submitted(self, drawn: Drawn) -> Reading | None:
        return None if self._thread is None else self._thread.submit(self._read, drawn)

    def _read(self, drawn: Drawn) -> Batch | Lifted:
        if self._lift is not None:
            slot = self._lift.slot(drawn.draw.number)
            with slot.host.lock:
                memory = self._lift.begin(slot)
                return self._lift.up(self._reader.read(drawn.store, drawn.draw, memory), slot)
        if not self._slots:
            batch = self._reader.read(drawn.store, drawn.draw)
            return batch if self.device.type == "cpu" else batch.to(self.device)
        slot_of = self._slots[drawn.draw.number % len(self._slots)]
        with slot_of.lock:
            slot_of.begin()
            return self._reader.read(drawn.store, drawn.draw, slot_of)

    def _drop_ahead(self) -> None:
        for _, reading in self._ahead:
            if reading is not None:
                reading.cancel()
        self._ahead.clear()


@dataclass(frozen=True)
class Drawn:
    """What was drawn for a batch, and from which commit."""

    store: Store
    draw: Draw

    def to_state(self) -> dict[str, Any]:
        """Step numbers, so that it still holds when the store has grown."""
        steps = self.store.spans.steps_at(self.draw.anchors)
        weight, probability = self.draw.weight, self.draw.probability
        return {
            "steps": steps.tolist(),
            "weight": weight.tolist(),
            "probability": probability.tolist(),
            "number": self.draw.number,
        }

    @staticmethod
    def from_state(store: Store, state: dict[str, Any], seed: int) -> Drawn:
        anchors = store.spans.positions_of(np.array(state["steps"], np.int64))
        probability = np.array(state["probability"], np.float64)
        weight = np.array(state["weight"], np.float32)
        return Drawn(store, Draw(anchors, probability, weight, seed, state["number"]))


def as_numbers(values: Any) -> NDArray[Any]:
    """A tensor, array or list as an array."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64 if values.is_floating_point() else None)
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise SchemaError(f"priorities must be numbers, got {type(values).__name__}")
    return array


def reduced(batch: Batch, priority: NDArray[Any], region: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """One priority for each distinct anchor of a batch."""
    anchors, valid = batch.info.anchor_index.cpu().numpy(), batch.info.validity_mask.cpu().numpy()
    if region not in ("window", "learning"):
        raise SchemaError(f'region must be "window" or "learning", got {region!r}')
    if priority.shape == anchors.shape[:1]:
        first = anchors.reshape(len(anchors), -1)[:, 0]
        return reduce_priorities(first, priority, np.ones(len(first), bool))
    if priority.shape != anchors.shape:
        raise SchemaError(
            f"priorities must have shape {tuple(anchors.shape[:1])} for the anchors or "
            f"{tuple(anchors.shape)} for the records, got {priority.shape}; reduce or reshape them"
        )
    if region == "learning":
        valid = valid & batch.info.learning_mask.cpu().numpy()
    return reduce_priorities(anchors, priority, valid)


def check_loader(store: Any, unit: Any) -> None:
    """Refuse what is no store or no unit now, and not at the first batch."""
    if not isinstance(store, Store):
        raise SchemaError(
            f"store must be what expstore.open returned, got {type(store).__name__} {store!r}"
        )
    if unit is None:
        return
    check_unit(unit)
    base = base_of(unit)
    if isinstance(base, Sequence) and store.fields:
        base.boundaries_in(store)  # an unknown done_key


def check_sampler(sampler: Any) -> None:
    """Refuse what is no sampler now, and not at the first batch."""
    if sampler is not None and (isinstance(sampler, type) or not hasattr(sampler, "draw")):
        raise SchemaError(f"sampler must be Uniform(), Prioritized() or the like, got {sampler!r}")


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
    for saved, ours in zip(state["stores"], own["stores"], strict=False):
        if saved["store_id"] != ours["store_id"]:
            raise StateError(
                f"the state belongs to store {saved['store_id']} at {saved['path']}, this is "
                f"{ours['store_id']} at {ours['path']}; open that store"
            )
    if len(state["stores"]) != len(own["stores"]):
        raise StateError(
            f"the state belongs to {len(state['stores'])} stores, here are {len(own['stores'])}"
        )


def check_same_steps(state: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuse a state from another commit or view: other steps would be drawn."""
    for saved, ours in zip(state["stores"], own["stores"], strict=True):
        if saved["commit"] != ours["commit"]:
            raise StateError(
                f"the state was saved at commit {saved['commit']} of {ours['path']}, this is "
                f"commit {ours['commit']}; to continue with exactly the batch that was next, give "
                f"expstore.open(path, at={saved['commit']}), to go on with what is there now, "
                "follow=True"
            )
        if saved["selection"] != ours["selection"]:
            raise StateError(
                f"the state belongs to another view of {ours['path']}; filter or split it alike"
            )
