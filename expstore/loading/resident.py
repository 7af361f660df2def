"""Fields that live in memory as a whole, on the device or page-locked: a batch is one lookup."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.errors import CapacityError, SchemaError
from expstore.loading.gather import as_tensor
from expstore.schema import Field
from expstore.storage.reading import resolve
from expstore.storage.store import Store

BLOCK_BYTES = 64 << 20  # read at a time while loading
PLACES = ("device", "pinned")
WORDS = ((8, np.int64), (4, np.int32), (2, np.int16), (1, np.uint8))


class Resident:
    """All rows of some fields of a store or view, by position.

    Args:
        places: of each field "device" or "pinned"; those on the host are page-locked where the
            device is a CUDA one.

    Raises:
        SchemaError: a ragged field.
        CapacityError: they do not fit into what is free; nothing was loaded.
    """

    def __init__(
        self, store: Store, fields: dict[str, Field], places: dict[str, str], device: torch.device
    ) -> None:
        self._fields = {name: fields[name] for name in places}
        self._device = device
        self._is_pinned = device.type == "cuda"
        for name, field in self._fields.items():
            if field.ragged:
                raise SchemaError(f"field {name!r} is ragged, so it cannot be resident; leave it")
        self._check_room(store.num_steps, places)
        self._rows = {name: self._loaded(store, name, place) for name, place in places.items()}

    def read(self, positions: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """New tensors (*S, *shape) on the device, of the rows at positions S of the selection."""
        on_host = torch.from_numpy(np.ascontiguousarray(positions).reshape(-1))
        on_device: torch.Tensor | None = None
        out = {}
        for name, rows in self._rows.items():
            if rows.device.type == "cpu":
                shape = (len(on_host), rows.shape[1])
                taken = torch.empty(shape, dtype=rows.dtype, pin_memory=self._is_pinned)
                torch.index_select(rows, 0, on_host, out=taken)
                taken = taken.to(self._device, non_blocking=True)
            else:
                on_device = on_host.to(rows.device) if on_device is None else on_device
                taken = torch.index_select(rows, 0, on_device)
            out[name] = _as_field(taken, self._fields[name], positions.shape)
        return out

    def _check_room(self, num_steps: int, places: dict[str, str]) -> None:
        wanted = dict.fromkeys(PLACES, 0)
        for name, place in places.items():
            wanted[place] += num_steps * self._fields[name].step_bytes
        is_cuda = self._device.type == "cuda"
        on_host = wanted["pinned"] + (0 if is_cuda else wanted["device"])
        rooms = [("the host", on_host, _free_on_host())]
        if is_cuda:
            rooms.append((str(self._device), wanted["device"], torch.cuda.mem_get_info()[0]))
        for where, num_bytes, free in rooms:
            if num_bytes > free:
                raise CapacityError(
                    f"resident fields need {num_bytes} bytes on {where}, {free} are free; name "
                    'fewer of them: resident={"reward": "device"}'
                )

    def _loaded(self, store: Store, name: str, place: str) -> torch.Tensor:
        """(N, words) of a field's rows."""
        field, num_steps = self._fields[name], store.num_steps
        size, word = next((s, w) for s, w in WORDS if field.step_bytes % s == 0)
        target = self._device if place == "device" else torch.device("cpu")
        rows = torch.empty(
            (num_steps, field.step_bytes // size),
            dtype=torch.from_numpy(np.empty(0, word)).dtype,
            device=target,
            pin_memory=self._is_pinned and target.type == "cpu",
        )
        block = max(1, BLOCK_BYTES // max(field.step_bytes, 1))
        for first in range(0, num_steps, block):
            at = np.arange(first, min(first + block, num_steps))
            part = np.empty((len(at), *field.shape), field.stored_dtype)
            store.read_into(store.spans.steps_at(at), {name: part})
            words = part.reshape(len(at), -1).view(np.uint8).view(word)
            rows[first : first + len(at)] = torch.from_numpy(words)
        return rows


def places_of(store: Store, fields: Any, resident: Any) -> dict[str, str]:
    """Of each field that is to be resident, where.

    Raises:
        SchemaError: no such place.
        FieldNotFoundError: an unknown field.
    """
    if resident is None:
        return {}
    schema = store.snapshots[0].schema
    wanted = resolve(schema, fields)
    given = resident if isinstance(resident, Mapping) else dict.fromkeys(wanted, resident)
    places: dict[str, str] = {}
    for name, place in given.items():
        if place not in PLACES:
            raise SchemaError(f'resident must be "device" or "pinned", got {place!r} for {name!r}')
        for full in resolve(schema, [name]):
            if full not in wanted:
                raise SchemaError(f"resident field {full!r} is not among the batch's fields")
            places[full] = place
    return places


def _as_field(words: torch.Tensor, field: Field, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows (n, words) as the field's own values (*S, *shape)."""
    example = as_tensor(np.empty(0, field.stored_dtype), field)
    return words.view(torch.uint8).view(example.dtype).reshape(*shape, *field.shape)


def _free_on_host() -> int:
    if not hasattr(os, "sysconf"):
        return 2**62
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
