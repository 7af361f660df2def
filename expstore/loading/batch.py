"""Batch: tensors by field, nested as recorded, and what is known about each of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from expstore.errors import FieldNotFoundError
from expstore.loading.tensordicts import to_tensordict
from expstore.schema import unknown_field

# A tensor, what becomes one, or what makes what becomes one.
Entry = torch.Tensor | NDArray[Any] | Callable[[], NDArray[Any] | torch.Tensor]


class Info(Mapping[str, torch.Tensor]):
    """What describes the rows of a batch; entries are attributes, too.

    Shapes are (B, W) for windows and (B,) for single steps. An entry becomes a tensor when it
    is first asked for: most training loops need few of them.

    Attributes:
        index: int64, step number of each row.
        anchor_index: int64, step number of the anchor the row belongs to.
        validity_mask: bool, the row is a step of the window; others repeat the nearest one. False
            also where a unit can make nothing of a step: see `NStep` and `Hindsight`.
        learning_mask: bool, the row lies in the learning region; padded rows, too.
        sequence_id: int64, 0 to B - 1.
        step_in_sequence: int64, 0 to W - 1.
        weight: float32, importance weight of the anchor; 1 for uniform sampling.
        discount: float32, of the next value in the target of an `NStep`; 0 after a termination.
        num_steps: int64, steps of the return of an `NStep`.
        relabeled: bool, the row has another goal, by `Hindsight`.
    """

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self._entries = dict(entries or {})

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        if not isinstance(entry, torch.Tensor):
            made = entry() if callable(entry) else entry
            entry = made if isinstance(made, torch.Tensor) else torch.from_numpy(made)
            self._entries[name] = entry
        return entry

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_") or name not in self._entries:
            known = ", ".join(self.__dict__.get("_entries", ()))
            raise AttributeError(f"a batch has no info {name!r}; it has {known}")
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Info({', '.join(self)})"

    def __reduce__(self) -> Any:
        return Info, (dict(self),)


class Batch(Mapping[str, Any]):
    """One batch: `batch["observation"]` is a tensor (B, W, *shape), or (B, *shape) for steps.

    A ragged field is a nested one with `values` (B, W, longest, *shape), filled up with zeros,
    and `length` (B, W). Nested fields are read as `batch["observation"]["image"]` and
    `batch["observation/image"]`. The tensors are the caller's to keep and to change.

    >>> batch = Batch({"a/b": torch.zeros(2, 3), "c": torch.ones(2)}, Info())
    >>> batch["a"]["b"].shape, list(batch)
    (torch.Size([2, 3]), ['a', 'c'])
    """

    def __init__(self, fields: dict[str, torch.Tensor], info: Info) -> None:
        self.fields = fields  # by full name
        self.info = info

    def __getitem__(self, name: str) -> Any:
        if name in self.fields:
            return self.fields[name]
        prefix = f"{name}/"
        members = {
            full.removeprefix(prefix): tensor
            for full, tensor in self.fields.items()
            if full.startswith(prefix)
        }
        if not members:
            raise FieldNotFoundError(unknown_field(name, self.fields))
        return Batch(members, self.info)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.split("/")[0] for name in self.fields))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def batch_size(self) -> int:
        """B, the number of anchors."""
        first = next(iter(self.fields.values()), None)
        return len(next(iter(self.info.values()), ()) if first is None else first)

    def text(self, name: str) -> list[Any]:
        """A text field as strings, nested like its steps: (B, W) or (B,).

        >>> word = torch.tensor([[104, 105, 0]], dtype=torch.uint8)
        >>> batch = Batch({"task/values": word, "task/length": torch.tensor([2])}, Info())
        >>> batch.text("task")
        ['hi']
        """
        values, lengths = self.fields[f"{name}/values"], self.fields[f"{name}/length"]
        flat = values.reshape(lengths.numel(), values.shape[-1]).cpu().numpy()
        sizes = lengths.reshape(-1).tolist()
        words: list[Any] = [row[:n].tobytes().decode() for row, n in zip(flat, sizes, strict=True)]
        for size in reversed(lengths.shape[1:]):
            words = [words[i : i + size] for i in range(0, len(words), size)]
        return words

    def to_tensordict(self) -> Any:
        """A TensorDict of batch size (B, W), or (B,) for single steps, without copies.

        The layout is TorchRL's: `reward`, flags and `next_<field>` lie under `"next"`, rewards
        and flags of one number as (B, W, 1); each flag also at the root, where it is false.
        Entries of `info` lie at the root, as `TensorDictReplayBuffer` puts them; `weight` is
        called `priority_weight` there. Losses that need `("next", "done")` or the next
        observation find them if `fields` of the batch had `done` and `next_observation`.

        Raises:
            MissingExtraError: tensordict is not installed.
            SchemaError: two tensors belong at the same place.

        >>> batch = Batch({"reward": torch.ones(4)}, Info({"weight": torch.ones(4)}))
        >>> batch.to_tensordict()["next", "reward"].shape
        torch.Size([4, 1])
        """
        index = self.info.get("index")
        shape = (self.batch_size,) if index is None else index.shape
        renamed = {"weight": "priority_weight"}
        info = {renamed.get(name, name): tensor for name, tensor in self.info.items()}
        return to_tensordict(self.fields, shape, info)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """A batch of what `function` makes of each tensor, info included."""
        return Batch(
            {name: function(tensor) for name, tensor in self.fields.items()},
            Info({name: function(tensor) for name, tensor in self.info.items()}),
        )

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; a DataLoader calls it."""
        return self.map(lambda tensor: tensor.pin_memory())

    def __repr__(self) -> str:
        fields = ", ".join(f"{n}: {tuple(t.shape)} {t.dtype}" for n, t in self.fields.items())
        return f"Batch({fields})"
