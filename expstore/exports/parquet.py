"""Parquet: `steps.parquet` with a row per step, `episodes.parquet` with a row per episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from expstore.exports.source import ExportEpisode, ExportSource
from expstore.formats import arrow

GROUP_ROWS = 1 << 16


class ParquetExporter:
    """Columns by the names of the fields, with `episode` and `step`, which counts from 0 in each.

    Values of a shape are lists of fixed size, whose shape stands in the column's metadata; next
    values of observations have a column of their own, null where they are not known. The rest of
    an episode stands in its row, metadata as JSON.
    """

    name = "parquet"
    is_folder = True

    def losses(self, source: ExportSource) -> list[str]:
        nested = source.field_losses(
            lambda n, f: not f.ragged or not f.shape, "any number of arrays per step"
        )
        return [*nested, *source.bfloat16_losses()]

    def write(self, source: ExportSource, target: Path) -> None:
        pa = arrow.load_pyarrow()
        target.mkdir()
        episodes: list[dict[str, Any]] = []
        writer, waiting, count = None, [], 0
        try:
            for episode in source.episodes():
                table = self._table(pa, source, episode)
                episodes.append(
                    {
                        "episode": episode.number,
                        "length": episode.length,
                        "end_reason": episode.end_reason,
                        "seed": episode.seed,
                        "metadata": json.dumps(episode.metadata),
                    }
                )
                if writer is None:
                    path = target / "steps.parquet"
                    writer = pa.parquet.ParquetWriter(path, table.schema, compression="zstd")
                waiting.append(table)
                count += len(table)
                if count >= GROUP_ROWS:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting, count = [], 0
            if writer is not None and waiting:
                writer.write_table(pa.concat_tables(waiting))
        finally:
            if writer is not None:
                writer.close()
        columns = ("episode", "length", "end_reason", "seed", "metadata")
        types = (pa.int64(), pa.int64(), pa.string(), pa.int64(), pa.string())
        schema = pa.schema(list(zip(columns, types, strict=True)))
        pa.parquet.write_table(pa.Table.from_pylist(episodes, schema), target / "episodes.parquet")

    def _table(self, pa: Any, source: ExportSource, episode: ExportEpisode) -> Any:
        arrays = [
            pa.array(np.full(episode.length, episode.number)),
            pa.array(np.arange(episode.length)),
        ]
        fields = [pa.field("episode", pa.int64()), pa.field("step", pa.int64())]
        for name, field in source.fields.items():
            if field.ragged and field.shape:
                continue
            arrays.append(_column(pa, episode.rows(name)))
            fields.append(_described(pa, name, arrays[-1].type, field.shape))
            if field.has_next:
                arrays.append(_following(pa, name, episode))
                fields.append(_described(pa, f"next_{name}", arrays[-1].type, field.shape))
        return pa.table(arrays, schema=pa.schema(fields))


def _described(pa: Any, name: str, kind: Any, shape: tuple[int, ...]) -> Any:
    return pa.field(name, kind, metadata={"shape": json.dumps(list(shape))})


def _column(pa: Any, rows: Any, mask: Any = None) -> Any:
    if isinstance(rows, list):  # strings, or arrays of one dimension
        is_null = [False] * len(rows) if mask is None else mask.tolist()
        values = [None if null else row for row, null in zip(rows, is_null, strict=True)]
        if rows and isinstance(rows[0], str):
            return pa.array(values, pa.string())
        return pa.array(values, pa.list_(pa.from_numpy_dtype(rows[0].dtype)))
    if rows.ndim == 1:
        return pa.array(rows, mask=mask)
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    null = None if mask is None else pa.array(mask)
    size = int(np.prod(rows.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(flat, size, mask=null)


def _following(pa: Any, name: str, episode: ExportEpisode) -> Any:
    mask = np.zeros(episode.length, bool)
    values = episode.data.get(f"next_{name}")
    if values is None:
        rows = episode.data[name]
        mask[-1] = not episode.final(name)
        values = rows[1:] if episode.final(name) else _padded(rows)
    return _column(pa, values, mask)


def _padded(rows: Any) -> Any:
    return (
        [*rows[1:], rows[-1]] if isinstance(rows, list) else np.concatenate([rows[1:], rows[-1:]])
    )
