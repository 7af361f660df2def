"""Exports come back exactly as they were, but for what was listed before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.episode import flatten
from expstore.errors import ExportLossError, SchemaError
from expstore.exporting import FORMATS

LENGTHS = (3, 1, 5)
ENDS = ("terminated", "truncated", "terminated")


def episode_of(number: int, *, final: bool = True, end: str = "") -> dict[str, Any]:
    rng, length = np.random.default_rng(number), LENGTHS[number]
    flags = {name: np.zeros(length, bool) for name in ("terminated", "truncated")}
    if (end or ENDS[number]) in flags:
        flags[end or ENDS[number]][-1] = True
    return {
        "observation": rng.normal(size=(length + final, 3)).astype(np.float32),
        "action": rng.integers(0, 5, (length, 2)),
        "reward": rng.normal(size=length),
        **flags,
    }


def nested(number: int) -> dict[str, Any]:
    data = episode_of(number)
    rows = len(data["observation"])
    image = np.random.default_rng(number).integers(0, 255, (rows, 4, 4, 3), np.uint8)
    return {**data, "observation": {"state": data["observation"], "image": image}}


Make = Callable[[int], dict[str, Any]]


def written(path: Path, make: Make, *, reasons: Any = None, **metadata: Any) -> Path:
    with expstore.Writer(path) as writer:
        for number in range(len(LENGTHS)):
            reason = None if reasons is None else reasons[number]
            writer.append(make(number), end_reason=reason, **metadata)
    return path


def flat(store: expstore.Store, number: int) -> dict[str, Any]:
    return flatten(store.episode(number))


def check_same(path: Path, back: Path, *, without: tuple[str, ...] = ()) -> None:
    """Every field and end reason of every episode; the importer may add fields of its own."""
    one, other = expstore.open(path), expstore.open(back)
    assert other.episodes["end_reason"].tolist() == one.episodes["end_reason"].tolist()
    for number in range(one.num_episodes):
        theirs = flat(other, number)
        for name, values in flat(one, number).items():
            if name not in without:
                np.testing.assert_array_equal(theirs[name], values, f"{name} of {number}")
                assert np.asarray(theirs[name]).dtype == np.asarray(values).dtype, name


def text_too(number: int) -> dict[str, Any]:
    data = nested(number)
    return {**data, "instruction": ["größer", "", "x"][number : number + 1] * LENGTHS[number]}


def images_only(number: int) -> dict[str, Any]:
    data = nested(number)
    rows = {n: v[: LENGTHS[number]] for n, v in data["observation"].items()}
    return {**data, "observation": rows}


def without_final(number: int) -> dict[str, Any]:
    return episode_of(number, final=False)


def with_gaps(number: int) -> dict[str, Any]:
    data = episode_of(number)
    following = data["observation"][1:].copy()
    following[0] += 1
    return {**data, "observation": data["observation"][:-1], "next_observation": following}


def without_truncated(number: int) -> dict[str, Any]:
    data = nested(number)
    del data["truncated"]
    return data


ROUND_TRIPS: list[tuple[str, Make, dict[str, Any], dict[str, Any], Any]] = [
    ("npz", episode_of, {}, {"seed": 3, "policy": "sac", "level": 2.5}, None),
    ("npz", text_too, {}, {}, None),
    ("npz", with_gaps, {}, {}, None),
    ("npz", without_final, {}, {}, None),
    ("d4rl", episode_of, {}, {}, None),
    ("d4rl", without_final, {}, {}, None),
    ("d4rl", with_gaps, {}, {}, None),
    ("minari", episode_of, {}, {"seed": 3}, None),
    ("minari", nested, {}, {}, None),
    ("minari", without_final, {}, {}, None),
    ("robomimic", without_truncated, {"done_mode": 0}, {}, ("terminated", "cut", "terminated")),
]


@pytest.mark.parametrize(("form", "make", "options", "metadata", "reasons"), ROUND_TRIPS)
def test_what_a_format_expresses_comes_back_exactly(
    tmp_path: Path, form: str, make: Make, options: Any, metadata: Any, reasons: Any
) -> None:
    if form != "npz":
        pytest.importorskip("h5py")
    path = written(tmp_path / "a.exp", make, reasons=reasons, **metadata)
    if reasons:
        path = written(tmp_path / "b.exp", terminated_by(make, reasons), reasons=reasons)

    export = expstore.export_to(path, tmp_path / "out", format=form)
    expstore.ingest_from(export.path, tmp_path / "back.exp", format=form, **options)

    assert export.losses == ()
    check_same(path, tmp_path / "back.exp")
    row = expstore.open(tmp_path / "back.exp").episodes[0]
    assert {key: row[key] for key in metadata} == metadata


def terminated_by(make: Make, reasons: Any) -> Make:
    def changed(number: int) -> dict[str, Any]:
        data = make(number)
        data["terminated"][-1] = reasons[number] == "terminated"
        return data

    return changed


def test_a_real_minari_dataset_opens(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    path = written(tmp_path / "a.exp", nested)

    expstore.export_to(path, tmp_path / "set", format="minari")

    dataset = minari.MinariDataset(tmp_path / "set" / "data")
    assert (dataset.total_episodes, dataset.total_steps) == (3, 9)
    for number, episode in enumerate(dataset.iterate_episodes()):
        data = nested(number)
        for name, values in data["observation"].items():
            np.testing.assert_array_equal(episode.observations[name], values)
            space = dataset.observation_space[name]
            assert all(space.contains(row) for row in episode.observations[name])
        np.testing.assert_array_equal(episode.rewards, data["reward"])
        np.testing.assert_array_equal(episode.terminations, data["terminated"])


def test_parquet_tables_hold_everything(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    path = written(tmp_path / "a.exp", text_too, seed=4, tags=["a", "b"])

    expstore.export_to(path, tmp_path / "tables", format="parquet")

    steps = pq.read_table(tmp_path / "tables" / "steps.parquet")
    episodes = pq.read_table(tmp_path / "tables" / "episodes.parquet").to_pylist()
    assert [json.loads(e["metadata"]) for e in episodes] == [{"tags": ["a", "b"]}] * 3
    assert [(e["length"], e["end_reason"], e["seed"]) for e in episodes] == [
        (n, end, 4) for n, end in zip(LENGTHS, ENDS, strict=True)
    ]
    store = expstore.open(path)
    whole = flatten(store.read(np.arange(9), [*store.fields, "next_observation/image"]))
    for name, values in whole.items():
        column = steps[name].combine_chunks()
        if name == "instruction":
            assert column.to_pylist() == list(values)
            continue
        shape = json.loads(steps.schema.field(name).metadata[b"shape"])
        found = column.flatten() if shape else column
        found = found.to_numpy(zero_copy_only=False).reshape(-1, *shape)
        np.testing.assert_array_equal(found, values)
        assert found.dtype == values.dtype
    assert steps["step"].to_pylist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]


def test_next_values_that_are_not_known_are_null_in_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    path = written(tmp_path / "a.exp", without_final)

    expstore.export_to(path, tmp_path / "tables", format="parquet")

    column = pq.read_table(tmp_path / "tables" / "steps.parquet")["next_observation"]
    assert [i for i, row in enumerate(column.to_pylist()) if row is None] == [2, 3, 8]


def test_zarr_arrays_and_where_episodes_end(tmp_path: Path) -> None:
    import zarr

    path = written(tmp_path / "a.exp", nested)

    expstore.export_to(path, tmp_path / "rows.zarr", format="zarr")

    root = zarr.open_group(str(tmp_path / "rows.zarr"), mode="r")
    store = expstore.open(path)
    for name, values in flatten(store.read(np.arange(9))).items():
        np.testing.assert_array_equal(root[f"data/{name}"][:], values)
    assert root["meta/episode_ends"][:].tolist() == [3, 4, 9]
    assert root["data/observation/image"].metadata.codecs[-1].to_dict()["name"] == "zstd"
    finals = np.stack([nested(n)["observation"]["image"][-1] for n in range(3)])
    np.testing.assert_array_equal(root["meta/final/observation/image"][:], finals)
    report = expstore.ingest_from(
        tmp_path / "rows.zarr", tmp_path / "back.exp", format="diffusion_policy"
    )
    assert (report.num_episodes, report.num_steps) == (3, 9)


# -- what cannot be expressed --------------------------------------------------------------------

LOSSES: list[tuple[str, Make, Any, dict[str, Any], list[str]]] = [
    ("npz", episode_of, None, {"tags": [1]}, ["metadata 'tags' of 3 episodes"]),
    ("d4rl", episode_of, None, {"seed": 1}, ["metadata 'seed' of 3 episodes"]),
    ("d4rl", text_too, None, {}, ["needs fields 'observation', 'action', 'reward'"]),
    ("minari", text_too, None, {}, ["field 'instruction': no place", "any number of values"]),
    ("minari", with_gaps, None, {}, ["next values of field 'observation', beyond"]),
    ("robomimic", nested, None, {}, ["field 'truncated': no place", "1 episodes ended as 'trunc"]),
    ("robomimic", episode_of, None, {}, ["it becomes obs/observation"]),
    ("zarr", text_too, None, {"seed": 1}, ["field 'instruction'", "metadata 'seed'"]),
]


@pytest.mark.parametrize(("form", "make", "reasons", "metadata", "texts"), LOSSES)
def test_what_would_be_lost_is_listed_and_nothing_written(
    tmp_path: Path, form: str, make: Make, reasons: Any, metadata: Any, texts: list[str]
) -> None:
    path = written(tmp_path / "a.exp", make, reasons=reasons, **metadata)

    with pytest.raises((ExportLossError, SchemaError)) as found:
        expstore.export_to(path, tmp_path / "out", format=form)

    for text in texts:
        assert text in str(found.value)
    assert [file.name for file in tmp_path.iterdir()] == ["a.exp"]


def test_lossy_writes_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    reasons = ("cut", "truncated", "incomplete")

    def make(number: int) -> dict[str, Any]:
        return episode_of(number, final=number != 1, end=reasons[number])

    path = written(tmp_path / "a.exp", make, reasons=reasons, note={"a": 1})

    export = expstore.export_to(path, tmp_path / "out.hdf5", format="d4rl", lossy=True)
    expstore.ingest_from(export.path, tmp_path / "back.exp")

    assert export.losses == (
        "that 1 episodes ended as 'cut'",
        "that 1 episodes ended as 'incomplete'",
        "that 1 episodes have no final observation; zeros stand there",
        "metadata 'note' of 3 episodes",
    )
    back = expstore.open(tmp_path / "back.exp")
    assert back.episodes["length"].tolist() == list(LENGTHS)
    assert back.episodes["end_reason"].tolist() == ["truncated"] * 3
    for number in range(3):
        np.testing.assert_array_equal(back.episode(number)["action"], make(number)["action"])


# -- whole or not at all -------------------------------------------------------------------------


@pytest.mark.parametrize("form", sorted(set(FORMATS) - {"lerobot"}))
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, form: str) -> None:
    pytest.importorskip("h5py")
    pytest.importorskip("pyarrow")
    path = written(tmp_path / "a.exp", episode_of)

    def stop(done: int, total: int) -> None:
        assert total == 3
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        expstore.export_to(path, tmp_path / "out", format=form, lossy=True, progress=stop)

    assert [file.name for file in tmp_path.iterdir()] == ["a.exp"]
    expstore.export_to(path, tmp_path / "out", format=form, lossy=True)


def test_what_a_killed_export_left_is_named_and_left_alone(tmp_path: Path) -> None:
    path, left = written(tmp_path / "a.exp", nested), tmp_path / "b.partial"
    left.mkdir()
    (left / "0.npz").write_bytes(b"half")
    with pytest.raises(SchemaError, match=r"b\.partial is in the way, .* killed export; remove it"):
        expstore.export_to(path, tmp_path / "b", format="npz")
    assert (left / "0.npz").read_bytes() == b"half"
    assert not (tmp_path / "b").exists()


def test_a_target_that_is_taken_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.exp", episode_of)
    (tmp_path / "out").write_text("mine")

    with pytest.raises(SchemaError, match="there is something at"):
        expstore.export_to(path, tmp_path / "out", format="npz")

    assert (tmp_path / "out").read_text() == "mine"
    with pytest.raises(SchemaError, match="must be one of d4rl, lerobot, minari"):
        expstore.export_to(path, tmp_path / "other", format="csv")
    with pytest.raises(SchemaError, match="no episodes to export"):
        expstore.export_to(path, tmp_path / "other", format="npz", where="length > 99")


def test_a_condition_chooses_episodes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.exp", episode_of)

    export = expstore.export_to(path, tmp_path / "out", format="npz", where="length >= 3")

    assert (export.num_episodes, export.num_steps) == (2, 8)
    assert len(list((tmp_path / "out").iterdir())) == 2


# -- LeRobot -------------------------------------------------------------------------------------


def test_lerobot_tables_come_back(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("PIL")
    path = written(tmp_path / "a.exp", images_only, task="pick")

    export = expstore.export_to(path, tmp_path / "set", format="lerobot")
    expstore.ingest_from(export.path, tmp_path / "back.exp")

    check_same(path, tmp_path / "back.exp")
    back = expstore.open(tmp_path / "back.exp")
    assert set(back.fields) - set(expstore.open(path).fields) == {"timestamp", "task"}
    assert back.episode(0)["task"] == ["pick"] * 3
    stats = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())
    actions = np.concatenate([images_only(n)["action"] for n in range(3)])
    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(0))
    np.testing.assert_allclose(stats["action"]["std"], actions.std(0))
    assert np.shape(stats["observation.image"]["max"]) == (3, 1, 1)


def test_lerobot_lists_what_it_has_no_place_for(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = written(tmp_path / "a.exp", episode_of, seed=1)

    with pytest.raises(ExportLossError) as found:
        expstore.export_to(path, tmp_path / "set", format="lerobot")

    assert found.value.losses == (
        "that field 'observation' has no name of its own; it is observation.state",
        "final observations of 3 episodes",
        "metadata 'seed' of 3 episodes",
    )
