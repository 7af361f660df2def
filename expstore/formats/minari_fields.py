"""What lies under a group of a Minari episode, as fields: nested spaces, text, JPEG images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats import hdf5
from expstore.formats.images import JPEG_MAGIC, decode_jpegs
from expstore.formats.source import Account

Space = Mapping[str, Any]  # as in the metadata, parsed; empty where it is not known
UNKNOWN: Space = {}
SCALARS = {"reward": "rewards", "terminated": "terminations", "truncated": "truncations"}
GROUPS = {"observation": "observations", "action": "actions"}
_INDEX = re.compile(r"_index_(0|[1-9]\d*)")


def check_lengths(data: Mapping[str, Any], num_steps: int, account: Account) -> None:
    """Refuse an episode whose columns do not fit one another.

    Raises:
        SourceError: names the column; it was not written whole.
    """
    has_final = True
    for name, values in data.items():
        allowed = {num_steps}
        if name.split("/")[0] == "observation":
            allowed.add(num_steps + 1)
            has_final &= len(values) == num_steps + 1
        if len(values) not in allowed:
            raise SourceError(
                f"{name} has {len(values)} rows, but there are {num_steps} rewards: it was "
                "not written whole"
            )
    if not has_final:
        account.remark("as many observations as actions, so no final observation", 1)


def end_reason(data: Mapping[str, NDArray[Any]], account: Account) -> str | None:
    """`cut` where no flag is set on the last step, else None; both are counted."""
    ended = {name: bool(data[name][-1]) for name in ("terminated", "truncated")}
    for name, is_set in ended.items():
        account.found(SCALARS[name], is_set)
    if all(ended.values()):
        account.remark("both flags set, so it ended as terminated; both are kept", 1)
    if any(ended.values()):
        return None
    account.remark("no end flag is set, so it is kept as cut", 1)
    return "cut"


def split_infos(fields: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """Infos, which come with observations, as those of each step and of the one after it.

    Raises:
        SourceError: there are not as many as observations, nor as steps.
    """
    split: dict[str, Any] = {}
    for name, values in fields.items():
        if len(values) not in (num_steps, num_steps + 1):
            raise SourceError(f"{name} must have {num_steps + 1} rows, got {len(values)}")
        split[name] = values[:num_steps]
        if len(values) == num_steps + 1:  # that of the reset comes first
            split[f"next_{name}"] = values[1:]
    return split


def fields_of(
    name: str,
    node: Any,
    space: Space,
    account: Account,
    *,
    keep_encoded: bool = False,
    jobs: int = 1,
) -> dict[str, Any]:
    """The fields `name/...` under a group, or the one field of a dataset, by name.

    Text is a list of str, encoded images that are kept are one of bytes, everything else an
    array. What has no rows, or no elements, is reported to the account and left out.
    """
    if hdf5.is_dataset(node):
        if not node.shape or 0 in node.shape[1:]:
            empty = "has no elements" if node.shape else "is one value, not one row per step"
            account.left_out[name] = empty
            return {}
        return {name: _leaf(name, node, space, account, keep_encoded, jobs)}
    is_tuple = _is_tuple(node, space)
    fields: dict[str, Any] = {}
    for key in node:
        called = key.removeprefix("_index_") if is_tuple else key
        below = subspace(space, called)
        inner = f"{name}/{called}"
        fields |= fields_of(inner, node[key], below, account, keep_encoded=keep_encoded, jobs=jobs)
    return fields


def _leaf(
    name: str, dataset: Any, space: Space, account: Account, keep_encoded: bool, jobs: int
) -> Any:
    if hdf5.is_text(dataset):
        return dataset.asstr()[()].tolist()
    shape = box_shape(space)
    if not _is_jpeg(dataset, shape):
        return hdf5.rows_of(dataset)
    return jpegs(name, [row.tobytes() for row in dataset[()]], shape, account, keep_encoded, jobs)


def jpegs(
    name: str,
    frames: list[bytes],
    shape: tuple[int, ...] | None,
    account: Account,
    keep_encoded: bool,
    jobs: int,
) -> Any:
    """Images that Minari encoded: their files, or the pixels in them."""
    if keep_encoded:
        account.remark(f"{name} was stored as JPEG, which had altered it, and was kept so", 1)
        return frames
    account.remark(f"{name} was stored as JPEG, which had altered it, and was decoded", 1)
    return decode_jpegs(frames, name, shape, jobs)


def _is_jpeg(dataset: Any, shape: tuple[int, ...] | None) -> bool:
    """Whether the rows are encoded; no flag in the metadata says so for every version.

    Images that are all equally long are no ragged rows, but a plain array of bytes.
    """
    if hdf5.is_ragged_bytes(dataset):
        return True
    if dataset.dtype != np.uint8 or dataset.ndim != 2 or not dataset.size:
        return False
    if shape is not None:
        return len(shape) > 1
    return bool((dataset[:, :3] == np.frombuffer(JPEG_MAGIC, np.uint8)).all())


def shape_in(space: Space) -> tuple[int, ...] | None:
    """Of a value of a Box, MultiDiscrete or MultiBinary space; None of any other."""
    if space.get("type") == "MultiDiscrete":
        return np.shape(space.get("nvec", ()))
    if space.get("type") == "MultiBinary":
        size = space.get("n")
        return tuple(size) if isinstance(size, list) else (int(size or 0),)
    return box_shape(space)


def box_shape(space: Space) -> tuple[int, ...] | None:
    """Of a Box, where that is known."""
    shape = space.get("shape")
    is_known = space.get("type") == "Box" and isinstance(shape, list)
    return tuple(shape) if is_known and isinstance(shape, list) else None


def _is_tuple(group: Any, space: Space) -> bool:
    """Whether the members are elements: they are called `_index_0`, `_index_1`, ..."""
    if "type" in space:
        return bool(space["type"] == "Tuple")
    return len(group) > 0 and all(_INDEX.fullmatch(key) for key in group)


def subspace(space: Space, called: str) -> Space:
    """Of a member, or an element by its number; `UNKNOWN` where there is none."""
    subspaces = space.get("subspaces")
    found = None
    if isinstance(subspaces, dict):
        found = subspaces.get(called)
    elif isinstance(subspaces, list) and called.isdecimal() and int(called) < len(subspaces):
        found = subspaces[int(called)]
    return found if isinstance(found, dict) else UNKNOWN
