"""export_to: the episodes of a store written in a foreign format, whole or not at all."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expstore.errors import ExportLossError, SchemaError, StorageError
from expstore.exports.source import Exporter, ExportSource
from expstore.storage.store import Store, absolute, open_store

# name -> module and class; loaded when they are asked for
FORMATS = {
    "d4rl": ("expstore.exports.d4rl", "D4rlExporter"),
    "lerobot": ("expstore.exports.lerobot", "LerobotExporter"),
    "minari": ("expstore.exports.minari", "MinariExporter"),
    "npz": ("expstore.exports.npz", "NpzExporter"),
    "parquet": ("expstore.exports.parquet", "ParquetExporter"),
    "robomimic": ("expstore.exports.robomimic", "RobomimicExporter"),
    "zarr": ("expstore.exports.zarr_rows", "ZarrExporter"),
}
TEMPORARY = ".partial"


@dataclass(frozen=True)
class Export:
    """What `export_to` wrote."""

    path: str
    format: str
    num_episodes: int
    num_steps: int
    losses: tuple[str, ...]  # what the format could not express


def export_to(
    store: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str],
    *,
    format: str,
    where: str | Callable[[Any], Any] | Iterable[Any] | None = None,
    lossy: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Export:
    """Write the episodes of a store in another format.

    What the format cannot express is found before anything is written; everything else is exact.
    Memory holds one episode at a time. The target is there in the end, whole, or not at all.

    Args:
        store: a directory, or a store, view or union.
        target: a free path: a file for d4rl and robomimic, a directory for the others.
        format: d4rl, lerobot, minari, npz, parquet, robomimic or zarr.
        where: which episodes, as for `Store.filter`.
        lossy: write although the format cannot express everything.
        progress: called with (episodes done, episodes in all).

    Raises:
        ExportLossError: the format cannot express everything, and not `lossy`; nothing is
            written. Its `losses` are the list.
        SchemaError: the format is none, something is at the target, or the store lacks what the
            format is made of.
        MissingExtraError: a package is needed.
        StorageError: the system refused to write.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp()
        >>> with expstore.Writer(path + "/demo.exp") as writer:
        ...     number = writer.append({"observation": np.zeros((4, 2)), "reward": np.ones(3)})
        >>> export = expstore.export_to(path + "/demo.exp", path + "/episodes", format="npz")
        >>> export.num_steps, export.losses
        (3, ())
    """
    exporter = exporter_of(format)
    opened = store if isinstance(store, Store) else open_store(store)
    chosen = opened if where is None else opened.filter(where)
    path = absolute(target)
    _check_free(path)
    if not chosen.num_episodes:
        raise SchemaError("there are no episodes to export; widen the condition")
    source = ExportSource(chosen, progress)
    losses = exporter.losses(source)
    if losses and not lossy:
        raise ExportLossError(format, losses)
    temporary = path.with_name(path.name + TEMPORARY)
    if os.path.lexists(temporary):
        raise SchemaError(f"{temporary} is in the way, perhaps of a killed export; remove it")
    try:
        exporter.write(source, temporary)
        os.replace(temporary, path)
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError):
            raise StorageError(f"cannot write {path}: {error}") from error
        raise
    return Export(str(path), format, chosen.num_episodes, chosen.num_steps, tuple(losses))


def exporter_of(format: str) -> Exporter:
    """The exporter of a format.

    Raises:
        SchemaError: there is none of that name.
    """
    if format not in FORMATS:
        raise SchemaError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    module, name = FORMATS[format]
    exporter: Exporter = getattr(importlib.import_module(module), name)()
    return exporter


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise SchemaError(f"there is something at {path} already; give a path that is free")
    if not path.parent.is_dir():
        raise SchemaError(f"there is no directory {path.parent}; make it, or give another path")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
