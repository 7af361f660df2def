"""All rows of a storage as columns that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from expstore.errors import FieldNotFoundError, ReadOnlyError
from expstore.storage.store import Store


class Columns:
    """All rows of an `ExperienceStorage`, of which a column is read when it is asked for.

    `columns["observation"]` and `columns.get(("next", "reward"))` are tensors (N, ...), groups
    are TensorDicts; `columns[3:7]` are rows. `to_tensordict()` reads everything.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    @property
    def shape(self) -> torch.Size:
        """(N,)."""
        return torch.Size(self._storage.shape)

    batch_size = shape

    def __len__(self) -> int:
        return len(self._storage)

    def __getitem__(self, index: Any) -> Any:
        found = self._storage.get(index)
        # The storage may keep the column, and what is given here is the caller's to change.
        return found.clone() if isinstance(found, torch.Tensor) else found

    def get(self, key: Any, default: Any = None) -> Any:
        """A column, or `default` where there is none."""
        try:
            return self[key]
        except FieldNotFoundError:
            return default

    def __contains__(self, key: Any) -> bool:
        return key in self.keys(include_nested=True)

    def __iter__(self) -> Iterator[Any]:
        return (self._storage.get(position) for position in range(len(self)))

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> Any:
        """As of a TensorDict of the rows."""
        return self._storage.get(slice(0, 1)).keys(include_nested, leaves_only)

    def to_tensordict(self) -> Any:
        """All rows in memory."""
        return self._storage.get(range(len(self)))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        refuse_to_write(self._storage.store)

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, as everything that would write."""
        refuse_to_write(self._storage.store)

    set_at_ = update_ = set_

    def __repr__(self) -> str:
        return f"Columns({self._storage!r})"


def is_key(index: Any) -> bool:
    """Whether an index names a column, and no rows."""
    if isinstance(index, str):
        return True
    return (
        isinstance(index, tuple | list)
        and len(index) > 0
        and all(isinstance(part, str) for part in index)
    )


def refuse_to_write(store: Store) -> NoReturn:
    """Say who writes instead."""
    where = ", ".join(map(str, store.paths))
    raise ReadOnlyError(
        f"{where} is read-only in a TorchRL buffer; append whole episodes with expstore.Writer, "
        "then build the storage anew from store.latest()"
    )
