"""What a step is made of: the fields of a store, their shapes, dtypes and layouts."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from expstore.errors import FieldNotFoundError, FormatError, SchemaError

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "text"),
)
LAYOUTS = ("auto", "mapped", "coded")
FLAGS = ("terminated", "truncated")
RESERVED = ("done", "episode", "next", "has_next")
MAX_DEPTH = 32  # of nested names: deeper ones are a mistake, and paths have a length limit
MAX_PART_BYTES = 200  # of one part of a name; file systems allow 255, temporary names need some
MAX_NAME_BYTES = 1000  # of a whole name; paths may have 4,096, with that of the store in front
MAX_STEP_BYTES = 1 << 31


@dataclass(frozen=True)
class Field:
    """One named quantity of a step.

    Attributes:
        shape: of one step's value; `()` is a scalar, which is not the same as `(1,)`. Of one
            element of a ragged field.
        dtype: a name out of `DTYPES`; `bfloat16` is stored as the 16 bits it consists of,
            `text` as UTF-8.
        layout: how its column lies on disk, "auto" until the first commit decides.
        has_next: whether its values after the last step of an episode are stored, too.
        ragged: each step has any number of elements: point clouds, encoded images, text.
        added: number of the commit that added it to a store which had steps; None for others.

    >>> Field(shape=(17,), dtype="float32").step_bytes
    68
    """

    shape: tuple[int, ...]
    dtype: str
    layout: str = "auto"
    has_next: bool = False
    ragged: bool = False
    added: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        if self.dtype == "text":
            object.__setattr__(self, "ragged", True)
        if self.dtype not in DTYPES:
            raise SchemaError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        if self.layout not in LAYOUTS:
            raise SchemaError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        try:
            object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        except TypeError:
            raise SchemaError(f"shape must be a tuple of integers, got {self.shape!r}") from None
        if any(n < 1 for n in self.shape):
            raise SchemaError(
                f"shape must be a tuple of positive integers, got {self.shape}; "
                "leave out a field that has no elements"
            )
        if self.step_bytes > MAX_STEP_BYTES:
            raise SchemaError(f"one step must take at most 2 GiB, shape {self.shape} takes more")

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the column on disk: uint16 for bfloat16, uint8 for text."""
        stored = {"bfloat16": "uint16", "text": "uint8"}.get(self.dtype, self.dtype)
        return np.dtype(stored).newbyteorder("<")

    @property
    def step_bytes(self) -> int:
        """Bytes of one step's value; of one element of a ragged field."""
        num_bytes = self.stored_dtype.itemsize
        for size in self.shape:
            num_bytes *= size  # Python integers: numpy's product would overflow silently
        return num_bytes


@dataclass(frozen=True)
class Schema:
    """The fields of a store by name, nested names written with `/`.

    >>> schema = Schema({"observation": Field((3,), "float32"), "action": Field((), "int64")})
    >>> list(schema.fields)
    ['observation', 'action']
    """

    fields: Mapping[str, Field] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.fields:
            check_name(name)
        check_nesting(self.fields)
        for name in ("reward", *FLAGS):
            if name in self.fields and self.fields[name].ragged:
                raise SchemaError(f"field {name!r} must have one value per step, not any number")
        # What an episode may bring one more row of is an observation; see `Episode`.
        fields = {
            name: replace(f, has_next=True) if is_observation(name) else f
            for name, f in self.fields.items()
        }
        object.__setattr__(self, "fields", fields)

    def __getitem__(self, name: str) -> Field:
        try:
            return self.fields[name]
        except KeyError:
            raise FieldNotFoundError(unknown_field(name, self.fields)) from None

    @cached_property
    def next_fields(self) -> tuple[str, ...]:
        """Names of the fields whose exceptions are stored under `next/`."""
        return tuple(name for name, f in self.fields.items() if f.has_next)

    @cached_property
    def added(self) -> frozenset[str]:
        """Names of the fields that were added to a store which had steps."""
        return frozenset(name for name, f in self.fields.items() if f.added is not None)

    def as_of(self, commit: int) -> Schema:
        """Without the fields that only later commits have added."""
        return Schema({n: f for n, f in self.fields.items() if (f.added or 0) <= commit})

    def to_json(self) -> dict[str, Any]:
        """The form in the root's attributes; `from_json` is its inverse."""
        return {
            "fields": {
                name: {
                    "shape": list(f.shape),
                    "dtype": f.dtype,
                    "layout": f.layout,
                    "next": f.has_next,
                    "ragged": f.ragged,
                    **({} if f.added is None else {"added": f.added}),
                }
                for name, f in self.fields.items()
            }
        }

    @staticmethod
    def from_json(document: Any) -> Schema:
        """Read what `to_json` made; anything else is a `FormatError`."""
        try:
            return Schema(
                {
                    name: Field(
                        tuple(f["shape"]),
                        f["dtype"],
                        f["layout"],
                        bool(f["next"]),
                        bool(f["ragged"]),
                        None if f.get("added") is None else operator.index(f["added"]),
                    )
                    for name, f in document["fields"].items()
                }
            )
        except (KeyError, TypeError, AttributeError, SchemaError) as error:
            raise FormatError(
                f"the schema in the root's attributes is not valid: {error}"
            ) from error

    @staticmethod
    def from_spaces(
        observation_space: Any, action_space: Any, *, reward_dtype: str = "float64"
    ) -> Schema:
        """The schema of an environment: observation, action, reward and both flags.

        Args:
            observation_space: a gymnasium space: Box, Discrete, MultiDiscrete, MultiBinary,
                Text, or Dict and Tuple of such; members of a Tuple are named "0", "1", ...
            action_space: likewise.
            reward_dtype: gymnasium rewards are Python floats, so `float64` by default.

        Raises:
            SchemaError: a space of another kind; the text names where it stands.
        """
        fields = dict(_space_fields("observation", observation_space))
        fields.update(_space_fields("action", action_space))
        fields["reward"] = Field((), reward_dtype)
        fields.update({flag: Field((), "bool") for flag in FLAGS})
        return Schema(fields)


def is_observation(name: str) -> bool:
    """Whether a field is `observation` or lies under it."""
    return name == "observation" or name.startswith("observation/")


def check_name(name: Any, where: str = "") -> None:
    """Refuse what cannot be a field: reserved, or not a safe relative path."""
    if not isinstance(name, str):
        raise SchemaError(f"field names must be strings, got {name!r}{_at(where)}")
    parts = name.split("/")
    if parts[0] in RESERVED or parts[0].startswith("next_"):
        raise SchemaError(
            f"field {name!r}{_at(where)} has a reserved name ({', '.join(RESERVED)} and next_* "
            "are the store's own); rename it"
        )
    if len(parts) > MAX_DEPTH:
        raise SchemaError(
            f"field {name[:80]!r}...{_at(where)} is nested deeper than {MAX_DEPTH} levels; "
            "shorten its name"
        )
    if sum(_check_part(name, part, where) for part in parts) + len(parts) > MAX_NAME_BYTES:
        raise SchemaError(
            f"field {name[:80]!r}...{_at(where)} is longer than {MAX_NAME_BYTES} bytes; "
            "shorten its name"
        )


def _check_part(name: str, part: str, where: str) -> int:
    """Refuse a part that is no safe file name and no Zarr node name; returns its bytes."""
    try:
        num_bytes = len(part.encode())
    except UnicodeEncodeError:
        raise SchemaError(f"field {name!r}{_at(where)} is not valid Unicode; rename it") from None
    # zarr.json.partial would stand in the way of a group's own temporary file.
    unsafe = not part.strip(".") or part.startswith(("__", "zarr.json"))
    if unsafe or any(ord(c) < 32 or c in "\\\x7f" for c in part):
        raise SchemaError(
            f"field {name!r}{_at(where)} has the part {part!r}, which cannot be a file name "
            "here; rename it"
        )
    if num_bytes > MAX_PART_BYTES:
        raise SchemaError(
            f"field {name[:80]!r}...{_at(where)} has a part longer than {MAX_PART_BYTES} bytes; "
            "shorten it"
        )
    return num_bytes


def _at(where: str) -> str:
    return f" {where}" if where else ""


def check_nesting(names: Mapping[str, Any], where: str = "") -> None:
    """Refuse a field that lies under another one: an array cannot hold arrays."""
    for name in names:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            if parent in names:
                raise SchemaError(
                    f"field {name!r}{_at(where)} lies under field {parent!r}; rename one of them"
                )


def unknown_field(name: str, fields: Mapping[str, Any]) -> str:
    """The text for a field that does not exist."""
    return f"there is no field {name!r}; the store has {', '.join(map(repr, fields)) or 'none yet'}"


def described(
    what: str, shape: tuple[int, ...], dtype: str, *, has_next: bool = False, ragged: bool = False
) -> Field:
    """The field of data that was found; an error says whose it was."""
    try:
        return Field(shape, dtype, has_next=has_next, ragged=ragged)
    except SchemaError as error:
        raise SchemaError(f"{what}: {error}") from None


def _dtype_name(dtype: Any) -> Any:
    """The name of a dtype given as one of numpy's; names stay as they are."""
    if dtype is None or isinstance(dtype, str):  # to numpy, None is a float64
        return dtype
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype).removeprefix("torch.")


def _space_fields(name: str, space: Any) -> list[tuple[str, Field]]:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        members = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        members = [(str(i), member) for i, member in enumerate(space.spaces)]
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        dtype = np.dtype(space.dtype).name
        return [(name, described(f"field {name!r}", tuple(space.shape or ()), dtype))]
    elif isinstance(space, spaces.Text):
        return [(name, Field((), "text"))]
    else:
        raise SchemaError(
            f"{name}: spaces of type {type(space).__name__} have no fixed-size field; "
            "give a schema= with the fields that your policy needs"
        )
    return [item for key, member in members for item in _space_fields(f"{name}/{key}", member)]
