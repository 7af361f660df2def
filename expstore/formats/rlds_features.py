"""The features of a data set of TensorFlow Datasets: how flat lists of values become rows."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.images import decode_images
from expstore.formats.lazy_rows import LazyRows
from expstore.formats.tf_example import Values

FLAT, LENGTHS = "ragged_flat_values", "ragged_row_lengths_0"
DEEPER = "ragged_row_lengths_1"
KINDS = ("tensor", "image", "text", "label")
BFLOAT16 = "bfloat16"  # given as float32
TEXTS = ("string", "object")
RAW = ("bytes", "zlib")  # encodings of a tensor, each row of which is one run of bytes


@dataclass(frozen=True)
class Feature:
    """One leaf of the tree.

    Attributes:
        kind: tensor, image, text, label, or the name of what is not read.
        shape: of a row; -1 where it may differ.
        is_list: a row is a list of such.
    """

    kind: str
    dtype: str = "int64"
    shape: tuple[int, ...] = ()
    encoding: str = "none"
    is_list: bool = False

    @property
    def problem(self) -> str | None:
        """Why it is not read."""
        if self.kind not in KINDS:
            return f"is a {self.kind}, which is not read"
        if self.is_list and (self.kind in ("image", "text") or self.dtype in TEXTS):
            return "is a list of images or texts a step, which is not read"
        if self.kind == "image" and self.dtype not in ("uint8", "uint16"):
            return f"has images of {self.dtype}, which are not read"
        if self.kind == "tensor" and self.dtype not in (*TEXTS, BFLOAT16):
            try:
                np.dtype(self.dtype)
            except TypeError:
                return f"has dtype {self.dtype}, which is not read"
        if self.kind == "tensor" and -1 in self.shape[1:]:
            return f"has the shape {self.shape}, which is not read"
        return None


def leaves(tree: Mapping[str, Any], prefix: str = "", is_list: bool = False) -> dict[str, Feature]:
    """Every feature under a node of `features.json`, by its path."""
    if "featuresDict" in tree:
        members = tree["featuresDict"].get("features", {})
        found: dict[str, Feature] = {}
        for name, member in members.items():
            found |= leaves(member, f"{prefix}/{name}" if prefix else name, is_list)
        return found
    if "sequence" in tree and not is_list:
        return leaves(tree["sequence"].get("feature", {}), prefix, is_list=True)
    return {prefix: _leaf(tree, is_list)}


def _leaf(tree: Mapping[str, Any], is_list: bool) -> Feature:
    if "tensor" in tree:
        found = tree["tensor"]
        encoding = str(found.get("encoding", "none")).lower()
        return Feature("tensor", found.get("dtype", ""), _shape(found), encoding, is_list)
    if "image" in tree:
        found = tree["image"]
        return Feature("image", found.get("dtype", "uint8"), _shape(found), "none", is_list)
    if "text" in tree:
        return Feature("text", is_list=is_list)
    if "classLabel" in tree:
        return Feature("label", is_list=is_list)
    return Feature(str(tree.get("pythonClassName", "unknown")).rsplit(".", 1)[-1])


def _shape(found: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in found.get("shape", {}).get("dimensions", ()))


def rows_of(
    feature: Feature, name: str, example: Mapping[str, Values], *, keep_encoded: bool, jobs: int = 1
) -> Any:
    """The rows of a feature: an array, a list of texts, or a list of arrays or bytes.

    Raises:
        SourceError: the values do not fit the feature.
        MissingExtraError: images, without Pillow.
    """
    if f"{name}/{DEEPER}" in example:
        raise SourceError(f"{name} has lists in lists, which are not read")
    if f"{name}/{FLAT}" in example:
        return _ragged_rows(feature, name, example)
    if name not in example:
        raise SourceError(f"{name} is missing: it was not written whole")
    values = example[name]
    if feature.kind == "image":
        frames = _bytes_of(values, name)
        return frames if keep_encoded else _images(frames, name, feature, jobs)
    if feature.kind == "text" or feature.dtype in TEXTS:
        return _texts(_bytes_of(values, name), name)
    return _array(values, name, feature)


def _ragged_rows(feature: Feature, name: str, example: Mapping[str, Values]) -> Any:
    """Rows of different lengths, which lie one after the other."""
    flat = example[f"{name}/{FLAT}"]
    shape = feature.shape if feature.is_list else feature.shape[1:]
    values = _array(flat, name, Feature(feature.kind, feature.dtype, shape))
    lengths = np.asarray(example.get(f"{name}/{LENGTHS}", ()), np.int64)
    if (lengths < 0).any() or lengths.sum() != len(values):
        raise SourceError(f"{name} has {len(values)} values, but its rows say {lengths.sum()}")
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _array(values: Values, name: str, feature: Feature) -> NDArray[Any]:
    dtype = np.dtype("float32" if feature.dtype == BFLOAT16 else feature.dtype)
    if -1 in feature.shape:
        raise SourceError(f"{name} has the shape {feature.shape}, but its rows have no lengths")
    size = math.prod(feature.shape)
    if feature.encoding in RAW:
        rows = [_raw(row, name, feature, size * dtype.itemsize) for row in _bytes_of(values, name)]
        flat = np.frombuffer(b"".join(rows), dtype.newbyteorder("<"))
    elif isinstance(values, list):
        raise SourceError(f"{name} holds bytes, but its features say {feature.dtype}")
    else:
        flat = values.astype(dtype)
    if not size or len(flat) % size:
        raise SourceError(
            f"{name} has {len(flat)} values, which are no rows of shape {feature.shape}"
        )
    return flat.reshape(-1, *feature.shape)


def _raw(row: bytes, name: str, feature: Feature, num_bytes: int) -> bytes:
    """A row's bytes; no more are unpacked than it can have."""
    if feature.encoding == "zlib":
        try:
            row = zlib.decompressobj().decompress(row, num_bytes + 1)
        except zlib.error as error:
            raise SourceError(f"a row of {name} cannot be unpacked: {error}") from error
    if len(row) != num_bytes:
        raise SourceError(f"a row of {name} must have {num_bytes} bytes, got {len(row)}")
    return row


def _images(frames: list[bytes], name: str, feature: Feature, jobs: int) -> NDArray[Any] | LazyRows:
    if -1 in feature.shape or not feature.shape:
        return decode_images(frames, name, jobs=jobs)
    is_grey = feature.shape[2:] == (1,)
    shape = feature.shape[:2] if is_grey else feature.shape
    decoded = decode_images(frames, name, shape, jobs=jobs)
    if not isinstance(decoded, LazyRows):
        return decoded.reshape(-1, *feature.shape)
    return LazyRows(
        len(decoded),
        decoded.row_bytes,
        lambda start, stop: decoded.read(start, stop).reshape(-1, *feature.shape),
    )


def _texts(rows: list[bytes], name: str) -> list[str]:
    try:
        return [row.decode() for row in rows]
    except UnicodeDecodeError as error:
        raise SourceError(f"{name} has rows that are no text: {error}") from error


def _bytes_of(values: Values, name: str) -> list[bytes]:
    if isinstance(values, list):
        return values
    raise SourceError(f"{name} must hold bytes, got {values.dtype}")
