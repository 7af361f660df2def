"""ALOHA and ACT: one HDF5 file per episode, of positions, images and position targets.

`action[t]` is the target that was sent on `observations[t]`; there are no rewards, no end flags
and no observation after the last action.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from expstore.errors import SourceError
from expstore.formats import hdf5
from expstore.formats.images import JPEG_MAGIC, decode_jpegs
from expstore.formats.jobs import check_jobs
from expstore.formats.ordering import natural
from expstore.formats.provenance import FileProvenance
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode

SUFFIXES = (".hdf5", ".h5")
LOOKS_FOR = "an HDF5 file, or a folder of such, with the datasets action and observations/qpos"
LENGTHS = "compress_len"  # of the encoded images; they are padded with zeros, which tells as much


class AlohaFiles:
    """The episodes of a file or folder in the order of their names, which are their keys."""

    boundary_rule = "each file is one episode, which ends where the file does"
    num_steps = None  # the files would have to be opened

    def __init__(self, path: Path, *, keep_encoded: bool = False, jobs: int = 1) -> None:
        hdf5.load_h5py()
        self.name = str(path.resolve())
        self.account = Account()
        self._keep_encoded, self._jobs = keep_encoded, check_jobs(jobs)
        self._files = sorted(_files(path), key=lambda file: natural(file.name))
        if not self._files:
            raise SourceError(f"there are no HDF5 files in {path}; looked for {LOOKS_FOR}")

    @property
    def num_episodes(self) -> int:
        return len(self._files)

    def describe(self) -> str:
        return f"{self.num_episodes:,} ALOHA episodes in {self.name}"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        for file in self._files:
            if file.name in imported.keys:
                continue
            with contextlib.ExitStack() as stack:  # long columns are read after it was given
                try:
                    opened = stack.enter_context(hdf5.open_file(file))
                    with hdf5.reading(file):
                        episode = self._episode(file, opened)
                except SourceError as error:
                    self.account.fail(file.name, str(error))
                    continue
                yield episode

    def close(self) -> None:
        pass

    def _episode(self, path: Path, file: Any) -> SourceEpisode:
        if not _is_episode(file):
            found = hdf5.found_in(file)
            raise SourceError(f"it is not of ALOHA; looked for {LOOKS_FOR}; found {found}")
        num_steps = len(file["action"])
        data: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        for old, dataset in hdf5.datasets(file):
            name = old.replace("observations/", "observation/", 1)
            if old == LENGTHS:
                self.account.left_out[old] = "the images are cut to these lengths"
            elif hdf5.is_text(dataset):
                metadata[old] = hdf5.plain_value(dataset[()])
            elif not dataset.shape or 0 in dataset.shape[1:]:
                self.account.left_out[old] = "is not one row per step, or has no elements"
            elif len(dataset) != num_steps:
                raise SourceError(
                    f"{old} has {len(dataset)} rows, but there are {num_steps} actions: it was "
                    "not written whole"
                )
            else:
                data[name] = self._column(name, dataset)
        attributes = {key: hdf5.plain_value(value) for key, value in file.attrs.items()}
        if attributes:
            metadata["attributes"] = attributes
        return SourceEpisode(
            key=path.name,
            data=data,
            end_reason="cut" if num_steps else None,
            metadata=metadata,
            provenance={"format": FORMAT.name, **FileProvenance(path).entries},
        )

    def _column(self, name: str, dataset: Any) -> Any:
        is_ragged = hdf5.is_ragged_bytes(dataset)
        if not is_ragged and not _are_jpegs(dataset):
            if dataset.dtype.kind not in "biuf":
                raise SourceError(f"{name} has dtype {dataset.dtype}, which is no number")
            return hdf5.rows_of(dataset)
        frames = [row.tobytes() for row in dataset[()]]
        if not is_ragged:  # a JPEG file ends with a byte that is not zero
            frames = [frame.rstrip(b"\0") for frame in frames]
        if self._keep_encoded:
            return frames
        self.account.remark(
            f"{name} was decoded as JPEG has it, red first; ACT itself may have blue first", 1
        )
        return decode_jpegs(frames, name, jobs=self._jobs)


def _are_jpegs(rows: Any) -> bool:
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] <= len(JPEG_MAGIC):
        return False
    return bool((rows[:, :3] == np.frombuffer(JPEG_MAGIC, np.uint8)).all()) and len(rows) > 0


def _files(path: Path) -> Iterator[Path]:
    """Those of a folder, those being written left out; or the file itself."""
    if path.is_file():
        yield path
        return
    for entry in path.iterdir():
        if entry.suffix in SUFFIXES and not entry.name.startswith(".") and entry.is_file():
            yield entry


def _is_episode(file: Any) -> bool:
    if not hdf5.is_dataset(hdf5.member(file, "action")) or not file["action"].shape:
        return False
    observations = hdf5.member(file, "observations")
    return hdf5.is_group(observations) and "qpos" in observations


def _sniff(path: Path) -> bool:
    for file in sorted(_files(path)):
        if hdf5.is_hdf5(file):
            try:
                with hdf5.open_file(file) as opened, hdf5.reading(file):
                    if _is_episode(opened):
                        return True
            except SourceError:  # another file of the folder may tell
                continue
    return False


FORMAT = Format(
    name="aloha",
    looks_for=LOOKS_FOR,
    sniff=_sniff,
    open=AlohaFiles,
    options=frozenset({"keep_encoded", "jobs"}),
)
