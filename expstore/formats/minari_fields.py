"""What lies under a group of a Minari episode, as fields: nested spaces, text, JPEG images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from expstore.formats import hdf5
from expstore.formats.images import JPEG_MAGIC, decode_jpegs
from expstore.formats.source import Account

Space = Mapping[str, Any]  # as in the metadata, parsed; empty where it is not known
UNKNOWN: Space = {}
_INDEX = re.compile(r"_index_(0|[1-9]\d*)")


def fields_of(name: str, node: Any, space: Space, account: Account) -> dict[str, Any]:
    """The fields `name/...` under a group, or the one field of a dataset, by name.

    Text is a list of str, everything else an array. What has no rows, or no elements, is
    reported to the account and left out.
    """
    if hdf5.is_dataset(node):
        if not node.shape or 0 in node.shape[1:]:
            empty = "has no elements" if node.shape else "is one value, not one row per step"
            account.left_out[name] = empty
            return {}
        return {name: _leaf(name, node, space, account)}
    is_tuple = _is_tuple(node, space)
    fields: dict[str, Any] = {}
    for key in node:
        called = key.removeprefix("_index_") if is_tuple else key
        below = _subspace(space, called)
        fields |= fields_of(f"{name}/{called}", node[key], below, account)
    return fields


def _leaf(name: str, dataset: Any, space: Space, account: Account) -> Any:
    if hdf5.is_text(dataset):
        return dataset.asstr()[()].tolist()
    shape = _box_shape(space)
    if not _is_jpeg(dataset, shape):
        return dataset[()]
    account.remark(f"{name} was stored as JPEG, which had altered it, and was decoded", 1)
    return decode_jpegs(dataset[()], name, shape)


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


def _box_shape(space: Space) -> tuple[int, ...] | None:
    shape = space.get("shape")
    is_known = space.get("type") == "Box" and isinstance(shape, list)
    return tuple(shape) if is_known and isinstance(shape, list) else None


def _is_tuple(group: Any, space: Space) -> bool:
    """Whether the members are elements: they are called `_index_0`, `_index_1`, ..."""
    if "type" in space:
        return bool(space["type"] == "Tuple")
    return len(group) > 0 and all(_INDEX.fullmatch(key) for key in group)


def _subspace(space: Space, called: str) -> Space:
    subspaces = space.get("subspaces")
    found = None
    if isinstance(subspaces, dict):
        found = subspaces.get(called)
    elif isinstance(subspaces, list) and called.isdecimal() and int(called) < len(subspaces):
        found = subspaces[int(called)]
    return found if isinstance(found, dict) else UNKNOWN
