"""Plain compressed Zarr: rows in `data`, and where episodes end in `meta/episode_ends`.

The layout of diffusion_policy's replay buffers, with the names that fields have here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.exports.source import ExportSource

CHUNK_BYTES = 1 << 20
END = "meta/end_reason"


class ZarrExporter:
    """One array a field; the final observations of episodes are in `meta/final`."""

    name = "zarr"
    is_folder = True

    def losses(self, source: ExportSource) -> list[str]:
        return [
            *source.ragged_losses(),
            *source.bfloat16_losses(),
            *source.gap_losses(),
            *source.metadata_losses(lambda key, value: False),
        ]

    def write(self, source: ExportSource, target: Path) -> None:
        import zarr

        root = zarr.open_group(str(target), mode="w-", zarr_format=3)
        arrays: dict[str, _Array] = {}
        ends = np.cumsum(source.store.spans.length)
        for at, episode in enumerate(source.episodes()):
            columns = {f"data/{name}": episode.rows(name) for name in source.plain}
            columns[END] = np.array([episode.end_reason.encode().ljust(10)]).view(np.uint8)[None]
            for name in source.observations:
                has_final = episode.final(name)
                values = episode.data[name]
                final = values[-1:] if has_final else np.zeros_like(values[:1])
                columns[f"meta/final/{name}"] = final
                columns[f"meta/has_final/{name}"] = np.array([has_final])
            for path, rows in columns.items():
                if path not in arrays:
                    steps = path.startswith("data/")
                    count = source.store.num_steps if steps else len(ends)
                    arrays[path] = _Array(root, path, count, rows)
                arrays[path].append(rows)
            del at
        for array in arrays.values():
            array.flush()
        meta = root.require_group("meta")
        stops = meta.create_array("episode_ends", shape=ends.shape, dtype=ends.dtype)
        stops[:] = ends


class _Array:
    """Rows collected until they fill chunks, which so are written once."""

    def __init__(self, root: Any, path: str, num_rows: int, example: NDArray[Any]) -> None:
        row_bytes = max(1, example[:1].nbytes)
        self._chunk = max(1, min(num_rows, CHUNK_BYTES // row_bytes))
        self._array = root.create_array(
            path,
            shape=(num_rows, *example.shape[1:]),
            chunks=(self._chunk, *example.shape[1:]),
            dtype=example.dtype,
        )
        self._rows: list[NDArray[Any]] = []
        self._collected = self._written = 0

    def append(self, rows: NDArray[Any]) -> None:
        self._rows.append(rows)
        self._collected += len(rows)
        if self._collected >= self._chunk:
            self._write(self._collected - self._collected % self._chunk)

    def flush(self) -> None:
        self._write(self._collected)

    def _write(self, count: int) -> None:
        if not count:
            return
        rows = np.concatenate(self._rows)
        self._array[self._written : self._written + count] = rows[:count]
        self._written += count
        self._rows, self._collected = [rows[count:]], len(rows) - count
