"""A folder of `.npz` files, one episode each, whose keys are the names of the fields.

Nothing is guessed: a key is a field of exactly that name (`observation/image` is nested), an
array without axes (a number or a text) is metadata of the episode, `end_reason` and `seed`
included. Pickled objects are refused.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.ordering import natural
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode

ZIP_MAGIC = b"PK\x03\x04"


class NpzFolder:
    """The `.npz` files of a folder in the order of their names, `ep2` before `ep10`.

    Files whose names begin with a dot are being written, so they are left for the next time.
    """

    boundary_rule = "each file is one episode; its end flags are kept as they are"
    num_steps = None  # the files would have to be opened

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise SourceError(f"{path} is a file; give the folder that holds the .npz files")
        self.name = str(path.resolve())
        self.account = Account()
        self._files = sorted(_files(path), key=lambda file: natural(file.name))
        if not self._files:
            raise SourceError(f"there are no .npz files in {path}")

    @property
    def num_episodes(self) -> int:
        return len(self._files)

    def describe(self) -> str:
        files = "file" if self.num_episodes == 1 else "files"
        return f"{self.num_episodes} .npz {files} in {self.name}"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        for file in self._files:
            if file.name in imported.keys:
                continue
            try:
                yield read_episode(file)
            except SourceError as error:
                self.account.fail(file.name, str(error))

    def close(self) -> None:
        pass


def read_episode(file: Path) -> SourceEpisode:
    """One file as an episode.

    Raises:
        SourceError: the file is damaged, or holds what cannot be stored.
    """
    try:
        # Read once, so that the hash is that of the bytes that were parsed.
        content = file.read_bytes()
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {key: np.asarray(archive[key]) for key in archive.files}
    except Exception as error:  # whatever zipfile, its decompressors and numpy make of it
        raise SourceError(f"cannot be read: {str(error) or type(error).__name__}") from error
    metadata = {key: _value(key, a) for key, a in arrays.items() if a.ndim == 0}
    end_reason = metadata.pop("end_reason", None)
    if end_reason is not None and not isinstance(end_reason, str):
        raise SourceError(f"'end_reason' must be a text, got {end_reason!r}")
    return SourceEpisode(
        key=file.name,
        data={key: array for key, array in arrays.items() if array.ndim > 0},
        end_reason=end_reason,
        metadata=metadata,
        provenance={
            "format": FORMAT.name,
            "num_bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        },
    )


def _value(key: str, array: NDArray[Any]) -> Any:
    if array.dtype.kind not in "biufU":
        raise SourceError(
            f"{key!r} must be a number, a text or one row per step, got dtype {array.dtype}"
        )
    return array.item()


def _files(path: Path) -> Iterator[Path]:
    for entry in path.iterdir():
        if entry.suffix == ".npz" and not entry.name.startswith(".") and entry.is_file():
            yield entry


def _sniff(path: Path) -> bool:
    if not path.is_dir():
        return False
    for file in _files(path):
        with file.open("rb") as opened:
            if opened.read(len(ZIP_MAGIC)) == ZIP_MAGIC:
                return True
    return False


FORMAT = Format(
    name="npz",
    looks_for="a folder of .npz files",
    sniff=_sniff,
    open=NpzFolder,
)
