"""Values of a row, which may be nested: copied, filled, taken apart by sub-environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from expstore.errors import SchemaError

IMMUTABLE = frozenset((bool, int, float, str, bytes, type(None)))
SPREAD = ("last_reward", "last_terminated", "last_truncated")  # a reset's are plain defaults


def copied(value: Any) -> Any:
    """The value in memory of its own: environments use theirs again."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "O":
            return np.array([copied(item) for item in value.flat], object).reshape(value.shape)
        return value.copy()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(member) for key, member in value.items()}
    if kind is list or kind is tuple:
        return kind([copied(member) for member in value])
    return value


def filled_like(value: Any) -> Any:
    """What stands where there is no value: NaN, 0 or false of the same shape and dtype."""
    if isinstance(value, Mapping):
        return {key: filled_like(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([filled_like(member) for member in value])
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, float("nan") if value.is_floating_point() else 0)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        array = np.full_like(value, np.nan if value.dtype.kind == "f" else 0)
        return array if isinstance(value, np.ndarray) else array[()]
    if isinstance(value, (bool, int, float)):
        return type(value)("nan") if type(value) is float else type(value)(0)
    return value


def spread_defaults(columns: dict[str, list[Any]]) -> None:
    """Put one reward and flag for each sub-environment in the place of a reset's plain ones."""
    for key in SPREAD:
        values = columns.get(key, [None])
        example = values[-1]
        if not isinstance(example, np.ndarray | torch.Tensor) or not example.ndim:
            continue
        for at, value in enumerate(values):
            if _is_plain(value) and isinstance(example, torch.Tensor):
                values[at] = torch.full_like(example, value)
            elif _is_plain(value):
                values[at] = np.full_like(example, value)


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float) or getattr(value, "ndim", 1) == 0


def rows_of(row: Mapping[str, Any], num_envs: int, env_id: str) -> list[dict[str, Any]]:
    """The row of a vector environment as one row for each sub-environment.

    Raises:
        SchemaError: a value, other than those of `info`, has not one entry for each.
    """
    taken = {
        key: _parts(value, num_envs, key, env_id, is_strict="info" not in key)
        for key, value in row.items()
    }
    return [{key: parts[at] for key, parts in taken.items()} for at in range(num_envs)]


def _parts(value: Any, num_envs: int, key: str, env_id: str, *, is_strict: bool) -> list[Any]:
    if isinstance(value, Mapping):
        members = {
            name: _parts(member, num_envs, f"{key}/{name}", env_id, is_strict=is_strict)
            for name, member in value.items()
        }
        return [{name: parts[at] for name, parts in members.items()} for at in range(num_envs)]
    is_default = key in SPREAD and _is_plain(value)
    if is_default or (not is_strict and not _has_rows(value, num_envs)):
        return [value] * num_envs
    if isinstance(value, tuple) and not _has_rows(value, num_envs):
        members_of = [_parts(m, num_envs, key, env_id, is_strict=is_strict) for m in value]
        return [tuple(parts[at] for parts in members_of) for at in range(num_envs)]
    if not _has_rows(value, num_envs):
        found = tuple(value.shape) if hasattr(value, "shape") else repr(value)
        raise SchemaError(
            f"{key!r} of env {env_id!r} must have {num_envs} entries, one for each "
            f"sub-environment, got {found}; make it a batch, or put it into info"
        )
    return [value[at] for at in range(num_envs)]


def _has_rows(value: Any, num_envs: int) -> bool:
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.ndim > 0 and len(value) == num_envs
    return isinstance(value, (list, tuple)) and len(value) == num_envs


def is_set(flag: Any, env_id: str) -> bool:
    """Whether a flag is true; of several agents, whether every one's is.

    Raises:
        SchemaError: it has several entries, but the environment is not known as a vector one.
    """
    if flag is False or flag is True:
        return flag
    if isinstance(flag, Mapping):
        if "__all__" in flag:
            return is_set(flag["__all__"], env_id)
        return bool(flag) and all(is_set(member, env_id) for member in flag.values())
    size = flag.numel() if isinstance(flag, torch.Tensor) else np.size(flag)
    if size != 1:
        raise SchemaError(
            f"the flags of env {env_id!r} have {size} entries; give its num_envs: "
            f"init(env_meta_list=[EnvMeta({env_id!r}, num_envs={size})])"
        )
    return bool(flag) if isinstance(flag, torch.Tensor) else bool(np.asarray(flag).reshape(()))


def has_ended(row: Mapping[str, Any], env_id: str) -> str | None:
    """Which end a row's flags tell, if any: "terminated" or "truncated"."""
    terminated, truncated = row.get("last_terminated", False), row.get("last_truncated", False)
    if terminated is False and truncated is False:
        return None
    if is_set(terminated, env_id):
        return "terminated"
    if is_set(truncated, env_id):
        return "truncated"
    if isinstance(terminated, Mapping) and isinstance(truncated, Mapping):
        agents = {**terminated, **truncated}
        ended = [
            is_set(terminated.get(a, False), env_id) or is_set(truncated.get(a, False), env_id)
            for a in agents
        ]
        if ended and all(ended):
            return "truncated"
    return None
