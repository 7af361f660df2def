"""Many fields, many stores, damaged bounds: what a process holds stays bounded."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

import expstore
from expstore.errors import DamagedError
from expstore.storage import mapped, mapping
from expstore.storage.files import crc32c
from tests.storage.damage import flip
from tests.storage.made import assert_same, episode, store, writer


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("durable", [False, True])
def test_many_fields_need_few_open_files(tmp_path: Path, monkeypatch, durable: bool) -> None:
    """200 fields have 1,000 arrays, and a process may open 1,024 files: the first commit failed."""
    monkeypatch.setattr(mapped, "MAX_KEPT", 8)
    monkeypatch.setattr(mapped, "_kept", set())
    gc.collect()  # what earlier tests left open
    before, most = descriptors(), 0
    data = {f"f{number}": np.arange(4.0) + number for number in range(12)}
    with writer(tmp_path / "a.exp", durable=durable, chunk_steps=512) as out:
        for _ in range(3):
            for _ in range(150):
                out.append(data)
                most = max(most, descriptors())
            out.commit()
            most = max(most, descriptors())
    assert most - before <= 8 + 2  # and those of the lock and the notes
    opened = expstore.open(tmp_path / "a.exp")
    assert opened.num_steps == 1800
    assert_same(opened.episode(449), data)
    assert expstore.verify(tmp_path / "a.exp").is_sound
    assert descriptors() <= before


def test_every_file_is_synced_that_was_not_kept_open(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mapped, "MAX_KEPT", 2)
    monkeypatch.setattr(mapped, "_kept", set())
    synced: list[str] = []
    real = mapped.files.sync

    def noted(descriptor: int, path: Path) -> None:
        synced.append(path.parent.name)
        real(descriptor, path)

    monkeypatch.setattr(mapped.files, "sync", noted)
    with writer(tmp_path / "a.exp", durable=True) as out:
        out.append({f"f{number}": np.ones(4) for number in range(9)})
    assert {f"f{number}" for number in range(9)} | {"done", "episode", "start"} <= set(synced)


def test_a_union_of_many_stores_leaves_address_space(tmp_path: Path, monkeypatch) -> None:
    """64 GiB for each of 4,000 columns are more than the 128 TiB that there are."""
    gc.collect()  # what earlier tests reserved would be given back in this one
    monkeypatch.setattr(mapping, "ADDRESS_BYTES", 64 << 30)
    monkeypatch.setattr(mapping, "RESERVED_SHARE", 16)
    monkeypatch.setattr(mapping._Range, "num_reserved_bytes", 0)
    for number in range(8):
        store(tmp_path / f"{number}.exp", episode(3, number), episode(4, number))
    both = expstore.open([tmp_path / f"{number}.exp" for number in range(8)])
    both.read(both.spans.start)
    ranges = [
        r
        for snapshot in both.snapshots
        for column in snapshot.columns.values()
        if isinstance(column, mapping.MappedColumn)
        for r in column._ranges
    ]
    assert len(ranges) > 50
    assert all(column._in_place for s in both.snapshots for column in s.columns.values())
    reserved = mapping._Range.num_reserved_bytes
    assert sum(r.mapping.num_bytes for r in ranges) == reserved < 64 << 30
    gone = [weakref.ref(r) for r in ranges]
    del both, ranges
    assert [r() for r in gone] == [None] * len(gone)
    assert mapping._Range.num_reserved_bytes == 0


@pytest.mark.parametrize(
    ("column", "bit"), [("length", 3), ("length", 45), ("length", 62), ("start", 4), ("start", 50)]
)
@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_bound_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, column: str, bit: int, number: int
) -> None:
    """The steps that it named were read from memory that was nobody's."""
    path = tmp_path / "a.exp"
    store(path, episode(3), episode(4), episode(5))
    expstore.open(path).read([0])  # found to be sound; another look must be one at the files
    flip(path / f"episodes/{column}/c.0", 8 * number + bit // 8, bit % 8)
    with pytest.raises(DamagedError, match=r"does not say where episode \d lies; run expstore ver"):
        expstore.open(path).read([0])
    assert not expstore.verify(path).is_sound
    assert expstore.repair(path).lost == []
    assert_same(expstore.open(path).episode(number), (episode(3), episode(4), episode(5))[number])


def test_an_older_commit_that_lies_about_its_steps_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with writer(path) as out:
        for number in range(3):
            out.append(episode(3, number))
            out.commit()
    file = path / "__expstore/commits"
    lines = file.read_bytes().splitlines(keepends=True)
    changed = lines[-2].rpartition(b" ")[0].replace(b'"step":[0,6]', b'"step":[0,5]')
    lines[-2] = changed + b" %08x\n" % crc32c(changed)
    file.write_bytes(b"".join(lines))
    assert expstore.open(path).num_steps == 9
    with pytest.raises(DamagedError, match="does not say where episode 1 lies"):
        expstore.open(path, at=expstore.open(path).commit - 1).read([0])


def test_bounds_are_looked_at_once_and_then_the_new_ones(tmp_path: Path, monkeypatch) -> None:
    from expstore.storage import contiguity

    looked: list[int] = []
    real = np.flatnonzero
    monkeypatch.setattr(contiguity.np, "flatnonzero", lambda a: (looked.append(len(a)), real(a))[1])
    path = tmp_path / "a.exp"
    with writer(path) as out:
        for number in range(50):
            out.append(episode(3, number))
        out.commit()
        opened = expstore.open(path)
        looked.clear()
        assert opened.num_steps == 150
        assert looked[0] == 50
        out.append(episode(3))
        out.commit()
        looked.clear()
        assert opened.latest().num_steps == 153
        assert looked[0] == 2
