"""A column that was being added: what is noted of it, and whether it is where it belongs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from expstore.errors import SchemaError
from expstore.schema import Field, Schema
from expstore.storage import files
from expstore.storage.layout import ADDING, ArrayLayout, ChunkLimits, arrays_of

PROGRESS_FILE = f"{ADDING}/progress"
KEYS = {"name", "store_id", "field", "rows", "next_episode"}


def noted_column(path: Path) -> dict[str, Any] | None:
    """The note of an addition that was not finished; None where there is none."""
    try:
        noted = json.loads(files.read(path / PROGRESS_FILE))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return noted if isinstance(noted, dict) and noted.keys() >= KEYS else None


def column_arrays(
    name: str, field: Field, known: Mapping[str, ArrayLayout]
) -> dict[str, ArrayLayout]:
    """The arrays of an added field, in chunks as long as those of the store."""
    limits = ChunkLimits(known["steps/done"].chunk_rows, known["episodes/end_reason"].chunk_rows)
    beside = f"episodes/crc32c/{name}"
    return {
        path: layout
        for path, layout in arrays_of(Schema({name: field}), limits).items()
        if path.startswith(f"steps/{name}") or path == beside
    }


def with_moved_column(
    path: Path,
    store_id: str,
    schema: Schema,
    arrays: dict[str, ArrayLayout],
    dims: Mapping[str, tuple[int, int]],
    number: int,
) -> tuple[Schema, dict[str, ArrayLayout]]:
    """Schema and arrays with the column that commit `number` added, if it did.

    Who adds a column moves its files to their places, commits, brings the copy of the root up
    and removes the note, in this order. If a kill came before the copy, it lacks the column.
    """
    noted = noted_column(path)
    if noted is None or noted["store_id"] != store_id or noted["name"] in schema.fields:
        return schema, arrays
    name = noted["name"]
    try:
        field = replace(Schema.from_json({"fields": {name: noted["field"]}})[name], added=number)
        longer, added = Schema({**schema.fields, name: field}), column_arrays(name, field, arrays)
        is_there = all(
            dims[layout.dimension][1] == noted["rows"][array] and _has_files(path, layout, dims)
            for array, layout in added.items()
        )
    except (SchemaError, KeyError, TypeError, AttributeError, ValueError):
        return schema, arrays  # not the note of this commit, whose rows it does not have
    return (longer, {**arrays, **added}) if is_there else (schema, arrays)


def _has_files(path: Path, layout: ArrayLayout, dims: Mapping[str, tuple[int, int]]) -> bool:
    start, stop = dims[layout.dimension]
    chunks = range(start // layout.chunk_rows, -(-stop // layout.chunk_rows))
    return all(files.size(path / layout.chunk_path(chunk)) is not None for chunk in chunks)
