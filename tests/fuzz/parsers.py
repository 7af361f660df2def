"""The parsers by themselves: bytes in, a value or an `ExpstoreError` out; no files, so quick."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from expstore.storage.coded import decode, encode
from expstore.storage.commits import Commit, Root, history_lines, root_of
from expstore.storage.conditions import Condition
from expstore.storage.layout import arrays_of
from expstore.storage.pointer import Pointer, SavedArray
from tests.fuzz.made import SCHEMA
from tests.fuzz.mutations import mutated_bytes
from tests.fuzz.targets import hostile_pointer, hostile_root

NOWHERE = Path("/nowhere.exp")


@dataclass(frozen=True)
class Parser:
    """What makes sense of bytes that somebody else has written."""

    sound: Callable[[], bytes]
    hostile: Callable[[Random, bytes], bytes]
    parse: Callable[[bytes], Any]


def _root() -> bytes:
    arrays = arrays_of(SCHEMA)
    dims = {array.dimension: (0, 8) for array in arrays.values()}
    return json.dumps(Root("ab" * 16, SCHEMA, Commit(3, 5.5, dims), arrays).document()).encode()


def _parse_root(data: bytes) -> None:
    root = root_of(NOWHERE, data)
    root.documents()
    for layout in root.arrays.values():
        assert layout.chunk_path(0).startswith(("steps/", "next/", "episodes/", "deleted/"))
        assert ".." not in layout.path.split("/"), layout.path


def _pointer() -> bytes:
    array = SavedArray.of("0" * 16, "sampler/raw", np.ones(5, np.float32))
    pointer = Pointer("0" * 16, 5.5, ("ab" * 16,), {"raw": None}, {"sampler/raw": array})
    return json.dumps(pointer.documents()[""]).encode()


def _parse_pointer(data: bytes) -> None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return  # see `read_pointer`
    pointer = Pointer.from_json(NOWHERE, document)
    pointer.documents()
    for array in pointer.arrays.values():
        assert ".." not in array.layout.path.split("/"), array.layout.path


ROWS = np.arange(64, dtype=np.int32)

PARSERS = {
    "root": Parser(_root, hostile_root, _parse_root),
    "pointer": Parser(_pointer, hostile_pointer, _parse_pointer),
    "history": Parser(lambda: b"{} 00000000\n" * 3, mutated_bytes, history_lines),
    "inner chunk": Parser(
        lambda: encode(ROWS),
        mutated_bytes,
        lambda data: decode(np.frombuffer(data, np.uint8), np.empty_like(ROWS), NOWHERE, 0),
    ),
    "condition": Parser(
        lambda: b'return < 10.5 and policy == "a" and length != 3',
        mutated_bytes,
        lambda data: Condition.parse(data.decode("utf-8", "replace")),
    ),
}
