"""Rows of episodes in files: the journal of open ones, and the quarantine of those that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expstore.buffer.open_episodes import OpenEpisode
from expstore.buffer.row_codec import decode, encode, record, records
from expstore.errors import SchemaError
from expstore.storage import files


class RowFile:
    """The rows of one episode, appended as they come; a kill tears at most the last one."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self._end = 0
        self._descriptor = files.create(path)
        self._write(dict(header), "the header")

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row.

        Raises:
            SchemaError: a value that has no bytes; nothing was written.
        """
        self._write(dict(row), "a row")

    def _write(self, value: Any, what: str) -> None:
        data = record(encode(value, what))
        files.pwrite(self._descriptor, data, self._end, self.path)
        self._end += len(data)

    def sync(self) -> None:
        files.sync(self._descriptor, self.path)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            files.close(descriptor)


def read_rows(path: Path) -> tuple[dict[str, Any], OpenEpisode]:
    """The header and the episode of a file of rows."""
    whole = [decode(content) for content in records(files.read(path))]
    header = whole[0] if whole else {}
    episode = OpenEpisode(
        header.get("env_id", ""), header.get("num_envs", 1), header.get("uid", path.name)
    )
    for row in whole[1:]:
        episode.add(row)
    episode.policy_valid = header.get("policy_valid", True)
    return header, episode


class Journal:
    """The files of the open episodes, by uid."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, RowFile] = {}
        files.make_directory(directory)

    def add(self, episode: OpenEpisode, row: Mapping[str, Any]) -> None:
        """Write a row down that is about to be added to an episode."""
        if episode.uid not in self._open:
            header = {"env_id": episode.env_id, "uid": episode.uid, "num_envs": episode.num_envs}
            self._open[episode.uid] = RowFile(self.directory / episode.uid, header)
        self._open[episode.uid].add(row)

    def close(self, uid: str) -> None:
        """The episode has ended; its file stays until `remove`."""
        if file := self._open.pop(uid, None):
            file.close()

    def remove(self, uid: str) -> None:
        """The episode is committed, or nobody wants it."""
        self.close(uid)
        files.unlink(self.directory / uid)

    def close_all(self) -> None:
        for uid in list(self._open):
            self.close(uid)

    def left_behind(self) -> Iterator[Path]:
        """The files of a process that ended without closing its buffer."""
        for entry in files.list_directory(self.directory):
            if entry.name not in self._open:
                yield Path(entry.path)


class QuarantinedEpisode:
    """An episode that could not be stored: its rows, and why.

    Attributes:
        env_id, uid: of the episode.
        function: `module:name` of the postprocess function that was to run.
        error: the text of what went wrong.
    """

    def __init__(self, path: Path, header: dict[str, Any], episode: OpenEpisode) -> None:
        self.path, self._header, self.episode = path, header, episode

    @staticmethod
    def read(path: Path) -> QuarantinedEpisode:
        return QuarantinedEpisode(path, *read_rows(path))

    @property
    def env_id(self) -> str:
        return self.episode.env_id

    @property
    def uid(self) -> str:
        return self.episode.uid

    @property
    def function(self) -> str:
        return str(self._header["function"])

    @property
    def error(self) -> str:
        return str(self._header["error"])

    @property
    def end_reason(self) -> str:
        return str(self._header["end_reason"])

    @property
    def rows(self) -> dict[str, list[Any]]:
        """For each key the values of all rows."""
        return self.episode.columns

    def __repr__(self) -> str:
        return (
            f"QuarantinedEpisode(env_id={self.env_id!r}, uid={self.uid!r}, "
            f"rows={self.episode.num_rows}, function={self.function!r}, error={self.error!r})"
        )


class Quarantine:
    """The episodes whose postprocess function raised, on disk until a retry or `remove`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._unwritten: dict[str, QuarantinedEpisode] = {}

    def add(
        self, episode: OpenEpisode, end_reason: str, function: str, error: BaseException
    ) -> QuarantinedEpisode:
        """Write an episode down; one with values that have no bytes stays in memory."""
        files.make_directory(self.directory)
        header = {
            "env_id": episode.env_id,
            "uid": episode.uid,
            "num_envs": episode.num_envs,
            "policy_valid": episode.policy_valid,
            "end_reason": end_reason,
            "function": function,
            "error": f"{type(error).__name__}: {error}",
        }
        path = self.directory / episode.uid
        kept = QuarantinedEpisode(path, header, episode)
        file = RowFile(files.temporary(path), header)
        try:
            for row in episode.rows():
                file.add(row)
            file.sync()
        except SchemaError:
            self._unwritten[episode.uid] = kept
            files.unlink(files.temporary(path))
            return kept
        finally:
            file.close()
        files.rename(files.temporary(path), path)
        files.sync_directory(self.directory)
        return kept

    def remove(self, uid: str) -> None:
        """Give an episode up, or take it out when it is stored."""
        self._unwritten.pop(uid, None)
        files.unlink(self.directory / uid)

    def __iter__(self) -> Iterator[QuarantinedEpisode]:
        for entry in files.list_directory(self.directory):
            if not entry.name.endswith(".partial"):
                yield QuarantinedEpisode.read(Path(entry.path))
        yield from list(self._unwritten.values())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, at: int) -> QuarantinedEpisode:
        return list(self)[at]

    def __repr__(self) -> str:
        return f"Quarantine({list(self)!r})"
