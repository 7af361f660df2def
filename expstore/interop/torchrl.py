"""A store as the storage of TorchRL's own `ReplayBuffer`: read-only, with TensorDict samples."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.errors import (
    FieldNotFoundError,
    MissingExtraError,
    SchemaError,
    StateError,
    StepRangeError,
    how_to_install,
)
from expstore.interop.columns import Columns, is_key, refuse_to_write
from expstore.loading.gather import Gather
from expstore.loading.replay import STATE_VERSION, check_loader, check_same_steps, check_state
from expstore.loading.tensordicts import AFTER_STEP, FLAGS, Key, keys_of, to_tensordict
from expstore.schema import is_observation
from expstore.storage.store import Store

try:  # at the top: its class has to be there when ours is made
    from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase
    from torchrl.data.replay_buffers.storages import TensorStorage
except ImportError as error:
    raise MissingExtraError(
        f"expstore.interop.torchrl needs torchrl; {how_to_install('torchrl')}"
    ) from error

STATE_FILE = "expstore.json"
BLOCK_STEPS = 1 << 20  # that a whole column is read in at a time
DONE: Key = ("next", "done")


class ExperienceStorage(TensorStorage):  # type: ignore[misc]
    """What `ReplayBuffer(storage=...)` takes; TorchRL's samplers and `Sequence` work on it.

    To TorchRL a store is a full ring of N rows: the positions of its steps, 0 to N - 1 in the
    order of the store, view or union. `index` and `anchor_index` of a sample are positions;
    `steps_at` gives the step numbers. Every episode ends with `("next", "done")`, so the windows
    of TorchRL's `Sequence` are those of `expstore.Sequence`. One difference: to TorchRL a union
    is one ring, in which windows that ignore episodes (`include_reset`, `done_key=None`) run on
    from one store into the next.

    A sample has TorchRL's layout: `observation` (nested as recorded), `action` and what else was
    recorded at the root; `reward` (*S, 1), flags (*S, 1) and the next observation under `"next"`.
    The flags are always there. A store without `terminated` or `truncated` columns gives them
    from the episodes' end reasons: `terminated` where the task ended, else `truncated`.
    `("next", "has_next")` is false where no next observation was recorded; what stands there is
    zero. A ragged field has `values`, filled up with zeros, and `length`. No dtype is changed.

    Nothing is kept in memory but the columns of one number per step that were asked for as such,
    as TorchRL does for end flags: 1 byte a step. `storage[:]`, in which TorchRL's slice samplers
    look these up, reads a column when it is asked for.

    Args:
        store: what `expstore.open` gave, or a view of it; as of its commit.
        fields: names as in `Store.read`; None for all fields and the next observations.
        num_threads: that copy rows; by default the number of cores, at most 4.

    Raises:
        FieldNotFoundError: an unknown field.
        SchemaError: no store, or two fields that TorchRL has one place for.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> from torchrl.data import ReplayBuffer, Sequence
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     number = writer.append({"observation": np.zeros((6, 2)), "reward": np.ones(5)})
        >>> storage = ExperienceStorage(expstore.open(path))
        >>> buffer = ReplayBuffer(storage=storage, batch_size=4, sample_unit=Sequence(length=3))
        >>> sample = buffer.sample()
        >>> sample["observation"].shape, sample["next", "reward"].shape
        (torch.Size([12, 2]), torch.Size([12, 1]))
    """

    _default_checkpointer = StorageCheckpointerBase
    supports_conditional_update = False

    def __init__(
        self, store: Store, fields: Iterable[str] | None = None, num_threads: int | None = None
    ) -> None:
        check_loader(store, None)
        super().__init__(None, max_size=store.num_steps)
        self.initialized = True
        # Where the ring's newest row is: nothing runs over the seam from the last row to row 0.
        self._set_last_cursor(store.num_steps - 1)
        self.store = store
        names = [fields] if isinstance(fields, str) else fields
        names = default_fields(store) if names is None else list(names)
        stored = [flag for flag in FLAGS if flag == "done" or flag in store.fields]
        self._names, self._num_threads = names, num_threads
        self._gather = Gather.of(store, [*names, *stored], num_threads)
        self._keys = keys_of([*self._gather.fields, *FLAGS])
        self._columns: dict[Key, torch.Tensor] = {}  # of one number per step, once asked for

    # -- what TorchRL asks for -------------------------------------------------------------------

    def __len__(self) -> int:
        return self.store.num_steps

    @property
    def shape(self) -> torch.Size:
        """(N,)."""
        return torch.Size([len(self)])

    def get(self, index: Any) -> Any:
        """Rows, as a TensorDict, or a column.

        Args:
            index: positions as an int, slice, list, array or tensor of any shape S, negative
                ones counted from the end; a mask (N,); or a key, as `("next", "done")`. The
                whole storage, `:`, comes as `Columns`.

        Raises:
            StepRangeError: a position that is not there.
            FieldNotFoundError: an unknown key.
        """
        if is_key(index):
            return self._column((index,) if isinstance(index, str) else tuple(index))
        if isinstance(index, slice) and index == slice(None):
            return Columns(self)
        positions = self._positions(index)
        if positions.ndim:
            return self._rows(positions, self._gather)
        return self._rows(positions[None], self._gather)[0]

    def steps_at(self, index: Any) -> torch.Tensor:
        """The store's step numbers of positions, such as a sample's `index`."""
        return torch.from_numpy(np.asarray(self.store.spans.steps_at(self._positions(index))))

    def _positions(self, index: Any) -> NDArray[np.int64]:
        if isinstance(index, tuple):
            if len(index) != 1:
                raise SchemaError(f"a store has one dimension, got {len(index)} coordinates")
            index = index[0]
        if isinstance(index, slice):
            return np.arange(*index.indices(len(self)))
        given = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
        if given.dtype == bool and given.shape == (len(self),):
            return np.flatnonzero(given)
        if given.dtype.kind not in "iu" and given.size:
            raise SchemaError(f"rows are chosen by integers, or a mask (N,), got {given.dtype}")
        positions = given.astype(np.int64)
        outside = (positions < -len(self)) | (positions >= len(self))
        if outside.any():
            raise StepRangeError(
                f"rows must be from 0 to {len(self) - 1}, got {int(positions[outside].flat[0])}"
            )
        return np.where(positions < 0, positions + len(self), positions)

    def _rows(self, positions: NDArray[np.int64], gather: Gather) -> Any:
        """A TensorDict of positions S, with the flags that the store does not hold."""
        spans = self.store.spans
        fields = gather.read(self.store, spans.steps_at(positions))
        if "done" in fields:
            done = fields["done"]
            if "terminated" not in fields:
                by_task = self._ended_by_task[spans.episodes_at(positions)]
                fields["terminated"] = done & torch.from_numpy(by_task)
            if "truncated" not in fields:
                terminated = fields["terminated"].bool()
                done = done.reshape(*done.shape, *[1] * (terminated.ndim - done.ndim))
                fields["truncated"] = done & ~terminated
        return to_tensordict(fields, positions.shape, {})

    @cached_property
    def _ended_by_task(self) -> NDArray[np.bool_]:
        """(E,) whether an episode's end reason is that its task ended."""
        return np.asarray(self.store.episodes["end_reason"] == "terminated")

    def _column(self, key: Key) -> Any:
        """Every row of one tensor, or of a group."""
        if key in self._columns:
            return self._columns[key]
        if key[0] in FLAGS:
            raise FieldNotFoundError(
                f"{key[0]!r} at the root is the flag before a step and never true; the ends are "
                f"at {('next', key[0])}"
            )
        if not (names := self._names_at(key)):
            known = ", ".join(str(place) for place in self._keys.values())
            raise FieldNotFoundError(f"the storage has no {key}; it has {known}")
        column = self._done() if key == DONE else self._read_column(key, names)
        if isinstance(column, torch.Tensor) and column.numel() == len(self):
            self._columns[key] = column
        return column

    def _names_at(self, key: Key) -> list[str]:
        """The fields at a key or under it; a ragged one is a group of its own."""
        ragged = [n for n, field in self._gather.fields.items() if field.ragged]
        if key[-1] in ("values", "length"):
            inside = [name for name in ragged if self._keys[name] == key[:-1]]
            if inside:
                return inside
        return [name for name, place in self._keys.items() if place[: len(key)] == key]

    def _done(self) -> torch.Tensor:
        """(N, 1) from the episode index."""
        spans = self.store.spans
        done = torch.zeros(len(self), 1, dtype=torch.bool)
        done[torch.from_numpy(spans.first + spans.length - 1)] = True
        return done

    def _read_column(self, key: Key, names: list[str]) -> Any:
        if any(name in FLAGS for name in names):  # they are made of each other
            names = [*names, *FLAGS]
        known = self._gather.fields
        fields = {name: known[name] for name in names if name in known}
        gather = Gather(fields, self._gather.threads.num_threads)
        is_ragged = any(field.ragged for field in fields.values())  # blocks differ in width
        block = max(1, len(self) if is_ragged else BLOCK_STEPS)
        parts = [
            self._rows(np.arange(first, min(first + block, len(self))), gather).get(key)
            for first in range(0, max(1, len(self)), block)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # -- saved with the buffer -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Which stores these are, at which commit, and what of them is selected; no data."""
        return {"version": STATE_VERSION, "stores": self.store.identities()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the state was taken on the same steps; there is nothing to load.

        Raises:
            StateError: it belongs to another store, commit or view.
        """
        check_state(state_dict, own := self.state_dict(), ("version",))
        check_same_steps(state_dict, own)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict` into a folder."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE_FILE).write_text(json.dumps(self.state_dict(), indent=2) + "\n")

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Check what `dumps` wrote.

        Raises:
            StateError: it belongs to another store, commit or view, or is not there.
        """
        file = Path(path) / STATE_FILE
        try:
            state = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise StateError(f"{file} cannot be read: {error}; give what dumps() wrote") from error
        self.load_state_dict(state)

    def __reduce__(self) -> Any:
        return ExperienceStorage, (self.store, self._names, self._num_threads)

    # -- nothing is written ----------------------------------------------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Refused: `add`, `extend` and assignments to the buffer end here."""
        refuse_to_write(self.store)

    def _empty(self) -> NoReturn:
        refuse_to_write(self.store)

    def __repr__(self) -> str:
        return f"ExperienceStorage({self.store!r}, fields={list(self._gather.fields)})"


def default_fields(store: Store) -> list[str]:
    """Every field, the next values that TorchRL has a place for, and whether they are there."""
    schema = store.snapshots[0].schema
    following = [
        f"next_{name}"
        for name, field in schema.fields.items()
        if is_observation(name) or (field.has_next and name.split("/")[0] not in AFTER_STEP)
    ]
    return [*schema.fields, *following, *(["has_next"] if following else [])]
