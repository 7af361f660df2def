"""Arrow and Parquet: opened with errors that say what is wrong, read in batches, as arrays."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import MissingExtraError, SourceError, how_to_install

PARQUET_MAGIC = b"PAR1"
BATCH_BYTES = 16 << 20  # of rows, decoded, held at a time
MAX_BATCH = 1 << 16  # rows
BUFFER_BYTES = 1 << 20  # of one column chunk, encoded, held at a time
SHAPE_KEYS = (b"shape", b"ARROW:extension:metadata")  # where a column says what a row's shape is


def load_pyarrow() -> Any:
    """The package, with the modules that are used here.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(
            f"Arrow and Parquet files need pyarrow; {how_to_install('arrow')}"
        ) from error
    return pyarrow


def is_parquet(path: Path) -> bool:
    """Whether a file begins as Parquet does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC


def has_footer(path: Path) -> bool:
    """Whether a file begins and ends as Parquet does; its footer is written last."""
    if not is_parquet(path) or path.stat().st_size < 3 * len(PARQUET_MAGIC):
        return False
    with path.open("rb") as file:
        file.seek(-len(PARQUET_MAGIC), 2)
        return file.read() == PARQUET_MAGIC


@contextlib.contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Give what pyarrow raises as a SourceError; our own errors pass."""
    pa = load_pyarrow()
    try:
        yield
    except SourceError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(f"{what} cannot be read: {text}") from error


def open_parquet(path: Path) -> Any:
    """A `ParquetFile`; to be closed.

    Raises:
        MissingExtraError: pyarrow is not installed.
        SourceError: it is no Parquet file, was not written whole, or is damaged.
    """
    pa = load_pyarrow()
    if not path.is_file():
        raise SourceError(f"{path} is missing")
    if not is_parquet(path):
        raise SourceError(f"{path} is no Parquet file: it does not begin as one")
    if not has_footer(path):
        raise SourceError(
            f"{path} has no footer, so nothing in it can be found: its writer was killed, or it "
            "was not copied whole; copy it again, or record it again"
        )
    with reading(path):
        # Column chunks may be larger than memory: they are read in pieces.
        return pa.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)


def batches(
    file: Any, wanted: Callable[[Any], bool] = lambda _: True, columns: list[str] | None = None
) -> Iterator[Any]:
    """Tables of consecutive rows of a `ParquetFile`, none much larger than `BATCH_BYTES`.

    Args:
        wanted: of a row group's metadata; others are not read.
        columns: those to read, all by default.
    """
    pa = load_pyarrow()
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        if not wanted(group) or not group.num_rows:
            continue
        row_bytes = max(1, group.total_byte_size // group.num_rows)
        rows = min(MAX_BATCH, max(1, BATCH_BYTES // row_bytes))
        with reading(f"row group {number}"):
            for batch in file.iter_batches(rows, row_groups=[number], columns=columns):
                yield pa.Table.from_batches([batch])


def runs(table: Any, *keys: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Stretches of rows that have the same values in all key columns, in order.

    >>> import pyarrow as pa
    >>> table = pa.table({"a": [1, 1, 2, 2, 1], "b": [None, None, None, "x", "x"]})
    >>> [(key, part.num_rows) for key, part in runs(table, "a", "b")]
    [((1, None), 2), ((2, None), 1), ((2, 'x'), 1), ((1, 'x'), 1)]
    """
    pa = load_pyarrow()
    pc = pa.compute
    differs = np.zeros(max(0, table.num_rows - 1), bool)
    columns = [table[key].combine_chunks() for key in keys]
    for column in columns:
        if pa.types.is_null(column.type):  # nothing is compared in it
            continue
        later, earlier = column.slice(1), column.slice(0, max(0, len(column) - 1))
        changed = pc.fill_null(pc.not_equal(later, earlier), False)
        appeared = pc.not_equal(pc.is_null(later), pc.is_null(earlier))
        differs |= pc.or_(changed, appeared).to_numpy(zero_copy_only=False)
    starts = np.flatnonzero(np.concatenate([[True] * bool(table.num_rows), differs])).tolist()
    for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True):
        yield tuple(c[start].as_py() for c in columns), table.slice(start, stop - start)


def members_of(name: str, column: Any, field: Any) -> Iterator[tuple[str, Any, Any]]:
    """The leaves of a column, `name/...` for each member of a struct: path, array, field."""
    pa = load_pyarrow()
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # combine_chunks gives one of none, of no rows
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if not pa.types.is_struct(array.type):
        yield name, array, field
        return
    if array.null_count:
        raise SourceError(f"{name} has {array.null_count:,} rows without a value")
    for below, values in zip(array.type, array.flatten(), strict=True):
        yield from members_of(f"{name}/{below.name}", values, below)


def shape_of(field: Any) -> tuple[int, ...] | None:
    """What a column's own metadata says of the shape of its rows."""
    metadata = field.metadata or {}
    for key in SHAPE_KEYS:
        if key not in metadata:
            continue
        try:
            found = json.loads(f"[{metadata[key].decode().strip('[]()').rstrip(',')}]")
        except ValueError:
            return None
        if isinstance(found, list) and all(isinstance(n, int) for n in found):
            return tuple(found)
    return None


def values_of(array: Any, what: str, shape: tuple[int, ...] | None = None) -> Any:
    """A leaf as an array (N, *shape); text, bytes and rows of varying length as a list.

    Args:
        what: begins the errors.
        shape: of a row, where more is known than the nesting of its lists.

    Raises:
        SourceError: rows without a value, values that are no numbers, or not of that shape.
    """
    pa = load_pyarrow()
    types = pa.types
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        raise SourceError(f"{what} has {array.null_count:,} rows without a value")
    if any(is_text(array.type) for is_text in (types.is_string, types.is_large_string)):
        return array.to_pylist()
    if types.is_binary(array.type) or types.is_large_binary(array.type):
        return array.to_pylist()
    if _is_list(array.type):
        return _lists(array, what, shape)
    if not (types.is_boolean(array.type) or _is_number(array.type)):
        raise SourceError(f"{what} has type {array.type}, which is neither numbers nor text")
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values if shape is None else _shaped(values, what, len(array), shape)


def _lists(array: Any, what: str, shape: tuple[int, ...] | None) -> Any:
    pa = load_pyarrow()
    flat = array.flatten()
    values = values_of(flat, what)
    if isinstance(values, list):
        raise SourceError(f"{what} has lists of {array.type.value_type}, which cannot be stored")
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(len(array), array.type.list_size, np.int64)
    else:
        lengths = array.value_lengths().to_numpy().astype(np.int64)
    if len(array) and (lengths != lengths[0]).any():
        if shape is not None:
            raise SourceError(f"{what} must have shape {shape} in each row, got rows that differ")
        return np.split(values, np.cumsum(lengths)[:-1])
    size = int(lengths[0]) if len(array) else 0
    dense = values.reshape(len(array), size, *values.shape[1:])
    return dense if shape is None else _shaped(dense, what, len(array), shape)


def _shaped(values: NDArray[Any], what: str, num_rows: int, shape: tuple[int, ...]) -> NDArray[Any]:
    # One number a row may be announced as one element, and the reverse: the shape decides.
    if values.size != num_rows * math.prod(shape):
        raise SourceError(f"{what} must have shape {shape} in each row, got {values.shape[1:]}")
    return values.reshape(num_rows, *shape)


def _is_list(kind: Any) -> bool:
    types = load_pyarrow().types
    return any(
        is_kind(kind) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    )


def _is_number(kind: Any) -> bool:
    types = load_pyarrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind))
