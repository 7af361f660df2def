"""diffusion_policy and UMI: a Zarr store, folder or zip, of rows cut by `meta/episode_ends`.

`action[t]` belongs to row t of everything else; there are no rewards, no end flags and no
observation after the last action.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.archive import is_zip, open_zip
from expstore.formats.hdf5 import RowReader
from expstore.formats.provenance import FileProvenance, folder_provenance
from expstore.formats.source import NOTHING, Account, Format, Imported, SourceEpisode

ENDS = "meta/episode_ends"
HEADS = (".zarray", "zarr.json")  # an array of Zarr v2 or v3 has one of them
NOT_COMMITTED = "rows after the last of episode_ends: of an episode that was not finished"
LOOKS_FOR = f"a Zarr store, a folder or a .zip, with the array {ENDS} and arrays in data"
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError)


class DiffusionPolicyStore:
    """The episodes of a store in the order of its rows; their keys count from 0."""

    boundary_rule = "episode_ends say where each episode ends; no flag says why"

    def __init__(self, path: Path) -> None:
        self.name = str(path.resolve())
        self.account = Account()
        self._path = path
        self._provenance: dict[str, Any] | None = None
        if not _is_store(path):
            raise SourceError(f"{path} is not of diffusion_policy; looked for {LOOKS_FOR}")
        self._store, self._root = _open(path)
        try:
            self._ends = self._read_ends()
            self._arrays = self._find_arrays()
        except BaseException:
            self.close()
            raise

    @property
    def num_episodes(self) -> int:
        return len(self._ends)

    @property
    def num_steps(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def describe(self) -> str:
        counts = f"{self.num_episodes:,} episodes, {self.num_steps:,} steps"
        return f"diffusion_policy store {self.name}: {counts}"

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        readers = {name: RowReader(_Rows(array)) for name, array in self._arrays.items()}
        start = 0
        for key, stop in enumerate(self._ends.tolist()):
            if key not in imported.keys:
                try:
                    episode = self._episode(key, readers, start, stop)
                except SourceError as error:
                    self.account.fail(f"episode {key}", str(error))
                else:
                    yield episode
            start = stop

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _read_ends(self) -> NDArray[np.int64]:
        try:
            _check_codecs(self._root[ENDS], ENDS)
            ends = np.asarray(self._root[ENDS][:])
        except SourceError:
            raise
        except UNREADABLE as error:
            raise SourceError(f"{ENDS} of {self._path} cannot be read: {_text(error)}") from error
        if ends.ndim != 1 or ends.dtype.kind not in "iu" or (np.diff(ends, prepend=0) < 1).any():
            raise SourceError(f"{ENDS} of {self._path} must be integers that ascend from 1")
        return ends.astype(np.int64)

    def _find_arrays(self) -> dict[str, Any]:
        """Field -> array; rows that no episode counts are reported."""
        arrays: dict[str, Any] = {}
        lengths = []
        for key, array in self._members():
            if array.dtype.kind not in "biuf" or not array.shape or 0 in array.shape[1:]:
                self.account.left_out[key] = "is not a number per step"
                continue
            _check_codecs(array, f"data/{key}")
            arrays[_field(key)] = array
            lengths.append(array.shape[0])
            missing = array.nchunks - array.nchunks_initialized
            if missing:
                self.account.remark(
                    f"{missing:,} chunks of data/{key} are not there; Zarr has them be "
                    f"{array.fill_value}"
                )
        if not arrays:
            raise SourceError(f"{self._path} has no arrays in data; looked for {LOOKS_FOR}")
        if (more := max(lengths) - self.num_steps) > 0:
            self.account.drop(more, NOT_COMMITTED)
        return arrays

    def _members(self) -> list[tuple[str, Any]]:
        try:
            members = dict(self._root["data"].members(max_depth=None))
        except UNREADABLE as error:
            hint = ""
            if "codec" in str(error):
                hint = "; register it before, as imagecodecs.numcodecs.register_codecs() does"
            text = f"data of {self._path} cannot be read: {_text(error)}{hint}"
            raise SourceError(text) from error
        return sorted((key, node) for key, node in members.items() if hasattr(node, "shape"))

    def _episode(
        self, key: int, readers: dict[str, RowReader], start: int, stop: int
    ) -> SourceEpisode:
        data: dict[str, Any] = {}
        for name, reader in readers.items():
            num_rows = self._arrays[name].shape[0]
            if num_rows < stop:
                raise SourceError(
                    f"{name} has {num_rows:,} rows, but the episode ends at {stop:,}: it was "
                    "not written whole"
                )
            try:
                data[name] = reader.read(start, stop)
            except UNREADABLE as error:
                raise SourceError(
                    f"rows {start:,} to {stop:,} of {name} cannot be read: {_text(error)}"
                ) from error
        return SourceEpisode(
            key=key,
            data=data,
            end_reason="cut",
            metadata=self._metadata(key),
            provenance={"format": FORMAT.name, "rows": [start, stop], **self._where()},
        )

    def _metadata(self, key: int) -> dict[str, Any]:
        attributes = dict(self._root.attrs)
        return {"dataset": attributes} if attributes else {}

    def _where(self) -> dict[str, Any]:
        if self._provenance is None:
            is_file = self._path.is_file()
            entries = FileProvenance(self._path).entries if is_file else None
            self._provenance = entries or folder_provenance(self._path)
        return self._provenance


class _Rows:
    """A Zarr array as `RowReader` takes a dataset of HDF5."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, array.chunks

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return np.asarray(self._array[rows])

    def read_direct(self, into: NDArray[Any], source: slice, target: slice) -> None:
        into[target] = self._array[source]


def _check_codecs(array: Any, name: str) -> None:
    """Refuse a codec that unpickles, which older numcodecs do without being asked."""
    about = array.metadata.to_dict()
    codecs = (about.get("compressor"), *(about.get("filters") or ()), *(about.get("codecs") or ()))
    if any("pickle" in str(codec).lower() for codec in codecs):
        raise SourceError(f"{name} is pickled, and is not read: that could run any code")


def _field(key: str) -> str:
    return key if key in ("action", "reward") else f"observation/{key}"


def _open(path: Path) -> tuple[Any, Any]:
    """The store, where it is to be closed, and the group in it."""
    import zarr

    store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else None
    try:
        return store, zarr.open_group(store or str(path), mode="r")
    except UNREADABLE as error:
        if store is not None:
            store.close()
        raise SourceError(f"{path} cannot be opened as Zarr: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _is_store(path: Path) -> bool:
    heads = [f"{ENDS}/{head}" for head in HEADS]
    if path.is_dir():
        return any((path / head).is_file() for head in heads)
    if not is_zip(path):
        return False
    with open_zip(path) as archive:
        return any(head in archive.namelist() for head in heads)


FORMAT = Format(
    name="diffusion_policy", looks_for=LOOKS_FOR, sniff=_is_store, open=DiffusionPolicyStore
)
