"""Files that run code if anybody unpickles them, in every form that a pickle can come in.

A new way to hide one is one more function in `PLANTED`; formats need not be named, since each of
them is given every one of these files.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 6


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def objects(mark: Path) -> Any:
    """An array (1,) of objects."""
    found = np.empty(1, object)
    found[0] = Payload(mark)
    return found


def columns() -> dict[str, Any]:
    """What many formats ask for, under the names of several of them."""
    rng = np.random.default_rng(0)
    obs, act = rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 2))
    ends = np.arange(ROWS) == ROWS - 1
    names = {"obs": obs, "actions": act, "rewards": np.ones(ROWS), "terminals": ends}
    singular = {"action": act, "reward": np.ones(ROWS), "discount": np.ones(ROWS), "image": obs}
    return {**names, **singular, "observations": obs, "observation": obs, "timeouts": ends & False}


def as_pickle(path: Path, mark: Path) -> None:
    for name in ("buffer.pkl", "buffer.pickle", "buffer", "prefetch.pkl", "other.pickle"):
        (path / name).write_bytes(pickle.dumps(Payload(mark)))


def as_pickle_of_a_buffer(path: Path, mark: Path) -> None:
    """Named as a class that a reader of buffers may know."""
    for module, name in (
        ("stable_baselines3.common.buffers", "ReplayBuffer"),
        ("tianshou.data.buffer.base", "ReplayBuffer"),
    ):
        opcodes = f"c{module}\n{name}\n)\x81}}(Vobservations\n".encode()
        inner = pickle.dumps(Payload(mark), 0)[:-1]
        (path / f"{module.split('.')[0]}.pkl").write_bytes(opcodes + inner + b"sb.")


def as_gzipped_arrays(path: Path, mark: Path) -> None:
    """As Dopamine keeps its buffers."""
    for name in ("observation", "action", "reward", "terminal", "invalid_range", "add_count"):
        content = io.BytesIO()
        np.save(content, objects(mark), allow_pickle=True)
        for key in (f"$store$_{name}_ckpt.0.gz", f"{name}_ckpt.0.gz"):
            (path / key).write_bytes(gzip.compress(content.getvalue()))
    (path / "ckpt.0").write_bytes(pickle.dumps(Payload(mark)))


def as_object_arrays(path: Path, mark: Path) -> None:
    """`.npz` and `.npy`, alone and beside what can be read."""
    np.savez(path / "ep0.npz", **columns(), extra=objects(mark))
    np.savez(path / "ep1.npz", **{name: objects(mark) for name in columns()})
    np.save(path / "obs.npy", objects(mark), allow_pickle=True)


def as_torch_file(path: Path, mark: Path) -> None:
    import torch

    for name in ("state.pt", "episode_0.pt", "buffer.pth"):
        torch.save({"state": Payload(mark)}, path / name)


def as_torchrl_dump(path: Path, mark: Path) -> None:
    """A TensorDict on disk, whose data that is no tensor lies in a pickle."""
    (path / "storage").mkdir()
    for folder in (path, path / "storage"):
        entry = {"device": "cpu", "shape": [ROWS], "dtype": "torch.float32"}
        meta = {"action": entry, "shape": [ROWS], "device": "None", "_type": "TensorDict"}
        (folder / "meta.json").write_text(json.dumps(meta))
        np.ones(ROWS, np.float32).tofile(folder / "action.memmap")
        (folder / "other.pickle").write_bytes(pickle.dumps(Payload(mark)))
        (folder / "prefetch.pkl").write_bytes(pickle.dumps(Payload(mark)))


def as_hdf5(path: Path, mark: Path) -> None:
    """In a dataset, a text and an attribute."""
    import h5py

    data = pickle.dumps(Payload(mark))
    with h5py.File(path / "data.hdf5", "w") as file:
        for name, rows in columns().items():
            file[name] = rows
        file["infos/pickled"] = np.void(data)
        file["metadata/pickled"] = np.frombuffer(data, np.uint8)
        file.attrs["pickled"] = np.void(data)
        file.create_group("_meta").attrs["obs"] = np.void(data)
        file.attrs["__data_type__"] = "pickle"


def as_zarr(path: Path, mark: Path) -> None:
    """A codec of Zarr v2 that unpickles, for objects and for numbers."""
    data = pickle.dumps(Payload(mark))
    for group in (path, path / "data", path / "meta"):
        group.mkdir(exist_ok=True)
        (group / ".zgroup").write_text('{"zarr_format": 2}')
    for name, dtype, key in (
        ("meta/episode_ends", "<i8", "compressor"),
        ("data/action", "<f4", "filters"),
        ("data/state", "|O", "filters"),
    ):
        codec: Any = {"id": "pickle", "protocol": 5}
        about = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": dtype, "order": "C"}
        about |= {"fill_value": None, "compressor": None, "filters": None}
        about[key] = [codec] if key == "filters" else codec
        folder = path / name
        folder.mkdir()
        (folder / ".zarray").write_text(json.dumps(about))
        (folder / "0").write_bytes(data)


def as_sound_zarr_with_one_pickled(path: Path, mark: Path) -> None:
    """Likewise, but the array that is read first is sound."""
    as_zarr(path, mark)
    folder = path / "meta/episode_ends"
    about = json.loads((folder / ".zarray").read_text())
    (folder / ".zarray").write_text(json.dumps({**about, "compressor": None}))
    (folder / "0").write_bytes(np.array([1], "<i8").tobytes())


def as_parquet(path: Path, mark: Path) -> None:
    """Bytes in columns, and in the metadata of the file and of a column."""
    import pyarrow
    import pyarrow.parquet

    data = pickle.dumps(Payload(mark))
    table = pyarrow.table(
        {
            "eps_id": ["0"] * ROWS,
            "obs": [data] * ROWS,
            "actions": [data] * ROWS,
            "rewards": [1.0] * ROWS,
            "item": [data] * ROWS,
        }
    )
    about = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": data}
    field = pyarrow.field("pickled", pyarrow.binary(), metadata=about)
    table = table.append_column(field, [[data] * ROWS])
    pyarrow.parquet.write_table(
        table.replace_schema_metadata({"pandas": data, "pickle": data}), path / "rows.parquet"
    )
    with pyarrow.ipc.new_file(str(path / "rows.arrow"), table.schema) as out:
        out.write_table(table)


def as_yaml(path: Path, mark: Path) -> None:
    """Where a configuration lies beside the data."""
    text = f"!!python/object/apply:os.mkdir ['{mark}']\n"
    for name in ("config.yaml", "config.yml", "meta/info.json", "metadata.json", "features.json"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)


PLANTED: dict[str, tuple[Callable[[Path, Path], None], str | None]] = {
    "pickle": (as_pickle, None),
    "pickle of a buffer": (as_pickle_of_a_buffer, None),
    "gzipped arrays": (as_gzipped_arrays, None),
    "object arrays": (as_object_arrays, None),
    "torch file": (as_torch_file, "torch"),
    "TorchRL": (as_torchrl_dump, None),
    "HDF5": (as_hdf5, "h5py"),
    "Zarr": (as_zarr, None),
    "Zarr, one array": (as_sound_zarr_with_one_pickled, None),
    "Parquet": (as_parquet, "pyarrow"),
    "YAML": (as_yaml, None),
}


def places(path: Path) -> Iterator[Path]:
    """The directory, and every file in it."""
    yield path
    yield from sorted(file for file in path.rglob("*") if file.is_file())
