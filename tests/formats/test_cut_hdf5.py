"""HDF5 files that are cut off: whole episodes before the cut are imported, the rest is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expstore.episode import flatten
from expstore.errors import SourceError
from expstore.formats import open_source

h5py = pytest.importorskip("h5py")


def demonstrations(path: Path) -> dict[str, Any]:
    """As robomimic writes them: one group after the other."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for number in range(12):
            group = data.create_group(f"demo_{number}")
            group["actions"] = rng.normal(size=(40, 7))
            group.create_dataset(
                "obs/image", data=rng.integers(0, 256, (40, 8, 8, 3), np.uint8), compression="gzip"
            )
            group["obs/state"] = rng.normal(size=(40, 5))
    return {}


def recorded(path: Path) -> dict[str, Any]:
    """As Minari writes them."""
    minari = pytest.importorskip("minari")
    from tests.formats.test_minari import buffer, main_file, write

    assert minari
    folder = write(path.parent / "minari", *(buffer(20 + n) for n in range(12)))
    main_file(folder).rename(path)
    return {}


def episodes_of(path: Path, **options: Any) -> tuple[dict[Any, dict[str, bytes]], list[str]]:
    """Every byte of the episodes that can be read, and which others were named."""
    source = open_source(path, **options)
    try:
        found = {
            episode.key: {name: bytes_of(rows) for name, rows in flatten(episode.data).items()}
            for episode in source.episodes()
        }
    finally:
        source.close()
    return found, [failure.key for failure in source.account.failures]


def bytes_of(rows: Any) -> bytes:
    return np.asarray(rows.read(0, len(rows)) if hasattr(rows, "read") else rows).tobytes()


@pytest.mark.parametrize("write", [demonstrations, recorded])
def test_whole_episodes_before_the_cut_come_and_the_others_are_named(
    tmp_path: Path, write: Any
) -> None:
    path = tmp_path / "whole.hdf5"
    options, cut = write(path), tmp_path / "cut.hdf5"
    data, (whole, _) = path.read_bytes(), episodes_of(path, **options)
    outcomes = set()

    tail = range(len(data) // 2, len(data), len(data) // 150)
    for num_bytes in [*range(100, len(data) // 2, len(data) // 10), *tail, len(data) - 1]:
        cut.write_bytes(data[:num_bytes])
        try:
            found, named = episodes_of(cut, **options)
        except SourceError as error:
            assert "cut off" in str(error) and f"{num_bytes:,} of its {len(data):,}" in str(error)
            outcomes.add("refused")
            continue
        assert found == {key: whole[key] for key in found}  # never zeros in the place of data
        assert len(found) + len(named) == len(whole)
        outcomes.add("some" if named else "all")
    assert {"refused", "some"} <= outcomes


def test_columns_of_all_episodes_that_lie_beyond_the_cut_are_named(tmp_path: Path) -> None:
    path, rng = tmp_path / "d4rl.hdf5", np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name in ("observations", "actions", "rewards"):
            file[name] = rng.normal(size=(500, 3) if name != "rewards" else 500)
        file["terminals"] = file["timeouts"] = np.zeros(500, bool)
        rewards = file["rewards"].id.get_offset()
    path.write_bytes(path.read_bytes()[: rewards + 100])

    with pytest.raises(SourceError, match=r"/rewards lies beyond the end of .*, which is cut off"):
        open_source(path)


def test_of_d4rl_only_the_columns_that_are_asked_for_must_be_there(tmp_path: Path) -> None:
    path, rng = tmp_path / "d4rl.hdf5", np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name in ("observations", "actions", "rewards"):
            file[name] = rng.normal(size=(500, 3) if name != "rewards" else 500)
        file["terminals"] = file["timeouts"] = np.arange(500) % 100 == 99
        file["infos/qpos"] = rng.normal(size=(500, 9))
        qpos = file["infos/qpos"].id.get_offset()
    whole, _ = episodes_of(path)
    path.write_bytes(path.read_bytes()[: qpos + 1000])

    source = open_source(path)
    assert "lies beyond the end" in source.account.left_out["infos/qpos"]
    source.close()
    assert episodes_of(path) == (whole, [])
    with pytest.raises(SourceError, match=r"/infos/qpos lies beyond .* leave out --infos"):
        open_source(path, infos=True)
