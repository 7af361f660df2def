"""Arrays in files and in memory, read window by window: numpy, h5py, zarr-python, tensorstore."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experience import Columns, Experience

LARGE_ROW_BYTES = 1024  # rows from this size on are copied window by window
EVERY_ROW, NO_ROW = 0, 1 << 62
PLANS = 64  # batches that are taken in turns
CHUNK_STEPS, CHUNK_BYTES = 64, 65_536  # of the Zarr arrays, at least: a window; few files


class Plain:
    """Copies into arrays that are used again, with the windows known beforehand.

    Rows of `sliced_bytes` and more are copied window by window, smaller ones by `numpy.take`.

    Args:
        arrays: the fields; arrays, or what gives an array when it is sliced.
    """

    def __init__(
        self,
        experience: Experience,
        arrays: Mapping[str, Any],
        batch_size: int,
        length: int,
        sliced_bytes: int = LARGE_ROW_BYTES,
    ):
        self.arrays = arrays
        self.shape = batch_size, length
        self.experience = experience
        columns = experience.columns
        self.sliced = [name for name in arrays if columns[name][0].nbytes >= sliced_bytes]
        self.out = {
            name: np.empty((batch_size, length, *columns[name].shape[1:]), columns[name].dtype)
            for name in arrays
        }
        rng = np.random.default_rng(1)
        drawn = rng.integers(0, experience.num_steps, (PLANS, batch_size))
        self._plans = itertools.cycle([self._plan(anchors) for anchors in drawn])

    def _plan(self, anchors: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        steps = self.experience.rows(anchors, self.shape[1])
        return anchors, steps.reshape(-1), steps[:, -1] - steps[:, 0] + 1

    def sample(self) -> Any:
        return self._copied(*next(self._plans))

    def read(self, anchors: NDArray[np.int64]) -> Any:
        return self._copied(*self._plan(anchors))

    def _copied(
        self, anchors: NDArray[np.int64], rows: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> Any:
        for name, array in self.arrays.items():
            if name in self.sliced:
                self.copy_windows(name, array, anchors.tolist(), counts.tolist())
            else:
                out = self.out[name]
                array.take(rows, 0, out.reshape(-1, *out.shape[2:]), mode="clip")
        return anchors, self.out

    def copy_windows(self, name: str, array: Any, starts: list[int], counts: list[int]) -> None:
        """Fill `out[name]`; a window that is cut short repeats its last row."""
        for window, start, count in zip(self.out[name], starts, counts, strict=True):
            window[:count] = array[start : start + count]
            if count < len(window):
                window[count:] = window[count - 1]

    def anchors(self, batch: Any) -> NDArray[np.int64]:
        anchors: NDArray[np.int64] = batch[0]
        return anchors

    def columns(self, batch: Any) -> Columns:
        columns: Columns = batch[1]
        return columns


class Tensorstore(Plain):
    """All windows of a field are asked for before the first one is awaited."""

    def copy_windows(self, name: str, array: Any, starts: list[int], counts: list[int]) -> None:
        reads = [array[a : a + n].read() for a, n in zip(starts, counts, strict=True)]
        for window, count, found in zip(self.out[name], counts, reads, strict=True):
            window[:count] = found.result()
            if count < len(window):
                window[count:] = window[count - 1]


def mapped_copies(experience: Experience, folder: Path) -> Columns:
    """The columns as plain files, one each, mapped."""
    folder.mkdir()
    arrays = {}
    for name, rows in experience.columns.items():
        rows.tofile(folder / name)
        mapped = np.memmap(folder / name, rows.dtype, "r", shape=rows.shape)
        arrays[name] = np.asarray(mapped)  # a memmap's own indexing costs microseconds
    return arrays


def hdf5_copies(experience: Experience, path: Path) -> Mapping[str, Any]:
    """The columns as contiguous HDF5 datasets."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, rows in experience.columns.items():
            file.create_dataset(name, data=rows)
    file = h5py.File(path, "r")
    return {name: file[name] for name in experience.columns}


def zarr_copies(experience: Experience, path: Path, num_threads: int) -> Mapping[str, Any]:
    """The columns as uncompressed Zarr arrays, by zarr-python."""
    import zarr

    zarr.config.set({"threading.max_workers": num_threads, "async.concurrency": num_threads})
    arrays = {}
    for name, rows in experience.columns.items():
        steps = max(CHUNK_STEPS, CHUNK_BYTES // rows[0].nbytes)
        chunks = (min(steps, len(rows)), *rows.shape[1:])
        arrays[name] = zarr.create_array(
            path / name, shape=rows.shape, chunks=chunks, dtype=rows.dtype, compressors=None
        )
        arrays[name][:] = rows
    return arrays


def tensorstore_of(experience: Experience, path: Path, num_threads: int) -> Mapping[str, Any]:
    """The arrays of `zarr_copies`, opened by tensorstore."""
    import tensorstore

    limits = ("data_copy_concurrency", "file_io_concurrency")
    context = tensorstore.Context({name: {"limit": num_threads} for name in limits})
    return {
        name: tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path / name}"}},
            open=True,
            read=True,
            context=context,
        ).result()
        for name in experience.columns
    }
