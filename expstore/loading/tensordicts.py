"""Tensors by field name as a TensorDict in TorchRL's layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from expstore.errors import MissingExtraError, SchemaError, how_to_install

FLAGS = ("done", "terminated", "truncated")
AFTER_STEP = ("reward", *FLAGS, "has_next")  # TorchRL keeps what comes after a step under "next"

Key = tuple[str, ...]


def key_of(name: str) -> Key:
    """Where TorchRL looks for a field.

    >>> key_of("observation/image"), key_of("next_observation"), key_of("reward")
    (('observation', 'image'), ('next', 'observation'), ('next', 'reward'))
    """
    after = name.startswith("next_")
    parts = tuple(name.removeprefix("next_").split("/"))
    return ("next", *parts) if after or parts[0] in AFTER_STEP else parts


def keys_of(names: Iterable[str]) -> dict[str, Key]:
    """The place of each field.

    Raises:
        SchemaError: two fields have the same one, as `reward` and `next_reward` do.
    """
    places: dict[Key, str] = {}
    for name in names:
        other = places.setdefault(key_of(name), name)
        if other != name:
            raise SchemaError(
                f"fields {other!r} and {name!r} both belong at {key_of(name)} of a TensorDict; "
                "leave one of them out of fields="
            )
    return {name: key for key, name in places.items()}


def to_tensordict(
    fields: Mapping[str, torch.Tensor], shape: Iterable[int], extra: Mapping[str, torch.Tensor]
) -> Any:
    """A TensorDict of batch size S without copies, as TorchRL's environments give it.

    Args:
        fields: tensors (*S, ...) by full name. Rewards and flags of one number become
            (*S, 1). Each flag lies under `"next"`, and at the root as it was before the
            step: false, since nothing is recorded after an episode's end.
        shape: S.
        extra: further tensors (*S, ...) for the root.

    Raises:
        MissingExtraError: tensordict is not installed.
        SchemaError: two tensors belong at the same place.
    """
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise MissingExtraError(
            f"a TensorDict needs tensordict; {how_to_install('torchrl')}"
        ) from error
    shape = torch.Size(shape)
    nested: dict[str, Any] = {}
    for name, key in keys_of(fields).items():
        value = fields[name]
        if key[0] == "next" and key[1] in AFTER_STEP and value.shape == shape:
            value = value.unsqueeze(-1)
        inner = nested
        for part in key[:-1]:
            inner = inner.setdefault(part, {})
        inner[key[-1]] = value
    for flag in FLAGS:
        if isinstance(value := nested.get("next", {}).get(flag), torch.Tensor):
            nested[flag] = torch.zeros_like(value)
    for name, value in extra.items():
        if name in nested:
            raise SchemaError(
                f"field {name!r} and info {name!r} both belong at the root of a TensorDict; "
                "leave the field out of fields="
            )
        nested[name] = value
    device = next(iter([*fields.values(), *extra.values()]), torch.empty(0)).device
    return TensorDict(nested, batch_size=shape, device=device)
