"""Images of LeRobot that lie in files of their own, beside the tables."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from expstore.errors import SourceError


class ImageFiles:
    """The image files of one episode.

    A table names them by their path from the folder of the data set; where it has no more than
    the name of a file, that is in `images/<feature>/episode_<number>`.
    """

    def __init__(self, folder: Path, episode: int) -> None:
        self._folder, self._episode = folder, episode
        self._found: dict[str, dict[str, Any]] = {}

    @property
    def entries(self) -> dict[str, Any]:
        """Number of bytes and hash of the files of each feature, for provenance."""
        return {"images": self._found} if self._found else {}

    def read(self, feature: str, paths: Sequence[str | None]) -> list[bytes]:
        """The files, as they are.

        Raises:
            SourceError: one is missing, or its path leads out of the data set.
        """
        files = [self._read(feature, path) for path in paths]
        self._found[feature] = {
            "num_bytes": sum(map(len, files)),
            "sha256": hashlib.sha256(
                b"".join(hashlib.sha256(f).digest() for f in files)
            ).hexdigest(),
        }
        return files

    def _read(self, feature: str, path: str | None) -> bytes:
        if not path:
            raise SourceError(f"{feature} has rows with neither an image nor the path of one")
        inner = PurePosixPath(path)
        if inner.is_absolute() or ".." in inner.parts:
            raise SourceError(f"{feature} has the path {path!r}, which leads out of the data set")
        if len(inner.parts) == 1:
            inner = PurePosixPath("images", feature, f"episode_{self._episode:06d}", inner)
        try:
            return (self._folder / inner).read_bytes()
        except OSError as error:
            raise SourceError(
                f"an image of {feature} cannot be read: {inner}: {error.strerror or error}"
            ) from error
