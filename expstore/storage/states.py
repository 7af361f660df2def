"""States of samplers as files can hold them: a JSON document, and arrays by their place in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import StateError

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]*")  # what a place is made of: a name in Zarr, and a path


def taken_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The state as JSON with null where arrays stand, and the arrays, little endian.

    A place is the keys and list positions that lead to the array, joined by `/`.

    Raises:
        StateError: something in it is no number, string, list, dict or array of numbers.

    >>> document, arrays = taken_apart({"seed": 7, "parts": [{"raw": np.ones(2)}]})
    >>> document, list(arrays)
    ({'seed': 7, 'parts': [{'raw': None}]}, ['parts/0/raw'])
    """
    arrays: dict[str, NDArray[Any]] = {}
    document = {key: _stored(value, _below("", key), arrays) for key, value in state.items()}
    return document, arrays


def put_together(document: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The inverse of `taken_apart`, into `document` itself.

    >>> put_together({"parts": [{"raw": None}]}, {"parts/0/raw": np.zeros(1)})
    {'parts': [{'raw': array([0.])}]}
    """
    for place, array in arrays.items():
        *parents, last = place.split("/")
        here: Any = document
        for key in parents:
            here = here[int(key) if isinstance(here, list) else key]
        here[int(last) if isinstance(here, list) else last] = array
    return document


def _stored(value: Any, place: str, arrays: dict[str, NDArray[Any]]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key: _stored(v, _below(place, key), arrays) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_stored(v, _below(place, str(at)), arrays) for at, v in enumerate(value)]
    if isinstance(value, np.ndarray) and _is_storable(value):
        arrays[place] = value.astype(value.dtype.newbyteorder("<"), copy=False)
        return None
    raise StateError(
        f"the state's {place} is of type {type(value).__name__}, which cannot be saved; state_dict "
        "must give numbers, strings, lists, dicts with names as keys, and arrays of numbers"
    )


def _is_storable(array: NDArray[Any]) -> bool:
    is_numbers = array.dtype.kind in "biuf" and array.dtype.itemsize <= 8
    return is_numbers and array.ndim > 0 and 0 not in array.shape[1:]


def _below(place: str, key: Any) -> str:
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise StateError(
            f"the state has the key {key!r} {f'in {place}' if place else 'at its top'}, which "
            "cannot name a file; give it letters, digits and underscores only"
        )
    return f"{place}/{key}" if place else key
