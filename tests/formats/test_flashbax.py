"""Vaults of Flashbax, written by Flashbax itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SourceError
from expstore.formats import open_source

pytest.importorskip("tensorstore")

WRITTEN = Path(__file__).parent / "data" / "vault.zip"
LENGTHS = [6, 7, 7, 4, 12, 4]  # rows of each episode, of two environments


@pytest.fixture
def vault(tmp_path: Path) -> Path:
    shutil.unpack_archive(WRITTEN, tmp_path / "arm")
    return tmp_path / "arm"


def ingest(path: Path, **options: Any) -> tuple[expstore.Store, expstore.IngestReport]:
    store = path.parent / "arm.exp"
    report = expstore.ingest_from(path, store, **{"alignment": "step", **options})
    return expstore.open(store), report


def values(rows: list[int] | None = None) -> Any:
    """What every row has, the second environment's from 100 on."""
    found = np.concatenate([np.arange(20), 100 + np.arange(20)])
    return found if rows is None else found[rows]


def test_what_flashbax_wrote_arrives_byte_for_byte(vault: Path) -> None:
    store, report = ingest(vault)

    assert store.episodes["length"].tolist() == LENGTHS
    back = store.read(np.arange(40))
    assert back["action"].tobytes() == values().astype(np.int32).tobytes()
    assert back["reward"].tobytes() == (values() / 4).astype(np.float32).tobytes()
    observation = np.repeat(values(), 3).astype(np.float32)
    assert back["observation"].tobytes() == observation.tobytes()
    assert back["infos"]["state"].tobytes() == (values() + 0.5).astype(np.float32).tobytes()
    assert report.failures == ()
    assert report.remarks == {"no end flag on the last rows, so they are kept as incomplete": 2}


def test_each_environment_is_a_stream_of_its_own(vault: Path) -> None:
    store, report = ingest(vault)

    keys = [store.episodes[i]["source"]["episode"] for i in range(6)]
    assert keys == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    assert store.episodes["end_reason"].tolist() == [
        "terminated",
        "truncated",
        "incomplete",
        "terminated",
        "terminated",
        "incomplete",
    ]
    assert report.flags == {"terminals": 3, "truncations": 1}
    assert store.episodes[0]["dataset"] == {"task": "reach"}


def test_what_a_row_is_is_asked_for_by_name(vault: Path) -> None:
    with pytest.raises(SourceError, match=r"give --alignment \(alignment=\), one of step \(action"):
        open_source(vault)
    with pytest.raises(SourceError, match="got 'next'"):
        open_source(vault, alignment="next")


def test_a_reward_of_arriving_moves_up_by_one(vault: Path) -> None:
    store, report = ingest(vault, alignment="arrival")

    assert store.episodes["length"].tolist() == [n - 1 for n in LENGTHS]
    first = store.episode(0)
    assert first["reward"].tolist() == (values([1, 2, 3, 4, 5]) / 4).tolist()
    assert first["action"].tolist() == [0, 1, 2, 3, 4]
    assert first["observation"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert report.final_observations == 6
    assert report.dropped_steps == {"the last row of an episode, whose action led nowhere": 6}


def test_an_action_that_belongs_to_the_previous_observation_moves_too(vault: Path) -> None:
    store, _ = ingest(vault, alignment="previous")

    first = store.episode(0)
    assert first["reward"].tolist() == (values([1, 2, 3, 4, 5]) / 4).tolist()
    assert first["action"].tolist() == [1, 2, 3, 4, 5]
    assert first["observation"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_vault_without_end_flags_is_refused(vault: Path) -> None:
    file = vault / "run" / "metadata.json"
    metadata = json.loads(file.read_text())
    for name in ("terminals", "truncations"):
        del metadata["structure_shape"][name]
    file.write_text(json.dumps(metadata))

    with pytest.raises(SourceError, match="does not say where an episode ends; looked for"):
        open_source(vault, alignment="step")


def test_of_several_vaults_one_is_to_be_chosen(vault: Path) -> None:
    shutil.copytree(vault / "run", vault / "walk")

    with pytest.raises(SourceError, match="has several vaults, run, walk; give the folder of one"):
        open_source(vault, alignment="step")


def test_a_file_that_is_cut_off_is_named(vault: Path) -> None:
    for file in (vault / "run" / "d").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])

    with pytest.raises(SourceError, match="cannot be opened as a vault"):
        open_source(vault, alignment="step")


def test_another_folder_under_the_right_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / "manifest.ocdbt").write_bytes(b"")

    with pytest.raises(SourceError, match="is no vault; looked for a vault of Flashbax"):
        open_source(tmp_path, "flashbax", alignment="step")
    with pytest.raises(SourceError, match="of no format that is known"):
        open_source(tmp_path)


def test_an_import_that_stopped_and_went_on_equals_one_that_did_not(vault: Path) -> None:
    store = vault.parent / "b.exp"
    expstore.ingest_from(vault, store, episodes=2, alignment="step")
    expstore.ingest_from(vault, store, resume=True, alignment="step")

    back = expstore.open(store).read(np.arange(40))["action"]
    assert back.tolist() == values().tolist()
