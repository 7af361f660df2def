"""A folder of `.npz` files, one episode each: what the importer of that name reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from expstore.exports.source import ExportSource
from expstore.schema import Field

TAKEN = ("end_reason",)


class NpzExporter:
    """`episode_000000.npz`, ...: fields by their names, and numbers and texts of the metadata."""

    name = "npz"
    is_folder = True

    def losses(self, source: ExportSource) -> list[str]:
        def is_told(key: str, value: Any) -> bool:
            is_free = key not in TAKEN and key not in source.fields
            return is_free and isinstance(value, (bool, int, float, str)) and _is_exact(value)

        return [
            *source.field_losses(_is_array, "values of any number per step, other than text"),
            *source.bfloat16_losses(),
            *source.metadata_losses(is_told),
        ]

    def write(self, source: ExportSource, target: Path) -> None:
        target.mkdir()
        width = max(6, len(str(source.store.num_episodes)))
        for at, episode in enumerate(source.episodes()):
            arrays: dict[str, Any] = {"end_reason": np.array(episode.end_reason)}
            if episode.seed is not None:
                arrays["seed"] = np.array(episode.seed)
            for key, value in episode.metadata.items():
                is_plain = isinstance(value, (bool, int, float, str)) and _is_exact(value)
                if is_plain and key not in arrays and key not in source.fields:
                    arrays[key] = np.array(value)
            for name, values in episode.data.items():
                if _is_array(name, source.fields[name.removeprefix("next_")]):
                    arrays[name] = np.array(values)
            with (target / f"episode_{at:0{width}}.npz").open("xb") as file:
                np.savez_compressed(file, **arrays)


def _is_array(name: str, field: Field) -> bool:
    return not field.ragged or field.dtype == "text"


def _is_exact(value: Any) -> bool:
    """Whether a numpy scalar is the same: no huge integers, no text that ends with NUL."""
    array = np.array(value)
    return array.dtype.kind in "biufU" and array.item() == value
