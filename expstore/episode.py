"""One finished episode: columns of equal length, checked against the schema once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError
from expstore.ragged import Ragged, Rows, one_row
from expstore.schema import (
    FLAGS,
    Field,
    Schema,
    check_name,
    check_nesting,
    described,
    is_observation,
)

NONE: Mapping[str, Field] = {}  # no field is known
END_REASONS = ("terminated", "truncated", "cut", "incomplete")
_AS_STORED = frozenset(np.dtype(f"<{code}").newbyteorder("<") for code in "?bBhHiIqQefd")
INDEX_COLUMNS = ("start", "length", "end_reason", "return", "number", "metadata")


@dataclass(frozen=True)
class Columns:
    """What `append` was given, flattened and as arrays, not yet compared with a schema."""

    arrays: dict[str, Rows]  # field -> (T, *shape)
    dtypes: dict[str, str]  # field -> name of the dtype; bfloat16 arrays are their bits, uint16
    following: dict[str, Rows]  # field -> (T, *shape) given as next_<field>
    final: dict[str, NDArray[Any]]  # field -> (*shape) observation after the last step
    num_steps: int  # T

    @staticmethod
    def of(data: Mapping[str, Any], where: str, known: Mapping[str, Field] = NONE) -> Columns:
        """Flatten and convert; lengths are checked here, since only they say what T is.

        Args:
            known: fields of the store; they decide what values can be read either way.

        Raises:
            SchemaError: names the field and `where` ("in episode 12").
        """
        return Columns._of(flatten(data, where, known), where, known, one_step=False)

    @staticmethod
    def of_step(flat: Mapping[str, Any], where: str, known: Mapping[str, Field]) -> Columns:
        """A flat step, whose values have no step axis, as columns of one row."""
        return Columns._of(flat, where, known, one_step=True)

    @staticmethod
    def _of(
        flat: Mapping[str, Any], where: str, known: Mapping[str, Field], *, one_step: bool
    ) -> Columns:
        arrays: dict[str, Rows] = {}
        dtypes: dict[str, str] = {}
        for name, value in flat.items():
            what, field = f"field {name!r} {where}", known.get(name.removeprefix("next_"))
            rows = [value] if one_step else value
            if is_ragged(rows, field):
                arrays[name], dtypes[name] = to_ragged(rows, what)
            else:
                array, dtypes[name] = to_array(value, what)
                arrays[name] = array[None] if one_step else array
                if not one_step and not array.ndim:
                    raise SchemaError(
                        f"{what} must have one row per step, got a single value; "
                        "give a list or an array"
                    )
        following = {
            name.removeprefix("next_"): arrays.pop(name)
            for name in list(arrays)
            if name.startswith("next_")
        }
        if not arrays.keys() | following.keys() <= known.keys():  # those are checked already
            for name in (*arrays, *following):
                check_name(name, where)
            check_nesting(arrays, where)
        num_steps = _num_steps(arrays, following, where)
        final = {}
        for name in arrays:
            arrays[name], last = _fit(name, arrays[name], num_steps, where)
            if last is not None:
                final[name] = last
        for name, values in following.items():
            if len(values) != num_steps:
                raise SchemaError(
                    f"field 'next_{name}' must have {num_steps} rows {where}, got {len(values)}; "
                    "all columns of an episode have one row per step"
                )
        return Columns(arrays, dtypes, following, final, num_steps)

    def schema(self, where: str) -> Schema:
        """The schema that this episode defines when it is the first of its store."""
        for name in self.following:
            if name not in self.arrays:
                raise SchemaError(
                    f"field 'next_{name}' {where} has no field {name!r} to be the next of; "
                    "give that one, too"
                )
        return Schema(
            {
                name: described(
                    f"field {name!r} {where}",
                    array.shape[1:],
                    self.dtypes[name],
                    has_next=name in self.following,
                    ragged=isinstance(array, Ragged),
                )
                for name, array in self.arrays.items()
            }
        )


@dataclass(frozen=True)
class Episode:
    """An episode that fits its store."""

    columns: dict[str, Rows]  # field -> (T, *shape), dtype as stored, C order
    following: dict[str, Rows]  # field -> (T, *shape), where next values were given
    final: dict[str, NDArray[Any]]  # field -> (*shape), where only the last next value was given
    num_steps: int  # T
    end_reason: str  # one of END_REASONS

    @staticmethod
    def fit(
        columns: Columns,
        schema: Schema,
        where: str,
        end_reason: str | None = None,
        casts: dict[str, int] | None = None,
    ) -> Episode:
        """Compare with the schema, field by field.

        Args:
            casts: allows casts that lose nothing and counts the cast rows by field;
                None forbids them.

        Raises:
            SchemaError: an unknown or missing field, a wrong shape or dtype, a flag inside
                the episode, an `end_reason` that contradicts the flags.
        """
        _check_names(columns, schema, where)
        how, dtype_of = (where, casts), columns.dtypes
        fitted = {
            name: _fit_field(name, columns.arrays[name], dtype_of[name], f, *how)
            for name, f in schema.fields.items()
        }
        following = {
            name: _fit_field(next_name(name), values, dtype_of[next_name(name)], schema[name], *how)
            for name, values in columns.following.items()
        }
        final = {
            name: _fit_field(
                name, one_row(value, columns.arrays[name]), dtype_of[name], schema[name], *how
            )[0]
            for name, value in columns.final.items()
        }
        for name, last in final.items():
            if name in following and following[name][-1].tobytes() != last.tobytes():
                raise SchemaError(
                    f"field {name!r} {where} has {columns.num_steps + 1} rows and the last "
                    f"differs from the last row of {next_name(name)!r}; give one of them"
                )
        reason = end_of(fitted, where, end_reason)
        return Episode(fitted, following, final, columns.num_steps, reason)


def flatten(
    data: Mapping[str, Any], where: str = "in the episode", known: Mapping[str, Field] = NONE
) -> dict[str, Any]:
    """Nested mappings, and tuples of arrays, as one mapping with names joined by `/`.

    Args:
        known: fields of the store; they decide where a tuple may be read either way: as the
            values of `name/0`, `name/1`, ... or as the rows of `name`.
    """
    if not isinstance(data, Mapping):
        raise SchemaError(
            f"what comes {where} must be a mapping of fields, got {type(data).__name__}"
        )
    flat: dict[str, Any] = {}
    stack: list[tuple[str, Any]] = [("", data)]
    while stack:
        prefix, value = stack.pop()
        name = prefix[:-1]
        if isinstance(value, Mapping):
            members = list(value.items())
        elif isinstance(value, tuple) and _is_nested(value, name.removeprefix("next_"), known):
            members = [(str(i), member) for i, member in enumerate(value)]
        else:
            if name in flat:
                raise SchemaError(
                    f"field {name!r} {where} is given twice, nested and by its path; "
                    "give one of them"
                )
            flat[name] = value
            continue
        if len(prefix) > 10_000:
            raise SchemaError(f"field {prefix[:80]!r}... {where} is nested too deeply; flatten it")
        for key, member in reversed(members):
            if not isinstance(key, str):
                raise SchemaError(
                    f"field names must be strings, got {key!r} under {name!r} {where}; rename it"
                )
            stack.append((f"{prefix}{key}/", member))
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`: `{"a/b": x}` becomes `{"a": {"b": x}}`."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        group = nested
        for parent in parents:
            group = group.setdefault(parent, {})
        group[last] = value
    return nested


def to_array(value: Any, what: str) -> tuple[NDArray[Any], str]:
    """An array in little-endian C order and the name of its dtype; bfloat16 as its bits.

    Raises:
        SchemaError: begins with `what`; the value is no array of numbers, or would not be the
            same as one.
    """
    if type(value) is np.ndarray and value.dtype in _AS_STORED and value.flags.c_contiguous:
        return value, _name_of(value.dtype)
    if isinstance(value, (list, tuple)) and any(hasattr(item, "detach") for item in value):
        return _stacked([to_array(item, what) for item in value], what)
    try:
        array, dtype = _as_array(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise SchemaError(f"{what} cannot be one array: {error}; convert it first") from error
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise SchemaError(
            f"{what} must hold booleans, integers or floats of at most 64 bits, got dtype "
            f"{array.dtype}; convert it first"
        )
    if isinstance(value, (list, tuple)) and not _is_exact(value, array):
        raise SchemaError(
            f"{what} holds integers that dtype {array.dtype} would change; give an array"
        )
    return array.astype(array.dtype.newbyteorder("<"), order="C", copy=False), dtype


def is_ragged(value: Any, field: Field | None) -> bool:
    """Whether rows are to be read as values of varying length.

    The store's field decides. Without one it is ragged if the rows are strings or bytes, or
    arrays that differ in their first dimension and in nothing else.
    """
    if field is not None:
        return field.ragged
    if isinstance(value, np.ndarray) and value.dtype.kind in "US":
        return value.ndim == 1
    is_list = isinstance(value, (list, tuple))
    if not is_list and not (isinstance(value, np.ndarray) and value.dtype.kind == "O"):
        return False
    if all(isinstance(row, str) for row in value) or all(isinstance(row, bytes) for row in value):
        return len(value) > 0
    if not len(value) or not getattr(value[0], "shape", ()):
        return False
    shapes = {tuple(getattr(row, "shape", ())) for row in value}
    return len(shapes) > 1 and () not in shapes and len({shape[1:] for shape in shapes}) == 1


def to_ragged(value: Any, what: str) -> tuple[Ragged, str]:
    """Rows of varying length, each a string, bytes or an array (n, *shape), and their dtype."""
    try:
        rows = [_ragged_row(row, what) for row in value]
    except TypeError:
        raise SchemaError(f"{what} must have one value per step; give a list") from None
    kinds = {(row.shape[1:], dtype) for row, dtype in rows}
    if len(kinds) != 1:
        raise SchemaError(
            f"{what} must have elements of one shape and dtype, got "
            f"{sorted(map(str, kinds)) or 'no rows'}; convert them first"
        )
    return Ragged.of([row for row, _ in rows]), rows[0][1]


def _ragged_row(row: Any, what: str) -> tuple[NDArray[Any], str]:
    if isinstance(row, str):
        try:
            return np.frombuffer(row.encode(), np.uint8), "text"
        except UnicodeEncodeError as error:
            raise SchemaError(f"{what} is not valid Unicode: {error}") from None
    if isinstance(row, bytes):
        return np.frombuffer(row, np.uint8), "uint8"
    array, dtype = to_array(row, what)
    if not array.ndim:
        raise SchemaError(f"{what} must have rows of elements, got a single value")
    return array, dtype


def _as_array(value: Any) -> tuple[NDArray[Any], str]:
    if hasattr(value, "detach"):  # a torch tensor, recognised without importing torch
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            return value.contiguous().view(_torch("int16")).numpy().view(np.uint16), "bfloat16"
        value = value.numpy()
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array has values that are none")
    array = np.asarray(value)
    name = _name_of(array.dtype)
    if name == "bfloat16":
        return array.astype(array.dtype, order="C", copy=False).view(np.uint16), "bfloat16"
    return array, name


@lru_cache(maxsize=64)  # numpy makes the name up each time, slowly
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name


def _stacked(rows: list[tuple[NDArray[Any], str]], what: str) -> tuple[NDArray[Any], str]:
    """Rows given one by one; numpy would join different dtypes to a third one."""
    kinds = {(array.shape, dtype) for array, dtype in rows}
    if len(kinds) > 1:
        (one, other) = sorted(kinds, key=str)[:2]
        raise SchemaError(
            f"{what} has rows of different shapes or dtypes, such as {one[1]} {one[0]} and "
            f"{other[1]} {other[0]}; convert them first"
        )
    return np.stack([array for array, _ in rows]), rows[0][1]


def _is_exact(value: Any, array: NDArray[Any]) -> bool:
    """Whether integers that stand beside floats, which makes all of them floats, stay the same."""
    if array.dtype != np.float64:
        return True
    large = np.abs(array) >= 2.0**53
    if not large.any():
        return True
    return bool((np.asarray(value, object)[large] == array[large].astype(object)).all())


def encode_metadata(metadata: Mapping[str, Any], where: str) -> bytes:
    """Metadata as UTF-8 JSON; numpy scalars and arrays become numbers and lists."""
    if not metadata:
        return b""
    for key in metadata:
        if key in INDEX_COLUMNS:
            raise SchemaError(f"metadata {key!r} {where} is a column of the index; rename it")
    try:
        text = json.dumps(_plain(metadata), separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(
            f"metadata {where} must be JSON: {error}; convert it or leave it out"
        ) from error
    return text.encode()


def end_of(columns: Mapping[str, Rows], where: str, end_reason: str | None) -> str:
    """Why the episode ended: from its flags, else as the caller says, else `cut`."""
    check_end_reason(end_reason, where)
    flagged = [flag for flag in FLAGS if _flag_at_end(columns, flag, where)]
    if end_reason is None:
        return flagged[0] if flagged else "cut"
    contradicts = end_reason in FLAGS and end_reason in columns
    if (flagged and end_reason not in flagged) or (not flagged and contradicts):
        raise SchemaError(
            f"end_reason {end_reason!r} {where} contradicts the flags of the last step "
            f"({', '.join(flagged) or 'none is true'}); leave it out"
        )
    return end_reason


def check_end_reason(end_reason: str | None, where: str) -> None:
    """Refuse what is no reason; None leaves it to the flags."""
    if end_reason is not None and end_reason not in END_REASONS:
        raise SchemaError(
            f"end_reason {where} must be one of {', '.join(END_REASONS)}, got {end_reason!r}"
        )


def _flag_at_end(columns: Mapping[str, Rows], flag: str, where: str) -> bool:
    if flag not in columns:
        return False
    values = columns[flag]
    assert not isinstance(values, Ragged), flag  # the schema does not allow it
    if not np.count_nonzero(values):
        return False
    if np.count_nonzero(values[:-1]):
        first = np.flatnonzero(values.reshape(len(values), -1).any(axis=1))[0]
        raise SchemaError(
            f"field {flag!r} is true at step {first} of {len(values)} {where}, but an episode "
            "ends with its flag; split it there into two episodes"
        )
    return True


def _num_steps(arrays: Mapping[str, Rows], following: Mapping[str, Rows], where: str) -> int:
    if not arrays:
        raise SchemaError(f"there are no fields {where}; give at least one")
    for lead in ("action", "reward", *FLAGS):
        lengths = [len(a) for name, a in arrays.items() if name.split("/")[0] == lead]
        if lengths:
            num_steps = lengths[0]
            break
    else:
        num_steps = min(len(a) for a in (*arrays.values(), *following.values()))
    if num_steps == 0:
        raise SchemaError(f"there are no steps {where}; skip episodes that are empty")
    return num_steps


def _fit(name: str, array: Rows, num_steps: int, where: str) -> tuple[Rows, NDArray[Any] | None]:
    """Split the final observation off, if it is there."""
    if len(array) == num_steps:
        return array, None
    if len(array) == num_steps + 1 and is_observation(name):
        return array[:num_steps], array[num_steps]
    also = f" or {num_steps + 1}" if is_observation(name) else ""
    raise SchemaError(
        f"field {name!r} must have {num_steps}{also} rows {where}, got {len(array)}; "
        "all columns of an episode have one row per step"
    )


def _check_names(columns: Columns, schema: Schema, where: str) -> None:
    for name in columns.arrays:
        if name not in schema.fields:
            raise SchemaError(
                f"field {name!r} {where} is not in the schema "
                f"({', '.join(schema.fields)}); leave it out, or create a store that has it"
            )
    for name in schema.fields:
        if name not in columns.arrays:
            raise SchemaError(f"field {name!r} is missing {where}; every episode must bring it")
    for name in columns.following:
        if name not in schema.fields or not schema[name].has_next:
            raise SchemaError(
                f"field 'next_{name}' {where} is not in the schema; the first episode decides "
                "which fields have next values (observations always may)"
            )


def _fit_field(
    name: str,
    array: Rows,
    dtype: str,
    expected: Field,
    where: str,
    casts: dict[str, int] | None,
) -> Rows:
    if isinstance(array, Ragged):
        how = expected, where, casts
        return Ragged(_fit_values(name, array.values, dtype, *how), array.lengths)
    return _fit_values(name, array, dtype, expected, where, casts)


def _fit_values(
    name: str,
    array: NDArray[Any],
    dtype: str,
    expected: Field,
    where: str,
    casts: dict[str, int] | None,
) -> NDArray[Any]:
    if array.shape[1:] != expected.shape:
        raise SchemaError(
            f"field {name!r} must have shape {expected.shape}, got {array.shape[1:]} {where}; "
            f"reshape it, or create the store with {name} of shape {array.shape[1:]}"
        )
    if dtype == expected.dtype:
        return np.ascontiguousarray(array)
    bits = not {"bfloat16", "text"}.isdisjoint((dtype, expected.dtype))
    safe = not bits and _keeps_values(array, expected.stored_dtype)
    if casts is None or not safe:
        hint = "convert it, or open the writer with cast=True" if safe else "convert it"
        raise SchemaError(
            f"field {name!r} must have dtype {expected.dtype}, got {dtype} {where}; {hint}"
        )
    casts[name] = casts.get(name, 0) + len(array)
    return np.ascontiguousarray(array, expected.stored_dtype)


def _keeps_values(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Whether a cast loses nothing; numpy calls integers to float64 safe, whatever their size."""
    if not np.can_cast(array.dtype, dtype, "safe"):
        return False
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or dtype.kind != "f":
        return True
    return not ((array > 2**53) | (array < -(2**53))).any()


def next_name(name: str) -> str:
    """`next_observation/image` for the field `observation/image`."""
    return f"next_{name}"


def _is_nested(value: tuple[Any, ...], name: str, known: Mapping[str, Field]) -> bool:
    """Whether it is an observation of a Tuple space and not one row per step."""
    if name in known or f"{name}/0" in known:
        return name not in known
    return any(
        isinstance(v, (Mapping, tuple)) or getattr(v, "ndim", 0) or hasattr(v, "detach")
        for v in value
    )


def _torch(name: str) -> Any:
    import sys

    return getattr(sys.modules["torch"], name)


def _plain(value: Any) -> Any:
    """JSON's own types; what JSON would change silently (keys that are no strings) is refused."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys must be strings, got {key!r}")
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if hasattr(value, "detach"):
        return _plain(value.detach().cpu().tolist())
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"{type(value).__name__} {value!r} is not JSON")
