"""LeRobot v3.0: a Parquet table of frames, images as PNG in it, and the tables under `meta`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import MissingExtraError, how_to_install
from expstore.exports.source import ExportEpisode, ExportSource
from expstore.formats import arrow
from expstore.schema import Field

NAMES = {"reward": "next.reward", "terminated": "next.terminated", "truncated": "next.truncated"}
DONE = "next.done"
COUNTERS = ("frame_index", "episode_index", "index", "task_index")
TASK = "task"  # a text field, or a key of the metadata
USUAL_FPS = 30
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float32", "float64")  # fmt: skip
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEOS = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


class LerobotExporter:
    """What `LeRobotDataset(repo_id, root=TARGET)` opens.

    Vectors and numbers are columns, RGB frames (height, width, 3) of bytes are PNG. The task of a
    frame is the text field `task`, else `task` of the episode's metadata. Frames are a 30th of a
    second apart, unless the episodes' metadata has `fps`, or `dataset` with it.
    """

    name = "lerobot"
    is_folder = True

    def losses(self, source: ExportSource) -> list[str]:
        source.require("LeRobot", "action")
        renamed = []
        if "observation" in source.fields:
            renamed.append("that field 'observation' has no name of its own; it is "
                           "observation.state")  # fmt: skip
        renamed += source.field_losses(
            lambda n, f: f.ragged or bool(f.shape) or n in (*NAMES, "timestamp"),
            "a number is written as shape (1,)",
        )
        finals = source.known_finals
        return [
            *source.field_losses(_has_place, "neither a vector nor RGB frames"),
            *renamed,
            *source.bfloat16_losses(),
            *source.flag_losses(),
            *source.reason_losses(("terminated", "truncated", "cut")),
            *([f"final observations of {finals:,} episodes"] if finals else []),
            *source.gap_losses(),
            *source.metadata_losses(lambda key, value: key == TASK and isinstance(value, str)),
        ]

    def write(self, source: ExportSource, target: Path) -> None:
        pa = arrow.load_pyarrow()
        for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
            (target / folder).mkdir(parents=True)
        frames = Frames(source)
        writer = None
        try:
            for episode in source.episodes():
                table = frames.table(pa, episode)
                if writer is None:
                    path = target / DATA.format(chunk_index=0, file_index=0)
                    writer = pa.parquet.ParquetWriter(path, table.schema, compression="snappy")
                writer.write_table(table)  # a row group an episode, as LeRobot has it
        finally:
            if writer is not None:
                writer.close()
        _write_meta(pa, target / "meta", frames)


class Frames:
    """Rows of the table of frames, episode by episode, and what `meta` says of them."""

    def __init__(self, source: ExportSource) -> None:
        self.source = source
        self.tasks: dict[str, int] = {}  # text -> number
        self.episodes: list[dict[str, Any]] = []
        self.fields = {n: f for n, f in source.fields.items() if _has_place(n, f) and n != TASK}
        self.features = {_feature(n): _described(f) for n, f in self.fields.items()}
        self.features |= {n: _described(Field((), "bool")) for n in (*NAMES.values(), DONE)
                          if n != NAMES["reward"]}  # fmt: skip
        counters = {n: _described(Field((), "int64")) for n in COUNTERS}
        self.features |= {"timestamp": _described(Field((), "float32")), **counters}
        self.moments: dict[str, Moments] = {}
        self.num_frames = 0
        self.fps = _fps_of(source)

    def table(self, pa: Any, episode: ExportEpisode) -> Any:
        """The rows of the next episode."""
        length, first = episode.length, self.num_frames
        tasks = self._tasks(episode)
        columns: dict[str, Any] = {_feature(n): episode.rows(n) for n in self.fields}
        columns |= {NAMES[n]: episode.flag(n) for n in ("terminated", "truncated")}
        done = np.zeros(length, bool)
        done[-1] = True
        columns[DONE] = done
        if "timestamp" not in columns:
            columns["timestamp"] = (np.arange(length) / self.fps).astype(np.float32)
        numbers = (
            np.arange(length),
            np.full(length, len(self.episodes)),
            np.arange(first, first + length),
            np.array([self.tasks[t] for t in tasks]),
        )
        columns |= dict(zip(COUNTERS, numbers, strict=True))
        own = {name: Moments.of(values) for name, values in columns.items()}
        for name, moments in own.items():
            self.moments[name] = self.moments[name].joined(moments) if first else moments
        self.episodes.append(
            {
                "episode_index": len(self.episodes),
                "tasks": list(dict.fromkeys(tasks)),
                "length": length,
                "data/chunk_index": 0,
                "data/file_index": 0,
                "dataset_from_index": first,
                "dataset_to_index": first + length,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
                **{f"stats/{n}/{key}": value
                   for n, moments in own.items()
                   for key, value in moments.stats(n, self).items()},
            }
        )  # fmt: skip
        self.num_frames += length
        arrays = [_column(pa, columns[name], f["dtype"]) for name, f in self.features.items()]
        table = pa.table(dict(zip(self.features, arrays, strict=True)))
        return table.replace_schema_metadata({"huggingface": json.dumps(self._hugging_face())})

    def _tasks(self, episode: ExportEpisode) -> list[str]:
        given = episode.data.get(TASK)
        text = episode.metadata.get(TASK)
        tasks = given if isinstance(given, list) else [text if isinstance(text, str) else ""]
        tasks = tasks if isinstance(given, list) else tasks * episode.length
        for task in tasks:
            self.tasks.setdefault(task, len(self.tasks))
        return tasks

    def _hugging_face(self) -> dict[str, Any]:
        """How the package `datasets` is to read the columns."""
        features: dict[str, Any] = {}
        for name, feature in self.features.items():
            value = {"dtype": feature["dtype"], "_type": "Value"}
            if feature["dtype"] == "image":
                features[name] = {"_type": "Image"}
            elif feature["shape"] == [1]:
                features[name] = value
            else:
                size = feature["shape"][0]
                features[name] = {"feature": value, "length": size, "_type": "List"}
        return {"info": {"features": features}}


class Moments:
    """Statistics of a feature as LeRobot keeps them, joined from episode to episode."""

    def __init__(self, low: Any, high: Any, mean: Any, squares: Any, count: int) -> None:
        self.low, self.high, self.mean, self.squares = low, high, mean, squares
        self.count = count

    @staticmethod
    def of(values: NDArray[Any]) -> Moments:
        rows = np.asarray(values, np.float64)
        if rows.ndim == 4:  # frames: of each channel, from 0 to 1
            rows = rows.reshape(-1, rows.shape[-1]) / 255
        mean = rows.mean(axis=0)
        squares = np.square(rows - mean).sum(axis=0)
        return Moments(rows.min(axis=0), rows.max(axis=0), mean, squares, len(rows))

    def joined(self, other: Moments) -> Moments:
        count = self.count + other.count
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart**2 * (self.count * other.count / count)
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return Moments(low, high, self.mean + apart * (other.count / count), squares, count)

    def stats(self, name: str, frames: Frames) -> dict[str, Any]:
        """Of one shape for each feature: (channels, 1, 1) for frames."""
        std = np.sqrt(self.squares / self.count)
        values = {"min": self.low, "max": self.high, "mean": self.mean, "std": std}
        shape = (-1, 1, 1) if frames.features[name]["dtype"] == "image" else (-1,)
        found = {key: np.reshape(value, shape).tolist() for key, value in values.items()}
        return {**found, "count": [self.count]}


def _write_meta(pa: Any, folder: Path, frames: Frames) -> None:
    info = {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": len(frames.episodes),
        "total_frames": frames.num_frames,
        "total_tasks": len(frames.tasks),
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": frames.fps,
        "splits": {"train": f"0:{len(frames.episodes)}"},
        "data_path": DATA,
        "video_path": VIDEOS,
        "features": frames.features,
    }
    (folder / "info.json").write_text(json.dumps(info, indent=4), encoding="utf-8")
    stats = {name: m.stats(name, frames) for name, m in frames.moments.items()}
    (folder / "stats.json").write_text(json.dumps(stats, indent=4), encoding="utf-8")
    tasks = pa.table({"task_index": list(frames.tasks.values()), "task": list(frames.tasks)})
    index = {"index_columns": ["task"], "column_indexes": [], "columns": [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64",
         "numpy_type": "int64", "metadata": None},
        {"name": "task", "field_name": "task", "pandas_type": "unicode",
         "numpy_type": "object", "metadata": None}]}  # fmt: skip
    tasks = tasks.replace_schema_metadata({"pandas": json.dumps(index)})
    pa.parquet.write_table(tasks, folder / "tasks.parquet")
    path = folder / "episodes/chunk-000/file-000.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(frames.episodes), path)


def _has_place(name: str, field: Field) -> bool:
    if name == TASK:
        return field.dtype == "text"
    if field.ragged or "." in name or name in (*COUNTERS, *NAMES.values()):
        return False
    return _is_rgb(field) or (len(field.shape) < 2 and field.dtype in (*DTYPES, "bfloat16"))


def _is_rgb(field: Field) -> bool:
    return field.dtype == "uint8" and len(field.shape) == 3 and field.shape[2] == 3


def _feature(name: str) -> str:
    if name == "observation":
        return "observation.state"
    return NAMES.get(name, name.replace("/", "."))


def _described(field: Field) -> dict[str, Any]:
    if _is_rgb(field):
        names = ["height", "width", "channels"]
        return {"dtype": "image", "shape": list(field.shape), "names": names}
    dtype = "float32" if field.dtype == "bfloat16" else field.dtype
    return {"dtype": dtype, "shape": list(field.shape) or [1], "names": None}


def _column(pa: Any, values: Any, dtype: str) -> Any:
    if dtype == "image":
        files = [{"bytes": _png(frame), "path": None} for frame in values]
        return pa.array(files, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    if values.ndim == 2 and values.shape[1] > 1:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.array(values.reshape(-1))


def _png(frame: NDArray[np.uint8]) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(f"images need pillow; {how_to_install('images')}") from error
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(file, "PNG")
    return file.getvalue()


def _fps_of(source: ExportSource) -> int:
    metadata = source.store.episodes[0]["metadata"]
    dataset = metadata.get("dataset")
    found = metadata.get("fps", dataset.get("fps") if isinstance(dataset, dict) else None)
    return int(found) if isinstance(found, (int, float)) and found >= 1 else USUAL_FPS
