"""LeRobot data sets, versions 2.0, 2.1 and 3.0: Parquet tables of frames, images and videos.

`action[t]` was chosen on frame t, and `next.reward` of row t came of it. The observation after
the last action is not stored. Rows are found by their `episode_index`, never by their place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats import arrow
from expstore.formats.images import decode_images
from expstore.formats.jobs import check_jobs
from expstore.formats.keyed import flags, scalars
from expstore.formats.lazy_rows import LazyRows
from expstore.formats.lerobot_images import ImageFiles
from expstore.formats.lerobot_metadata import INFO, LerobotEpisode, LerobotMetadata
from expstore.formats.provenance import HashedFiles
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode
from expstore.formats.video import decode_frames, load_av

NUMBERS = ("frame_index", "episode_index", "index", "task_index")  # columns that only count
FLAGS = {"next.terminated": "terminated", "next.truncated": "truncated"}
DONE = "next.done"
TASK = "task"
UNLISTED = "rows that meta/episodes does not have there"
LOOKS_FOR = f"a LeRobot data set, a folder with {INFO} that has a codebase_version"


class LerobotDataset:
    """The episodes of a data set in the order of their numbers, which are their keys."""

    boundary_rule = "rows with one episode_index are one episode"

    def __init__(
        self,
        path: Path,
        *,
        keep_encoded: bool = False,
        drop: Collection[str] = (),
        jobs: int = 1,
    ) -> None:
        arrow.load_pyarrow()
        self.name = str(path.resolve())
        self.account = Account()
        self._folder, self._keep_encoded, self._jobs = path, keep_encoded, check_jobs(jobs)
        self._metadata = LerobotMetadata(path, self.account)
        self._dropped = {n for n in self._metadata.features if _is_among(n, drop)}
        self._cameras = [c for c in self._metadata.cameras if c not in self._dropped]
        for camera in self._cameras:
            load_av(f"{field_of(camera)} of {path}")
        for asked in drop:
            if any(_is_among(name, [asked]) for name in self._dropped):
                self.account.left_out[asked] = "as asked for"
        self._hashes = HashedFiles(path)
        self._check_files()

    @property
    def num_episodes(self) -> int:
        return len(self._metadata.episodes)

    @property
    def num_steps(self) -> int:
        return self._metadata.num_steps

    def describe(self) -> str:
        counts = f"{self.num_episodes:,} episodes, {self.num_steps:,} frames"
        return f"LeRobot data set {self.name}, {self._metadata.version}: {counts}"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        files: dict[str, list[LerobotEpisode]] = {}
        for listed in self._metadata.episodes:
            files.setdefault(listed.file, []).append(listed)
        for file, inside in files.items():
            missing = {e.index: e for e in inside if e.index not in imported.keys}
            if not missing:
                continue
            try:
                for index, table in self._runs(file, imported.keys):
                    if found := missing.pop(index, None):
                        try:
                            yield self._episode(found, table)
                        except SourceError as error:
                            self.account.fail(f"episode {index}", str(error))
                    elif index not in imported.keys:
                        self.account.drop(table.num_rows, UNLISTED)
                    del table  # not to be held beside the next episode
            except SourceError as error:
                numbers = ", ".join(map(str, list(missing)[:8]))
                self.account.fail(file, f"{error}; with it, episodes {numbers} are missing")
            else:
                for index in missing:
                    self.account.fail(f"episode {index}", f"there are no rows of it in {file}")

    def close(self) -> None:
        pass

    def _check_files(self) -> None:
        """Refuse a recording of which no table can be read."""
        files = sorted({episode.file for episode in self._metadata.episodes})
        broken = [file for file in files if not arrow.has_footer(self._folder / file)]
        if files and broken == files:
            raise SourceError(
                f"{self._folder} has no rows that can be found: {', '.join(broken[:4])} "
                f"{'is' if len(broken) == 1 else 'are'} missing or without a footer, which is "
                "written last: the recording was killed, or it was not copied whole"
            )
        on_disk = (self._folder / "data").rglob("*.parquet")
        extra = {p.relative_to(self._folder).as_posix() for p in on_disk} - set(files)
        for file in sorted(extra):
            self.account.left_out[file] = "meta/episodes has no episode in it"

    def _runs(self, file: str, imported: Collection[int | str]) -> Iterator[tuple[int, Any]]:
        """Episodes of one file, each with the rows that follow one another."""
        pa = arrow.load_pyarrow()
        index = -1
        parts: list[Any] = []
        with arrow.open_parquet(self._folder / file) as opened, arrow.reading(file):
            names = [n for n in opened.schema_arrow.names if n not in self._dropped]
            if "episode_index" not in names:
                raise SourceError(f"{file} has no column episode_index")
            for table in arrow.batches(opened, _has_others(opened, imported), names):
                for (found,), rows in arrow.runs(table, "episode_index"):
                    if parts and found != index:
                        whole, parts = pa.concat_tables(parts), []
                        yield index, whole
                        del whole  # not to be held beside the next episode
                    index = found
                    parts.append(rows)
                    self.account.reached(sum(part.num_rows for part in parts))
        if parts:
            yield index, pa.concat_tables(parts)

    def _episode(self, listed: LerobotEpisode, table: Any) -> SourceEpisode:
        if table.num_rows != listed.length:
            raise SourceError(
                f"meta/episodes says it has {listed.length} frames, but there are "
                f"{table.num_rows} rows that follow one another: it was not written whole"
            )
        with arrow.reading("its rows"):
            images = ImageFiles(self._folder, listed.index)
            data = self._columns(table, images)
            frames = self._frame_numbers(table)
            data |= self._tasks(table, listed)
        for camera in self._cameras:
            data[field_of(camera)] = self._video(camera, listed, frames)
        end = self._end(data)
        names = {
            field_of(n): f["names"] for n, f in self._metadata.features.items() if f.get("names")
        }
        return SourceEpisode(
            key=listed.index,
            data=data,
            end_reason=end,
            metadata={
                "dataset": {**self._metadata.dataset, "names": names},
                "tasks": list(listed.tasks),
            },
            provenance={"format": FORMAT.name, **self._where(listed), **images.entries},
        )

    def _columns(self, table: Any, files: ImageFiles) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name in table.column_names:
            feature = self._metadata.features.get(name)
            if name in NUMBERS and (name != "task_index" or self._metadata.tasks):
                told = "is told by task" if name == "task_index" else "only counts"
                self.account.left_out[name] = told
                continue
            if feature is None:
                self.account.left_out[name] = "is not among the features of info.json"
                continue
            if feature["dtype"] == "image":
                data[field_of(name)] = self._images(name, table[name], files)
            else:
                shape = feature.get("shape")
                shape = tuple(shape) if shape and feature["dtype"] != "string" else None
                data[field_of(name)] = arrow.values_of(table[name].combine_chunks(), name, shape)
        for name in ("reward", "timestamp"):  # features have no shape () in LeRobot
            if name in data:
                data[name] = scalars(name, data[name], self.account)
        return data

    def _images(self, feature: str, column: Any, files: ImageFiles) -> Any:
        """Of a chunked column, which is not made one: images are what takes memory here."""
        encoded: list[Any] = []
        for chunk in column.chunks:
            is_struct = arrow.load_pyarrow().types.is_struct(chunk.type)
            inside = chunk.field("bytes") if is_struct else chunk
            if not inside.null_count:
                encoded += [file.as_buffer() for file in inside]
            elif is_struct and inside.null_count == len(inside):
                encoded += files.read(feature, chunk.field("path").to_pylist())
            else:
                raise SourceError(f"{feature} has rows without an image")
        if self._keep_encoded:
            return [bytes(file) for file in encoded]
        frames = [np.frombuffer(file, np.uint8) for file in encoded]
        return decode_images(frames, field_of(feature), jobs=self._jobs)

    def _tasks(self, table: Any, listed: LerobotEpisode) -> dict[str, list[str]]:
        """The text of each step's task."""
        if "task_index" not in table.column_names or not self._metadata.tasks:
            return {}
        numbers = table["task_index"].to_pylist()
        if unknown := set(numbers) - self._metadata.tasks.keys():
            raise SourceError(f"task_index {min(unknown)} is not in the table of tasks")
        texts = [self._metadata.tasks[number] for number in numbers]
        if listed.tasks and set(texts) != set(listed.tasks):
            self.account.remark("its rows have other tasks than meta/episodes; rows were taken", 1)
        return {TASK: texts}

    def _frame_numbers(self, table: Any) -> NDArray[np.int64]:
        counted = np.arange(table.num_rows)
        if "frame_index" not in table.column_names:
            return counted
        numbers = np.asarray(table["frame_index"].to_numpy(), np.int64)
        if (numbers != counted).any():
            self.account.remark("frame_index does not count 0, 1, 2, ...: rows may be missing", 1)
        return numbers

    def _video(
        self, camera: str, listed: LerobotEpisode, frames: NDArray[np.int64]
    ) -> NDArray[np.uint8] | LazyRows:
        info = self._metadata.features[camera]
        fps = float((info.get("info") or {}).get("video.fps") or self._metadata.fps)
        if fps <= 0:
            raise SourceError(f"{INFO} does not say how many frames a second {camera} has")
        clip = listed.clips[camera]
        times = clip.start_s + frames / fps
        return decode_frames(self._folder / clip.file, times, 0.5 / fps, field_of(camera))

    def _end(self, data: dict[str, Any]) -> str | None:
        """Flags, where the source tells one from the other, and why the episode ended."""
        done = data.pop(DONE, None)
        for old, name in FLAGS.items():
            if old in data:
                data[name] = flags(name, data.pop(old), self.account)
        if done is None and not data.keys() & set(FLAGS.values()):
            return "cut"
        if done is not None:
            done = flags(DONE, done, self.account)
            self.account.found(DONE, bool(done[-1]))
            if done[:-1].any():
                self.account.remark(f"{DONE} is set before the last step, where no flag can be", 1)
        if "truncated" in data and "terminated" not in data and done is not None:
            data["terminated"] = done & ~data["truncated"]
        for old, name in FLAGS.items():
            if name in data:
                self.account.found(old, bool(data[name][-1]))
        if any(name in data and data[name][-1] for name in FLAGS.values()):
            return None
        if not data.keys() & set(FLAGS.values()):
            self.account.left_out[DONE] = "says only where an episode ends"
            text = f"{DONE} does not tell termination from truncation, so it is kept as cut"
            self.account.remark(text, 1)
        return "cut"

    def _where(self, listed: LerobotEpisode) -> dict[str, Any]:
        where = dict(self._hashes.entries(listed.file))
        if self._cameras:
            files = {camera: listed.clips[camera].file for camera in self._cameras}
            where["videos"] = {c: self._hashes.entries(file) for c, file in files.items()}
        return where


def field_of(feature: str) -> str:
    """What a feature is called in a store; the end flags keep their names until they are read.

    >>> field_of("observation.images.top"), field_of("next.reward"), field_of("next.success")
    ('observation/images/top', 'reward', 'success')
    """
    if feature == DONE or feature in FLAGS:
        return feature
    return feature.removeprefix("next.").replace(".", "/")


def _is_among(feature: str, asked: Collection[str]) -> bool:
    """Whether a feature, by its own name or as a field, or what it lies under, was asked for."""
    name = field_of(feature)
    return any(feature == a or name == a or name.startswith(f"{a}/") for a in asked)


def _has_others(file: Any, imported: Collection[int | str]) -> Callable[[Any], bool]:
    """Whether a row group may have rows of other episodes, as its statistics have it."""
    schema = file.metadata.schema
    column = [schema.column(i).path for i in range(len(schema))].index("episode_index")

    def has_others(group: Any) -> bool:
        found = group.column(column).statistics
        if found is None or not found.has_min_max or found.max - found.min >= len(imported):
            return True
        return any(index not in imported for index in range(found.min, found.max + 1))

    return has_others


def _sniff(path: Path) -> bool:
    if not (path / INFO).is_file():
        return False
    with (path / INFO).open("rb") as file:
        return b'"codebase_version"' in file.read(1 << 20)


FORMAT = Format(
    name="lerobot",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=LerobotDataset,
    options=frozenset({"keep_encoded", "drop", "jobs"}),
)
