"""Rows as bytes: JSON with the arrays behind it, and nothing that runs code when read."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from expstore.errors import DamagedError, SchemaError
from expstore.storage import files

HEAD = struct.Struct("<I")  # bytes of the JSON
PLAIN = (type(None), bool, int, float, str)
RECORD = struct.Struct("<II")  # bytes of the content, and its CRC-32C


def encode(value: Any, what: str) -> bytes:
    """A value of dicts, lists, tuples, numbers, strings, bytes, arrays and tensors.

    Raises:
        SchemaError: something in it is none of these; begins with `what`.
    """
    blobs: list[bytes] = []
    text = json.dumps(_document(value, blobs, what), separators=(",", ":")).encode()
    return b"".join([HEAD.pack(len(text)), text, *blobs])


def decode(data: bytes) -> Any:
    """The inverse of `encode`.

    >>> decode(encode({"action": 1, "reward": np.float32(0.5)}, "here"))
    {'action': 1, 'reward': np.float32(0.5)}
    """
    (size,) = HEAD.unpack_from(data)
    blobs = memoryview(data)[HEAD.size + size :]
    return _value(json.loads(data[HEAD.size : HEAD.size + size]), blobs)


def record(content: bytes) -> bytes:
    """Content with its length and checksum before it."""
    return RECORD.pack(len(content), files.crc32c(content)) + content


def records(data: bytes) -> list[bytes]:
    """The contents of whole records; a torn one, and what follows, is left out."""
    found, at = [], 0
    while at + RECORD.size <= len(data):
        size, crc = RECORD.unpack_from(data, at)
        content = data[at + RECORD.size : at + RECORD.size + size]
        if len(content) < size or files.crc32c(content) != crc:
            break
        found.append(content)
        at += RECORD.size + size
    return found


def _document(value: Any, blobs: list[bytes], what: str) -> Any:
    if type(value) in PLAIN:  # np.float64 is a float, too
        return value
    if isinstance(value, Mapping):
        pairs = [[_document(k, blobs, what), _document(v, blobs, what)] for k, v in value.items()]
        return {"map": pairs}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_document(member, blobs, what) for member in value]}
    if isinstance(value, bytes):
        return {"bytes": _placed(value, blobs)}
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        tensor = value.detach().cpu().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [name, list(value.shape), *_placed(raw, blobs)]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcmMSU":
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        raw = np.ascontiguousarray(value).tobytes()
        return {kind: [value.dtype.str, list(value.shape), *_placed(raw, blobs)]}
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        members = [_document(member, blobs, what) for member in value.flat]
        return {"objects": [list(value.shape), members]}
    raise SchemaError(f"{what} holds {value!r} of type {type(value).__name__}, which has no bytes")


def _placed(raw: bytes, blobs: list[bytes]) -> list[int]:
    start = sum(map(len, blobs))
    blobs.append(raw)
    return [start, len(raw)]


def _value(document: Any, blobs: memoryview) -> Any:
    if not isinstance(document, dict):
        return document
    ((kind, content),) = document.items()
    if kind == "map":
        return {_value(key, blobs): _value(member, blobs) for key, member in content}
    if kind in ("list", "tuple"):
        members = [_value(member, blobs) for member in content]
        return members if kind == "list" else tuple(members)
    if kind == "bytes":
        return bytes(blobs[content[0] : sum(content)])
    if kind == "objects":
        shape, members = content
        objects = np.empty(len(members), object)
        objects[:] = [_value(member, blobs) for member in members]
        return objects.reshape(shape)
    name, shape, start, size = content
    raw = blobs[start : start + size]
    if kind == "tensor":
        flat = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
        return flat.view(getattr(torch, name)).reshape(shape)
    if kind not in ("array", "scalar"):
        raise DamagedError(f"rows hold {kind!r}, which this version does not know")
    array = np.frombuffer(raw, name).reshape(shape)
    return array.copy() if kind == "array" else array[()]
