"""Columns of finished episodes between the names that functions use and those of the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from expstore.errors import SchemaError
from expstore.schema import RESERVED

GIVEN = "given."  # stands before keys that are names of the store's own
NEXT = "next_"
FLAG_NAMES = ("terminated", "truncated", "last_terminated", "last_truncated", "done")


def stored_key(key: str, keys: Iterable[str]) -> str:
    """The name under which a key's column is stored.

    >>> stored_key("done", ["done"]), stored_key("next_observation", ["observation"])
    ('given.done', 'next_observation')
    """
    is_next = key.startswith(NEXT) and key.removeprefix(NEXT) not in keys
    if key.split("/")[0] in RESERVED or is_next or key.startswith(GIVEN):
        return GIVEN + key
    return key


def given_key(name: str) -> str:
    """The inverse of `stored_key`, of a name and of what lies under it."""
    return name.removeprefix(GIVEN)


def to_stored(columns: Any) -> dict[str, Any]:
    """Columns as the store takes them.

    Raises:
        SchemaError: they are no mapping of names, or there are none.
    """
    if not isinstance(columns, Mapping) or not columns:
        raise SchemaError(
            f"a finished episode must be a mapping of at least one column, got {columns!r}"
        )
    for key in columns:
        if not isinstance(key, str):
            raise SchemaError(f"columns must have names, got {key!r}")
    return {stored_key(key, columns): value for key, value in columns.items()}


def one_environment(columns: Mapping[str, Any], at: int, num_envs: int, key: str = "") -> Any:
    """The columns (T, ...) of one of several environments (T, num_envs, ...)."""
    own: dict[str, Any] = {}
    for name, value in columns.items():
        where = f"{key}/{name}" if key else name
        if isinstance(value, Mapping):
            own[name] = one_environment(value, at, num_envs, where)
            continue
        if not isinstance(value, torch.Tensor):
            value = np.asarray(value)
        if value.ndim < 2 or value.shape[1] != num_envs:
            raise SchemaError(
                f"column {where!r} must have shape (T, {num_envs}, ...), one entry for each "
                f"environment, got {tuple(value.shape)}"
            )
        own[name] = value[:, at]
    return own


def split_at_flags(columns: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Transitions of several episodes, one after the other, as one mapping for each."""
    flags = [
        np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
        for name in FLAG_NAMES
        if not isinstance(value := columns.get(name, {}), Mapping)
    ]
    flags = [np.asarray(flag.reshape(len(flag), -1).any(axis=1)) for flag in flags if flag.ndim]
    if not flags or len({len(flag) for flag in flags}) > 1:
        return [columns]
    ends = np.flatnonzero(np.any(flags, axis=0)).tolist()
    last = len(flags[0]) - 1
    if not [end for end in ends if end < last]:
        return [columns]
    parts: list[Mapping[str, Any]] = []
    start = 0
    for end in [*(end for end in ends if end < last), last]:
        parts.append(_rows(columns, start, None if end == last else end + 1))
        start = end + 1
    return parts


def _rows(columns: Mapping[str, Any], start: int, stop: int | None) -> dict[str, Any]:
    return {
        key: _rows(value, start, stop) if isinstance(value, Mapping) else value[start:stop]
        for key, value in columns.items()
    }


def end_of(columns: Mapping[str, Any], reason: str) -> str | None:
    """The `end_reason` to give along: the columns' own flags come first."""
    flags = {name: columns[name] for name in ("terminated", "truncated") if name in columns}
    plain = {name: flag for name, flag in flags.items() if not isinstance(flag, Mapping)}
    if any(bool(np.any(np.asarray(_host(flag)[-1:]))) for flag in plain.values()):
        return None
    return "cut" if reason in plain else reason


def _host(flag: Any) -> Any:
    return flag.detach().cpu() if isinstance(flag, torch.Tensor) else flag
