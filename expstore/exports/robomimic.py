"""robomimic HDF5: a group `data/demo_<i>` for each episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from expstore.exports.source import ExportEpisode, ExportSource
from expstore.formats import hdf5
from expstore.schema import Field

NAMES = {"action": "actions", "reward": "rewards"}
TAKEN = ("obs", "next_obs", "dones")


class RobomimicExporter:
    """`obs/<key>`, `next_obs/<key>`, `actions`, `rewards` and `dones`, which mean success.

    Read it back with `--done-mode 0`. Other fields come along under their names.
    """

    name = "robomimic"
    is_folder = False

    def losses(self, source: ExportSource) -> list[str]:
        source.require("robomimic", "action")
        told = ("terminated", "cut")
        return [
            *source.field_losses(_is_told, "no place"),
            *(["that field 'observation' has no name of its own; it becomes obs/observation"]
              if "observation" in source.fields else []),
            *source.ragged_losses(),
            *source.bfloat16_losses(),
            *(line for line in source.flag_losses() if "'terminated'" in line),
            *source.reason_losses(told),
            *source.final_losses(),
            *(f"next values of field {n!r}" for n in source.gaps
              if not n.startswith("observation")),
            *source.metadata_losses(lambda key, value: False),
        ]  # fmt: skip

    def write(self, source: ExportSource, target: Path) -> None:
        h5py = hdf5.load_h5py()
        with h5py.File(target, "x") as file:
            data = file.create_group("data")
            data.attrs["total"] = source.store.num_steps
            data.attrs["env_args"] = json.dumps({"env_name": "", "type": 2, "env_kwargs": {}})
            for at, episode in enumerate(source.episodes()):
                group = data.create_group(f"demo_{at}")
                group.attrs["num_samples"] = episode.length
                for name, rows in self._columns(source, episode).items():
                    group.create_dataset(name, data=rows)

    def _columns(self, source: ExportSource, episode: ExportEpisode) -> dict[str, Any]:
        columns: dict[str, Any] = {"dones": episode.flag("terminated").astype(np.int64)}
        for name in source.plain:
            if name in source.observations:
                key = name.removeprefix("observation/")
                columns[f"obs/{key}"] = episode.rows(name)
                if source.known_finals:
                    columns[f"next_obs/{key}"] = episode.next_rows(name)
            elif _is_told(name, source.fields[name]) and name != "terminated":
                columns[NAMES.get(name, name)] = episode.rows(name)
        return columns


def _is_told(name: str, _: Field) -> bool:
    """`truncated` has no place: a reader would take it for a second end flag."""
    return name != "truncated" and name.split("/")[0] not in (*TAKEN, *NAMES.values())
