"""D4RL: one HDF5 file of rows, whose episodes end with `terminals` or `timeouts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expstore.exports.source import ExportEpisode, ExportSource
from expstore.formats import hdf5

NAMES = {"observation": "observations", "action": "actions", "reward": "rewards"}
FLAGS = {"terminated": "terminals", "truncated": "timeouts"}
CHUNK_BYTES = 1 << 20


class D4rlExporter:
    """The datasets of D4RL; fields under `infos/` come along."""

    name = "d4rl"
    is_folder = False

    def losses(self, source: ExportSource) -> list[str]:
        source.require("D4RL", *NAMES)
        known = {*NAMES, *FLAGS}
        told = ("terminated", "truncated")
        return [
            *source.field_losses(lambda n, _: n in known or n.startswith("infos/"), "no place"),
            *(line for line in source.ragged_losses() if "'infos/" in line),
            *source.bfloat16_losses(),
            *source.flag_losses(),
            *source.reason_losses(told),
            *source.final_losses(),
            *(f"next values of field {n!r}" for n in source.gaps if n != "observation"),
            *source.metadata_losses(lambda key, value: False),
        ]

    def write(self, source: ExportSource, target: Path) -> None:
        h5py = hdf5.load_h5py()
        with h5py.File(target, "x") as file:
            done = 0
            for episode in source.episodes():
                for name, rows in self._columns(source, episode).items():
                    if name not in file:
                        shape = (source.store.num_steps, *rows.shape[1:])
                        _create(file, name, shape, rows.dtype)
                    file[name][done : done + episode.length] = rows
                done += episode.length

    def _columns(self, source: ExportSource, episode: ExportEpisode) -> dict[str, Any]:
        columns = {old: episode.rows(name) for name, old in NAMES.items()}
        if source.known_finals:
            columns["next_observations"] = episode.next_rows("observation")
        columns |= {old: episode.flag(name) for name, old in FLAGS.items()}
        if episode.end_reason in ("cut", "incomplete"):
            # Nothing else says where it ends: a row that belongs to the next one would be worse.
            columns["timeouts"] = columns["timeouts"].copy()
            columns["timeouts"][-1] = True
        infos = (name for name in source.plain if name.startswith("infos/"))
        return columns | {name: episode.rows(name) for name in infos}


def _create(file: Any, name: str, shape: tuple[int, ...], dtype: Any) -> None:
    row_bytes = dtype.itemsize
    for size in shape[1:]:
        row_bytes *= size
    rows = max(1, min(shape[0], CHUNK_BYTES // row_bytes))
    file.create_dataset(
        name, shape, dtype, chunks=(rows, *shape[1:]), compression="gzip", compression_opts=1
    )
