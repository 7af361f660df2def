"""Hashes of files and folders."""

import hashlib
from pathlib import Path

from expstore.formats.provenance import HashedFiles, folder_provenance


def test_a_file_is_hashed_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    files = HashedFiles(tmp_path)
    first = files.entries("a")

    (tmp_path / "a").write_bytes(b"changed")

    expected = {"file": "a", "num_bytes": 3, "sha256": hashlib.sha256(b"one").hexdigest()}
    assert first == files.entries("a") == expected


def test_a_folder_is_all_its_names_sizes_and_contents(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "z").write_bytes(b"22")
    (tmp_path / "a").write_bytes(b"1")

    found = folder_provenance(tmp_path)

    expected = hashlib.sha256(b"a\x001\x001b/c/z\x002\x0022").hexdigest()
    assert found == {"num_bytes": 3, "sha256": expected}


def test_a_file_that_is_renamed_is_another_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    before = folder_provenance(tmp_path)

    (tmp_path / "a").rename(tmp_path / "b")

    assert folder_provenance(tmp_path) != before
