"""LeRobot data sets in the layouts of versions 2.1 and 3.0, written with pyarrow."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

FPS = 10
CAMERA = "observation.images.top"
TASKS = ["pick the cube", "größer stapeln"]
NUMBERS = {
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    **{
        name: {"dtype": "int64", "shape": [1], "names": None}
        for name in ("frame_index", "episode_index", "index", "task_index")
    },
}
FEATURES: dict[str, Any] = {
    "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]},
    "action": {"dtype": "float32", "shape": [2], "names": ["a", "b"]},
    "next.reward": {"dtype": "float32", "shape": [1], "names": None},
    "next.done": {"dtype": "bool", "shape": [1], "names": None},
    **NUMBERS,
}
IMAGE = {"dtype": "image", "shape": [6, 8, 3], "names": ["height", "width", "channel"]}
VIDEO = {**IMAGE, "dtype": "video", "shape": [32, 48, 3]}


def rows(index: int, length: int, first: int = 0) -> dict[str, Any]:
    """The columns of one episode; every value tells the episode and the step."""
    rng = np.random.default_rng(index)
    done = np.zeros(length, bool)
    done[-1] = True
    return {
        "observation.state": rng.normal(size=(length, 3)).astype(np.float32),
        "action": rng.normal(size=(length, 2)).astype(np.float32),
        "next.reward": rng.normal(size=length).astype(np.float32),
        "next.done": done,
        "timestamp": (np.arange(length) / FPS).astype(np.float32),
        "frame_index": np.arange(length),
        "episode_index": np.full(length, index),
        "index": np.arange(first, first + length),
        "task_index": np.full(length, index % len(TASKS)),
    }


def png(pixels: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def table_of(columns: dict[str, Any]) -> Any:
    import pyarrow as pa

    arrays = {}
    for name, values in columns.items():
        if isinstance(values, list) and values and isinstance(values[0], bytes):
            arrays[name] = pa.array([{"bytes": v, "path": None} for v in values])
        elif np.ndim(values) == 2:
            kind = pa.list_(pa.from_numpy_dtype(values.dtype), values.shape[1])
            arrays[name] = pa.FixedSizeListArray.from_arrays(values.reshape(-1), type=kind)
        else:
            arrays[name] = pa.array(values)
    return pa.table(arrays)


def info_of(version: str, features: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    info = {
        "codebase_version": version,
        "robot_type": "so100",
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_tasks": len(TASKS),
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{len(lengths)}"},
        "features": features,
    }
    if version == "v3.0":
        data_path = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        video_path = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    else:
        data_path = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        video_path = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    return {**info, "data_path": data_path, "video_path": video_path}


def write_v3(
    folder: Path,
    episodes: list[dict[str, Any]],
    features: dict[str, Any] = FEATURES,
    files: list[int] | None = None,
    listed: list[int] | None = None,
) -> Path:
    """Version 3.0.

    Args:
        files: number of the data file of each episode, one for all by default.
        listed: which of the episodes the table of episodes has, all by default.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = files or [0] * len(episodes)
    lengths = [len(columns["episode_index"]) for columns in episodes]
    for name in ("meta/episodes/chunk-000", "data/chunk-000"):
        (folder / name).mkdir(parents=True)
    info = info_of("v3.0", features, lengths)
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4))
    tasks = pa.table({"task_index": list(range(len(TASKS))), "__index_level_0__": TASKS})
    pq.write_table(tasks, folder / "meta/tasks.parquet")
    for number in sorted(set(files)):
        inside = [table_of(e) for e, file in zip(episodes, files, strict=True) if file == number]
        with pq.ParquetWriter(
            folder / f"data/chunk-000/file-{number:03d}.parquet", inside[0].schema
        ) as writer:
            for table in inside:  # one row group per episode, as recent writers have it
                writer.write_table(table)
    table, start_s = [], 0.0
    for at, (columns, length) in enumerate(zip(episodes, lengths, strict=True)):
        first = sum(lengths[:at])
        row = {
            "episode_index": int(columns["episode_index"][0]),
            "tasks": [TASKS[i] for i in sorted(set(columns["task_index"].tolist()))],
            "length": length,
            "data/chunk_index": 0,
            "data/file_index": files[at],
            "dataset_from_index": first,
            "dataset_to_index": first + length,
            "stats/action/min": [0.0, 0.0],
        }
        for key in (n for n, f in features.items() if f["dtype"] == "video"):
            row |= {f"videos/{key}/chunk_index": 0, f"videos/{key}/file_index": 0}
            row |= {f"videos/{key}/from_timestamp": start_s}
            row |= {f"videos/{key}/to_timestamp": start_s + length / FPS}
        start_s += length / FPS
        table.append(row)
    table = [row for i, row in enumerate(table) if listed is None or i in listed]
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pa.Table.from_pylist(table), path)
    return folder


def write_v2(
    folder: Path,
    episodes: list[dict[str, Any]],
    features: dict[str, Any] = FEATURES,
    version: str = "v2.1",
) -> Path:
    """Version 2.1, or 2.0."""
    import pyarrow.parquet as pq

    lengths = [len(columns["episode_index"]) for columns in episodes]
    (folder / "meta").mkdir(parents=True)
    info = info_of(version, features, lengths)
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4))
    lines = [{"task_index": i, "task": task} for i, task in enumerate(TASKS)]
    (folder / "meta/tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = []
    for columns, length in zip(episodes, lengths, strict=True):
        index = int(columns["episode_index"][0])
        tasks = [TASKS[i] for i in sorted(set(columns["task_index"].tolist()))]
        lines.append({"episode_index": index, "tasks": tasks, "length": length})
        where = {"episode_chunk": index // 1000, "episode_index": index}
        path = folder / info["data_path"].format(**where)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table_of(columns), path)
    (folder / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_video(path: Path, frames: Any) -> None:
    """One frame every 1/FPS seconds, without loss but for the colours' own rounding.

    Args:
        frames: (T, height, width, 3) uint8.
    """
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264rgb", rate=FPS)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24"
        stream.options = {"crf": "0", "g": "4"}
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
