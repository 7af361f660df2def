"""From host to device: a ring of slots, copied by a stream of their own while others compute."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.errors import SchemaError
from expstore.loading.batch import Batch, Entry, Info


class Slot:
    """Host memory of one batch, used again by a later one: a buffer for each read of it."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffers: list[torch.Tensor] = []
        self._num_taken = 0
        self.lock = threading.Lock()  # held while a batch is read into it

    def begin(self) -> None:
        """All that was taken may be overwritten."""
        self._num_taken = 0

    def empty(self, num_bytes: int) -> NDArray[np.uint8]:
        """The next buffer of this batch."""
        at = self._num_taken
        self._num_taken += 1
        if at == len(self._buffers) or len(self._buffers[at]) != num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._buffers[at:] = [memory]
        array: NDArray[np.uint8] = self._buffers[at].numpy()
        return array

    @property
    def taken(self) -> list[torch.Tensor]:
        """The buffers of this batch."""
        return self._buffers[: self._num_taken]


class Streams(Protocol):
    """The device's queues: one of copies, and the one in which the caller of now computes."""

    is_pinned: bool  # whether host memory has to be page-locked

    def copy(
        self, source: torch.Tensor, target: torch.Tensor | None, after: Any | None
    ) -> tuple[torch.Tensor, Any]:
        """Begin to copy, once `after` has happened; the copy, and the event of its end."""
        ...

    def settle(self, event: Any) -> None:
        """Have the calling thread wait for an event."""
        ...

    def wait(self, event: Any) -> None:
        """Have what the caller computes from now on wait for an event; the caller goes on."""
        ...

    def mark(self) -> Any:
        """The event of the end of all that the caller computes so far."""
        ...

    def keep(self, tensor: torch.Tensor) -> None:
        """The caller computes with memory of the queue of copies, also after it let go of it."""
        ...


class CudaStreams:
    """Streams and events of a CUDA device."""

    is_pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(
        self, source: torch.Tensor, target: torch.Tensor | None, after: Any | None
    ) -> tuple[torch.Tensor, Any]:
        """See `Streams.copy`."""
        with torch.cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)
            if target is None:
                target = torch.empty_like(source, device=self._device)
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._copies)
        return target, event

    def settle(self, event: Any) -> None:
        """See `Streams.settle`."""
        event.synchronize()

    def wait(self, event: Any) -> None:
        """See `Streams.wait`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def mark(self) -> Any:
        """See `Streams.mark`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def keep(self, tensor: torch.Tensor) -> None:
        """See `Streams.keep`."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


@dataclass
class Lifting:
    """What a slot's batches have on the device, and when."""

    host: Slot
    device: list[torch.Tensor] = field(default_factory=list)  # with `reuse`: one for each buffer
    copied: Any | None = None  # the end of the last copy out of `host`
    released: Any | None = None  # the end of what the caller did with `device`


@dataclass(frozen=True)
class Lifted:
    """A batch whose copies have begun."""

    batch: Batch
    slot: Lifting
    tensors: tuple[torch.Tensor, ...]  # on the device, that fields lie in
    copied: Any | None


class Lift:
    """Moves batches to a device, each through the slot of its number.

    A slot's host memory is written again only after the copies out of it, and its device memory
    only after what the caller computed with it: only the first ever waits in a thread.

    Args:
        num_slots: batches that are read, copied or used at the same time.
        reuse: device memory is a slot's as well; a batch lives until the next one.
    """

    def __init__(
        self, device: torch.device, streams: Streams, num_slots: int, *, reuse: bool
    ) -> None:
        self._device = device
        self._streams = streams
        self._reuse = reuse
        self._slots = [Lifting(Slot(pinned=streams.is_pinned)) for _ in range(num_slots)]
        self._used: Lifting | None = None  # the slot that the caller has, with `reuse`

    def slot(self, number: int) -> Lifting:
        """That of a batch; its lock is held from `begin` until `up` has returned."""
        return self._slots[number % len(self._slots)]

    def begin(self, slot: Lifting) -> Slot:
        """Memory to read into, from which nothing is copied any more."""
        if slot.copied is not None:
            self._streams.settle(slot.copied)
        slot.host.begin()
        return slot.host

    def up(self, batch: Batch, slot: Lifting) -> Lifted:
        """Begin to copy a batch that was read into a slot."""
        buffers, moved, copied = slot.host.taken, [], None
        for at, buffer in enumerate(buffers):
            target = slot.device[at] if self._reuse and at < len(slot.device) else None
            if target is not None and len(target) != len(buffer):
                target = None
            after = slot.released if target is not None else None
            tensor, copied = self._streams.copy(buffer, target, after)
            moved.append(tensor)
        if self._reuse:
            slot.device = list(moved)
        fields: dict[str, torch.Tensor] = {}
        for name, tensor in batch.fields.items():
            found = _within(tensor, buffers, moved)
            if found is None and tensor.device != self._device:  # made by a unit, or ragged
                found, copied = self._streams.copy(tensor, None, None)
                moved.append(found)
            fields[name] = tensor if found is None else found
        slot.copied = copied
        entries: dict[str, Entry] = {
            name: partial(_on_device, batch.info, name, self._device) for name in batch.info
        }
        return Lifted(Batch(fields, Info(entries)), slot, tuple(moved), copied)

    def hand_out(self, lifted: Lifted) -> Batch:
        """Give a batch to the caller, whose next kernels wait for its copies."""
        if lifted.copied is not None:
            self._streams.wait(lifted.copied)
        if self._reuse:
            self._used = lifted.slot
        else:
            for tensor in lifted.tensors:
                self._streams.keep(tensor)
        return lifted.batch

    def take_back(self) -> None:
        """The caller has begun all that it does with the batch it had."""
        if self._used is not None:
            self._used.released = self._streams.mark()
            self._used = None


def _within(
    tensor: torch.Tensor, buffers: list[torch.Tensor], moved: list[torch.Tensor]
) -> torch.Tensor | None:
    """The part of a copied buffer that a tensor on the host is of the buffer."""
    for buffer, copy in zip(buffers, moved, strict=False):
        offset = tensor.data_ptr() - buffer.data_ptr()
        if 0 <= offset < max(len(buffer), 1) and tensor.numel() and tensor.is_cpu:
            empty = torch.empty(0, dtype=tensor.dtype, device=copy.device)
            at = offset // tensor.element_size()
            found: torch.Tensor = empty.set_(
                copy.untyped_storage(), at, tensor.shape, tensor.stride()
            )
            return found
    return None


def _on_device(info: Info, name: str, device: torch.device) -> torch.Tensor:
    return info[name].to(device, non_blocking=True)


def device_of(device: str | torch.device) -> torch.device:
    """A device that is there.

    Raises:
        SchemaError: torch knows no such device, or it is CUDA's and there is none.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(f"device {device!r} is none that torch knows: {error}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise SchemaError(
            f"device {str(found)!r} needs CUDA, and torch {torch.__version__} finds no CUDA device "
            'here; give device="cpu", or install a torch build and a driver that find it'
        )
    return found


def streams_of(device: torch.device) -> Streams | None:
    """The queues of a device; None where batches are moved without any."""
    return CudaStreams(device) if device.type == "cuda" else None
