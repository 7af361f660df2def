"""The format's constants: names, version, chunk rules, and each array's Zarr metadata.

`docs/format.md` is the prose to this module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from expstore.episode import END_REASONS
from expstore.errors import FormatError
from expstore.schema import Field, Schema

FORMAT = 1
ROOT_KEY = "expstore"  # in the root group's attributes
METADATA_FILE = "zarr.json"
PRIVATE = "__expstore"  # Zarr tools ignore names that begin with two underscores
LOCK_FILE = f"{PRIVATE}/lock"
HOLDER_FILE = f"{PRIVATE}/holder"
HISTORY_FILE = f"{PRIVATE}/commits"
ROOT_COPY = f"{PRIVATE}/root"  # an older root, should the newest one be damaged
QUARANTINE = f"{PRIVATE}/quarantine"  # what repairs took out, by the number of their commit
WRITING_FILE = f"{PRIVATE}/writing"
ADDING = f"{PRIVATE}/adding"  # a column that is being added, until its commit
PRIORITIES = "priorities"  # beside the data; no commit names what lies in it
PRIORITIES_KEY = "expstore_priorities"  # in the attributes of a saved set's group
TEMPORARY = ".partial"  # suffix of files that are not yet what their name says

PAGE_BYTES = 4096  # a chunk is a multiple of it, so that files can be mapped one after another
MAX_CHUNK_STEPS = 65_536
MAX_CHUNK_BYTES = 32 << 20
LARGE_STEP_BYTES = 64 << 10  # from here on a chunk may be larger: fewer files, fewer maps
MAX_LARGE_CHUNK_BYTES = 256 << 20
VALUES_BYTES = 4 << 20  # of chunks of small elements, of which a step has many
INNER_BYTES = 512 << 10  # of an inner chunk, decoded
MIN_INNER_ROWS, MAX_INNER_ROWS = 16, 64
MAX_INNER_BYTES = 4 << 20
MAX_SHARD_BYTES = 64 << 20  # decoded
ZSTD_LEVEL = 1  # higher levels take longer and save little on frames
# What a reader takes at most, far above what any writer makes: who says more is up to no good.
MOST_CHUNK_BYTES = 1 << 30  # unless it is a single row
MOST_DECODED_BYTES = 64 << 20  # of an inner chunk, likewise
MOST_INNER_CHUNKS = 1 << 16  # of a shard
MISSING_CHUNK = (1 << 64) - 1  # offset and size of an inner chunk that is not there
MANY_CHUNKS = 256  # with a size hint, chunks grow until a column has about as many

STEP = "step"
EPISODE = "episode"
DELETED = "deleted"  # a dimension, and the group of its arrays
METADATA_VALUES = "episode/metadata/values"
NO_SEED = -1


@dataclass(frozen=True)
class ArrayLayout:
    """One Zarr array of the store: where it lies, what a row is and how rows are chunked."""

    path: str  # below the root, such as "steps/observation/image"
    dimension: str  # name of the first dimension; its live range stands in the commit's dims
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]  # little endian
    chunk_rows: int
    axis_names: tuple[str, ...] = ()  # of the row's own dimensions
    attributes: tuple[tuple[str, Any], ...] = ()
    inner_rows: int = 0  # of a coded array's inner chunks; 0 for a mapped array

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * self.row_bytes

    def chunk_path(self, chunk: int) -> str:
        """The file of a chunk, below the root."""
        return f"{self.path}/c.{'.'.join([str(chunk), *['0'] * len(self.row_shape)])}"

    @property
    def is_coded(self) -> bool:
        return self.inner_rows > 0

    @property
    def chunks_per_shard(self) -> int:
        return self.chunk_rows // self.inner_rows

    @property
    def _is_moderate(self) -> bool:
        """Whether nothing it makes others hold in memory is larger than a writer would make it."""
        decoded = self.inner_rows * self.row_bytes
        return (
            (self.chunk_rows == 1 or self.chunk_bytes <= MOST_CHUNK_BYTES)
            and (self.inner_rows <= 1 or decoded <= MOST_DECODED_BYTES)
            and (not self.is_coded or self.chunks_per_shard <= MOST_INNER_CHUNKS)
        )

    def codecs(self) -> list[dict[str, Any]]:
        """How rows become a chunk's bytes."""
        codec: dict[str, Any] = {"name": "bytes"}
        if self.dtype.itemsize > 1:
            codec["configuration"] = {"endian": "little"}
        if not self.is_coded:
            return [codec]
        squeeze = {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}
        index = {"name": "bytes", "configuration": {"endian": "little"}}
        configuration = {
            "chunk_shape": [self.inner_rows, *self.row_shape],
            "codecs": [codec, squeeze, {"name": "crc32c"}],
            "index_codecs": [index, {"name": "crc32c"}],
            "index_location": "end",
        }
        return [{"name": "sharding_indexed", "configuration": configuration}]

    def metadata(self, num_rows: int) -> dict[str, Any]:
        """The array's `zarr.json` when it has this many rows."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [num_rows, *self.row_shape],
            "data_type": self.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [self.chunk_rows, *self.row_shape]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": False if self.dtype.kind == "b" else 0,
            "codecs": self.codecs(),
            "attributes": dict(self.attributes),
            "dimension_names": [self.dimension, *self.axis_names],
            "storage_transformers": [],
        }

    @staticmethod
    def of_metadata(path: str, document: Mapping[str, Any]) -> ArrayLayout:
        """Read what `metadata` made; anything else is a `FormatError`."""
        try:
            shape, chunk = document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"]
            dtype = np.dtype(document["data_type"]).newbyteorder("<")
            names = document["dimension_names"]
            sizes = [*shape, *chunk]
            inner = 0
            if document["codecs"][0]["name"] == "sharding_indexed":
                inner = document["codecs"][0]["configuration"]["chunk_shape"][0]
            layout = ArrayLayout(
                path,
                names[0],
                tuple(shape[1:]),
                dtype,
                chunk[0],
                tuple(names[1:]),
                tuple(document.get("attributes", {}).items()),
                inner,
            )
            valid = (
                all(type(size) is int and 0 <= size < 1 << 62 for size in [*sizes, inner])
                and all(size >= 1 for size in shape[1:])
                and chunk[0] >= 1
                and chunk[1:] == shape[1:]
                and len(names) == len(shape)
                and dtype.kind in "biuf"
                and (not inner or chunk[0] % inner == 0)
                and layout.codecs() == document["codecs"]
                and layout._is_moderate
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise FormatError(f"the metadata of array {path!r} is not valid: {error!r}") from error
        if not valid:
            raise FormatError(f"array {path!r} is not laid out as format {FORMAT} says")
        return layout


def chunk_rows(row_bytes: int, most: int = MAX_CHUNK_STEPS) -> int:
    """Rows of a chunk: a power of two whose bytes are a multiple of the page, if there is one.

    Args:
        most: rows that a chunk should not exceed, unless it takes more to fill pages.
    """
    limit = MAX_LARGE_CHUNK_BYTES if row_bytes >= LARGE_STEP_BYTES else MAX_CHUNK_BYTES
    rows = 1
    while rows * 2 <= most and rows * 2 * row_bytes <= limit:
        rows *= 2
    paged = max(rows, PAGE_BYTES // (row_bytes & -row_bytes))
    return paged if paged * row_bytes <= limit else rows


def inner_rows(row_bytes: int) -> int:
    """Rows of an inner chunk: a power of two, of 128 to 512 KiB where steps allow it.

    Steps of 1 KiB and more get 16 to 64: more would squeeze little better, and a window reads
    all of every chunk that it touches. Only for steps that make 4 MiB of 16 it is fewer.
    """
    most = max(MAX_INNER_ROWS, INNER_BYTES // 4 // row_bytes)
    rows = _power_of_two(min(most, max(MIN_INNER_ROWS, INNER_BYTES // row_bytes)))
    while rows > 1 and rows * row_bytes > MAX_INNER_BYTES:
        rows //= 2
    return rows


def shard_rows(row_bytes: int, most: int = MAX_CHUNK_STEPS) -> tuple[int, int]:
    """Rows of a shard and of its inner chunks, both powers of two."""
    inner = min(inner_rows(row_bytes), _power_of_two(most))
    return max(inner, _power_of_two(min(most, MAX_SHARD_BYTES // row_bytes))), inner


def _power_of_two(most: int) -> int:
    """The largest one that is not above `most`; 1 for less."""
    return 1 << max(0, most.bit_length() - 1)


def most_rows(chunk_steps: int | None, expected_steps: int | None) -> int:
    """How many rows a chunk may have, from what the creator of the store said."""
    if chunk_steps is not None:
        return chunk_steps
    hinted = 1 << ((expected_steps or 0) // MANY_CHUNKS).bit_length()
    return max(MAX_CHUNK_STEPS, hinted)


def fits_pages(layout: ArrayLayout, page_bytes: int) -> bool:
    """Whether the chunk files can be mapped one after the other without a gap."""
    return layout.chunk_bytes % page_bytes == 0


@dataclass(frozen=True)
class ChunkLimits:
    """How many rows a chunk should not exceed, unless it takes more to fill pages."""

    steps: int = MAX_CHUNK_STEPS  # of the arrays under `steps/`
    index: int = MAX_CHUNK_STEPS  # of those that have about one row per episode
    values_bytes: int = VALUES_BYTES  # that chunks of `values` may take, whatever their rows

    def elements(self, element_bytes: int, rows: int) -> int:
        """How many elements a chunk of `values` should not exceed, beside others of `rows` rows.

        Who asked for small chunks gets them here, too.
        """
        return max(rows, self.values_bytes // element_bytes) if rows >= MAX_CHUNK_STEPS else rows


def arrays_of(schema: Schema, limits: ChunkLimits | None = None) -> dict[str, ArrayLayout]:
    """Every array of a store with this schema, by path."""
    if not schema.fields:
        return {}
    limits = limits or ChunkLimits()
    arrays = [
        *_step_arrays(schema, limits),
        *_next_arrays(schema, limits),
        *_episode_arrays(schema, limits),
    ]
    return {array.path: array for array in arrays}


def _step_arrays(schema: Schema, limits: ChunkLimits) -> Iterator[ArrayLayout]:
    most = limits.steps
    for name, f in schema.fields.items():
        elements = f"{name}/values", limits.elements(f.step_bytes, most)
        yield from _field_arrays(f"steps/{name}", STEP, *elements, name, f, most)
    yield ArrayLayout("steps/done", STEP, (), np.dtype("bool"), chunk_rows(1, most))
    yield ArrayLayout("steps/episode", STEP, (), np.dtype("<i8"), chunk_rows(8, most))


def _next_arrays(schema: Schema, limits: ChunkLimits) -> Iterator[ArrayLayout]:
    most = limits.index
    for name in schema.next_fields:
        f, group = schema[name], f"next/{name}"
        elements = f"{group}/values", limits.elements(f.step_bytes, most)
        yield ArrayLayout(f"{group}/step", group, (), np.dtype("<i8"), chunk_rows(8, most))
        yield ArrayLayout(f"{group}/present", group, (), np.dtype("bool"), chunk_rows(1, most))
        yield from _field_arrays(f"{group}/value", group, *elements, name, f, most)


def _field_arrays(
    path: str, dimension: str, elements: str, most_elements: int, name: str, f: Field, most: int
) -> Iterator[ArrayLayout]:
    """The array of a field along `dimension`, or the two of a ragged one."""
    if f.ragged:
        yield ArrayLayout(f"{path}/end", dimension, (), np.dtype("<i8"), chunk_rows(8, most))
        path, dimension, most = f"{path}/values", elements, most_elements
    rows, inner = chunk_rows(f.step_bytes, most), 0
    if f.layout == "coded":
        rows, inner = shard_rows(f.step_bytes, most)
    yield ArrayLayout(path, dimension, f.shape, f.stored_dtype, rows, _axis_names(name, f),
                      _attributes(f), inner)  # fmt: skip


def _episode_arrays(schema: Schema, limits: ChunkLimits) -> list[ArrayLayout]:
    def column(
        name: str, dtype: str, shape: tuple[int, ...] = (), **attributes: Any
    ) -> ArrayLayout:
        stored = np.dtype(dtype)
        axes = tuple(f"reward[{axis + 1}]" for axis in range(len(shape)))
        row_bytes = stored.itemsize * math.prod(shape)
        rows = chunk_rows(row_bytes, limits.index)
        notes = tuple(attributes.items())
        return ArrayLayout(f"episodes/{name}", EPISODE, shape, stored, rows, axes, notes)

    text_rows = chunk_rows(1, limits.elements(1, MAX_CHUNK_STEPS))
    arrays = [
        column("start", "<i8"),
        column("length", "<i8"),
        column("end_reason", "u1", names=list(END_REASONS)),
        column("seed", "<i8", missing=NO_SEED),
        column("index_crc32c", "<u4"),
        column("metadata/end", "<i8"),
        ArrayLayout("episodes/metadata/values", METADATA_VALUES, (), np.dtype("u1"), text_rows),
    ]
    if "reward" in schema.fields:
        arrays.append(column("return", "<f8", schema["reward"].shape))
    return arrays + [column(f"crc32c/{name}", "<u4") for name in schema.fields]


def deleted_arrays() -> dict[str, ArrayLayout]:
    """The arrays of tombstones, which a store has from its first deletion on."""
    columns = {"episode": "<i8", "length": "<i8", "crc32c": "<u4"}
    dtypes = {f"{DELETED}/{name}": np.dtype(dtype) for name, dtype in columns.items()}
    return {
        path: ArrayLayout(path, DELETED, (), dtype, chunk_rows(dtype.itemsize))
        for path, dtype in dtypes.items()
    }


def _axis_names(name: str, field: Field) -> tuple[str, ...]:
    """Dimension names of a step's own axes; xarray needs all of them, and unique ones."""
    return tuple(f"{name}[{axis + 1}]" for axis in range(len(field.shape)))


def _attributes(field: Field) -> tuple[tuple[str, Any], ...]:
    return (("dtype", "bfloat16"),) if field.dtype == "bfloat16" else ()


def group_metadata(children: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A group's `zarr.json`, with the metadata of what it holds inside."""
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {},
        "consolidated_metadata": {
            "kind": "inline",
            "must_understand": False,
            "metadata": dict(children or {}),
        },
    }


def parents(paths: Iterable[str]) -> list[str]:
    """All groups above the given arrays, outermost first, each once."""
    groups: dict[str, None] = {}
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            groups["/".join(parts[:depth])] = None
    return sorted(groups)


def canonical_json(document: Any) -> bytes:
    """The one spelling of a document that checksums cover."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
