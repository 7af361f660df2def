"""Minari in its HDF5 form: `data/main_data.hdf5` and `data/metadata.json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from expstore.exports.source import ExportEpisode, ExportSource
from expstore.formats import hdf5
from expstore.schema import Field

VERSION = "0.5.0"  # whose data sets these are; every later one reads them
SCALARS = {"reward": "rewards", "terminated": "terminations", "truncated": "truncations"}
GROUPS = {"observation": "observations", "action": "actions"}


class MinariExporter:
    """What `minari.MinariDataset(TARGET / "data")` opens; fields under `infos/` come along."""

    name = "minari"
    is_folder = True

    def losses(self, source: ExportSource) -> list[str]:
        source.require("Minari", "reward")
        for group in GROUPS:
            if not _members(source, group):
                source.require("Minari", group)
        return [
            *source.field_losses(lambda n, _: _place(n) is not None, "no place"),
            *(line for line in source.ragged_losses()),
            *source.bfloat16_losses(),
            *source.flag_losses(),
            *source.reason_losses(("terminated", "truncated", "cut")),
            *source.gap_losses(),
            *source.metadata_losses(lambda key, value: key == "seed" and type(value) is int),
        ]

    def write(self, source: ExportSource, target: Path) -> None:
        h5py = hdf5.load_h5py()
        folder = target / "data"
        folder.mkdir(parents=True)
        with h5py.File(folder / "main_data.hdf5", "x", track_order=True) as file:
            for at, episode in enumerate(source.episodes()):
                group = file.create_group(f"episode_{at}")
                group.attrs["id"] = at
                group.attrs["total_steps"] = episode.length
                if episode.seed is not None:
                    group.attrs["seed"] = episode.seed
                for name, rows in self._columns(source, episode).items():
                    group.create_dataset(name, data=rows)
        name = re.sub(r"[^-\w]+", "-", target.name.removesuffix(".partial")).strip("-") or "data"
        metadata = {
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "dataset_id": f"expstore/{name}-v0",
            "minari_version": VERSION,
            "total_episodes": source.store.num_episodes,
            "total_steps": source.store.num_steps,
            "dataset_size": round((folder / "main_data.hdf5").stat().st_size / 1e6, 1),
            **{f"{group}_space": json.dumps(_space(source, group)) for group in GROUPS},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")

    def _columns(self, source: ExportSource, episode: ExportEpisode) -> dict[str, Any]:
        columns = {old: episode.flag(n) for n, old in SCALARS.items() if n != "reward"}
        for name in source.plain:
            if (place := _place(name)) is not None:
                columns[place] = episode.data[name]
        return columns


def _place(name: str) -> str | None:
    """Where a field lies in the group of an episode."""
    first, *rest = name.split("/")
    if name in SCALARS:
        return SCALARS[name]
    if first in GROUPS:
        return "/".join([GROUPS[first], *rest])
    return name if first == "infos" and rest else None


def _members(source: ExportSource, group: str) -> list[str]:
    return [n for n in source.plain if n == group or n.startswith(f"{group}/")]


def _space(source: ExportSource, group: str) -> dict[str, Any]:
    """A space in which all values of the fields lie; bounds are not known, so they are those of
    the dtype."""
    space: dict[str, Any] = {"type": "Dict", "subspaces": {}}
    for name in _members(source, group):
        if name == group:
            return _box(source.fields[name])
        *parents, last = name.removeprefix(f"{group}/").split("/")
        node = space
        for parent in parents:
            node = node["subspaces"].setdefault(parent, {"type": "Dict", "subspaces": {}})
        node["subspaces"][last] = _box(source.fields[name])
    return space


def _box(field: Field) -> dict[str, Any]:
    dtype = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    if dtype.kind == "b":
        return {"type": "MultiBinary", "n": list(field.shape)}
    low: Any = -np.inf if dtype.kind == "f" else np.iinfo(dtype).min
    high: Any = np.inf if dtype.kind == "f" else np.iinfo(dtype).max
    bounds = {k: np.full(field.shape, v, dtype).tolist() for k, v in (("low", low), ("high", high))}
    return {"type": "Box", "dtype": dtype.name, "shape": list(field.shape), **bounds}
