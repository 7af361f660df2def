"""The folder of a data set of TensorFlow Datasets: which files it has, and what features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expstore.errors import SourceError
from expstore.formats.json_files import read_object
from expstore.formats.ordering import natural
from expstore.formats.rlds_features import leaves
from expstore.formats.tfrecord import begins_as_tfrecord

FEATURES, INFO = "features.json", "dataset_info.json"
TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


@dataclass(frozen=True)
class Shard:
    """One file, and how many episodes it is to have, where that is known."""

    name: str
    split: str
    num_episodes: int | None


def steps_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The features of a step; nothing where the data set has none."""
    features = tree.get("featuresDict", {}).get("features", {})
    found = features.get("steps", {}).get("sequence", {}).get("feature", {})
    return found if isinstance(found, Mapping) else {}


def data_folder(path: Path) -> Path | None:
    """The folder with the features: itself, that of a file, or the only version in it."""
    if path.is_file():
        return path.parent if _has_steps(path.parent) and begins_as_tfrecord(path) else None
    if _has_steps(path):
        return path
    versions = [found.parent for found in path.glob(f"*/{FEATURES}") if _has_steps(found.parent)]
    if len(versions) > 1:
        names = ", ".join(sorted(version.name for version in versions))
        raise SourceError(f"{path} has several versions, {names}; give the folder of one")
    return versions[0] if versions else None


def _has_steps(folder: Path) -> bool:
    if not (folder / FEATURES).is_file():
        return False
    try:
        return bool(leaves(steps_of(read_object(folder / FEATURES))).keys() - {""})
    except (SourceError, AttributeError, ValueError, TypeError):
        return False


def find_shards(path: Path, folder: Path, info: Mapping[str, Any]) -> list[Shard]:
    """The files that the data set says it has; or those that are there."""
    kind = info.get("fileFormat", "tfrecord")
    if kind != "tfrecord":
        raise SourceError(f"{path} is in the form {kind}; this reads tfrecord")
    shards = [
        shard
        for split in info.get("splits", ())
        for shard in _shards(str(info.get("name", "")), split)
    ]
    if not shards:
        names = sorted(
            (file.name for file in folder.glob("*.tfrecord*") if file.is_file()),
            key=natural,
        )
        shards = [Shard(name, "", None) for name in names]
    if path.is_file():
        known = [shard for shard in shards if shard.name == path.name]
        return known or [Shard(path.name, "", None)]
    return shards


def _shards(dataset: str, split: Mapping[str, Any]) -> Iterator[Shard]:
    lengths = [int(length) for length in split.get("shardLengths", ())]
    for number, length in enumerate(lengths):
        name = str(split.get("filepathTemplate") or TEMPLATE)
        parts = {
            "DATASET": dataset,
            "SPLIT": str(split.get("name", "")),
            "FILEFORMAT": "tfrecord",
            "SHARD_INDEX": f"{number:05d}",
            "NUM_SHARDS": f"{len(lengths):05d}",
            "SHARD_X_OF_Y": f"{number:05d}-of-{len(lengths):05d}",
        }
        for part, value in parts.items():
            name = name.replace(f"{{{part}}}", value)
        if "/" in name or name.startswith("."):
            raise SourceError(f"{INFO} names the file {name!r}, which is not beside it")
        yield Shard(name, parts["SPLIT"], length)
