"""The metadata of a LeRobot data set, versions 2.0, 2.1 and 3.0: features, episodes, tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from expstore.errors import SourceError
from expstore.formats import arrow
from expstore.formats.source import Account

INFO = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
DATA_PATH = {
    2: "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    3: "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
VIDEO_PATH = {
    2: "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    3: "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
OF_THE_DATASET = ("codebase_version", "robot_type", "fps")  # kept with each episode
STATISTICS = "stats"  # LeRobot computes them from the data
# What an episode's row is made of; `stats/...` and `videos/...` aside.
EPISODE_COLUMNS = ("episode_index", "tasks", "length", "data/chunk_index", "data/file_index")
TASK_COLUMNS = ("task", "__index_level_0__")  # the index of a pandas frame, named or not


@dataclass(frozen=True)
class Clip:
    """Where an episode's frames of one camera are."""

    file: str  # from the data set's folder
    start_s: float  # of the first frame, in the file


@dataclass(frozen=True)
class LerobotEpisode:
    """One episode as the table of episodes has it."""

    index: int
    length: int  # frames
    tasks: tuple[str, ...]
    file: str  # with its rows, from the data set's folder
    clips: Mapping[str, Clip] = field(default_factory=dict)  # feature -> where its frames are


class LerobotMetadata:
    """What the folder `meta` says.

    Attributes:
        features: name -> dtype, shape, names.
        episodes: by index, ascending.
        tasks: task_index -> text.
        dataset: what each episode is to keep of it.
        fps: frames a second.
    """

    def __init__(self, folder: Path, account: Account) -> None:
        """Read it.

        Raises:
            SourceError: a part is missing, was not written whole, or is not as LeRobot has it.
        """
        self._folder, self._account = folder, account
        self._info = self._read_info()
        self.features = self._read_features()
        self.dataset = {key: self._info[key] for key in OF_THE_DATASET if key in self._info}
        try:
            self.fps = float(self._info.get("fps") or 0)
            self.tasks = dict(self._read_tasks())
            found = {episode.index: episode for episode in self._read_episodes()}
        except SourceError:
            raise
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise SourceError(f"{folder / 'meta'} is not as LeRobot has it: {error!r}") from error
        self.episodes = [found[index] for index in sorted(found)]
        self._compare()

    @property
    def version(self) -> str:
        return str(self._info["codebase_version"])

    @property
    def cameras(self) -> tuple[str, ...]:
        """Features that are videos."""
        return tuple(name for name, f in self.features.items() if f["dtype"] == "video")

    @property
    def num_steps(self) -> int:
        return sum(episode.length for episode in self.episodes)

    @property
    def _major(self) -> int:
        return int(self.version[1])

    def _read_info(self) -> dict[str, Any]:
        path = self._folder / INFO
        try:
            info = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise SourceError(f"{self._folder} is not of LeRobot: {INFO} is missing") from None
        except (OSError, ValueError) as error:
            raise SourceError(f"{path} cannot be read, or is no JSON: {error}") from error
        version = info.get("codebase_version") if isinstance(info, dict) else None
        if version not in VERSIONS:
            known = ", ".join(VERSIONS)
            raise SourceError(f"{path} must have a codebase_version of {known}, got {version!r}")
        return dict(info)

    def _read_features(self) -> dict[str, dict[str, Any]]:
        features = self._info.get("features")
        is_valid = isinstance(features, dict) and all(
            isinstance(f, dict) and isinstance(f.get("dtype"), str) for f in features.values()
        )
        if not is_valid or not features:
            raise SourceError(f"{self._folder / INFO} must have features, each with a dtype")
        return dict(features)

    def _read_tasks(self) -> Iterator[tuple[int, str]]:
        path = self._folder / "meta" / ("tasks.parquet" if self._major == 3 else "tasks.jsonl")
        if not path.is_file():
            self._account.remark(f"there is no meta/{path.name}, so tasks are not known by text")
            return
        if self._major == 2:
            for line in self._lines(path):
                yield int(line["task_index"]), str(line["task"])
            return
        with arrow.open_parquet(path) as file, arrow.reading(path):
            table = file.read()
            texts = next((name for name in TASK_COLUMNS if name in table.column_names), None)
            if texts is None:
                raise SourceError(f"{path} has no task; it has {', '.join(table.column_names)}")
            rows = zip(table["task_index"].to_pylist(), table[texts].to_pylist(), strict=True)
            yield from ((int(number), str(text)) for number, text in rows)

    def _read_episodes(self) -> Iterator[LerobotEpisode]:
        yield from self._from_tables() if self._major == 3 else self._from_lines()

    def _from_lines(self) -> Iterator[LerobotEpisode]:
        size = int(self._info.get("chunks_size") or 1000)
        for line in self._lines(self._folder / "meta" / "episodes.jsonl"):
            index = int(line["episode_index"])
            where = {"episode_chunk": index // size, "episode_index": index}
            clips = {
                key: Clip(self._path("video_path", VIDEO_PATH, video_key=key, **where), 0.0)
                for key in self.cameras
            }
            tasks = tuple(map(str, line.get("tasks") or ()))
            file = self._path("data_path", DATA_PATH, **where)
            yield LerobotEpisode(index, int(line["length"]), tasks, file, clips)

    def _from_tables(self) -> Iterator[LerobotEpisode]:
        paths = sorted((self._folder / "meta" / "episodes").rglob("*.parquet"))
        if not paths:
            raise SourceError(
                f"{self._folder} has no meta/episodes/chunk-000/file-000.parquet, which says "
                "where episodes are: the recording was killed, or it was not copied whole"
            )
        for path in paths:
            with arrow.open_parquet(path) as file:
                names = file.schema_arrow.names
                columns = [n for n in names if n in EPISODE_COLUMNS or n.startswith("videos/")]
                if any(name.startswith("stats/") for name in names):
                    self._account.left_out[STATISTICS] = "come of the data"
                for table in arrow.batches(file, columns=columns):
                    for row in table.to_pylist():
                        yield self._from_row(row)

    def _from_row(self, row: Mapping[str, Any]) -> LerobotEpisode:
        clips = {}
        for key in self.cameras:
            at = f"videos/{key}"
            where = {n: int(row[f"{at}/{n}"]) for n in ("chunk_index", "file_index")}
            file = self._path("video_path", VIDEO_PATH, video_key=key, **where)
            clips[key] = Clip(file, float(row[f"{at}/from_timestamp"]))
        where = {n: int(row[f"data/{n}"]) for n in ("chunk_index", "file_index")}
        file = self._path("data_path", DATA_PATH, **where)
        tasks = tuple(map(str, row.get("tasks") or ()))
        return LerobotEpisode(int(row["episode_index"]), int(row["length"]), tasks, file, clips)

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """JSON, line by line; a line that was not written whole is named."""
        if not path.is_file():
            raise SourceError(
                f"{self._folder} has no meta/{path.name}: the recording was killed, or it was "
                "not copied whole"
            )
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except ValueError:
                    found = None
                if isinstance(found, dict):
                    yield found
                else:
                    reason = f"line {number + 1} is no JSON: it was not written whole"
                    self._account.fail(f"meta/{path.name}", reason)

    def _path(self, key: str, defaults: Mapping[int, str], **where: Any) -> str:
        """A file's path from the data set's folder, as `info.json` has it made."""
        template = self._info.get(key) or defaults[self._major]
        try:
            path = PurePosixPath(str(template).format(**where))
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise SourceError(f"{key} of {INFO} cannot be filled in: {template!r}") from error
        if path.is_absolute() or ".." in path.parts:
            raise SourceError(f"{key} of {INFO} leads out of the data set: {template!r}")
        return str(path)

    def _compare(self) -> None:
        """Say where there is not what `info.json` announces."""
        counts = {"total_episodes": len(self.episodes), "total_frames": self.num_steps}
        for key, found in counts.items():
            if (announced := self._info.get(key, found)) != found:
                of = key.removeprefix("total_")
                self._account.remark(f"info.json says {announced} {of}, meta/episodes has {found}")
        highest = self.episodes[-1].index + 1 if self.episodes else 0
        if missing := highest - len(self.episodes):
            text = f"{missing:,} of the episode numbers up to {highest - 1:,} are missing"
            self._account.remark(text)
