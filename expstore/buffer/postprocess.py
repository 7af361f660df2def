"""What is made of an episode's rows when it ends: N + 1 rows become N transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.buffer.types import mapped
from expstore.errors import SchemaError

# Names that the shift makes, or that belong to the environment: no policy fields.
ENV_KEYS = frozenset(
    (
        *("observation", "last_reward", "last_terminated", "last_truncated", "info"),
        *("next_observation", "reward", "terminated", "truncated"),
    )
)
PYTHON_NUMBERS = frozenset((bool, int, float))


class RawEpisode(dict[str, list[Any]]):
    """An episode's rows: for each key a list of N + 1 values, the first from the reset.

    Attributes:
        env_id: the environment.
        uid: names this episode, also in the store's metadata.
        end_reason: why it ended: "terminated", "truncated", "cut" or "incomplete".
        policy_valid: whether the last row has an answer of the policy, such as a `value`;
            if not, its policy fields are NaN, 0 or false.
    """

    def __init__(
        self,
        columns: Mapping[str, list[Any]],
        env_id: str = "",
        uid: str = "",
        end_reason: str = "cut",
        policy_valid: bool = True,
    ) -> None:
        super().__init__(columns)
        self.env_id, self.uid = env_id, uid
        self.end_reason, self.policy_valid = end_reason, policy_valid

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.values()), []))


def default_postprocess_fn(raw_episode: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Transitions of an episode's rows.

    `last_<key>` becomes `<key>`, taken from rows 1 to N; `observation` becomes itself, rows 0 to
    N - 1, and `next_observation`, rows 1 to N; everything else, such as `action`, comes from rows
    0 to N - 1. Keys with "info" in them are left out. Dicts of values are handled leaf by leaf.

    Args:
        raw_episode: for each key a list of N + 1 values.

    Returns:
        For each key a tensor (N, *shape), or a nested dict of such. Strings, and arrays that
        differ in their first dimension, stay lists of N.

    Raises:
        SchemaError: names a key whose values are no such thing.

    >>> rows = {"observation": [1.0, 2.0, 3.0], "last_reward": [0.0, 0.5, 0.7], "action": [4, 5, 6]}
    >>> {key: values.tolist() for key, values in default_postprocess_fn(rows).items()}
    {'next_observation': [2.0, 3.0], 'observation': [1.0, 2.0], 'reward': [0.5, 0.699...],
     'action': [4, 5]}
    """
    episode: dict[str, Any] = {}
    for key, values in raw_episode.items():
        if "info" in key:
            continue
        rows = stacked(values, key)
        if key.startswith("last_"):
            episode[key.removeprefix("last_")] = sliced(rows, 1, None)
        if key == "observation":
            episode["next_observation"] = sliced(rows, 1, None)
            episode["observation"] = sliced(rows, 0, -1)
        elif key not in ENV_KEYS:
            episode[key] = sliced(rows, 0, -1)
    return episode


def stacked(values: Sequence[Any], key: str) -> Any:
    """Values of rows as one tensor (N + 1, *shape), or as a nested dict of such.

    Python floats become float32, integers int64; arrays and tensors keep their dtype. A plain
    number among arrays, such as a reset's reward 0.0, is spread to their shape.

    Raises:
        SchemaError: names the key whose values no tensor can hold.
    """
    try:
        return _stacked(values, key)
    except (OverflowError, TypeError) as error:  # 2**70, or a dtype that torch has not
        raise SchemaError(
            f"key {key!r} cannot be a tensor: {error}; convert it in a preprocess function"
        ) from error


def _stacked(values: Sequence[Any], key: str) -> Any:
    kinds = set(map(type, values))
    if kinds <= PYTHON_NUMBERS:
        dtype = np.float32 if float in kinds else np.int64 if int in kinds else np.bool_
        if not values:
            raise IndexError(f"key {key!r} has no rows")
        return torch.from_numpy(np.array(values, dtype))
    if any(issubclass(kind, Mapping) for kind in kinds):
        return _stacked_tree(values, key)
    if kinds == {tuple} and not set(map(type, values[-1])) <= PYTHON_NUMBERS:
        return _stacked_tree([{str(i): v for i, v in enumerate(row)} for row in values], key)
    if kinds == {str}:
        return list(values)
    if any(issubclass(kind, torch.Tensor) for kind in kinds):
        return _stacked_tensors(values, key)
    return _stacked_arrays(values, key)


def sliced(rows: Any, start: int | None, stop: int | None) -> Any:
    """Rows of every leaf."""
    if isinstance(rows, dict):
        return {key: sliced(member, start, stop) for key, member in rows.items()}
    return rows[start:stop]


def _stacked_tree(values: Sequence[Any], key: str) -> dict[str, Any]:
    """Dicts of rows as a dict of stacked values; a reset's default is spread over the keys."""
    keys = list(values[-1]) if isinstance(values[-1], Mapping) else []
    first = values[0]
    if not isinstance(first, Mapping) or not first:
        fill = 0.0 if isinstance(first, Mapping) else first
        values = [_like(values[-1], fill), *values[1:]]
    for row, value in enumerate(values):
        if not isinstance(value, Mapping) or set(value) != set(keys):
            found = list(value) if isinstance(value, Mapping) else value
            raise SchemaError(
                f"key {key!r} must have {keys} in every row, got {found!r} in row {row}"
            )
    if not all(isinstance(name, str) for name in keys):
        raise SchemaError(f"the keys under {key!r} must be strings, got {keys}; rename them")
    return {name: stacked([value[name] for value in values], f"{key}/{name}") for name in keys}


def _like(example: Any, fill: Any) -> Any:
    if isinstance(example, Mapping):
        return {key: _like(member, fill) for key, member in example.items()}
    return bool(fill) if isinstance(example, (bool, np.bool_)) else fill


def _stacked_tensors(values: Sequence[Any], key: str) -> Any:
    example = next(value for value in values if isinstance(value, torch.Tensor))
    rows = [
        torch.full_like(example, value)
        if type(value) in PYTHON_NUMBERS
        else torch.as_tensor(value, device=example.device)
        for value in values
    ]
    kinds = {(tuple(row.shape), row.dtype) for row in rows}
    if len(kinds) == 1:
        return torch.stack([row.detach() for row in rows])
    if len({dtype for _, dtype in kinds}) == 1 and _is_ragged([shape for shape, _ in kinds]):
        return rows
    raise SchemaError(f"key {key!r} has rows of different shapes or dtypes, {_some(kinds)}")


def _stacked_arrays(values: Sequence[Any], key: str) -> Any:
    if set(map(type, values)) == {np.ndarray}:  # the usual case, and a quick one
        kinds = {(value.shape, value.dtype) for value in values}
        if len(kinds) == 1 and values[0].dtype.kind in "biuf":
            return torch.from_numpy(np.array(values))
    try:
        rows = [np.asarray(value) for value in values]
    except ValueError as error:
        raise SchemaError(f"key {key!r} cannot be an array: {error}") from error
    bad = next((v for v, row in zip(values, rows, strict=True) if row.dtype.kind not in "biuf"), 0)
    if not isinstance(bad, int):
        raise SchemaError(
            f"key {key!r} has {bad!r} of type {type(bad).__name__}, which cannot be stored; leave "
            "it out in a preprocess function, or convert it"
        )
    declared = [
        r for v, r in zip(values, rows, strict=True) if isinstance(v, np.ndarray | np.generic)
    ]
    dtype = _declared_dtype(rows, declared)
    shape = (declared or rows)[-1].shape
    rows = [
        np.full(shape, value) if type(value) in PYTHON_NUMBERS else row
        for value, row in zip(values, rows, strict=True)
    ]
    if all(row.shape == shape for row in rows):
        return torch.from_numpy(_joined(rows, dtype))
    if _is_ragged([row.shape for row in rows]):
        return [row.astype(dtype) for row in rows]
    raise SchemaError(f"key {key!r} has rows of different shapes, {_some(r.shape for r in rows)}")


def _joined(rows: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    joined = np.empty((len(rows), *rows[0].shape), dtype)
    for at, row in enumerate(rows):
        joined[at] = row
    return joined


def _declared_dtype(rows: list[NDArray[Any]], declared: list[NDArray[Any]]) -> Any:
    """Of those rows that say one; Python's own numbers do not."""
    if declared:
        dtypes = {row.dtype for row in declared}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.result_type(*declared)
        is_float = any(row.dtype.kind == "f" for row in rows)
        return np.float32 if is_float and dtype.kind in "iu" else dtype
    kind = np.result_type(*rows).kind
    return {"f": np.float32, "b": np.bool_}.get(kind, np.int64)


def _is_ragged(shapes: list[Any]) -> bool:
    return all(shapes) and len({tuple(shape[1:]) for shape in shapes}) == 1


def _some(kinds: Any) -> str:
    return " and ".join(map(str, sorted(set(kinds), key=str)[:2]))


def to_device(raw: RawEpisode, device: torch.device) -> RawEpisode:
    """The rows as a custom function sees them: tensors on the device in place of arrays."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.from_numpy(leaf)
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    columns = {key: [mapped(value, moved) for value in values] for key, values in raw.items()}
    return RawEpisode(columns, raw.env_id, raw.uid, raw.end_reason, raw.policy_valid)
