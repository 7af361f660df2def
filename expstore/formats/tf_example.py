"""The wire form of `tf.train.Example`: names of features, and lists of bytes, floats or integers.

Example { Features features = 1 }
Features { map<string, Feature> feature = 1 }
Feature { oneof { BytesList = 1, FloatList = 2, Int64List = 3 } }  each { repeated value = 1 }
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # how a field's value lies there
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3
MAX_VARINT_BYTES = 10

Values = list[bytes] | NDArray[np.float32] | NDArray[np.int64]


def parse_example(content: bytes) -> dict[str, Values]:
    """Feature -> its values, in one list whatever their shape.

    Raises:
        SourceError: the bytes are no Example.
    """
    found: dict[str, Values] = {}
    for features in _members(memoryview(content), 1):
        for entry in _members(features, 1):
            parts = dict(_fields(entry))
            name = parts.get(1, memoryview(b""))
            feature = parts.get(2, memoryview(b""))
            if not isinstance(name, memoryview) or not isinstance(feature, memoryview):
                raise SourceError("a feature has no name, so the record is no tf.train.Example")
            try:
                found[bytes(name).decode()] = _values(feature)
            except UnicodeDecodeError as error:
                raise SourceError(f"the name of a feature is no text: {error}") from error
    return found


def _values(feature: memoryview) -> Values:
    for kind, values in _fields(feature):
        if not isinstance(values, memoryview):
            break
        if kind == BYTES_LIST:
            return [bytes(value) for value in _members(values, 1)]
        if kind == FLOAT_LIST:
            return _numbers(values, "<f4")
        if kind == INT64_LIST:
            return _integers(values)
    return []


def _numbers(values: memoryview, dtype: str) -> NDArray[np.float32]:
    """Floats, packed or each by itself."""
    parts = []
    for number, value in _fields(values):
        if number == 1 and isinstance(value, memoryview):
            if len(value) % 4:
                raise SourceError("a list of floats ends in the middle of one")
            parts.append(np.frombuffer(value, dtype))
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _integers(values: memoryview) -> NDArray[np.int64]:
    parts = []
    for number, value in _fields(values):
        if number != 1:
            continue
        if isinstance(value, memoryview):
            parts.append(_varints(np.frombuffer(value, np.uint8)))
        else:
            parts.append(np.array([value], np.uint64).view(np.int64))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _varints(content: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Numbers of 7 bits a byte, the lowest first; the last byte of each is below 128.

    >>> _varints(np.array([1, 0x96, 0x01], np.uint8)).tolist()
    [1, 150]
    """
    ends = np.flatnonzero(content < 0x80)
    if len(content) and (not len(ends) or ends[-1] != len(content) - 1):
        raise SourceError("a list of integers ends in the middle of one")
    if len(ends) == len(content):
        return content.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > MAX_VARINT_BYTES:
        raise SourceError(f"an integer has more than {MAX_VARINT_BYTES} bytes")
    place = np.arange(len(content)) - np.repeat(starts, lengths)
    shifted = (content & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(shifted, starts).view(np.int64)


def _members(content: memoryview, wanted: int) -> Iterator[memoryview]:
    """The values of one field that are messages, texts or bytes."""
    for number, value in _fields(content):
        if number == wanted and isinstance(value, memoryview):
            yield value


def _fields(content: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Number and value of each field; the value is an integer where it lies there as one.

    Raises:
        SourceError: a field is of no known kind, or goes beyond the end.
    """
    at, end = 0, len(content)
    while at < end:
        tag, at = _varint(content, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = _varint(content, at)
            yield number, value
            continue
        if kind == LENGTH:
            num_bytes, at = _varint(content, at)
        elif kind in (FIXED32, FIXED64):
            num_bytes = 4 if kind == FIXED32 else 8
        else:
            raise SourceError(f"a field is of kind {kind}, so the record is no tf.train.Example")
        if num_bytes > end - at:
            raise SourceError("a field goes beyond its end, so the record is no tf.train.Example")
        yield number, content[at : at + num_bytes]
        at += num_bytes


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for place in range(MAX_VARINT_BYTES):
        if at >= len(content):
            break
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise SourceError("a number goes beyond its end, so the record is no tf.train.Example")
